"""Pipelines over slices of sequences beside 1F1B, torch's interleaved 1F1B and ZBV: bytes by rank, and step times."""
