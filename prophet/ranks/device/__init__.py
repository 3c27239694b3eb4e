"""Streams of a device, and times of what runs in them."""
