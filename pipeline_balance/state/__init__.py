"""Moves training state between layouts: spaces, boxes, routes and staged transitions."""
