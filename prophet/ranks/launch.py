"""Ranks as processes of this machine: started, watched, and none left behind.

Every wait ends: ranks give up on each other after their group's time limit, and the caller's process ends all of them
when one dies or when the whole run takes too long. This file owns the start and the end of process groups; what runs
in between is handed a rank and talks through a `Collective`.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from prophet.errors import PeerLost, RankFailed, SpecError
from prophet.ranks.collective import Collective
from prophet.ranks.process_group import collective_for

_GRACE_S = 5.0  # for the other ranks to notice and to say what they saw
PRELOADED = ["prophet.ranks.launch"]  # imported once, torch with it, by the process that all ranks are forked from


def run_ranks(
    body: Callable[..., None],
    args: Sequence[Any],
    *,
    ranks: int,
    folder: Path,
    limit_s: float,
    timeout_s: float,
    what: str = "the run",
    traces: Path | None = None,
) -> None:
    """Run `body(rank, *args)` on `ranks` processes of one gloo group, and return when all have ended well.

    `body` must be importable. folder: a private folder that outlives the call, where the ranks meet and leave messages.
    limit_s: on everything; timeout_s: on every wait within the group. what: the run's name in messages. traces: a
    folder for tracebacks of ranks that fail, if they are wanted.

    Raises `RankFailed` when a rank fails, dies or the time is up; no process survives.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    told = (ranks, body, tuple(args), folder, timeout_s, traces, dict(os.environ))
    processes = [
        context.Process(target=_rank_main, args=(rank, *told), name=f"rank {rank}", daemon=True)
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.start()
        _watch(processes, folder, limit_s, what)
    finally:
        _end(processes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a launcher such as torchrun has started this process, as one of several ranks.

    ranks: on all nodes. local_rank: this one's number on its node. local_ranks: on this node, where that is known.
    """

    ranks: int
    local_rank: int
    local_ranks: int | None

    @property
    def device(self) -> str:
        """This rank's own GPU, such as cuda:1; cpu where it has none."""
        return f"cuda:{self.local_rank}" if torch.cuda.device_count() > self.local_rank else "cpu"


def launched() -> Launch | None:
    """What a launcher has written into this process's environment; None where none has started it.

    Raises `SpecError` for a variable that is no whole number, or too small.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return Launch(
        ranks=_told("WORLD_SIZE", least=1),
        local_rank=_told("LOCAL_RANK", least=0) if "LOCAL_RANK" in os.environ else 0,
        local_ranks=_told("LOCAL_WORLD_SIZE", least=1) if "LOCAL_WORLD_SIZE" in os.environ else None,
    )


def _told(name: str, *, least: int) -> int:
    """A number that the launcher has written into the environment."""
    text = os.environ[name]
    if not text.isdecimal() or int(text) < least:
        raise SpecError(f"the launcher's {name} must be a whole number of at least {least}, got {text!r}")
    return int(text)


@contextmanager
def joined_group(launch: Launch, *, timeout_s: float, backend: str | None = None) -> Iterator[Collective]:
    """The collective over all ranks that a launcher has started.

    backend: as for `init_process_group`; None for NCCL where this rank has a GPU, else gloo.
    """
    on_gpu = launch.device != "cpu"
    if on_gpu:
        torch.cuda.set_device(launch.local_rank)
    backend = backend or ("nccl" if on_gpu else "gloo")
    dist.init_process_group(backend, init_method="env://", timeout=timedelta(seconds=timeout_s))
    try:
        yield collective_for(None, timeout_s=timeout_s)
    finally:
        dist.destroy_process_group()


def _watch(processes: Sequence[BaseProcess], folder: Path, limit_s: float, what: str) -> None:
    """Wait until all have ended well; raise `RankFailed` otherwise."""
    deadline = time.monotonic() + limit_s
    running = list(processes)
    while running:
        left = deadline - time.monotonic()
        if left <= 0:
            names = ", ".join(p.name for p in running)
            raise RankFailed(f"{what} took more than {limit_s:g} s and was ended; still running: {names}")
        multiprocessing.connection.wait([p.sentinel for p in running], timeout=left)
        # Read once: a process may end between two readings, and one that failed must not count as one that ended.
        codes = [p.exitcode for p in running]
        failed = [p for p, code in zip(running, codes, strict=True) if code not in (None, 0)]
        if failed:
            limit = time.monotonic() + _GRACE_S
            for p in running:
                p.join(max(0.0, limit - time.monotonic()))
            raise RankFailed(_explain(failed[0], processes, folder))
        running = [p for p, code in zip(running, codes, strict=True) if code is None]


def _explain(first: BaseProcess, processes: Sequence[BaseProcess], folder: Path) -> str:
    """Say which rank ended how: the one that was not merely left alone by another is the cause."""
    said: dict[str, dict[str, str]] = {}
    for rank, process in enumerate(processes):
        with contextlib.suppress(OSError, ValueError):
            said[process.name] = json.loads((folder / f"error-{rank}.json").read_text(encoding="utf-8"))
    killed = [p for p in processes if p.exitcode is not None and p.exitcode < 0 and p.name not in said]
    causes = [name for name, words in said.items() if words["kind"] not in (PeerLost.__name__, "CollectiveTimeout")]
    if killed:
        message = f"{killed[0].name} was ended by {_signal_name(-(killed[0].exitcode or 0))}"
    elif causes:
        message = f"{causes[0]} failed: {said[causes[0]]['kind']}: {said[causes[0]]['message']}"
    else:
        message = f"{first.name} ended with exit code {first.exitcode}"
    others = [words["message"] for name, words in said.items() if name not in causes[:1]]
    return message + (f"; {others[0]}" if others else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end(processes: Sequence[BaseProcess]) -> None:
    """Leave no process behind."""
    started = [p for p in processes if p.pid is not None]
    for process in started:
        if process.is_alive():
            process.terminate()
    for process in started:
        process.join(_GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()


def _rank_main(
    rank: int,
    ranks: int,
    body: Callable[..., None],
    args: tuple[Any, ...],
    folder: Path,
    timeout_s: float,
    traces: Path | None,
    environment: dict[str, str],
) -> None:
    """Body of one rank's process, in its caller's environment; leaves a message where it fails."""
    try:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(1)
        # A file in a private folder is the meeting point: no port has to be free.
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'meeting-point'}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        try:
            dist.barrier()  # gloo connects ranks one by one: a body that ends at once cuts off none that still connects
            body(rank, *args)
        finally:
            dist.destroy_process_group()
    except BaseException as error:
        words = {"kind": type(error).__name__, "message": str(error).strip() or repr(error)}
        (folder / f"error-{rank}.json").write_text(json.dumps(words), encoding="utf-8")
        if traces is not None:
            (traces / f"error-rank-{rank}.txt").write_text(traceback.format_exc(), encoding="utf-8")
        raise SystemExit(1) from None
    leave()


def leave(code: int = 0) -> NoReturn:
    """End this process at once, well unless told otherwise.

    The interpreter's own end takes the lock away from threads that still need it. gloo's workers outlive their group
    while anything holds a tensor of theirs, and one that then lets go of it brings the whole process down (SIGABRT).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
