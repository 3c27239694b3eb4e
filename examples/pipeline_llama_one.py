"""A Llama whose layers freeze from below while it trains, in one process.

    python examples/pipeline_llama_one.py --out out/llama

`pipeline_llama.py` is the same loop over the stages of a pipeline.
"""

from __future__ import annotations

import argparse

import torch
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, ROWS, TOKENS, FREEZE_EVERY = 60, 16, 32, 8

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--out", default="out/llama", help="folder for the trained model")
out = arguments.parse_args().out

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4)
model = LlamaForCausalLM(config)
optimizer = AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

for step in range(STEPS):
    starts = torch.randint(64, (ROWS, 1))
    ids = (starts + torch.arange(TOKENS) * (1 + starts % 3)) % 64  # the model learns to count by ones, twos and threes
    if step and step % FREEZE_EVERY == 0:
        model.model.layers[step // FREEZE_EVERY - 1].requires_grad_(False)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss:.3f}")

model.save_pretrained(out)
