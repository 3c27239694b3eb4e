"""Runs the checks one after another, each within its limit and all within ten minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from prophet.errors import UsageError
from prophet.gpu_check.checks import Task, relevant
from prophet.gpu_check.process import Job, run_job
from prophet.gpu_check.verdict import Verdict, left_out, too_few, verdict

ALL_S = 600.0
"""Seconds for all checks."""

# A check that has less than this left is not begun
_LEAST_S = 15.0
# What its ranks leave of a check's time, for the news of which of them hangs
_NEWS_S, _NEWS_SHARE = 8.0, 0.3
_TIMEOUT_S = 20.0


def run_all(
    tasks: Sequence[Task],
    environment: Mapping[str, str],
    added: Mapping[str, str],
    *,
    on_gpus: bool,
    scratch: Path,
    limit_s: float = ALL_S,
    working: Callable[[str], AbstractContextManager[None]],
) -> list[Verdict]:
    """Run checks, and return what each has found, in their order.

    Args:
        tasks: The checks; the first finds the GPUs.
        environment: This process's environment variables.
        added: Those that the checks' processes have besides.
        on_gpus: Whether they are about this machine's GPUs; otherwise the CPU plays them.
        scratch: A private folder.
        limit_s: Seconds for all of them.
        working: Called with what begins; left when it has ended.

    Raises:
        UsageError: There is no GPU.
    """
    deadline, found = time.monotonic() + limit_s, list[Verdict]()
    processes = {**environment, **added}
    shared = scratch / "shared"
    shared.mkdir()
    gpus: int | None = None
    for number, task in enumerate(tasks):
        left_s = deadline - time.monotonic()
        # The first one runs on one rank, wherever it is
        ranks = 1 if number == 0 else task.ranks_on(gpus)
        if left_s < _LEAST_S:
            found.append(left_out(task, f"the {limit_s:.0f} s for all checks are over"))
        elif ranks == 0:
            found.append(left_out(task, too_few(task, gpus or 0)))
        else:
            folder, own_s = scratch / task.name, min(task.limit_s, left_s)
            folder.mkdir()
            job = Job(
                function=task.function,
                ranks=ranks,
                on_gpu=on_gpus,
                until_s=time.time() + own_s - min(_NEWS_S, _NEWS_SHARE * own_s),
                timeout_s=min(_TIMEOUT_S, 0.3 * own_s),
                shared=str(shared),
                variables=relevant(environment),
                ends_at_once=task.ends_at_once,
            )
            with working(f"{task.name}: check {number + 1} of {len(tasks)}"):
                found.append(verdict(task, ranks, run_job(job, folder, processes, own_s), own_s))
        if number == 0 and on_gpus:
            gpus = _gpus(found[0], environment)
    return found


def _gpus(first: Verdict, environment: Mapping[str, str]) -> int:
    """The number of GPUs by the first check's answer; without one by what CUDA is told, or by their device files."""
    if "gpus" not in first.figures:
        told = environment.get("CUDA_VISIBLE_DEVICES")
        some = told.split(",") if told is not None else list(Path("/dev").glob("nvidia[0-9]*"))
        return len(some) or 1
    count = len(first.figures["gpus"])
    if not count:
        why = [f"{check.message} ({check.mend})" for check in first.checks if check.state == "finding"]
        raise UsageError(
            f"no GPU that torch can use{': ' * bool(why)}{'; '.join(why)}; `prophet gpu-check --device cpu` runs the "
            "same checks on the CPU, over gloo"
        )
    return count
