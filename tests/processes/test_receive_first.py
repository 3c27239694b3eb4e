"""All-to-alls over gloo that post their receives first: the same results, and what hangs on them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.cluster.profiles import uniform
from benchmarks.cluster.testbed import Testbed
from prophet.errors import CollectiveError, CollectiveTimeout
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import ProcessGroupCollective, collective_for
from prophet.ranks.waiting import Waiter
from tests.helpers.cluster_testbed import needs_testbed
from tests.helpers.launch import ROOT, ended_within, mark, on_processes, wait_for

OP = Operation("dispatch", 3)


def same_as_gloos_own() -> list[str]:
    """What differs between the two ways, for uneven and empty pieces of several types, several at a time."""
    wrong = []
    ours = ProcessGroupCollective(timeout_s=30, receive_first=True)
    gloos = ProcessGroupCollective(timeout_s=30, receive_first=False)
    rank, size = ours.rank, ours.size
    generator = torch.Generator().manual_seed(5)
    counts = torch.randint(0, 5, (6, size, size), generator=generator)
    counts[0] = 0
    counts[1, 0], counts[1, :, 1] = 0, 0  # a rank that sends nothing, and one that gets nothing
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for shape in ((), (3,), (2, 2)):
            expected, under_way = [], []
            for k, table in enumerate(counts.tolist()):
                send, recv = table[rank], [row[rank] for row in table]
                x = (torch.arange(sum(send) * max(1, torch.Size(shape).numel())) + 100 * rank).to(dtype)
                x = x.reshape(sum(send), *shape).requires_grad_(dtype.is_floating_point)
                channel: Any = "weights" if k % 2 else "tokens"
                expected.append(gloos.all_to_all(x.detach(), send, recv, op=OP).wait())
                under_way.append(ours.all_to_all(x, send, recv, op=OP, channel=channel))
            for k in reversed(range(len(under_way))):  # waited for in another order than they were made
                found = under_way[k].wait()
                if not torch.equal(found, expected[k]) or found.requires_grad or not under_way[k].ended():
                    wrong.append(f"{dtype} {shape} {k}: {found} for {expected[k]}")
    ours.close()
    gloos.close()
    return wrong


def ways_of_groups() -> list[bool]:
    """Whether groups receive first where ranks 0 and 1 share a host: of all ranks, then of those that this one is in.

    Only the first of them asks where ranks are.
    """
    rank = dist.get_rank()
    with mock.patch("prophet.ranks.process_group.place", return_value=rank // 2):
        found = [ProcessGroupCollective(timeout_s=30)._receive_first]
    for members in ((0, 1), (1, 2)):
        group = dist.new_group(members)
        with mock.patch.object(ProcessGroupCollective, "all_gather", side_effect=AssertionError):
            if rank in members:
                found.append(ProcessGroupCollective(group, timeout_s=30, channels=(group, group))._receive_first)
    return list(map(bool, found))


def test_groups_know_from_the_first_of_all_ranks_who_shares_a_host() -> None:
    assert on_processes(3, ways_of_groups) == [[True, False], [True, False, True], [True, True]]


def test_the_same_rows_arrive_as_by_gloos_own() -> None:
    assert on_processes(3, same_as_gloos_own) == [[]] * 3


def order_of_posts() -> list[str]:
    seen = []
    group = ProcessGroupCollective(timeout_s=30, receive_first=True)
    isend, irecv = dist.isend, dist.irecv

    def noted(name: str, call: Any) -> Any:
        return lambda *args, **kwargs: (seen.append(name), call(*args, **kwargs))[1]

    with mock.patch.object(dist, "isend", noted("s", isend)), mock.patch.object(dist, "irecv", noted("r", irecv)):
        group.all_to_all(torch.ones(3), [1, 1, 1], [1, 1, 1], op=OP).wait()
    return seen


def test_receives_are_posted_before_sends() -> None:
    assert on_processes(3, order_of_posts) == [["r", "r", "s", "s"]] * 3


def known_progress() -> list[bool]:
    """Whether a transfer has ended, and when, while its peer is late."""
    group = ProcessGroupCollective(timeout_s=30, receive_first=True)
    began = time.perf_counter()
    if group.rank == 1:
        time.sleep(0.5)
    pending = group.all_to_all(torch.ones(2), [1, 1], [1, 1], op=OP, channel="weights")
    pending.watch()
    at_once = pending.ended()
    deadline = time.monotonic() + 20
    while not pending.ended() and time.monotonic() < deadline:
        time.sleep(0.01)
    arrived = pending.arrived_s is not None and pending.arrived_s > began + 0.4
    found = [at_once and group.rank == 0, pending.ended(), arrived, pending.wait().tolist() == [1.0, 1.0]]
    group.close()
    deadline = time.monotonic() + 20
    while any(t.name.startswith("gloo ") for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [*found, not any(t.name.startswith("gloo ") for t in threading.enumerate())]


def test_progress_is_known_and_the_thread_ends_with_the_collective() -> None:
    assert on_processes(2, known_progress) == [[False, True, True, True, True]] * 2


def missing_peer() -> str:
    group = ProcessGroupCollective(timeout_s=1.0, receive_first=True)
    if group.rank == 1:
        wait_for("given up")
        return "late"
    with pytest.raises(CollectiveTimeout, match=r"rank 0: dispatch of layer 3 failed: no answer within 1 s") as caught:
        group.all_to_all(torch.ones(2), [1, 1], [1, 1], op=OP).wait()
    mark("given up")
    return type(caught.value).__name__


def test_a_peer_that_does_not_come_is_a_named_error_in_time() -> None:
    assert on_processes(2, missing_peer) == ["CollectiveTimeout", "late"]


def other_modes() -> list[float]:
    with torch.device("meta"):  # where a model is built whose parameters come later
        group = ProcessGroupCollective(timeout_s=30)
    group.close()
    group = ProcessGroupCollective(timeout_s=30, receive_first=True)
    with torch.inference_mode():
        x = torch.tensor([1.0, 2.0]) + 10 * group.rank
        return list(group.all_to_all(x, [1, 1], [1, 1], op=OP).wait().tolist())


def test_inference_mode_and_another_default_device() -> None:
    assert on_processes(2, other_modes) == [[1.0, 11.0], [2.0, 12.0]]


FORKED = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
from prophet.ranks.process_group import Operation, ProcessGroupCollective
folder, ranks, times, op = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Operation("Trans", 3)
def rounds():  # the rank and the meeting point, in a process of its own; returns in the first process alone
    for at in range(times):
        running = []
        for rank in range(ranks):
            if (pid := os.fork()) == 0:
                os.dup2(os.open(f"{folder}/{at}-{rank}.err", os.O_CREAT | os.O_WRONLY), 2)
                return rank, f"file://{folder}/store-{at}"
            running.append(pid)
        print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in running), flush=True)
    raise SystemExit
rank, store = rounds()
def init(backend): dist.init_process_group(backend, store, timedelta(seconds=30), ranks, rank)
"""


