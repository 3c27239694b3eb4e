"""A Llama whose layers freeze from below while it trains, over the stages of a pipeline that stays even.

    torchrun --standalone --nproc-per-node 2 examples/pipeline_llama.py --out out/llama

`pipeline_llama_one.py` is the same loop in one process.
"""

from __future__ import annotations

import argparse

import torch
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline_balance import ControllerConfig, ElasticPipeline, attach

STEPS, ROWS, TOKENS, FREEZE_EVERY = 60, 16, 32, 8

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--out", default="out/llama", help="folder for the trained model")
out = arguments.parse_args().out

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4)
model = LlamaForCausalLM(config)
torch.distributed.init_process_group("gloo")
pipe = ElasticPipeline.from_transformers(model, microbatches=4, make_optimizer=lambda named: AdamW(named, lr=3e-3))
balanced = attach(pipe, config=ControllerConfig(every_steps=FREEZE_EVERY))
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(pipe.optimizer, STEPS)

for step in range(STEPS):
    starts = torch.randint(64, (ROWS, 1))
    ids = (starts + torch.arange(TOKENS) * (1 + starts % 3)) % 64  # the model learns to count by ones, twos and threes
    if step and step % FREEZE_EVERY == 0:
        model.model.layers[step // FREEZE_EVERY - 1].requires_grad_(False)
    loss = balanced.step(ids, ids, max_norm=1.0)
    schedule.step()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss:.3f}")

pipe.save_pretrained(out)
torch.distributed.destroy_process_group()
