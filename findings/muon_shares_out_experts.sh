#!/usr/bin/env bash
# Guess: an optimizer's step is local, so a rank may give it the experts that it alone holds.
# Fact (muon-optimizer 0.1.0, `from muon import Muon`): each parameter is updated on one rank only, and the others take
# the values from there, by an all-gather inside of `step()`. After one step every rank has the same experts, and what
# the other ranks had learnt is gone. Torch's own Muon sends nothing.
# Why it matters: expert parallelism, pipelines and tensor parallelism have other parameters on every rank. If their
# shapes agree, nothing fails and the loss goes on.
# A way out: `SingleDeviceMuon` of the same package for what differs by rank.
set -euo pipefail

work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
export CUDA_VISIBLE_DEVICES="" GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
python3 -m venv "$work/venv"
timeout 900 "$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.0 muon-optimizer==0.1.0

cat >"$work/program.py" <<'PY'
import sys
from datetime import timedelta
from importlib.metadata import version

import muon
import torch
import torch.distributed as dist
from torch import nn

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)


def moved(kind):
    """Make one step with two experts of each rank. Returns how far each expert is from where it was."""
    torch.manual_seed(rank)  # every rank has experts of its own
    experts = [nn.Parameter(torch.randn(4, 4)) for _ in range(2)]
    before = [p.detach().clone() for p in experts]
    for p in experts:
        p.grad = torch.randn(4, 4)
    kind(experts, lr=0.01, weight_decay=0.0).step()
    mine = [p.detach() for p in experts]
    ranks = [None, None]
    dist.all_gather_object(ranks, mine)
    equal = [torch.equal(a, b) for a, b in zip(*ranks)]
    return [round(float((p - old).norm()), 2) for p, old in zip(mine, before)], equal


KINDS = {
    "muon-optimizer, Muon": muon.Muon,
    "muon-optimizer, SingleDeviceMuon": muon.SingleDeviceMuon,
    "torch, Muon": torch.optim.Muon,
}
if rank == 0:
    print("torch", torch.__version__, "muon-optimizer", version("muon-optimizer"))
for name, kind in KINDS.items():
    seen = [None, None]
    dist.all_gather_object(seen, moved(kind))
    (first, equal), (second, _) = seen
    if rank == 0:
        print(f"{name:33} rank 0's experts moved by {first}, rank 1's by {second}, now the same on both: {equal}")
    mixes = name == "muon-optimizer, Muon"
    assert equal == [mixes, mixes], "changed: what ranks have in common"
    # one rank keeps expert 0 and the other one expert 1; what they lose is as large as two random matrices are apart
    far = [[step > 1.0 for step in steps] for steps in (first, second)]
    assert far == ([[False, True], [True, False]] if mixes else [[False, False]] * 2), "changed: how far experts move"
dist.destroy_process_group()
if rank == 0:
    print("Seen: muon-optimizer's Muon gave every rank one rank's experts.")
PY
timeout 120 "$work/venv/bin/python" "$work/program.py" 1 "$work" &
timeout 120 "$work/venv/bin/python" "$work/program.py" 0 "$work"
wait "$!"
