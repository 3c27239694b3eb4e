"""The experts' grouped products on their own."""
