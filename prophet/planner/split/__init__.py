"""Splits: how many of a step's tokens every holder of an expert takes."""
