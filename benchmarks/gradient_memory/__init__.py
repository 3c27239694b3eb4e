"""Memory that averaging and measuring gradients takes beside them."""
