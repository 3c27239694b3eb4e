"""A small language model that goes through five parallel layouts while it trains, and loses nothing on the way.

    torchrun --standalone --nproc-per-node 4 examples/elastic_training.py

With --fixed it stays in the first layout: the losses are the same, but for rounding.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline_balance import elastic

LAYOUTS = ("pp2,dp2", "pp4", "dp4,zero1", "pp2,dp2,zero1", "dp2")
VOCABULARY, DIM, CONTEXT = 64, 32, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mix = nn.Linear(DIM, DIM)
        self.feed = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        past = self.mix(x).cumsum(dim=1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.feed(self.norm(x + past))


def build() -> nn.Sequential:
    """The whole model; without memory, so no rank ever holds more than its part."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(VOCABULARY, DIM), *(Block() for _ in range(4)))
        model.append(nn.Linear(DIM, VOCABULARY, bias=False))
    model[-1].weight = model[0].weight
    return model


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="in each layout")
    parser.add_argument("--fixed", action="store_true", help="stay in the first layout")
    args = parser.parse_args()
    dist.init_process_group("gloo")

    start = torch.randint(VOCABULARY, (512, 1), generator=torch.Generator().manual_seed(0))
    text = (start + 5 * torch.arange(CONTEXT + 1)) % VOCABULARY
    data = elastic.Batches(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=32)

    layouts = [elastic.Parallelism.parse(words) for words in LAYOUTS]
    job = elastic.Job(
        build,
        lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-3),
        layouts[0],
        data=data,
        loss_fn=loss_fn,
        counted=lambda labels: labels.numel(),
        microbatches=8,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(job.optimizer, args.steps * len(layouts))
    for number, layout in enumerate(layouts):
        if number and not args.fixed:
            report = job.switch()
            if dist.get_rank() == 0:
                moved = sum(report.link_bytes.values())
                print(f"{layouts[number - 1]} -> {layout}: {moved:,} bytes, held up for {report.seconds:.3f} s")
        if number + 1 < len(layouts) and not args.fixed:
            job.prepare(layouts[number + 1])  # groups and routes, while training goes on
        for _ in range(args.steps):
            loss = job.step(max_norm=1.0)
            schedule.step()
        if dist.get_rank() == 0:
            print(f"step {job.steps} in {job.layout}: loss {loss:.6f}", flush=True)
    job.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
