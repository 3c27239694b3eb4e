"""Ranks that are processes, for the tests: functions on a gloo group, and programs that torchrun has started.

Ranks of a group are forked from a server that has imported and loaded what they need (`tests.helpers.warm_ranks`), and
so are those of `run_ranks`: a case gets processes that nobody has used, and waits for no import. Every wait has a
limit, and no process outlives it.
"""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from datetime import timedelta
from io import StringIO
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from prophet.ranks.launch import PRELOADED, leave, open_store

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
START_S = 240.0  # for the server's imports; minutes only where it compiles the planner
GRACE_S = 5.0  # for the others to end, once a rank has failed
STACK_AFTER = 0.9  # of a rank's time: where it is then is said if it does not end


# --- functions on a gloo group -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How one rank ended: its result, or the text of its error; exit code and seconds it ran."""

    result: Any
    error: str | None
    exit_code: int | None
    seconds: float

    @property
    def well(self) -> bool:
        return self.error is None and self.exit_code == 0


def process_outcomes(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    grace_s: float | None = None,
    told: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Run `body(*args)` on `size` gloo processes, and say by rank how each ended.

    `body` must be importable; it finds the process group initialised, and may end it. Results travel by pipe, so keep
    them small. timeout_s: what still runs then is killed. grace_s: how long after a rank's failure; None: no sooner.
    told: no group is initialised, and the environment says what a launcher says, and this. Rank 0 keeps the store.
    """
    context = _server()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main,
                    args=(rank, _Start(size, Path(folder), timeout_s, told), body, args, theirs),
                    name=f"rank {rank}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _watch(pipes, processes, Path(folder), timeout_s, grace_s)
        finally:
            _end(processes)


@functools.cache
def _server() -> ForkServerContext:
    """The server that ranks are forked from; its imports are done when this returns, so that no case pays for them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    first = context.Process(target=leave, daemon=True)
    first.start()
    first.join(START_S)
    if first.exitcode != 0:
        raise RuntimeError(f"no process was forked within {START_S:g} s: see `python -m tests.helpers.warm_ranks`")
    return context


def on_processes(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    vanishing: Collection[int] = (),
    told: Mapping[str, str] | None = None,
) -> list[Any]:
    """The results by rank of `body(*args)` on `size` gloo processes; RuntimeError names the rank that failed first.

    vanishing: ranks that may end without a result; None is theirs. told: as for `process_outcomes`.
    """
    # a rank that vanishes is no failure: the others have the whole time to notice it
    grace_s = None if vanishing else GRACE_S
    outcomes = process_outcomes(size, body, *args, timeout_s=timeout_s, grace_s=grace_s, told=told)
    failed = [rank for rank, o in enumerate(outcomes) if not o.well and rank not in vanishing]
    # one that was killed is the cause of what the others say; else the first that ended is
    failed.sort(key=lambda rank: ((outcomes[rank].exit_code or 0) >= 0, outcomes[rank].seconds))
    if failed:
        raise RuntimeError(
            "; ".join(f"rank {r} ended with {outcomes[r].exit_code}: {outcomes[r].error}" for r in failed)
        )
    return [o.result for o in outcomes]


def run_gloo(
    body: Callable[..., Any], size: int, *args: Any, timeout_s: float = 150.0, silent: Collection[int] = ()
) -> list[Any]:
    """`on_processes` for functions that are told their rank and the group's size: `body(rank, size, *args)`."""
    return on_processes(size, _told, body, args, timeout_s=timeout_s, vanishing=silent)


def mark(*events: str) -> None:
    """Tell the ranks of this group, by its store, that something has happened."""
    for event in events:
        dist.distributed_c10d._get_default_store().set(event, "yes")


def wait_for(*events: str, limit_s: float = 60.0) -> None:
    """Wait until ranks have marked these events: no longer than it takes, where a sleep has to be long enough."""
    dist.distributed_c10d._get_default_store().wait(list(events), timedelta(seconds=limit_s))


def _told(body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return body(dist.get_rank(), dist.get_world_size(), *args)


class _Start(NamedTuple):
    """What a rank's process needs to know before it runs its body."""

    size: int
    folder: Path
    timeout_s: float
    told: Mapping[str, str] | None

    def prepare(self, rank: int) -> object:
        """Let a rank meet the others, or know where; what is returned has to live as long as the rank."""
        torch.set_num_threads(1)
        if self.told is None:
            limit = timedelta(seconds=self.timeout_s)
            store = dist.FileStore(str(self.folder / "store"), self.size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=self.size, timeout=limit)
            # gloo connects ranks one by one: a body that vanishes at once must not cut off one that still connects
            store.set(f"connected/{rank}", "yes")
            store.wait([f"connected/{r}" for r in range(self.size)], limit)
            return None
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.size)})
        os.environ.update({"CUDA_VISIBLE_DEVICES": "", **self.told})
        return open_store(rank, self.folder, timeout_s=self.timeout_s)


