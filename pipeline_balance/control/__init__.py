"""Measures layers, and decides when moving them pays."""
