"""Layouts as values: which process holds which box of which tensor."""
