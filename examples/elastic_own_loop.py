"""A training loop of your own that changes its layout halfway.

    torchrun --standalone --nproc-per-node 4 examples/elastic_own_loop.py --layout dp4 --then dp4,zero3

Layouts are dp4 (DDP), dp4,zero3 (FSDP2), tp4 (tensor parallelism), dp2,tp2,zero3 (both), dp1 and so on.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from pipeline_balance import elastic


def build() -> nn.Module:
    block = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
    model = nn.Sequential(nn.Embedding(64, 32), block, nn.Linear(32, 64))
    model.tp_plan = {"1.1": "colwise", "1.3": "rowwise"}  # how tp cuts it, in transformers' words
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", type=elastic.Parallelism.parse, default="dp4", help="of the first half")
    parser.add_argument("--then", type=elastic.Parallelism.parse, default="dp4,zero3", help="of the second half")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, layout = dist.get_rank(), elastic.Parallelism()

    model = build() if rank == 0 else build().to("meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    averages = {n: elastic.register("ema", p.detach().clone(), p) for n, p in model.named_parameters()}

    for step in range(40):
        if step % 20 == 0:  # the first time from one process, which alone has the weights
            wanted = args.then if step else args.layout
            model, layout = elastic.reshard(model, optimizer, layout, wanted, build), wanted
        place = layout.place(rank)
        if place is not None:  # the others have nothing to do in this layout
            ids = torch.randint(64, (32,), generator=torch.Generator().manual_seed(step))
            mine = ids.chunk(layout.dp)[place.dp]
            loss = F.cross_entropy(model(mine), (mine * 3 + 1) % 64)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            value = loss.item()
            del loss  # its graph would hold the parameters from before a switch
            for name, p in model.named_parameters():  # DDP puts a word in front
                averages[name.removeprefix("module.")].tensor.lerp_(p.detach(), 0.1)
        schedule.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1} in {layout}: loss of rank 0 {value:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
