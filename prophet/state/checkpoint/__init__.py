"""Training state in files: a folder that always holds one whole checkpoint, in a format that torch reads."""
