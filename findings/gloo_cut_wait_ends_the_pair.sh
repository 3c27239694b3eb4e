#!/usr/bin/env bash
# Guess: `work.wait(timeout)` that expires leaves the operation under way, so a wait may be cut into short turns.
# Fact (torch 2.13.0): on gloo that holds for collectives only. The first turn of a *message* that expires closes the
# connection between the two ranks. The receive fails although its peer sends at once, the peer's send fails, and so
# does every later collective of the group on both.
# Why it matters: a loop of short waits, by which Ctrl-C or news of other ranks can be seen, works for `all_reduce` and
# destroys the group for `irecv`. So does a limit that a caller lowers for one receive.
# A way out: wait for messages in a thread, without a limit for the single wait; ask `is_completed()` before.
set -euo pipefail

work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
export CUDA_VISIBLE_DEVICES="" GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
python3 -m venv "$work/venv"
timeout 900 "$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.0

cat >"$work/program.py" <<'PY'
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

TURN = timedelta(milliseconds=200)
rank, folder = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(f"{folder}/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))


def attempt(call):
    """Return what a call returns, or the first words of what it raises."""
    try:
        return call()
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        return f"raised: {text.partition('] ')[2] or text}"[:60]


# A collective whose other rank is a second late, waited for in turns.
total = torch.ones(1)
if rank == 0:
    late = dist.all_reduce(total, async_op=True)
    turns = 0
    while not late.is_completed():
        attempt(lambda: late.wait(TURN))
        turns += 1
    late.wait()
    print("torch", torch.__version__)
    print(f"all_reduce after {turns} turns: {total.item()}")
else:
    time.sleep(1.0)
    dist.all_reduce(total)
assert total.item() == 2.0, "changed: a collective does not survive a turn that expires"
dist.barrier()

# A message that is sent as soon as the first turn is over, long before the group's limit.
if rank == 0:
    message = dist.irecv(torch.zeros(1), src=1)
    first = attempt(lambda: message.wait(TURN))
    store.set("turn is over", "yes")
    second = attempt(lambda: message.wait())
else:
    store.wait(["turn is over"])
    first, second = "", attempt(lambda: dist.send(torch.ones(1), dst=0))
after = attempt(lambda: dist.all_reduce(torch.ones(1)))
if rank == 0:
    print(f"irecv: the first turn {first!r}, the next wait {second!r}")
    print(f"the group's next all_reduce {after!r}")
assert "raised" in str(second), "changed: a message survives a turn that expires"
assert "raised" in str(after), "changed: the group survives it"
if rank == 0:
    print("Seen: a wait that is cut short ends the connection of a message, and not that of a collective.")
PY
timeout 120 "$work/venv/bin/python" "$work/program.py" 1 "$work" &
timeout 120 "$work/venv/bin/python" "$work/program.py" 0 "$work"
wait "$!"