def by_themselves(
    program: str, tmp_path: Path, *, ranks: int = 2, times: int = 1, debug: str = "OFF"
) -> list[tuple[int, str]]:
    """Exit codes and errors of processes that end as Python does: `ranks` at once, `times` one after the other.

    They are forked from one that has imported torch, which takes longer than what they do.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", FORKED + program, str(tmp_path), str(ranks), str(times)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": debug},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    ((said, _),) = ended_within(60 * times, [process])
    assert process.returncode == 0
    return [
        (int(code), (tmp_path / f"{at}-{rank}.err").read_text())
        for at, line in enumerate(said.splitlines())
        for rank, code in enumerate(line.split())
    ]


UNDER_WAY = """
init("gloo")
group = ProcessGroupCollective(timeout_s=12, receive_first=True)
x = torch.zeros(200, 1000)
for _ in range(5):
    pending = group.all_to_all(x, [100, 100], [100, 100], op=op, channel="weights")
    _ or pending.wait()
raise SystemExit(3)
"""


def test_a_program_may_end_with_transfers_under_way(tmp_path: Path) -> None:
    """Threads that were in the middle of a wait used to abort every second of such processes.

    torch alone aborts one of some ninety that end without destroying their groups, so one of eight may.
    """
    codes = [code for code, _ in by_themselves(UNDER_WAY, tmp_path, times=4)]
    assert len(codes) == 8
    assert codes.count(3) >= 7, codes


OTHER_BACKEND = """
init("cuda:gloo")  # serves no tensors of the host, as NCCL does not
group = ProcessGroupCollective(dist.new_group([0, 1], backend="gloo"), timeout_s=12)
dist.destroy_process_group()
"""
COUNTED = """
init("gloo")
from unittest import mock
with mock.patch("prophet.ranks.process_group.place", lambda: rank):
    group = ProcessGroupCollective(timeout_s=12)
send, recv = [[0, 1, 0], [0] * 3, [0] * 3][rank], [[0] * 3, [1, 0, 0], [0] * 3][rank]
group.all_to_all(torch.ones(sum(send)), send, recv, op=op).wait()
assert group.all_gather(torch.tensor(rank), op=op).tolist() == [0, 1, 2]
dist.destroy_process_group()
"""


@pytest.mark.parametrize("program", [OTHER_BACKEND, COUNTED], ids=["backend", "debug"])
def test_where_receiving_first_is_not_to_be_had(program: str, tmp_path: Path) -> None:
    ranks = 3 if program is COUNTED else 2  # two send and receive the same number of messages
    done = by_themselves(program, tmp_path, ranks=ranks, debug="DETAIL" if program is COUNTED else "OFF")
    assert [(code, error[-500:] if code else "") for code, error in done] == [(0, "")] * ranks


def test_nothing_waits_for_a_thread_that_was_ended() -> None:
    waiter = Waiter("gloo posts nothing")
    assert waiter.submit(lambda: 5).result(10) == 5
    waiter.close()
    with pytest.raises(RuntimeError, match="gloo posts nothing: the thread was ended"):
        waiter.submit(lambda: 6)


def closed() -> str:
    group = ProcessGroupCollective(timeout_s=5, receive_first=True)
    group.close()
    with pytest.raises(CollectiveError, match="the collective was closed") as caught:
        group.all_to_all(torch.ones(2), [1, 1], [1, 1], op=OP)
    return str(caught.value)


def test_a_closed_collective_says_so() -> None:
    assert len(set(on_processes(2, closed))) == 2


def chosen() -> bool:
    group = collective_for(None)
    assert isinstance(group, ProcessGroupCollective)
    return bool(group._receive_first)


def test_ranks_on_one_host_keep_gloos_own() -> None:
    assert on_processes(2, chosen) == [False, False]


@needs_testbed
def test_ranks_on_several_hosts_receive_first() -> None:
    with Testbed(uniform("two", hosts=2, share=0.3)) as bed:
        assert bed.run("tests.helpers.cluster_programs:receives_first", {}, timeout_s=60) == [True, True]
