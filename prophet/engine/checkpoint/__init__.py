"""Checkpoints of model, optimizer and what balancing remembers, for any number of ranks."""
