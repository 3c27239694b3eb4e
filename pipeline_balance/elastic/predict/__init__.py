"""What a switch would take, from descriptions alone."""
