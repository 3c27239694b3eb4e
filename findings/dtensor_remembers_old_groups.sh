#!/usr/bin/env bash
# Guess: a DTensor talks over the process group of the mesh that it was given.
# Fact (torch 2.13.0): meshes of the same ranks are equal, and DTensor keeps what it has worked out by that. An operation
# that one mesh has done before is done over that mesh's group, also for tensors of a new mesh with a group of its own.
# Once the old group is destroyed it fails: "Could not resolve the process group registered under the name ...".
# Why it matters: a job that changes its layout cannot give back the groups of meshes it has left. An option of the new
# group, as its limit or NCCL's priority, does not hold for operations that the old mesh had.
# A way out: keep the groups of meshes for the life of the process, and make a mesh of given ranks once.
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
if rank == 0:
    print("torch", torch.__version__)


def doubled(group):
    """Twice 0, 1, 2, 3, cut over the two ranks of a new mesh, and gathered again."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh=[0, 1])
    parts = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    return mesh, (parts * 2).redistribute(mesh, [Replicate()]).to_local().tolist()


first = dist.new_group()
old, right = doubled(first)
assert right == [0.0, 2.0, 4.0, 6.0]

# The new mesh works while the old group is there, and is equal to the old one.
second = dist.new_group()
new, answer = doubled(second)
assert answer == right and old == new and hash(old) == hash(new), "changed: meshes of the same ranks differ"

dist.destroy_process_group(first)
third = dist.new_group()
total = torch.ones(1)
dist.all_reduce(total, group=third)
try:
    doubled(third)
    said = ""
except RuntimeError as error:
    said = str(error).splitlines()[0]
if rank == 0:
    print("the third group itself adds up to", total.item())
    print("a mesh of it raises:", said)
assert total.item() == 2.0
assert "Could not resolve the process group" in said, "changed: a new mesh uses its own group"
dist.destroy_process_group()
if rank == 0:
    print("Seen: DTensor went to a group that was destroyed.")
PY
timeout 120 "$work/venv/bin/python" "$work/program.py" 1 "$work" &
timeout 120 "$work/venv/bin/python" "$work/program.py" 0 "$work"
wait "$!"
