"""Our planner, and when other homes pay."""
