"""The whole MoE layer, on real ranks, next to its peers."""
