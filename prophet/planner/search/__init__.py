"""The planner `prophet`, and the search for better homes."""
