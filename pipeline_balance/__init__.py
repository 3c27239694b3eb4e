"""Keeps the pipeline stages of a dynamic model equally busy and moves training state between layouts."""
