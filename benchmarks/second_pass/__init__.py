"""What it costs that a block of somebody's own code runs twice."""
