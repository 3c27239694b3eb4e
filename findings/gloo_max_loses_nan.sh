#!/usr/bin/env bash
# Guess: the maximum over ranks of a tensor with a NaN is NaN, as `torch.max`, `torch.maximum` and NumPy have it. At
# least it does not depend on which rank has the NaN.
# Fact (torch 2.13.0, gloo, three ranks): in `MAX` and `MIN` a NaN of one rank only survives in part of the tensor, in
# another part for each rank, and a scalar keeps that of rank 0 alone. All ranks get the same answer, which depends on
# where the NaN was. `SUM` and `PRODUCT` keep every NaN.
# Why it matters: a loop that takes the maximum of the ranks' losses or gradient norms, and steps if it is finite, steps
# on NaN gradients unless they are rank 0's.
# A way out: add up, or share `isfinite` as a number.
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

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3, timeout=timedelta(seconds=60)
)
if rank == 0:
    print("torch", torch.__version__)
assert torch.stack([torch.tensor(1.0), torch.tensor(float("nan"))]).max().isnan()


def nans_left(size, operation, place):
    """Where the answer has NaN if rank `place` has only NaN and the others have only ones."""
    x = torch.full((size,), float("nan") if rank == place else 1.0)
    dist.all_reduce(x, op=operation)
    answers = [torch.empty_like(x) for _ in range(3)]
    dist.all_gather(answers, x)
    assert all(torch.equal(a.isnan(), x.isnan()) for a in answers), "changed: ranks differ in the answer"
    return x.isnan().int().tolist()


for name in ("MAX", "MIN", "SUM", "PRODUCT"):
    operation = getattr(dist.ReduceOp, name)
    one = [nans_left(1, operation, place) for place in range(3)]
    nine = [nans_left(9, operation, place) for place in range(3)]
    if rank == 0:
        print(f"{name}: one value; NaN on rank 0, 1, 2 is kept: {[bool(x[0]) for x in one]}")
        for place, kept in enumerate(nine):
            print(f"{name}: nine values; NaN on rank {place} is kept at: {kept}")
    if name in ("SUM", "PRODUCT"):
        assert one == [[1]] * 3 and nine == [[1] * 9] * 3, "changed: sums and products lose NaN"
    else:
        assert one == [[1], [0], [0]], "changed: another rank's NaN is kept"
        assert all(0 < sum(kept) < 9 for kept in nine), "changed: NaN is kept everywhere or nowhere"
        assert [sum(column) for column in zip(*nine)] == [1] * 9, "changed: a place keeps more than one rank's NaN"
dist.destroy_process_group()
if rank == 0:
    print("Seen: in a maximum each element keeps the NaN of one rank and loses those of the others.")
PY
timeout 120 "$work/venv/bin/python" "$work/program.py" 1 "$work" &
first=$!
timeout 120 "$work/venv/bin/python" "$work/program.py" 2 "$work" &
second=$!
timeout 120 "$work/venv/bin/python" "$work/program.py" 0 "$work"
wait "$first"
wait "$second"
