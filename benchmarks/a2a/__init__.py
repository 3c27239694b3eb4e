"""All-to-all over sizes: algorithm and bus bandwidth."""
