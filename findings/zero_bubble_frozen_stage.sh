#!/usr/bin/env bash
# Guess: a pipeline schedule decides when gradients are computed, never which.
# Fact (torch 2.13.0): if a stage is frozen entirely, ScheduleInterleavedZeroBubble and ScheduleZBVZeroBubble leave
# `.grad` at None for every weight of the stage after it. There is no error, and the loss is right.
# ScheduleInterleaved1F1B computes all gradients. Two processes with two stages each show the same.
# Why it matters: fine-tuning often freezes the first layers. The next stage then never learns, and no curve says so.
# A way out: let the frozen stage's output require a gradient by a forward hook, or keep one parameter trainable.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
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

dist.init_process_group(
    "gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1, timeout=timedelta(seconds=60)
)
print("torch", torch.__version__)


def trained(schedule, *, hook=False):
    """Train a frozen stage and a second one for a step. Returns whether the second one has its gradients."""
    torch.manual_seed(0)
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    stages[0].requires_grad_(False)
    reference = copy.deepcopy(stages)
    if hook:
        stages[0].register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    inputs, targets = torch.randn(8, 4), torch.randn(8, 4)

    pipeline = [PipelineStage(stage, i, 2, torch.device("cpu")) for i, stage in enumerate(stages)]
    losses = []
    schedule(pipeline, 2, loss_fn=nn.functional.mse_loss).step(inputs, target=targets, losses=losses)

    loss = nn.functional.mse_loss(reference[1](reference[0](inputs)), targets)
    loss.backward()
    torch.testing.assert_close(torch.stack(losses).mean(), loss)
    found, expected = stages[1].weight.grad, reference[1].weight.grad
    if found is not None:
        torch.testing.assert_close(found, expected)
    print(f"{schedule.__name__:30} {'hook' if hook else 'plain':6} loss right, second stage: ", end="")
    print("no gradient" if found is None else "gradient right")
    return found is not None


assert trained(schedules.ScheduleInterleaved1F1B), "changed: 1F1B loses gradients too"
for schedule in (schedules.ScheduleInterleavedZeroBubble, schedules.ScheduleZBVZeroBubble):
    assert not trained(schedule), "changed: the stage after a frozen one has gradients"
    assert trained(schedule, hook=True), "changed: the hook does not help any more"
dist.destroy_process_group()
print("Seen: zero-bubble schedules drop the gradients of the stage after a frozen one.")
PY
timeout 120 "$work/venv/bin/python" "$work/program.py" "$work"
