"""A GPT whose weights are pruned by masks while it trains, in one process.

    python examples/pipeline_pruned_one.py

`pipeline_pruned.py` is the same loop over the stages of a pipeline.
"""

from __future__ import annotations

import torch
from torch.nn.utils import prune
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel

STEPS, ROWS, TOKENS = 40, 16, 32
PRUNE_EVERY = 10

torch.manual_seed(0)
sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 64, "n_layer": 6, "n_head": 4}
config = GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
optimizer = AdamW(model.parameters(), lr=3e-3)

for step in range(STEPS):
    starts = torch.randint(64, (ROWS, 1))
    ids = (starts + torch.arange(TOKENS) * (1 + starts % 3)) % 64  # the model learns to count by ones, twos and threes
    if step and step % PRUNE_EVERY == 0:
        for block in model.transformer.h:
            if prune.is_pruned(block.mlp.c_fc):
                prune.remove(block.mlp.c_fc, "weight")
            prune.l1_unstructured(block.mlp.c_fc, "weight", amount=0.2 * step / PRUNE_EVERY)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss:.3f}")
