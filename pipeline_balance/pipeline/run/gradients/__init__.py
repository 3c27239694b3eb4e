"""Gradients of a pipeline before the update: summed in float32, unscaled, and clipped by one norm."""
