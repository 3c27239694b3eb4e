"""A Llama learns bytes of pages that get longer while it trains; every length has the layout that suits it.

    torchrun --standalone --nproc-per-node 4 examples/elastic_long_context.py

The text is this repository's documentation. With --fixed the job stays in the first layout: the losses are the same,
but for rounding.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline_balance import elastic
from pipeline_balance.slices import SliceOptions

PHASES = ((64, "pp2,dp2"), (256, "pp2,dp2,slices4"), (512, "pp4,slices8"), (128, "pp2,v2,dp2,zero1,slices2"))
ROWS = 4


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of bytes [4, tokens], the same on every rank; of each length as many as there are steps."""
    pages = sorted((Path(__file__).resolve().parents[1] / "docs").glob("*.md"))
    text = torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8).long()
    random = torch.Generator().manual_seed(0)
    for tokens, _ in PHASES:
        for _ in range(steps):
            starts = torch.randint(len(text) - tokens, (ROWS, 1), generator=random)
            ids = text[starts + torch.arange(tokens)]
            yield ids, ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="at each length")
    parser.add_argument("--fixed", action="store_true", help="stay in the first layout")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    layouts = [elastic.Parallelism.parse(text) for _, text in PHASES]
    job = elastic.Job(
        build,
        lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
        layouts[0],
        data=batches(args.steps),
        microbatches=4,
        slices=SliceOptions(1, order="aligned"),
    )
    for number, (tokens, _) in enumerate(PHASES):
        if number and not args.fixed:
            report = job.switch()
            if dist.get_rank() == 0:
                moved = sum(report.link_bytes.values())
                print(f"{layouts[number - 1]} -> {job.layout}: {moved:,} bytes, held up for {report.seconds:.3f} s")
        if number + 1 < len(PHASES) and not args.fixed:
            job.prepare(layouts[number + 1])  # groups and routes, while training goes on
        for _ in range(args.steps):
            loss = job.step(max_norm=1.0)
        if dist.get_rank() == 0:
            print(f"step {job.steps} of {tokens} tokens in {job.layout}: loss {loss:.5f}", flush=True)
    job.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
