"""A training loop of your own, with its MoE layers balanced. Run it on two processes:

torchrun --standalone --nproc-per-node 2 examples/own_loop.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import prophet


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same parameters on every rank; experts differ by their number

    model = nn.Sequential(
        nn.Embedding(256, 64),
        prophet.MoE(dim=64, hidden=128, num_experts=8, top_k=2),
        nn.Linear(64, 256),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = prophet.attach(model, optimizer)  # before DDP: it leaves the experts' gradients to the engine
    ddp = DistributedDataParallel(model)

    data = torch.Generator().manual_seed(1 + rank)  # every rank has tokens of its own
    for step in range(20):
        # some tokens come far more often than others, and so do the experts that they visit
        ids = (torch.rand(4, 129, generator=data) ** 4 * 64).long()
        loss = F.cross_entropy(ddp(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report = engine.last_step
        if rank == 0 and report is not None and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}, rank max/mean {report.max_mean:.3f}", end=" ")
            print(f"(without balancing {report.max_mean_static:.3f}), {report.copies.sum()} copies of experts")

    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
