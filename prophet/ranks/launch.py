"""Ranks as processes of this machine: started, watched, and none left behind.

Every wait ends: ranks give up on each other after their group's time limit, and the caller's process ends all of them
when one dies or when the whole run takes too long. This file owns the start and the end of process groups; what runs
in between is handed a rank and talks through a `Collective`. Commands and benchmarks start their ranks here. What
starts processes elsewhere says there why it has to.
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

from prophet.errors import PeerLost, RankFailed, SpecError, UsageError
from prophet.ranks.collective import Collective
from prophet.ranks.process_group import collective_for

# For the other ranks to notice a failure and to leave their messages
_GRACE_S = 5.0
# Imported once, torch with it, by the process that all ranks are forked from
PRELOADED = ["prophet.ranks.launch"]
_HERE = "127.0.0.1"


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
    on_gpus: bool = False,
) -> None:
    """Run `body(rank, *args)` on `ranks` processes of one group, and return when all have ended well.

    The group talks by gloo.

    Args:
        body: An importable function.
        args: Its arguments after the rank.
        ranks: How many processes.
        folder: A private folder that outlives the call, where the ranks meet and leave messages.
        limit_s: Seconds for the whole run.
        timeout_s: Seconds for every wait within the group.
        what: The run's name in messages.
        traces: A folder for tracebacks of ranks that fail; None for no tracebacks.
        on_gpus: Each rank takes the GPU of its number, and the group has NCCL beside gloo.

    Raises:
        RankFailed: When a rank fails, dies or the time is up; no process survives.
    """
    # Not fork: this process may have threads (of BLAS, of gloo) whose locks a fork would copy in the held state
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # The fork server keeps the environment that it was started with, so each rank is handed the present one
    shared = (ranks, body, tuple(args), folder, timeout_s, traces, on_gpus, dict(os.environ))
    processes = [
        context.Process(target=_rank_main, args=(rank, *shared), name=f"rank {rank}", daemon=True)
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.start()
        _watch(processes, folder, limit_s, what)
    finally:
        _end(processes)


def check_gpus(ranks: int) -> None:
    """Check that each of so many ranks of this machine can take a GPU, as `run_ranks(on_gpus=True)` has it.

    Raises:
        UsageError: There is no GPU, or there are fewer than ranks.
    """
    gpus = torch.cuda.device_count()
    if not gpus:
        why = "`prophet doctor` says why" if torch.version.cuda or torch.version.hip else "it was built for the CPU"
        raise UsageError(f"--device cuda: torch sees no GPU here ({why}); --device cpu needs none")
    if gpus < ranks:
        seen = f"{gpus} GPU{'s' * (gpus > 1)}"
        raise UsageError(f"--device cuda: {ranks} ranks need a GPU each, and torch sees {seen}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a launcher such as torchrun has started this process, as one of several ranks.

    Attributes:
        ranks: Number of ranks on all nodes.
        local_rank: This rank's number on its node.
        local_ranks: Number of ranks on this node; None where that is not known.
    """

    ranks: int
    local_rank: int
    local_ranks: int | None

    @property
    def device(self) -> str:
        """This rank's own GPU, such as cuda:1; cpu where it has none."""
        return f"cuda:{self.local_rank}" if torch.cuda.device_count() > self.local_rank else "cpu"


