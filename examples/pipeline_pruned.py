"""A GPT whose weights are pruned by masks while it trains, over the stages of a pipeline that stays even.

    torchrun --standalone --nproc-per-node 2 examples/pipeline_pruned.py

`pipeline_pruned_one.py` is the same loop in one process.
"""

from __future__ import annotations

import torch
from torch.nn.utils import prune
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel

from pipeline_balance import ControllerConfig, ElasticPipeline, attach

STEPS, ROWS, TOKENS = 40, 16, 32
PRUNE_EVERY = 10

torch.manual_seed(0)
sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 64, "n_layer": 6, "n_head": 4}
config = GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
torch.distributed.init_process_group("gloo")
pipe = ElasticPipeline.from_transformers(model, microbatches=4, make_optimizer=lambda named: AdamW(named, lr=3e-3))
balanced = attach(pipe, config=ControllerConfig(every_steps=10))

for step in range(STEPS):
    starts = torch.randint(64, (ROWS, 1))
    ids = (starts + torch.arange(TOKENS) * (1 + starts % 3)) % 64  # the model learns to count by ones, twos and threes
    if step and step % PRUNE_EVERY == 0:
        for block in model.transformer.h:
            if prune.is_pruned(block.mlp.c_fc):
                prune.remove(block.mlp.c_fc, "weight")
            prune.l1_unstructured(block.mlp.c_fc, "weight", amount=0.2 * step / PRUNE_EVERY)
    loss = balanced.step(ids, ids)
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss:.3f}")

torch.distributed.destroy_process_group()
