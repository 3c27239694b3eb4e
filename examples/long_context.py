"""A Llama learns bytes of long pages, cut into slices that pass the stages of a pipeline one by one.

    torchrun --standalone --nproc-per-node 2 examples/long_context.py

The text is this repository's documentation. `--slices 1` runs the same without slices, with the same losses.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline_balance import ElasticPipeline
from pipeline_balance.slices import SliceOptions

STEPS, ROWS, MICROBATCHES = 20, 2, 2

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--slices", type=int, default=8, help="parts of a sequence")
parser.add_argument("--tokens", type=int, default=512, help="tokens of a sequence")
arguments = parser.parse_args()

pages = sorted((Path(__file__).resolve().parents[1] / "docs").glob("*.md"))
text = torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8).long()

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=arguments.tokens,
)  # fmt: skip
model = LlamaForCausalLM(config)
torch.distributed.init_process_group("gloo")
pipe = ElasticPipeline.from_transformers(
    model,
    slices=SliceOptions(arguments.slices),
    microbatches=MICROBATCHES,
    make_optimizer=lambda named: AdamW(named, lr=3e-3),
)

for step in range(STEPS):
    starts = torch.randint(len(text) - arguments.tokens, (ROWS, 1))
    ids = text[starts + torch.arange(arguments.tokens)]
    loss = pipe.step(ids, ids, max_norm=1.0)
    if step % 5 == 4:
        print(f"step {step + 1}: loss {loss:.3f}")

torch.distributed.destroy_process_group()
