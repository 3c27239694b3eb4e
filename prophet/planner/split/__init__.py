"""How many of a step's tokens every holder takes."""
