#!/usr/bin/env bash
# Guess: if ranks hold other values under the same names, `torch.distributed.checkpoint.save` keeps one rank's.
# Fact (torch 2.13.0): it decides tensor by tensor, for the rank that has the least to write so far. A checkpoint can
# have the weight of rank 1 and the moments of rank 0 for one parameter. Nothing is said; all ranks load the mixture.
# `DefaultSavePlanner(dedup_save_to_lowest_rank=True)` keeps rank 0's everywhere.
# Why it matters: experts, stages and adapters that ranks hold under the same names, and states of random generators,
# come back as a model that no rank ever had.
# A way out: names with the rank or the expert's global number in them, or DTensors.
set -euo pipefail

work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
export CUDA_VISIBLE_DEVICES="" GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
python3 -m venv "$work/venv"
timeout 900 "$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.0

cat >"$work/program.py" <<'PY'
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

warnings.filterwarnings("ignore")
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
if rank == 0:
    print("torch", torch.__version__)


def state(value):
    """A model's and its optimizer's state after one step; weights and first moments are `value`."""
    experts = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(experts.parameters(), lr=0.0, betas=(0.0, 0.5))
    for parameter in experts.parameters():
        nn.init.constant_(parameter, value)
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    model, optim = get_state_dict(experts, optimizer)
    return {"model": model, "optim": optim}


def came_from(planner=None):
    """By parameter, the rank whose weight and the rank whose first moment are read back."""
    place = f"{folder}/{'default' if planner is None else 'lowest'}"
    dcp.save(state(float(rank)), checkpoint_id=place, planner=planner)
    read = state(9.0)
    dcp.load(read, checkpoint_id=place)
    result = {}
    for name, weight in read["model"].items():
        moment = read["optim"]["state"][name]["exp_avg"]
        assert weight.unique().numel() == moment.unique().numel() == 1
        result[name] = (int(weight.flatten()[0]), int(moment.flatten()[0]))
    return result


seen = came_from()
if rank == 0:
    for name, (weight, moment) in seen.items():
        print(f"{name}: weight of rank {weight}, first moment of rank {moment}")
assert {weight for weight, _ in seen.values()} == {0, 1}, "changed: all weights are one rank's"
assert any(weight != moment for weight, moment in seen.values()), "changed: weights and their moments are one rank's"

lowest = came_from(dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True))
assert set(lowest.values()) == {(0, 0)}, "changed: the option keeps others than rank 0's"
dist.destroy_process_group()
if rank == 0:
    print("Seen: a checkpoint that mixes two ranks' weights and moments, without a word.")
PY
timeout 120 "$work/venv/bin/python" "$work/program.py" 1 "$work" &
timeout 120 "$work/venv/bin/python" "$work/program.py" 0 "$work"
wait "$!"
