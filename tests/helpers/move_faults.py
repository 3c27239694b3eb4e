"""Faults at named phases of whatever moves training state, and what each rank is left with.

`SEAMS` is all that knows where a mover's phases are. A fault strikes one rank; the others are asked what they were
told, and which state they have.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import prophet
from pipeline_balance import elastic
from pipeline_balance.elastic import own_loop
from pipeline_balance.elastic.shards.new_model import NewModel
from pipeline_balance.elastic.shards.user_model import UserModel
from pipeline_balance.pipeline.model.ownership import local
from pipeline_balance.pipeline.move import pipeline_state
from pipeline_balance.pipeline.move import stage_map as rebuild
from pipeline_balance.pipeline.move.stage_map import Change, StageMove, StateMover
from pipeline_balance.pipeline.run.experts import StageExperts
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.errors import ReshardedError, StageFailed
from prophet.ranks.collective import Collective
from prophet.state import transition
from prophet.state.transition import Mode
from tests.helpers import elastic_jobs, own_loops, pipeline_experts, pipeline_model, pipeline_owners
from tests.helpers.pipeline_blows import Broken


class Seam(NamedTuple):
    """Where a phase is: an attribute of an owner, or a key of a dictionary. `after`: the fault follows the call.

    `nth` is the call that is struck. An owner that is a function is given the mover's run.
    """

    owner: Any
    name: str
    nth: int = 1
    after: bool = False


_OF_RUN: Callable[[Any], Any] = lambda run: run.mover  # noqa: E731
_LAYOUT = {
    "agreeing": Seam(pipeline_state, "items"),
    "preparing": Seam(_OF_RUN, "allocate"),
    "moving": Seam(transition._Mover, "_pack"),
    "building": Seam(StateMover, "change"),
    "deciding": Seam(Collective, "decide"),
    "decided": Seam(Change, "make", after=True),
}
_STAGES = {
    "agreeing": Seam(rebuild, "collect"),
    "preparing": Seam(_OF_RUN, "allocate"),
    "moving": Seam(transition._Mover, "_pack"),
    "building": Seam(StageMove, "assemble"),
    "deciding": Seam(Collective, "decide"),
    "decided": Seam(Change, "make", after=True),
}
SEAMS = {
    "stages": _STAGES,
    "owners": _STAGES,
    # layers have moved by then; the rest of a column waits for a rank that does not attach
    "experts": _STAGES | {"attaching": Seam(StageExperts, "_attach_to"), "balancing": Seam(StageExperts, "_remember")},
    "layout": _LAYOUT,
    "in_place": _LAYOUT,
    "own": {
        "agreeing": Seam(UserModel, "held"),
        "preparing": Seam(own_loop, "route"),
        "moving": Seam(transition._Mover, "_pack"),
        "building": Seam(NewModel, "filled"),
        "deciding": Seam(Collective, "decide"),
        "decided": Seam(NewModel, "make", after=True),
    },
}
ALLOCATE = {
    **{mover: {"preparing": Seam(_OF_RUN, "allocate")} for mover in ("stages", "owners", "experts")},
    "layout": {"preparing": Seam(_OF_RUN, "allocate", nth=2)},
    "in_place": {"preparing": Seam(_OF_RUN, "allocate"), "moving": Seam(_OF_RUN, "allocate", nth=3)},
    "own": {"preparing": Seam(own_loop, "empty", nth=2)},
}
"""Where memory is asked for."""

BEFORE = ("agreeing", "preparing", "moving", "building", "deciding")
"""Phases up to the decision, for every mover."""
VICTIM = 1
LIMIT_S = 4.0
TOO_HOT = "too hot"
LOST = ("killed", "halved", "stopped")
"""Faults after which a rank is no more. One that is "halved" ends when one other rank has its word, and one has not."""
LONE = (*LOST, "late")
"""Faults that take a launch of processes each."""


class Row(NamedTuple):
    """Which mover is struck, how, and in which phase."""

    mover: str
    fault: str
    phase: str

    def __str__(self) -> str:
        return "-".join(self)

    @property
    def seam(self) -> Seam:
        return (ALLOCATE if self.fault == "memory" else SEAMS)[self.mover][self.phase]


@dataclass(frozen=True, kw_only=True)
class End:
    """How a move ended on one rank: the kind and text of its error, seconds, and what is in force.

    state: "old", "new", "lost" (all without memory), or "neither". says: the layout or map that counts as in force.
    goes_on: whether training went on as without the fault; in words why not, empty where that was not tried.
    """

    error: str
    said: str
    took_s: float
    state: str
    says: str
    goes_on: str


# --- the movers -----------------------------------------------------------------------------------------------


class _Stages:
    """A pipeline whose stages go to other ranks, all of them."""

    ranks = 3
    old = StageMap.contiguous((0, 3, 5, pipeline_model.LAYERS))
    new = StageMap(old.boundaries, (1, 2, 0))
    other = StageMap(old.boundaries, (2, 0, 1))
    tolerance = pipeline_model.TOLERANCE

    def __init__(self, folder: Path) -> None:
        self.run = self.pipeline(timeout_s=LIMIT_S, budget_bytes=1 << 12)
        self.losses: list[float] = []
        self.train()

    def pipeline(self, **options: Any) -> ElasticPipeline:
        return pipeline_model.pipeline(self.old, **options)

    @property
    def mover(self) -> Any:
        return self.run.mover

    @property
    def says(self) -> StageMap:
        return self.run.stage_map

    def train(self) -> None:
        self.losses.append(self.run.step(*pipeline_model.batch(len(self.losses))))

    next_call = train

    def move(self, target: StageMap | None = None) -> None:
        self.run.rebuild(target or self.new)

    def move_asking_else(self) -> None:
        self.move(self.other)

    def move_without_room(self) -> None:
        self.mover.budget_bytes = 1
        self.move()

    def held(self) -> dict[str, str]:
        return digests(self.run.module, *self.run.optimizers.all)

    def save(self) -> None:
        """Write what `recover` reads; all runs of a mover begin alike."""

    def recover(self) -> bool:
        """Whether it can go on after a `StageFailed`."""
        return False

    def expected(self) -> list[float]:
        return _alone("stages")


class _Owners(_Stages):
    """Two replicas, where each tensor's optimizer state has one owner; many owners are in the other replica next."""

    ranks = 4
    old, new, other = (
        StageMap((0, cut, pipeline_owners.UNITS), ranks) for cut, ranks in ((3, (0, 1)), (1, (1, 0)), (2, (0, 1)))
    )
    tolerance = pipeline_owners.TOLERANCE

    def pipeline(self, **options: Any) -> ElasticPipeline:
        return pipeline_owners.pipeline(self.old, **options)

    def train(self) -> None:
        whole = pipeline_owners.batch(len(self.losses))
        self.losses.append(self.run.step(*(t.chunk(2)[self.run.replica] for t in whole)))

    next_call = train

    def expected(self) -> list[float]:
        return _alone("owners")