def launched() -> Launch | None:
    """Read what a launcher has written into this process's environment; None where none has started it.

    Raises:
        SpecError: For a variable that is no whole number, or too small.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return Launch(
        ranks=_variable("WORLD_SIZE", least=1),
        # Launchers other than torchrun may set the first two alone; then the process is the only one of its node
        local_rank=_variable("LOCAL_RANK", least=0) if "LOCAL_RANK" in os.environ else 0,
        local_ranks=_variable("LOCAL_WORLD_SIZE", least=1) if "LOCAL_WORLD_SIZE" in os.environ else None,
    )


def _variable(name: str, *, least: int) -> int:
    """Read a number of at least `least` that the launcher has written into the environment."""
    text = os.environ[name]
    if not text.isdecimal() or int(text) < least:
        raise SpecError(f"the launcher's {name} must be a whole number of at least {least}, got {text!r}")
    return int(text)


@contextmanager
def joined_group(launch: Launch, *, timeout_s: float, backend: str | None = None) -> Iterator[Collective]:
    """Join all ranks that a launcher has started, for as long as the context lasts; collective.

    Args:
        launch: How this process was started.
        timeout_s: Seconds for every wait within the group.
        backend: As for `init_process_group`; None for NCCL where this rank has a GPU, else gloo.
    """
    on_gpu = launch.device != "cpu"
    # NCCL takes the current device: without this all ranks of a node would share GPU 0
    if on_gpu:
        torch.cuda.set_device(launch.local_rank)
    backend = backend or ("nccl" if on_gpu else "gloo")
    dist.init_process_group(backend, init_method="env://", timeout=timedelta(seconds=timeout_s))
    try:
        yield collective_for(None, timeout_s=timeout_s)
    finally:
        dist.destroy_process_group()


def open_store(rank: int, folder: Path, *, timeout_s: float) -> object:
    """Open rank 0's store on a port of its own, and tell this process's environment where ranks meet.

    The system gives rank 0 the port, and rank 0 keeps it. One that a launcher finds free beforehand is free until
    another program takes it: then ranks of two groups meet each other and wait.

    Args:
        rank: This process's rank.
        folder: A private folder of all ranks, where rank 0 leaves the port.
        timeout_s: How long the others wait for it, in seconds.

    Returns:
        What has to stay alive until `joined_group` has joined; on other ranks than 0 it is nothing.

    Raises:
        RuntimeError: Rank 0 has not opened its store in time.
    """
    limit = timedelta(seconds=timeout_s)
    kept: Any = None
    shared = dist.FileStore(str(folder / "port"), -1)  # type: ignore[attr-defined]
    shared.set_timeout(limit)
    if rank == 0:
        # Multi-tenant: `init_process_group` finds this process's server at its port, and opens no second one
        how: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "multi_tenant": True, "timeout": limit}
        kept = dist.TCPStore(_HERE, 0, **how)  # type: ignore[attr-defined]
        shared.set("port", str(kept.port))
    os.environ.update({"MASTER_ADDR": _HERE, "MASTER_PORT": shared.get("port").decode()})
    return kept


def _watch(processes: Sequence[BaseProcess], folder: Path, limit_s: float, what: str) -> None:
    """Wait until all have ended well; raise `RankFailed` where one has not."""
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
            # The first to end may be a victim: give the others time to leave their messages, which name the cause
            limit = time.monotonic() + _GRACE_S
            for p in running:
                p.join(max(0.0, limit - time.monotonic()))
            raise RankFailed(_explain(failed[0], processes, folder))
        running = [p for p, code in zip(running, codes, strict=True) if code is None]


def _explain(first: BaseProcess, processes: Sequence[BaseProcess], folder: Path) -> str:
    """Describe which rank ended how: the one that was not merely left alone by another is the cause."""
    messages: dict[str, dict[str, str]] = {}
    for rank, process in enumerate(processes):
        with contextlib.suppress(OSError, ValueError):
            messages[process.name] = json.loads((folder / f"error-{rank}.json").read_text(encoding="utf-8"))
    killed = [p for p in processes if p.exitcode is not None and p.exitcode < 0 and p.name not in messages]
    # These two errors are what a rank sees of another one's end
    victims = (PeerLost.__name__, "CollectiveTimeout")
    causes = [name for name, found in messages.items() if found["kind"] not in victims]
    # A process ended by a signal has left no message, and explains those of all others
    if killed:
        message = f"{killed[0].name} was ended by {_signal_name(-(killed[0].exitcode or 0))}"
    elif causes:
        message = f"{causes[0]} failed: {messages[causes[0]]['kind']}: {messages[causes[0]]['message']}"
    else:
        message = f"{first.name} ended with exit code {first.exitcode}"
    others = [found["message"] for name, found in messages.items() if name not in causes[:1]]
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
    on_gpus: bool,
    environment: dict[str, str],
) -> None:
    """Body of one rank's process, in its caller's environment; leaves a message where it fails."""
    try:
        os.environ.clear()
        os.environ.update(environment)
        # Ranks share this machine's cores: with more threads each they would wait for one another's
        torch.set_num_threads(1)
        # NCCL takes the current device: without this all ranks would share GPU 0
        if on_gpus:
            torch.cuda.set_device(rank)
        # A file in a private folder is the meeting point: no port has to be free.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
            init_method=f"file://{folder / 'meeting-point'}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        try:
            # gloo connects ranks one by one: a body that ends at once must not cut off one that still connects
            dist.barrier()
            body(rank, *args)
        finally:
            dist.destroy_process_group()
    except BaseException as error:
        report = {"kind": type(error).__name__, "message": str(error).strip() or repr(error)}
        (folder / f"error-{rank}.json").write_text(json.dumps(report), encoding="utf-8")
        if traces is not None:
            (traces / f"error-rank-{rank}.txt").write_text(traceback.format_exc(), encoding="utf-8")
        raise SystemExit(1) from None
    leave()


def leave(code: int = 0) -> NoReturn:
    """End this process at once with exit code `code`, without the interpreter's shutdown.

    The shutdown takes the lock away from threads that still need it. gloo's workers outlive their group while anything
    holds a tensor of theirs, and one that then lets go of it brings the whole process down (SIGABRT).
    """
    # `_exit` flushes nothing
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
