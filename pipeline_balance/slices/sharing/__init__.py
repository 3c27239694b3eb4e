"""What ranks do of each other's attention: exchanged between stages, or over replicas that share every slice."""