class _Experts(_Stages):
    """Two replicas that share the experts of two layers, which are balanced: both come to one column."""

    ranks = 4
    old, new, other = (
        StageMap((0, cut, pipeline_experts.UNITS), ranks) for cut, ranks in ((3, (0, 1)), (5, (1, 0)), (2, (1, 0)))
    )
    tolerance = pipeline_experts.TOLERANCE

    def pipeline(self, **options: Any) -> ElasticPipeline:
        pipe = pipeline_experts.pipeline(self.ranks, 2, **options)
        pipe.balance_experts(lambda part: prophet.attach(part, config=pipeline_experts.random_placements()))
        return pipe

    def train(self) -> None:
        whole = pipeline_experts.batch(len(self.losses))
        mine = (t.chunk(2)[self.run.replica] for t in whole)
        self.losses.append(self.run.step(*mine, max_norm=pipeline_experts.MAX_NORM))

    next_call = train

    def expected(self) -> list[float]:
        return _alone("experts")


class _Layout:
    """A job that goes from stages to replicas with owners."""

    ranks = 3
    old, new, other = map(elastic.Parallelism.parse, ("pp3", "dp3,zero1", "dp3"))
    mode: Mode = "safe"
    tolerance = 1e-10

    def __init__(self, folder: Path) -> None:
        self.run = elastic_jobs.start("pp3", timeout_s=LIMIT_S, budget_bytes=1 << 12)
        self.folder = folder
        self.losses: list[float] = []
        self.train()

    @property
    def mover(self) -> Any:
        return self.run.pipeline.mover

    @property
    def says(self) -> Any:
        return self.run.layout

    def train(self) -> None:
        self.losses += elastic_jobs.train(self.run, 1)

    next_call = train

    def move(self, target: Any = new) -> None:
        self.run.switch(target, mode=self.mode)

    def move_asking_else(self) -> None:
        """Prepared alike, and switched in another mode."""
        self.run.prepare(self.new, mode=self.mode)
        self.run.switch(mode="safe" if self.mode == "in-place" else "in-place")

    def move_without_room(self) -> None:
        self.mover.budget_bytes = 1
        self.move()

    def held(self) -> dict[str, str]:
        return digests(self.run.model, self.run.optimizer)

    def save(self) -> None:
        self.run.save(self.folder)

    def recover(self) -> bool:
        self.run.load(self.folder)
        del self.losses[1:]
        return True

    def expected(self) -> list[float]:
        return _alone("layout")


