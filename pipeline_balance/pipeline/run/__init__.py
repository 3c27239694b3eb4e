"""Running a batch through the stages in force, measuring it, and updating what the stages hold."""
