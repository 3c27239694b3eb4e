"""Models whose slices are chosen while they train: pieces are timed on all ranks, and all take the same candidate.

Shape legend: L units, P ranks, V stages per rank, N slices.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from pipeline_balance.pipeline.model.expert_layers import expert_layers
from pipeline_balance.pipeline.model.layers import ChoosesCuts, LossFn, Microbatch, NextBatch, labels_of
from pipeline_balance.pipeline.run.agreement import from_all
from pipeline_balance.schedules.actions import Schedule, ScheduleError
from pipeline_balance.slices.adapter import SlicedTransformers, window_of
from pipeline_balance.slices.alone import check_limits
from pipeline_balance.slices.auto.choice import (
    AutoSlices,
    Choice,
    Setting,
    SliceCosts,
    SliceSeconds,
    UnitCosts,
    choose,
)
from pipeline_balance.slices.auto.pieces import Pieces, tokens_of
from pipeline_balance.slices.chain import SlicedChain
from pipeline_balance.slices.options import Recompute, SliceOptions
from pipeline_balance.slices.parts import SlicePart, part_of
from pipeline_balance.slices.sharing.exchanging import Timed
from prophet.errors import SpecError
from prophet.ranks.collective import Collective
from prophet.ranks.json_messages import gather_json
from prophet.ranks.operation import Operation

_log = logging.getLogger(__name__)
# Of the two messages from whose times latency and seconds per byte follow
_SMALL_BYTES, _LARGE_BYTES = 1 << 14, 1 << 20


class InForce:
    """The slices in force where they are chosen; see `Slicing`.

    Attributes:
        asked: What is named, and what is to be chosen.
        now: What is in force.
        choice: The latest choice, with its reason and all candidates; None before the first.
        costs: What it rests on.
    """

    # ranks that share slices cannot time layers alone
    context_parallel = 1

    def __init__(self, asked: AutoSlices) -> None:
        self.asked, self.now = asked, asked.whole()
        self.stages_per_rank = asked.stages_per_rank
        self.choice: Choice | None = None
        self.costs: SliceCosts | None = asked.costs

    def __str__(self) -> str:
        # what ranks compare when they meet: one that joins has chosen nothing yet
        return str(self.asked)

    @property
    def slices(self) -> int:
        """N, at the moment."""
        return self.now.slices

    def check(self, ranks: Sequence[int]) -> None:
        """Raise `SpecError` unless stages on these ranks [S] can run in some number of slices."""
        replace(self.now, slices=len(set(ranks))).check(ranks)

    def schedule(self, ranks: Sequence[int], microbatches: int) -> Schedule:
        """The order of all slices over stages on `ranks` [S]."""
        try:
            return self.now.schedule(ranks, microbatches)
        except ScheduleError:
            # of these ranks nothing is chosen yet, which comes before anything runs
            return replace(self.now, slices=len(set(ranks))).schedule(ranks, microbatches)


class Choosing(Pieces, ChoosesCuts):
    """A model in slices that are chosen; goes before `SlicedTransformers` or `SlicedChain` among the bases.

    Attributes:
        chosen: The slices in force.
    """

    chosen: InForce

    def _begin(self, asked: AutoSlices, options: dict[str, Any]) -> SliceOptions:
        """What slices begin with; raises `SpecError` for `options` of which nothing can be measured alone."""
        if options.get("split_vocabulary"):
            raise SpecError(
                "slices that are chosen time every layer alone, and a split vocabulary is computed by all ranks "
                "together: give SliceOptions(...), or leave out split_vocabulary"
            )
        # lengths of sequences for which they were chosen, on which ranks and stages
        self._chosen_for: frozenset[int] = frozenset()
        self._at: tuple[ref[Collective], object] | None = None
        # by all ranks and by those with a stage: every rank knows the same
        self._messages = WeakKeyDictionary[Collective, dict[tuple[int, ...], dict[str, Any]]]()
        self.known = {}
        self.asked, self.chosen = asked, InForce(asked)
        return self.chosen.now

    def look(self) -> None:
        super().look()
        check_limits(self.units)
        shared = sorted({unit for unit, _, _ in expert_layers(self.units)})
        if shared:
            raise SpecError(
                f"slices that are chosen time every layer alone, and layer {shared[0]} shares experts with other "
                "ranks: give SliceOptions(...)"
            )

    # --- cutting -----------------------------------------------------------------------------------------------

    def begin_batch(self, world: Collective, stages: object) -> None:
        self.asks = False
        if self._at is None or self._at[0]() is not world or self._at[1] != stages:
            self._chosen_for = frozenset()
        self._at = ref(world), stages

    def sliced(self, microbatch: Microbatch) -> list[Microbatch]:
        tokens = tokens_of(microbatch)
        if not torch.is_grad_enabled():
            # what is only evaluated may have any length
            fits = self._divides(tokens)
        else:
            fits = tokens in self._chosen_for
            self.asks = self.asks or not fits
        with nullcontext() if fits else self.cutting(self.asked.whole()):
            return super().sliced(microbatch)

    def _divides(self, tokens: int) -> bool:
        try:
            self.starts(tokens)
        except SpecError:
            return False
        return True

    # --- choosing ----------------------------------------------------------------------------------------------

    def choose(self, given: NextBatch) -> None:
        asked, used = self.asked, sorted({*given.ranks})
        every = from_all(lambda: self._figures(given), given.world, Operation("measuring pieces of slices"), waits=True)
        lengths = sorted({tokens for row in every for tokens in row["tokens"]})
        costs = asked.costs if asked.costs is not None else self._slowest(every, self._links(given))
        setting = Setting(
            stages=tuple(map(tuple, given.stages)),
            ranks=tuple(used.index(rank) for rank in given.ranks),
            # replicas cut their batches into equally many
            tokens=tuple(map(max, zip(*(row["tokens"] for row in every), strict=True))),
            lengths=tuple(lengths),
            memory_bytes=tuple(_limit(every, rank, asked.memory_bytes) for rank in used),
        )
        choice = choose(asked, costs, setting)
        self.chosen.choice, self.chosen.costs, self.chosen.now = choice, costs, choice.options
        self.follow(choice.options)
        self._chosen_for = frozenset(lengths)
        if given.world.rank == 0:
            _log.info("sequences of %s tokens: %s", ", ".join(map(str, lengths)), choice)

    def _figures(self, given: NextBatch) -> dict[str, Any]:
        """What this rank tells all others; local."""
        here, asked = given.collective.rank, self.asked
        batch = list({id(one): one for part in given.parts if (one := part_of(part).whole) is not None}.values())
        mine = [unit for its, rank in zip(given.stages, given.ranks, strict=True) if rank == here for unit in its]
        weights = [p for unit in mine for p in self.units[unit].parameters() if p.requires_grad]
        found: dict[str, Any] = {
            "rank": here,
            "tokens": [tokens_of(one) for one in batch],
            # one name is one memory
            "host": socket.gethostname(),
            "free": free_bytes(self.device),
            # before the first step: gradients, and about twice as much of the optimizer's
            "to_come": 3 * sum(p.nbytes for p in weights) if all(p.grad is None for p in weights) else 0,
        }
        if asked.costs is not None:
            if len(asked.costs.units) != len(self.units):
                raise SpecError(f"costs are of {len(asked.costs.units)} layers, the model has {len(self.units)}")
            return found
        if self.device.type != "cpu":
            raise SpecError(f"pieces of slices are timed on CPUs only, not on {self.device}: give AutoSlices its costs")
        room = asked.memory_bytes if asked.memory_bytes is not None else found["free"]
        timed = Timed(given.collective, self.device)
        return found | {"costs": self.measured(batch, mine, len({*given.ranks}), room, timed)}

    def _slowest(self, every: Sequence[dict[str, Any]], links: dict[str, Any]) -> SliceCosts:
        """The slowest rank's figures of everything."""
        told = largest([row["costs"] for row in every])
        measured, units = told.pop("units"), []
        for unit in range(len(self.units)):
            one, its = measured[str(unit)], [row["costs"]["units"].get(str(unit)) for row in every]
            # what some replica cannot compute again, none does
            everywhere = set.intersection(*(set(found["kept_bytes"]) for found in its if found is not None))
            for figures in ("kept_bytes", "again_s"):
                one[figures] = {how: figure for how, figure in one[figures].items() if how in everywhere}
            lengths = sorted((int(tokens), seconds) for tokens, seconds in one.pop("lengths").items())
            units.append(UnitCosts(lengths=tuple(SliceSeconds(tokens, *seconds) for tokens, seconds in lengths), **one))
        told |= {name: tuple(told[name]) for name in ("heads", "call_s")}
        if not all(row["costs"]["query_bytes"] for row in every):
            # where some cannot exchange attention, nobody does
            told["query_bytes"] = 0.0
        return SliceCosts(units=tuple(units), **told, **links)

    def _links(self, given: NextBatch) -> dict[str, Any]:
        """Latency of a message between stages, and seconds per byte, measured once; collective."""
        used, here = sorted({*given.ranks}), given.collective.rank
        known = self._messages.setdefault(given.world, {})
        if (kept := known.get(tuple(used))) is not None:
            return kept
        found = {"latency_s": 0.0, "byte_s": 0.0}
        if len(used) > 1 and here in used:
            timed, taken = Timed(given.collective, self.device), []
            for size in (_SMALL_BYTES, _LARGE_BYTES):
                sent = torch.zeros(size, dtype=torch.uint8, device=self.device)
                taken.append(timed.message(used, sent, "measuring messages between stages", "weights"))
            byte_s = max(taken[1] - taken[0], 0.0) / (_LARGE_BYTES - _SMALL_BYTES)
            found = {"latency_s": max(taken[0] - byte_s * _SMALL_BYTES, 0.0), "byte_s": byte_s}
        every = gather_json(found, given.world, Operation("comparing measured messages"))
        return known.setdefault(tuple(used), {name: max(row[name] for row in every) for name in found})


