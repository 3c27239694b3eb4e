"""Experts over groups of processes, everything else cut by FSDP2, and a checkpoint that any other number can resume.

torchrun --standalone --nproc-per-node 4 examples/expert_and_data_parallel.py --ep-size 2 --folder out/moe
torchrun --standalone --nproc-per-node 2 examples/expert_and_data_parallel.py --ep-size 1 --folder out/moe --steps 30
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import prophet
from prophet import checkpoint
from prophet.comm import Collective
from prophet.parallel import ExpertReplicas, expert_groups, expert_parameters

VOCAB, DIM, ROWS = 64, 32, 8


class Block(nn.Module):
    """A small residual block; yours has attention."""

    def __init__(self, group: Collective) -> None:
        super().__init__()
        self.mix = nn.Linear(DIM, DIM)
        self.moe = prophet.MoE(dim=DIM, hidden=64, num_experts=8, top_k=2, group=group)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.gelu(self.mix(x))
        return x + self.moe(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ep-size", type=int, default=2, help="processes that share one set of experts")
    parser.add_argument("--steps", type=int, default=20, help="steps in all, those before a resume among them")
    parser.add_argument(
        "--folder", type=Path, required=True, help="the checkpoint; training goes on where there is one"
    )
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same parameters on every process; experts differ by their number

    group, replicas = expert_groups(args.ep_size)
    model = nn.Sequential(nn.Embedding(VOCAB, DIM), Block(group), Block(group), nn.Linear(DIM, VOCAB))
    experts = {p for _, p in expert_parameters(model)}
    for module in model:
        if isinstance(module, Block):
            fully_shard(module, ignored_params=experts)  # FSDP leaves the experts where they are
    fully_shard(model, ignored_params=experts)
    # After fully_shard, which makes new parameters; in groups of their own, so that `fused=True` works, too.
    dense = [p for p in model.parameters() if p not in experts]
    optimizer = torch.optim.AdamW([{"params": dense}, {"params": list(experts)}], lr=3e-3)
    ExpertReplicas(model, replicas)  # averages the experts' gradients over the groups
    engine = prophet.attach(model, optimizer)

    first = 0
    if (args.folder / checkpoint.DESCRIPTION).exists():
        first = checkpoint.load(args.folder, model, optimizer)["step"]
    for step in range(first, args.steps):
        data = torch.Generator().manual_seed(step)
        rows = torch.randint(0, VOCAB // 4, (ROWS, 17), generator=data)[rank::world]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        engine.clip_grad_norm_(list(model.parameters()), 1.0)  # torch's own would see one process's experts
        optimizer.step()
        total = loss.detach() / world
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step + 1}: loss {total.item():.6f}", flush=True)
    checkpoint.save(args.folder, model, optimizer, extra={"step": args.steps})

    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
