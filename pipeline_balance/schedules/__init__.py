"""Pipeline schedules as data: lists of actions by rank, and a simulator of what they take."""
