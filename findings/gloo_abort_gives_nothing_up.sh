#!/usr/bin/env bash
# Guess: `abort()` of a process group ends the waits in it, and `shutdown()` ends the group, on every backend.
# Fact (torch 2.13.0): on gloo both return None at once and do nothing. A receive that another thread waits for goes on
# to its own time limit, and afterwards the group reduces as before. NCCL gives up its communicator.
# Why it matters: code that frees ranks stuck beside a failed one, tried on CPUs, waits for the whole limit (30 minutes
# by default) and looks right. In a group of both backends, as `init_process_group()` makes it, half of it goes on.
# A way out: a short limit for the group that may be given up, or a receive in it with a limit of its own.
set -euo pipefail

work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
export CUDA_VISIBLE_DEVICES="" GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
python3 -m venv "$work/venv"
timeout 900 "$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.0

cat >"$work/program.py" <<'PY'
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

LIMIT_S = 4.0
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
if rank == 0:
    print("torch", torch.__version__)

# Rank 0 waits in a thread for what rank 1 never sends, and gives the group up after a second.
given_up = dist.new_group(timeout=timedelta(seconds=LIMIT_S))
waited_s = []


def receive():
    began = time.monotonic()
    try:
        dist.recv(torch.empty(1), src=1, group=given_up)
    except RuntimeError:
        waited_s.append(time.monotonic() - began)


if rank == 0:
    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(1.0)
    given_up.abort()
    thread.join(60)
dist.barrier()

# Both ranks abort a group, shut it down, and use it all the same.
ended = dist.new_group(timeout=timedelta(seconds=LIMIT_S))
answers = [ended.abort(), ended.shutdown()]
total = torch.ones(1)
dist.all_reduce(total, group=ended)

if rank == 0:
    print(f"a wait that was aborted after 1 s ended after {waited_s[0]:.0f} s, at its limit of {LIMIT_S:.0f} s")
    print("abort() and shutdown() returned", answers, "and the sum over two ranks after them is", total.item())
    assert waited_s[0] > LIMIT_S - 0.5, "changed: abort ends a wait"
assert answers == [None, None] and total.item() == 2.0, "changed: a group that was given up is not used"
dist.destroy_process_group()
if rank == 0:
    print("Seen: gloo gives nothing up.")
PY
timeout 120 "$work/venv/bin/python" "$work/program.py" 1 "$work" &
timeout 120 "$work/venv/bin/python" "$work/program.py" 0 "$work"
wait "$!"
