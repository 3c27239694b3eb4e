"""Which layer belongs to which stage: layer costs in, stage maps out."""
