"""What `prophet gpu-check` tries on a machine with GPUs, each check in separate processes and within a time limit."""
