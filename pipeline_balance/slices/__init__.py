"""Pipelines over slices of sequences (SlimPipe): a slice attends to the kept keys and values of those before it."""
