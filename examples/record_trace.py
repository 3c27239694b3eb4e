"""Would balancing help this model? Record what its routers choose while it trains, then ask. One process is enough:

python examples/record_trace.py

The line that a script of your own needs is the one with `prophet.record`. Nothing is converted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import prophet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/routing.npz"))
    parser.add_argument("--ranks", type=int, default=8, help="ranks of the job that you think of")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=32,
        num_experts_per_tok=4,
    )
    model = Qwen3MoeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with prophet.record(model, options.out, ranks=options.ranks):
        for step in range(options.steps):
            optimizer.zero_grad()
            for _ in range(options.ranks):  # each pass is the microbatch of one would-be rank
                # some tokens come far more often than others, and so do the experts that they visit
                ids = (torch.rand(4, 64) ** 4 * 256).long()
                loss = model(input_ids=ids, labels=ids).loss
                (loss / options.ranks).backward()
            optimizer.step()
            if step % 5 == 4:
                print(f"step {step + 1}: loss {loss.item():.3f}")

    print(f"Now run: prophet plan {options.out} --machine h100-ib")


if __name__ == "__main__":
    main()
