"""A model with prophet.MoE layers goes through layouts that share its experts over one process, two and four.

    torchrun --standalone --nproc-per-node 4 examples/elastic_experts.py

The text is this repository's documentation. With --fixed the job stays in the first layout: the losses are the same,
but for rounding.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import prophet
from pipeline_balance import elastic

LAYOUTS = ("dp4", "dp4,ep2", "pp2,dp2,ep2,zero1", "dp4,ep4")
DIM, CONTEXT, ROWS = 32, 32, 16


class Block(nn.Module):
    """A small residual block; yours has attention."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(DIM, DIM)
        self.moe = prophet.MoE(DIM, 64, 8, top_k=2, group=elastic.one_rank())  # built with all its experts

    def forward(self, x: Tensor) -> Tensor:
        past = self.mix(x).cumsum(dim=1) / torch.arange(1, x.shape[1] + 1)[:, None]
        x = x + torch.tanh(past)
        return x + self.moe(x)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, DIM), Block(), Block(), nn.Linear(DIM, 256))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="in each layout")
    parser.add_argument("--fixed", action="store_true", help="stay in the first layout")
    args = parser.parse_args()
    dist.init_process_group("gloo")

    pages = sorted((Path(__file__).resolve().parents[1] / "docs").glob("*.md"))
    text = torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8).long()
    rows = text.unfold(0, CONTEXT + 1, CONTEXT)
    layouts = [elastic.Parallelism.parse(words) for words in LAYOUTS]
    job = elastic.Job(
        build,
        lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-3),
        layouts[0],
        data=elastic.Batches(TensorDataset(rows[:, :-1], rows[:, 1:]), ROWS),
        loss_fn=loss_fn,
        counted=lambda labels: labels.numel(),
        microbatches=4,
        balance_experts=prophet.EngineConfig(),
    )
    for number in range(len(layouts)):
        if number and not args.fixed:
            report = job.switch()
            if dist.get_rank() == 0:
                moved = sum(report.link_bytes.values())
                print(f"{layouts[number - 1]} -> {job.layout}: {moved:,} bytes, held up for {report.seconds:.3f} s")
        if number + 1 < len(layouts) and not args.fixed:
            job.prepare(layouts[number + 1])  # groups and routes, while training goes on
        for _ in range(args.steps):
            loss = job.step(max_norm=1.0)
        if dist.get_rank() == 0:
            print(f"step {job.steps} in {job.layout}: loss {loss:.5f}", flush=True)
    job.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
