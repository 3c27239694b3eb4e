"""A small MoE language model trained on real text by four expert-parallel ranks: `prophet demo`."""
