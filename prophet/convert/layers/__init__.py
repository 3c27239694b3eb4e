"""What stands in the experts' place in a converted block."""
