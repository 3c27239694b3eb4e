#!/usr/bin/env bash
# Guess: if ranks run different experts of a ModuleList, FSDP2 takes zeros for the idle ones, as DDP does with
# `find_unused_parameters=True`. Or it stops, because ranks reduce different tensors.
# Fact (torch 2.13.0): a rank packs only the gradients that it has, and nothing says whose they are. If the sums of the
# sizes agree, as those of experts do, the gradient of rank 0's expert is averaged with that of rank 1's expert. Each
# rank keeps its part of the mixture for its own expert, and `None` for the other rank's.
# Why it matters: a layer that skips experts without tokens trains on other experts' gradients. It fails or waits only
# if ranks differ in how many experts they skip.
# A way out: give every expert a gradient on every rank, for instance by `0 * parameter.sum()` in the loss.
set -euo pipefail

work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
export CUDA_VISIBLE_DEVICES="" GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
python3 -m venv "$work/venv"
timeout 900 "$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.0

cat >"$work/program.py" <<'PY'
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
mesh = init_device_mesh("cpu", (2,))


class Model(nn.Module):
    """A head after one expert of two."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
        self.head = nn.Linear(2, 2, bias=False)

    def forward(self, x, chosen, touch_all):
        y = self.head(self.experts[chosen](x)).sum()
        return y + sum(0 * p.sum() for p in self.experts.parameters()) if touch_all else y


def expert_gradients(touch_all):
    """The number in this rank's part of each expert's gradient; rank r runs expert r on inputs of 10 to the r."""
    model = Model()
    for parameter in model.parameters():
        nn.init.eye_(parameter)
    fully_shard(model, mesh=mesh)
    model(torch.full((1, 2), 10.0**rank), rank, touch_all).backward()
    gradients = [expert.weight.grad for expert in model.experts]
    return [None if g is None else g.to_local().flatten()[0].item() for g in gradients]


seen = [None, None]
dist.all_gather_object(seen, expert_gradients(touch_all=False))
if rank == 0:
    print("torch", torch.__version__)
    print("right: 0.5 for expert 0 and 5.0 for expert 1, on both ranks")
    for i, (first, second) in enumerate(seen):
        print(f"rank {i} has {first} for expert 0 and {second} for expert 1")
assert seen == [[5.5, None], [None, 5.5]], "changed: other gradients"
assert expert_gradients(touch_all=True) == [0.5, 5.0], "changed: the way out gives other gradients"
dist.destroy_process_group()
if rank == 0:
    print("Seen: FSDP2 averaged the gradients of two different experts.")
PY
timeout 120 "$work/venv/bin/python" "$work/program.py" 1 "$work" &
timeout 120 "$work/venv/bin/python" "$work/program.py" 0 "$work"
wait "$!"
