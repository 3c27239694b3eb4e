"""One family converted and trained on two ranks, against the same model trained alone: what differs, in words.

Shape legend: R ranks.
"""

from __future__ import annotations

import math
import re
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import prophet
from prophet.convert import original_state_dict
from prophet.engine.config import Experiment
from prophet.errors import ConversionError
from prophet.experts.replica import Replica
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import collective_for
from tests.helpers.families import batch, loss_of, overloaded, small
from tests.helpers.family_sizes import SINGLE
from tests.helpers.launch import on_processes
from tests.helpers.support import RandomPlanner, dense_parameters

RANKS = 2
RATE = 0.01
STEPS = {"plain": 10, "overloaded": 4, "lost": 2}
LOSSES, MOVES = 1e-6, 1e-3  # relative: of a loss, and of the largest move of a parameter
WAIT_S = 20.0  # for a rank whose peer has failed
JOB_S = 120.0
State = dict[str, Tensor]


@dataclass(kw_only=True, slots=True)
class Row:
    """What became of one family in one case, as one rank sees it.

    verdict: "right", "refused" by name, "wrong", "not built", or "failed" for anything else. said: why. gap: the worst
    difference, as a multiple of what is allowed. copies: gradients of replicas that this rank sent home or received.
    """

    family: str
    case: str
    verdict: str = "failed"
    said: str = ""
    gap: float = 0.0
    copies: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Run:
    """How a model trained: losses of rank 0, of rank 1, by step, and the state before and after."""

    losses: list[list[float]] = field(default_factory=lambda: [[] for _ in range(RANKS)])
    before: State = field(default_factory=dict)
    after: State = field(default_factory=dict)
    copies: int = 0


# --- one family -----------------------------------------------------------------------------------------------
def row_of(family: str, case: str, group: Collective, folder: Path) -> Row:
    """Convert and train one family; collective over `group`, whose ranks share `folder`."""
    row, began = Row(family=family, case=case), monotonic()
    try:
        model = built(family, case)
    except ValueError as error:
        row.verdict, row.said = "not built", str(error)
        return row
    try:
        _train_and_judge(row, model, group, folder)
    except ConversionError as error:
        row.said = str(error)
        row.verdict = "refused" if names_its_reason(str(error), model) else "failed"
    except Exception as error:
        row.said = f"{type(error).__name__}: {error}"
    row.seconds = monotonic() - began
    return row


def _train_and_judge(row: Row, model: nn.Module, group: Collective, folder: Path) -> None:
    steps = batches(row.family, row.case, model)
    prophet.convert(model, group=group)
    found = together(model, steps, group, lose=row.case == "lost")
    row.copies = found.copies
    gaps = [(math.inf, words) for words in exported(model, found.after, group, folder)] if row.case == "plain" else []
    if group.rank == 0:  # the other rank's core is another pair's meanwhile
        gaps += differences(alone(built(row.family, row.case), steps), found)
    gaps.sort(reverse=True)
    row.gap = gaps[0][0] if gaps else 0.0
    row.said = "; ".join(words for gap, words in gaps[:3] if gap > 1)
    row.verdict = "wrong" if row.said else "right"


def built(family: str, case: str) -> nn.Module:
    """The model of a case, the same on every rank: in float64, or in float32 where the family computes in no other.

    Some families multiply a difference by 1e5 within ten steps, whoever computes them: in float32 an order of sums
    could not be told from a mistake.
    """
    model = small(family)
    model = overloaded(model) if case == "overloaded" else model
    return model if family in SINGLE else model.double()


def batches(family: str, case: str, model: nn.Module) -> list[list[dict[str, Tensor]]]:
    """By step and rank; where one expert is overloaded, the second rank has two tokens."""
    few = {"rows": 1, "tokens": 3} if case == "overloaded" else {}
    return [
        [batch(family, model, RANKS * step + rank, **(few if rank else {})) for rank in range(RANKS)]
        for step in range(STEPS[case])
    ]


def alone(model: nn.Module, steps: Sequence[Sequence[dict[str, Tensor]]]) -> Run:
    """Train on the batches of all ranks in one process: the losses' mean is what the ranks minimise together."""
    run = Run(before=copied(model.state_dict()))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for by_rank in steps:
        optimizer.zero_grad()
        for rank, given in enumerate(by_rank):
            loss = loss_of(model, given)
            (loss / RANKS).backward()
            run.losses[rank].append(float(loss.detach()))
        optimizer.step()
    run.after = copied(model.state_dict())
    return run


