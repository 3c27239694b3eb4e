"""Groups that shrink and grow, and checkpoints that outlive them."""
