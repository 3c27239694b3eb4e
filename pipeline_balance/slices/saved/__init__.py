"""What layers save for the backward pass: which of it is computed again, and which waits on the host."""
