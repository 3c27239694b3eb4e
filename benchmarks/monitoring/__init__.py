"""What the monitor costs a step."""
