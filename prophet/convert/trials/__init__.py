"""Finding out what a user's module does, by running a copy of it."""
