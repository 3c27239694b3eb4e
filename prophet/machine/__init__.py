"""What the planner is told of a machine: described, measured, or taken from a preset."""