class _InPlace(_Layout):
    mode: Mode = "in-place"


class _Own:
    """A loop that goes from shards to whole replicas."""

    ranks = 3
    old, new, other = map(elastic.Parallelism.parse, ("dp3,zero3", "dp3", "dp3,zero2"))
    tolerance = 1e-9

    def __init__(self, folder: Path) -> None:
        self.model: nn.Module = own_loops.build()
        self.optimizer = own_loops.adamw(self.model.parameters())
        self.says = elastic.Parallelism(dp=3)
        self.budget_bytes = 1 << 12
        self.move(self.old)
        self.losses: list[float] = []
        self.train()

    def train(self) -> None:
        self.losses.append(own_loops.train_step(self.model, self.optimizer, self.says, len(self.losses)))

    def next_call(self) -> None:
        self.move(self.other)

    def move(self, target: Any = new) -> None:
        options = {"timeout_s": LIMIT_S, "budget_bytes": self.budget_bytes}
        try:
            self.model = elastic.reshard(self.model, self.optimizer, self.says, target, own_loops.build, **options)  # type: ignore[arg-type]
        except ReshardedError as error:
            self.model, self.says = error.model, target
            raise
        self.says = target

    def move_asking_else(self) -> None:
        self.move(self.other)

    def move_without_room(self) -> None:
        self.budget_bytes = 1
        try:
            self.move()
        finally:
            self.budget_bytes = 1 << 12

    def held(self) -> dict[str, str]:
        root = self.model.module if isinstance(self.model, nn.parallel.DistributedDataParallel) else self.model
        return digests(root, self.optimizer)

    def save(self) -> None:
        """Nothing: it does not end with a failure."""

    def recover(self) -> bool:
        return False

    def expected(self) -> list[float]:
        return _alone("own")


@functools.cache
def _alone(mover: str) -> list[float]:
    """The losses of three steps in one process."""
    alone: dict[str, Callable[[], list[float]]] = {
        "stages": lambda: pipeline_model.plain_losses(3)[0],
        "owners": lambda: pipeline_owners.one_process(3),
        "experts": lambda: pipeline_experts.one_process(3).losses,
        "layout": lambda: elastic_jobs.plain_losses(3),
        "own": lambda: own_loops.alone(3, own_loops.adamw),
    }
    return alone[mover]()


MOVERS: dict[str, Any] = {
    "stages": _Stages,
    "owners": _Owners,
    "experts": _Experts,
    "layout": _Layout,
    "in_place": _InPlace,
    "own": _Own,
}


def digests(root: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, str]:
    """A digest of every parameter, buffer and tensor of optimizers that this rank has memory for, by name; their
    numbers as they are.

    What lacks the memory that it says it has is "gone": reading it would end the process.
    """
    found: dict[str, Tensor] = {n: local(t.detach()) for n, t in (*root.named_parameters(), *root.named_buffers())}
    names = {id(p): n for n, p in root.named_parameters()}
    numbers: dict[str, str] = {}
    for p, entries in (item for optimizer in optimizers for item in optimizer.state.items()):
        for entry, value in entries.items():
            name = f"{names.get(id(p), '?')}@{entry}"
            if isinstance(value, Tensor):
                found[name] = local(value)
            else:
                numbers[name] = repr(value)

    def digest(t: Tensor) -> str:
        if t.numel() and not t.untyped_storage().nbytes():
            return "gone"
        copy = t.reshape(-1).clone()  # memory that numpy has seen can never be given back
        return hashlib.blake2b(copy.view(torch.uint8).numpy().tobytes()).hexdigest()

    return {n: digest(t) for n, t in found.items() if not t.is_meta} | numbers


# --- faults ---------------------------------------------------------------------------------------------------


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _blow(row: Row) -> None:
    match row.fault:
        case "raises":
            raise RuntimeError(TOO_HOT)
        case "breaks":  # with an error that nobody expects
            raise Broken(TOO_HOT)
        case "memory":
            raise MemoryError(TOO_HOT)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "halved":
            _end_after_a_word()
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "late":  # comes back once all others have given up
            _store().wait(
                [f"{row} has ended on {r}" for r in range(dist.get_world_size()) if r != VICTIM], timedelta(seconds=60)
            )


def _end_after_a_word() -> None:
    """Have this process end once the first message that it sends from here on has arrived."""
    isend = dist.isend

    def last(*given: Any, **options: Any) -> Any:
        work: Any = isend(*given, **options)
        work.wait()
        os.kill(os.getpid(), signal.SIGKILL)

    dist.isend = last


