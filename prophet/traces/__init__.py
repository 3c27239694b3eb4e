"""Routing traces: read, write, replay, extrapolate."""