class ChosenTransformers(Choosing, SlicedTransformers):
    """A transformers model in slices that are chosen.

    Args:
        model: The model.
        asked: What is named, and what is to be chosen.
        **options: Those of `TransformersModel`.
    """

    def __init__(self, model: nn.Module, asked: AutoSlices, **options: Any) -> None:
        SlicedTransformers.__init__(self, model, self._begin(asked, options), **options)
        self.slicing = self.chosen

    def follow(self, slicing: SliceOptions) -> None:
        super().follow(slicing)
        self.recompute = slicing.recompute

    def _ready(self, part: SlicePart) -> None:
        self.recorded(part)
        if not part.slice and part.whole is not None:
            # a piece is run again and again, a microbatch once
            part.whole.kept.pop("routers", None)

    def _arguments(self, unit: int, part: SlicePart) -> Sequence[Any]:
        return self.recorded(part).calls[unit - 1].leaves if 0 < unit <= len(self.layers) else ()

    def _kind(self, unit: int) -> object:
        weights = tuple(p.requires_grad for p in self.units[unit].parameters())
        return (self._kinds[unit - 1], weights) if 0 < unit <= len(self.layers) else -unit - 1

    def _window(self, unit: int, whole: Microbatch) -> int | None:
        return window_of(self._whole(whole)[0].calls[unit - 1].leaves) if 0 < unit <= len(self.layers) else None

    @contextmanager
    def _recomputing(self, how: Recompute) -> Iterator[None]:
        before = self.recompute
        self.recompute = how
        # parts that may not run twice are found where shapes are asked for
        self._outputs.clear()
        try:
            self.look()
            yield
        finally:
            self.recompute = before
            self._outputs.clear()