def together(
    model: nn.Module, steps: Sequence[Sequence[dict[str, Tensor]]], group: Collective, *, lose: bool = False
) -> Run:
    """Train a converted model on one rank's batches, with placements at random.

    lose: the gradients of one replica are lost on their way home, in every step.
    """
    run, mine = Run(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    config = prophet.EngineConfig(planner=RandomPlanner(4, 0.9), slots_per_rank=4)
    engine = prophet.attach(model, optimizer, config=config, experiment=Experiment(check_every=1))
    for by_rank in steps:
        optimizer.zero_grad()
        loss = loss_of(model, by_rank[group.rank])
        with losing(lose):
            loss.backward()
        dense = [p for p in dense_parameters(model).values() if p.requires_grad]
        for p in dense:  # a rank of few tokens may not reach all that another does
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        group.all_reduce_mean_([p.grad for p in dense])
        mine.append(float(loss.detach()))
        step = engine.runtime.step
        run.copies += 0 if step is None else sum(a.kind == "AGG" for a in step.actions)
        optimizer.step()
    engine.close()
    told = group.all_gather(torch.tensor(mine, dtype=torch.float64), op=Operation("what the ranks saw"))
    run.losses = told.tolist()
    run.after = original_state_dict(model)
    return run


@contextmanager
def losing(lose: bool) -> Iterator[None]:
    """While it lasts, the first replica that has summed up anything loses it before it is sent home."""
    collect, lost = Replica.collect_grads, list[Replica]()

    def losing_one(replica: Replica) -> None:
        collect(replica)
        if not lost and bool(replica.grads.any()):
            lost.append(replica)
            replica.grads.zero_()

    Replica.collect_grads = losing_one if lose else collect  # type: ignore[method-assign]
    try:
        yield
    finally:
        Replica.collect_grads = collect  # type: ignore[method-assign]


# --- what differs ---------------------------------------------------------------------------------------------
def differences(wanted: Run, found: Run) -> list[tuple[float, str]]:
    """How far apart two runs are, as multiples of what `LOSSES` and `MOVES` allow, each with words."""
    gaps: list[tuple[float, str]] = []
    for rank, (mine, its) in enumerate(zip(wanted.losses, found.losses, strict=True)):
        for step, (a, b) in enumerate(zip(mine, its, strict=True)):
            gaps.append(
                (_multiple(abs(a - b), LOSSES * abs(a)), f"loss of rank {rank}, step {step}: {b!r}, alone {a!r}")
            )
    if set(wanted.after) != set(found.after):
        gaps.append((math.inf, f"other names: {sorted(set(wanted.after) ^ set(found.after))[:4]}"))
    for name in wanted.after.keys() & found.after.keys():
        start, a, b = (t.double() for t in (wanted.before[name], wanted.after[name], found.after[name]))
        if a.numel():
            move, gap = float((a - start).abs().max()), float((a - b).abs().max())
            dtype = wanted.after[name].dtype
            rounding = (torch.finfo(dtype).eps if dtype.is_floating_point else 1e-9) * max(float(a.abs().max()), 1.0)
            words = f"{name} moved by {move:.3g}, and is {gap:.3g} off"
            gaps.append((_multiple(gap, max(MOVES * move, rounding)), words))
    return gaps


def _multiple(gap: float, allowed: float) -> float:
    """How often `allowed` fits into `gap`; no number is infinitely far away."""
    return gap / allowed if math.isfinite(gap) else math.inf


def exported(model: Any, state: State, group: Collective, folder: Path) -> list[str]:
    """What `from_pretrained` of the model's own class does not find as it was, bit for bit; collective.

    Some classes load some of their parameters in float32, whatever they were.
    """
    model.save_pretrained(folder)
    if group.rank:
        return []
    loaded = type(model).from_pretrained(folder).state_dict()
    shutil.rmtree(folder)
    same = {name for name, t in loaded.items() if name in state and torch.equal(t, state[name].to(t.dtype))}
    return [f"{name} is not loaded as it was saved" for name in state if name not in same]


def names_its_reason(text: str, model: nn.Module) -> bool:
    """Whether a refusal names a class of the model, an attribute of it, and what that is."""
    words = set(re.findall(r"\w+", text))
    for module in model.modules():
        if type(module).__name__ in words:
            held = [getattr(module, w) for w in words if hasattr(module, w)]
            if any(str(v) in text or type(v).__name__.lower() in text.lower() for v in held):
                return True
    return False


def copied(state: Mapping[str, Tensor]) -> State:
    return {name: t.clone() for name, t in state.items()}


# --- two ranks that walk --------------------------------------------------------------------------------------
class Pair:
    """Two ranks that take one family after the other, so that starting them is paid for once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread: threading.Thread | None = None
        self._ranks: list[Connection] = []

    def do(self, family: str, case: str) -> list[Row]:
        """The rows of both ranks."""
        if not self._ranks:
            self._start()
        try:
            for rank in self._ranks:
                rank.send((family, case))
            if not all(rank.poll(JOB_S) for rank in self._ranks):
                raise TimeoutError(f"a rank said nothing for {JOB_S:g} s")
            return [rank.recv() for rank in self._ranks]
        except (OSError, EOFError) as error:  # the next family gets a new pair
            self.close()
            return [Row(family=family, case=case, said=f"a rank ended: {type(error).__name__}: {error}")]

    def _start(self) -> None:
        address = str(self._folder / "jobs")
        with Listener(address) as listener:
            told = (RANKS, serve, address, str(self._folder))
            self._thread = threading.Thread(target=on_processes, args=told, kwargs={"timeout_s": 3000.0}, daemon=True)
            self._thread.start()
            by_rank = {accepted.recv(): accepted for accepted in (listener.accept() for _ in range(RANKS))}
            self._ranks = [by_rank[rank] for rank in range(RANKS)]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        if self._thread:
            self._thread.join(10.0)
        self._ranks = []


def serve(address: str, folder: str) -> None:
    """One rank's part: do what is asked for until nobody asks any more. A family's group is its own."""
    with Client(address) as asking:
        asking.send(dist.get_rank())
        while True:
            try:
                family, case = asking.recv()
            except EOFError:
                return
            group = dist.new_group(timeout=timedelta(seconds=WAIT_S))
            asking.send(row_of(family, case, collective_for(group, timeout_s=WAIT_S), Path(folder) / "saved"))
            dist.destroy_process_group(group)