def _rank_main(rank: int, start: _Start, body: Callable[..., Any], args: tuple[Any, ...], pipe: Connection) -> None:
    """One rank's process. It stays until it is told that all others have their results: one that is still connecting
    must not be cut off.
    """
    with (start.folder / f"stack-{rank}").open("w") as stack:
        # of one that hangs, where it does so is all that can be known
        faulthandler.dump_traceback_later(STACK_AFTER * start.timeout_s, file=stack)
        try:
            _run(rank, start, body, args, pipe)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _run(rank: int, start: _Start, body: Callable[..., Any], args: tuple[Any, ...], pipe: Connection) -> None:
    try:
        kept = start.prepare(rank)
        pipe.send((body(*args), None))
    except BaseException as error:
        pipe.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        raise SystemExit(3) from None
    with suppress(EOFError):
        all_well = pipe.recv()
        if all_well and dist.is_initialized():
            dist.destroy_process_group()
    del kept
    leave()


def _watch(
    pipes: Sequence[Any], processes: Sequence[BaseProcess], folder: Path, timeout_s: float, grace_s: float | None
) -> list[Outcome]:
    """Wait until all ranks have ended, or the time is up; `folder` has the stacks of those that are late."""
    began = time.monotonic()
    deadline = began + timeout_s
    said: dict[int, tuple[Any, str | None]] = {}
    ended: dict[int, float] = {}
    released = False
    ranks = range(len(processes))
    while len(ended) < len(processes) and time.monotonic() < deadline:
        waiting = [pipes[r] for r in ranks if r not in said] + [processes[r].sentinel for r in ranks if r not in ended]
        ready = wait(waiting, timeout=max(deadline - time.monotonic(), 0.01))
        for rank in ranks:
            if pipes[rank] in ready:
                try:
                    said[rank] = pipes[rank].recv()
                except (EOFError, OSError):
                    said[rank] = (None, "ended without a word")
            if processes[rank].sentinel in ready:
                ended[rank] = time.monotonic() - began
        failed = [r for r in ranks if (r in said and said[r][1]) or (r in ended and processes[r].exitcode)]
        if failed and grace_s is not None:
            deadline = min(deadline, time.monotonic() + grace_s)
            grace_s = None
        if len(said) == len(processes) and not released:
            released = True
            for pipe in pipes:
                with suppress(OSError):
                    pipe.send(not failed)
    after = f"still running after {time.monotonic() - began:.0f} s"
    late = {r: (None, "\n".join([after, *_stack(folder / f"stack-{r}")])) for r in ranks if r not in said}
    return [
        Outcome(
            result=(said | late)[r][0],
            error=(said | late)[r][1],
            exit_code=processes[r].exitcode if r in ended else None,
            seconds=ended.get(r, timeout_s),
        )
        for r in ranks
    ]


def _stack(file: Path) -> list[str]:
    """The lines of a rank's threads, where it was running for most of its time."""
    with suppress(OSError):
        return file.read_text(encoding="utf-8").splitlines()
    return []


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
        process.join(GRACE_S)


# --- programs ------------------------------------------------------------------------------------------------
def torchrun(program: Path, *arguments: str, ranks: int, timeout_s: float = 240.0, **settings: str) -> str:
    """What a program prints on `ranks` processes that torchrun starts; AssertionError where it fails.

    It finds the packages of this repository, and no GPU. settings: more of its environment.
    """
    paths = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
    environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with subprocess.Popen(
        [*start, str(program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment, **settings},
    ) as agent:
        try:
            printed, errors = agent.communicate(timeout=timeout_s)
        except BaseException:
            agent.terminate()  # it ends its processes then; if it were killed they would go on
            raise
    if agent.returncode:
        raise AssertionError(printed[-2000:] + errors[-6000:])
    return printed


def as_launched(
    program: Path | str, *arguments: str, ranks: int, timeout_s: float = 120.0, **settings: str
) -> list[str]:
    """What each rank of a program prints, a file or a module's name, where a launcher has set its variables.

    Its processes are those of `on_processes`: they need not import torch first, as torchrun's do. settings: more of
    its environment.
    """
    return on_processes(ranks, _play, program, arguments, timeout_s=timeout_s, told=settings)


def _play(program: Path | str, arguments: Sequence[str]) -> str:
    """Run a program in this process; what it prints."""
    sys.argv = [str(program), *arguments]
    with redirect_stdout(StringIO()) as printed:
        try:
            if isinstance(program, Path):
                runpy.run_path(str(program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"exit code {end.code}") from end
    return printed.getvalue()


def ended_within(timeout_s: float, running: Sequence[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """What processes printed, and their errors, when all have ended; each is killed that lives longer."""
    try:
        return [process.communicate(timeout=timeout_s) for process in running]
    finally:
        for process in running:
            process.kill()