class ChosenChain(Choosing, SlicedChain):
    """Modules in a row, in slices that are chosen; see `SlicedChain`.

    Args:
        layers: The modules.
        loss_fn: As there.
        asked: What is named, and what is to be chosen.
        **options: Those of `ModuleChain`.
    """

    def __init__(
        self, layers: nn.Module | Sequence[nn.Module], loss_fn: LossFn, asked: AutoSlices, **options: Any
    ) -> None:
        if options.get("counted") is None:
            # by tokens, whatever is chosen: a loss must not depend on it
            options["counted"] = labels_of(loss_fn, tokens=True)
        SlicedChain.__init__(self, layers, loss_fn, self._begin(asked, options), **options)
        self.slicing = self.chosen


def free_bytes(device: torch.device) -> int | None:
    """Memory that `device`, or the machine, has free; None where that is not known."""
    if device.type != "cpu":
        asks = getattr(torch.get_device_module(device), "mem_get_info", None)
        return int(asks(device)[0]) if asks is not None else None
    found: list[int] = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        return None
    folder = Path("/sys/fs/cgroup")
    try:
        # a container may have less than the machine
        most = (folder / "memory.max").read_text(encoding="utf-8").strip()
        if most != "max":
            found.append(int(most) - int((folder / "memory.current").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        pass
    return max(min(found), 0) if found else None


def largest(told: Sequence[Any]) -> Any:
    """Of what each rank tells, the largest of every figure, by name or place; None, which is no limit, is the largest.

    A rank that lacks a name says nothing of it.
    """
    if isinstance(told[0], dict):
        names = {name: [one[name] for one in told if name in one] for row in told for name in row}
        return {name: largest(its) for name, its in names.items()}
    if isinstance(told[0], list):
        return [largest(its) for its in zip(*told, strict=True)]
    return None if None in told else max(told)


def _limit(every: Sequence[dict[str, Any]], rank: int, named: int | None) -> int | None:
    """What the ranks of all replicas with this place may hold: what was named, or an equal part of what is free."""
    if named is not None:
        return named
    found = []
    for row in every:
        beside = [other["free"] for other in every if other["host"] == row["host"]]
        known = [free for free in beside if free is not None]
        if row["rank"] == rank and known:
            found.append(max(min(known) // len(beside) - row["to_come"], 0))
    return min(found, default=None)
