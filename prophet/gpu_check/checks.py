"""The checks in their order, what a check is handed, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prophet.doctor.check import Check
from prophet.errors import SpecError, UsageError, no_such

TOPOLOGY = "topology.toml"
"""The file in `Place.shared` that the calibration writes, and later checks read."""


_STARTS = ("NCCL_", "TORCH_NCCL_", "TORCH_CUDA_", "GLOO_", "TRITON_", "PYTORCH_")
_NAMES = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One check of the command, whatever it finds.

    Attributes:
        name: Its name.
        function: `module:function`, which is called with a `Place` on every rank and returns an `Answer`. A name, since
            it is imported in the check's own processes only.
        limit_s: Seconds for all of it.
        ranks: The numbers of ranks that it can run on, rising; on GPUs it takes the largest that there are GPUs for.
        on_cpu: Ranks without GPUs.
        ends_at_once: Whether its ranks end without taking leave of their group, which has lost a rank.
    """

    name: str
    function: str
    limit_s: float
    ranks: tuple[int, ...] = (1,)
    on_cpu: int = 1
    ends_at_once: bool = False

    def ranks_on(self, gpus: int | None) -> int:
        """How many ranks it runs on with so many GPUs; 0 where they are too few. None: on the CPU."""
        return self.on_cpu if gpus is None else max((n for n in self.ranks if n <= gpus), default=0)


_HERE, _PIPELINES = "prophet.gpu_check", "pipeline_balance.elastic.gpu_checks"
# The most doubtful ones first. One GPU has no peers, but an engine can imagine some
TASKS = (
    Task(name="environment", function=f"{_HERE}.environment:environment", limit_s=60),
    Task(name="kernels", function=f"{_HERE}.kernels:kernels", limit_s=150),
    Task(name="channels", function=f"{_HERE}.channels:channels", limit_s=60, ranks=(2, 4, 8), on_cpu=2),
    Task(name="engine", function=f"{_HERE}.engine:engine", limit_s=90, ranks=(1, 2, 4, 8), on_cpu=2),
    Task(
        name="lost-rank",
        function=f"{_HERE}.engine:lost_rank",
        limit_s=90,
        ranks=(2, 4),
        on_cpu=2,
        ends_at_once=True,
    ),
    Task(name="pipeline", function=f"{_PIPELINES}:pipeline", limit_s=60, ranks=(2, 4), on_cpu=4),
    Task(name="slices", function=f"{_PIPELINES}:slices", limit_s=60, ranks=(1, 2), on_cpu=2),
    Task(name="switch", function=f"{_PIPELINES}:switch", limit_s=60, ranks=(2, 4), on_cpu=2),
    Task(name="calibration", function=f"{_HERE}.calibration:calibration", limit_s=90, ranks=(1, 2, 4, 8), on_cpu=2),
    Task(name="layer", function=f"{_HERE}.layer:layer", limit_s=90, ranks=(2, 4, 8), on_cpu=2),
    Task(name="model", function=f"{_HERE}.layer:model", limit_s=90, ranks=(2, 4, 8), on_cpu=2),
)


def chosen(names: str | None, tasks: tuple[Task, ...] = TASKS) -> list[Task]:
    """The tasks of a list such as `kernels,engine`, in the tasks' own order; None: all.

    The first task is always among them: it counts the GPUs.

    Raises:
        UsageError: For a name that is none.
    """
    known = [task.name for task in tasks]
    asked = known if names is None else [name.strip() for name in names.split(",") if name.strip()]
    if not asked:
        raise UsageError(f"--checks: expected names of checks, such as {known[1]},{known[-1]}, got {names!r}")
    for name in asked:
        if name not in known:
            raise UsageError(f"--checks: {no_such('check', name, known)}")
    return [task for i, task in enumerate(tasks) if i == 0 or task.name in asked]


def relevant(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that change how GPUs compute and communicate."""
    return {n: v for n, v in sorted(variables.items()) if n in _NAMES or n.startswith(_STARTS)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a check runs.

    Attributes:
        rank: This rank.
        ranks: Their number; with 1 there is no process group.
        on_gpu: Whether every rank has the GPU of its number.
        timeout_s: Seconds for every wait for another rank.
        shared: A folder that the checks share.
        variables: The environment variables that `relevant` finds.
    """

    rank: int
    ranks: int
    on_gpu: bool
    timeout_s: float
    shared: Path
    variables: Mapping[str, str]

    @property
    def device(self) -> str:
        """This rank's device, as torch names it."""
        return f"cuda:{self.rank}" if self.on_gpu else "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a check has found on one rank.

    Attributes:
        checks: Its lines, one at least.
        paste: Lines for a user's script or shell.
        figures: What goes into the JSON.
    """

    checks: list[Check]
    paste: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The answer as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Answer:
        """Read what `to_json` wrote.

        Raises:
            SpecError: For any other text.
        """
        try:
            found = json.loads(text)
            checks = [Check(**check) for check in found["checks"]]
            answer = cls(checks=checks, paste=[str(line) for line in found["paste"]], figures=dict(found["figures"]))
        except (ValueError, KeyError, TypeError) as error:
            raise SpecError(f"expected a check's answer, got {text[:60]!r} ({type(error).__name__})") from None
        if not checks or any(check.state not in ("sound", "finding", "not checked") for check in checks):
            raise SpecError(f"expected a check's answer with lines of known states, got {text[:60]!r}")
        return answer