@contextmanager
def _struck(mover: Any, row: Row) -> Iterator[None]:
    """The fault strikes in the middle of what is within."""
    seam, calls = row.seam, [0]
    owner = seam.owner(mover) if seam.owner is _OF_RUN else seam.owner
    inner = owner[seam.name] if isinstance(owner, dict) else getattr(owner, seam.name)

    def call(*given: Any, **options: Any) -> Any:
        calls[0] += 1
        strikes = calls[0] == seam.nth
        if strikes and not seam.after:
            _blow(row)
        made = inner(*given, **options)
        if strikes and seam.after:
            _blow(row)
        return made

    with pytest.MonkeyPatch.context() as patch:
        put = patch.setitem if isinstance(owner, dict) else patch.setattr
        put(owner, seam.name, call)
        yield
    assert calls[0] >= seam.nth, f"{row}: the fault has not struck"


def _caught(call: Callable[[], Any]) -> tuple[str, str]:
    """The kind of what a call raises, and its text; both empty where it raises nothing."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _move(mover: Any, row: Row) -> tuple[str, str]:
    if dist.get_rank() != VICTIM:
        return _caught(mover.move)
    if row.fault in ("asks", "room"):
        return _caught(mover.move_asking_else if row.fault == "asks" else mover.move_without_room)

    def struck() -> None:
        with _struck(mover, row):
            mover.move()

    return _caught(struck)


def _state(now: dict[str, str], old: dict[str, str], new: dict[str, str]) -> str:
    same = [name for name, one in (("old", old), ("new", new)) if now == one]
    return same[0] if same else "neither" if now else "lost"


# --- what ranks run -------------------------------------------------------------------------------------------


def strike(rank: int, size: int, rows: list[Row]) -> list[End]:
    """Let these faults strike, each a fresh run; see `End`."""
    _store().set(f"pid of {rank}", str(os.getpid()))
    return [end for mover, its in groupby(rows, lambda row: row.mover) for end in _of_mover(MOVERS[mover], list(its))]


def _of_mover(make: Callable[[Path], Any], rows: list[Row]) -> list[End]:
    with tempfile.TemporaryDirectory() as own:
        told: list[Any] = [own]
        dist.broadcast_object_list(told)  # all write into one folder
        folder = Path(told[0])
        unharmed = make(folder)
        unharmed.save()
        old = unharmed.held()
        unharmed.move()
        new = unharmed.held()
        assert old != new
        ends = [_ended(make(folder), row, old, new) for row in rows]
        if not any(row.fault in LOST for row in rows):
            dist.barrier()  # nobody reads it any more
        return ends


def _ended(mover: Any, row: Row, old: dict[str, str], new: dict[str, str]) -> End:
    rank, others = dist.get_rank(), dist.get_world_size() - 1
    assert mover.held() == old, "every run begins alike"
    dist.barrier()
    began = time.monotonic()
    error, said = _move(mover, row)
    state, says = _state(mover.held(), old, new), _word(mover)
    if not error and row.fault != "late":
        error, said = _caught(mover.next_call)  # it is what hears of the fault
    took_s = time.monotonic() - began
    if row.fault in LONE and rank != VICTIM:
        _store().set(f"{row} has ended on {rank}", "")
        if row.fault == "stopped" and _store().add(f"{row} has ended", 1) == others:
            os.kill(int(_store().get(f"pid of {VICTIM}")), signal.SIGKILL)
    goes_on = "" if row.fault in LOST else _goes_on(mover, error)
    return End(error=error, said=said, took_s=took_s, state=state, says=says, goes_on=goes_on)


def _word(mover: Any) -> str:
    return {str(mover.old): "old", str(mover.new): "new"}.get(str(mover.says), str(mover.says))


def _goes_on(mover: Any, error: str) -> str:
    """Train on, move, and train on: "yes" where losses are those of a run without faults; all ranks are alive."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, error)
    try:
        if StageFailed.__name__ in every:
            if error != StageFailed.__name__:
                heard, _ = _caught(mover.next_call)  # others cannot go on
                if heard != StageFailed.__name__:
                    return f"another rank has failed, and the next call raises {heard or 'nothing'}"
            if not mover.recover():
                return "no"
        if isinstance(mover, _Stages | _Layout):
            mover.mover.allocate, mover.mover.budget_bytes = transition.empty, 1 << 12
        for move in (False, True):
            if move and mover.says != mover.new:
                mover.move()
            mover.train()
    except Exception as failed:
        return f"{type(failed).__name__}: {failed}"
    expected = mover.expected()
    return "yes" if mover.losses == pytest.approx(expected, rel=mover.tolerance) else f"{mover.losses}, not {expected}"
