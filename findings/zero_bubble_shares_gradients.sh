#!/usr/bin/env bash
# Guess: a zero-bubble schedule computes the gradients that 1F1B computes, and what hangs on them happens as ever.
# Fact (torch 2.13.0): from the second stage on, ScheduleInterleavedZeroBubble puts gradients into `.grad` by hand.
# (1) Two parameters that are added before they are used get one tensor for both. Each further microbatch is then added
# to it twice, and the mean over microbatches divides it twice: with 4 microbatches the gradients are about half as
# large. (2) Hooks on accumulated gradients never run, so DistributedDataParallel averages nothing over ranks.
# Why it matters: experts as a shared weight plus one of their own, or a frozen base unfrozen beside its delta, learn at
# the wrong rate. Replicas under DDP drift apart. The first stage is right, and so are all losses.
# A way out: a 1F1B schedule; average over ranks by hand after `step()`.
set -euo pipefail

work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
export CUDA_VISIBLE_DEVICES="" GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
python3 -m venv "$work/venv"
timeout 900 "$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.0

cat >"$work/program.py" <<'PY'
import copy
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
alone = [dist.new_group([0]), dist.new_group([1])][rank]  # each rank runs both stages of a pipeline of its own
generator = torch.Generator().manual_seed(0)
INPUTS, TARGETS = (torch.randn(2, 8, 4, generator=generator) for _ in range(2))  # [ranks, rows, features]
ONE_F_ONE_B, ZERO_BUBBLE = schedules.ScheduleInterleaved1F1B, schedules.ScheduleInterleavedZeroBubble


class Delta(nn.Module):
    """A layer whose weight is a sum of two."""

    def __init__(self):
        super().__init__()
        self.shared, self.own = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.zeros(4, 4))

    def forward(self, x):
        return torch.tanh(x @ (self.shared + self.own))


def gradients(stages, schedule, microbatches, wrap=lambda stage: stage):
    """A step of a pipeline of two stages. Returns the gradients of each."""
    stages = copy.deepcopy(stages)
    pipeline = [PipelineStage(wrap(s), i, 2, torch.device("cpu"), group=alone) for i, s in enumerate(stages)]
    schedule(pipeline, microbatches, loss_fn=nn.functional.mse_loss).step(INPUTS[rank], target=TARGETS[rank])
    return [[p.grad for p in stage.parameters()] for stage in stages]


def ratios(found, expected):
    return [[round(float(g.norm() / e.norm()), 2) for g, e in zip(*stage)] for stage in zip(found, expected)]


def apart(found):
    """Whether ranks have other gradients, by stage."""
    ranks = [None, None]
    dist.all_gather_object(ranks, found)
    return [not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*stages)) for stages in zip(*ranks)]


torch.manual_seed(0)
deltas, linears = [Delta(), Delta()], [nn.Linear(4, 4), nn.Linear(4, 4)]
sums = ratios(gradients(deltas, ZERO_BUBBLE, 4), gradients(deltas, ONE_F_ONE_B, 4))
drift = {s.__name__: apart(gradients(linears, s, 2, DistributedDataParallel)) for s in (ONE_F_ONE_B, ZERO_BUBBLE)}
if rank == 0:
    print("torch", torch.__version__)
    print("weights that are a sum of two; zero-bubble gradients over those of 1F1B, by stage:", sums)
    for name, differ in drift.items():
        print(f"{name} under DDP: ranks differ in stage 0: {differ[0]}, in stage 1: {differ[1]}")
    assert sums[0] == [1.0, 1.0] and max(sums[1]) < 0.8, "changed: gradients of summed weights"
assert list(drift.values()) == [[False, False], [False, True]], "changed: what ranks have in common under DDP"
dist.destroy_process_group()
if rank == 0:
    print("Seen: zero-bubble schedules give two parameters one gradient, and DDP averages none of the second stage.")
PY
timeout 120 "$work/venv/bin/python" "$work/program.py" 1 "$work" &
timeout 120 "$work/venv/bin/python" "$work/program.py" 0 "$work"
wait "$!"
