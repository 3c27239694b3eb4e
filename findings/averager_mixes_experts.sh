#!/usr/bin/env bash
# Guess: PeriodicModelAverager gives every rank the mean of each parameter over the ranks.
# Fact (torch 2.13.0): each rank leaves out the parameters whose `.grad` is None, packs the rest into one buffer and
# averages the buffers. If the ranks leave out different parameters of equal size, different parameters are averaged
# with each other, without an error. PostLocalSGDOptimizer does the same. After `optimizer.zero_grad()` nothing is
# left, and the error is about `torch.cat()`.
# Why it matters: an expert that got no token has no gradient, so MoE ranks differ in exactly this way. Two experts
# that should be 1 and 100 on both ranks become (50.5, 100) on one and (1, 50.5) on the other.
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
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
if rank == 0:
    print("torch", torch.__version__)


def model():
    """Two experts with one weight each, 1 and 100 on both ranks. Rank 0 has used expert 0 alone, rank 1 expert 1."""
    experts = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
    for expert, value in zip(experts, (1.0, 100.0), strict=True):
        nn.init.constant_(expert.weight, value)
    experts[rank](torch.ones(1, 1)).sum().backward()
    return experts


def gather(experts):
    """The weights of all experts on rank 0, then on rank 1."""
    weights = [torch.empty(2) for _ in range(2)]
    dist.all_gather(weights, torch.cat([expert.weight.detach().reshape(-1) for expert in experts]))
    return [each.tolist() for each in weights]


# The learning rate is zero: every change of a weight is the averager's.
mixed = [[50.5, 100.0], [1.0, 50.5]]
experts = model()
torch.optim.SGD(experts.parameters(), lr=0.0).step()
PeriodicModelAverager(period=2, warmup_steps=0).average_parameters(experts.parameters())
averaged = gather(experts)

local_experts = model()
averager = PeriodicModelAverager(period=2, warmup_steps=0)
PostLocalSGDOptimizer(torch.optim.SGD(local_experts.parameters(), lr=0.0), averager).step()
local = gather(local_experts)

optimizer = torch.optim.SGD(experts.parameters(), lr=0.0)
optimizer.zero_grad()
message = "none"
try:
    PeriodicModelAverager(period=2, warmup_steps=0).average_parameters(experts.parameters())
except ValueError as error:
    message = str(error)

if rank == 0:
    print("before, on both ranks:               [1.0, 100.0]")
    print("average_parameters, rank 0 and 1:   ", averaged)
    print("PostLocalSGDOptimizer, rank 0 and 1:", local)
    print("after zero_grad, the error:         ", message)
assert averaged == mixed and local == mixed, "changed: experts are averaged otherwise"
assert "torch.cat(): expected a non-empty list" in message, "changed: another answer after zero_grad"
dist.destroy_process_group()
if rank == 0:
    print("Seen: one rank's expert 0 was averaged with the other rank's expert 1.")
PY
timeout 120 "$work/venv/bin/python" "$work/program.py" 1 "$work" &
timeout 120 "$work/venv/bin/python" "$work/program.py" 0 "$work"
wait "$!"
