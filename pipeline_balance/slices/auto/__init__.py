"""Slices that are chosen: pieces of the model are measured, candidates simulated, and the best is put in force."""
