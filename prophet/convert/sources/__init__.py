"""Whose blocks are converted: an adapter for each kind reads it. Nothing in here changes a model."""
