"""Training state between layouts: which box of which tensor lives where, and how it gets elsewhere."""
