"""Moving replicas' parameters and gradients on its own."""
