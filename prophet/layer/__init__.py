"""The drop-in layer: gate, counts, dispatch, experts, combine; and the port through which it is balanced."""
