"""What a process holds of a parameter, and the modules that hold it: stacks of experts, shards over dp and tp."""
