"""What a schedule takes when operations are uneven: start and end of every action, bubble, activations by rank.

Shape legend: S stages, P ranks, U units (microbatches, or slices of them). Model: start(op) = max(its rank is free +
what the runtime takes between two actions, its dependency's end + transfer); transfers take time on the wire only and
overlap with computation on both sides, and so does what the runtime takes where a rank waits for its input anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline_balance.schedules.actions import SHARED, Action, Schedule, ScheduleError
from pipeline_balance.schedules.links import Transfers, between_stages
from pipeline_balance.spec import LayerCost, StageMap
from prophet.errors import SpecError
from prophet.spec import FloatArray


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds and bytes of every operation, each by stage [S] or, where units differ, by stage and unit [S, U].

    Attributes:
        forward_s: Of a forward.
        input_s: Of a backward for the input.
        weight_s: Of a backward for the weights.
        forward_transfer_s: [S - 1]: from stage s to s + 1 for an activation; stages on one rank transfer in no time.
        backward_transfer_s: [S - 1]: from stage s + 1 to s for a gradient.
        activation_bytes: What one unit keeps in a stage from its forward until its last backward part.
        chunk_gradient_bytes: What the gradients of one slice's keys and values take, from the first backward that adds
            to them until the slice's own.
        between_s: What the runtime takes on a rank from the end of one action to the next one's start.
        all_reduce_s: [S]: what averaging a stage's gradients over replicas takes after its last backward. The stages of
            a rank take turns at that, beside what the rank still computes.
        vocabulary_s: What a unit's S and T take on each rank, where ranks share a vocabulary.
    """

    forward_s: FloatArray
    input_s: FloatArray
    weight_s: FloatArray
    forward_transfer_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    backward_transfer_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    activation_bytes: Sequence[int] | Sequence[Sequence[int]] = ()
    chunk_gradient_bytes: Sequence[int] | Sequence[Sequence[int]] = ()
    between_s: float = 0.0
    all_reduce_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    vocabulary_s: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def uniform(
        cls,
        stages: int,
        *,
        forward_s: float = 1.0,
        input_s: float = 1.0,
        weight_s: float = 1.0,
        transfer_s: float = 0.0,
    ) -> Durations:
        """The same figures for every stage; every activation takes one byte.

        Args:
            stages: S.
            forward_s: Of a forward.
            input_s: Of a backward for the input.
            weight_s: Of a backward for the weights.
            transfer_s: Of every transfer.
        """
        links = np.full(stages - 1, transfer_s)
        return cls(
            forward_s=np.full(stages, forward_s),
            input_s=np.full(stages, input_s),
            weight_s=np.full(stages, weight_s),
            forward_transfer_s=links,
            backward_transfer_s=links,
            activation_bytes=(1,) * stages,
        )

    @classmethod
    def of_stages(
        cls,
        costs: Sequence[LayerCost],
        stage_map: StageMap,
        *,
        speeds: Sequence[float] | None = None,
        transfer_s: Transfers = 0.0,
        between_s: float = 0.0,
    ) -> Durations:
        """Sums of the layers' costs by stage, divided by the speed of the stage's rank.

        Args:
            costs: Of every layer.
            stage_map: Which rank runs which layers.
            speeds: Of every rank; None: all 1.
            transfer_s: Of every transfer, or of one between any two ranks [P, P].
            between_s: What the runtime takes between two actions.
        """
        stage_map.check_layers(len(costs))

        def total(name: str) -> list[Any]:
            return [sum(getattr(costs[i], name) for i in stage_map.layers_of(s)) for s in range(stage_map.stages)]

        speed = np.array([speeds[r] if speeds else 1.0 for r in stage_map.ranks])
        links = between_stages(transfer_s, stage_map.ranks)
        return cls(
            forward_s=total("forward_s") / speed,
            input_s=total("backward_input_s") / speed,
            weight_s=total("backward_weight_s") / speed,
            forward_transfer_s=links,
            backward_transfer_s=links,
            activation_bytes=tuple(total("activation_bytes")),
            between_s=between_s,
            all_reduce_s=np.array(total("all_reduce_s")),
        )


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """When every action runs and what follows from it.

    Attributes:
        makespan_s: Until the last action ends, and the last all-reduce.
        start_s, end_s: Of every action.
        busy_s: Seconds that every rank computes [P].
        reduced_s: When every rank's gradients are averaged over replicas [P]; zeros where nothing is.
        peak_activation_bytes: Most that every rank holds at once [P].
    """

    makespan_s: float
    start_s: Mapping[Action, float]
    end_s: Mapping[Action, float]
    busy_s: tuple[float, ...]
    reduced_s: tuple[float, ...]
    peak_activation_bytes: tuple[int, ...]

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds every rank waits between 0 and the makespan, [P]."""
        return tuple(self.makespan_s - b for b in self.busy_s)

    @property
    def bubble_ratio(self) -> float:
        """Idle rank-seconds over all rank-seconds."""
        if self.makespan_s <= 0:
            return 0.0
        return 1.0 - sum(self.busy_s) / (self.makespan_s * len(self.busy_s))

    @property
    def idle_over_work(self) -> float:
        """Idle rank-seconds over busy ones, which most papers call the bubble; `bubble_ratio` divides by both."""
        work = sum(self.busy_s)
        return sum(self.idle_s) / work if work > 0 else 0.0


def _checked(durations: Durations, name: str, *shapes: tuple[int, ...]) -> FloatArray:
    """The durations of that name, which must have one of the shapes."""
    array = np.asarray(getattr(durations, name), dtype=np.float64)
    if array.shape not in shapes:
        raise SpecError(f"{name} must have shape {' or '.join(str(list(s)) for s in shapes)}, got {list(array.shape)}")
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise SpecError(f"{name} must be finite and not negative, got {array.tolist()}")
    return array


def simulate(schedule: Schedule, durations: Durations) -> Simulation:
    """Run the schedule on paper. Raises `ScheduleError`, naming the heads of the waiting ranks, if it deadlocks."""
    stages, whole = schedule.stages, (schedule.stages, schedule.units)

    def table(name: str) -> FloatArray:
        array = _checked(durations, name, whole[:1], whole)
        return np.broadcast_to(array[:, None], whole) if array.ndim == 1 else array

    def links(name: str) -> list[float]:
        return _checked(durations, name, (stages - 1,), (0,)).tolist() or [0.0] * stages

    forward, input_, weight = table("forward_s"), table("input_s"), table("weight_s")
    taken_s = {"F": forward, "I": input_, "W": weight, "B": input_ + weight}
    seconds = {kind: array.tolist() for kind, array in taken_s.items()}
    down, up = links("forward_transfer_s"), links("backward_transfer_s")
    _checked(durations, "between_s", ())
    # looked up once: each look goes over a rank's actions
    home, shares = schedule.stage_ranks, schedule.shares
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    # the same by stage, kind and unit: making an action to look for takes longer than all else
    ended: dict[tuple[int, str, int], float] = {}
    free = [0.0] * schedule.ranks
    busy = [0.0] * schedule.ranks
    position = [0] * schedule.ranks

    # when the ranks have run an S and the like of a unit
    shared: dict[tuple[str, int], list[float]] = {}
    other_s = {"S": durations.vocabulary_s[0], "T": durations.vocabulary_s[1]}

    def of_all(kind: str, unit: int) -> float | None:
        ends = shared.get((kind, unit), [])
        return max(ends) if len(ends) == schedule.ranks else None

    def ready_s(action: Action) -> float | None:
        """When the action's input is on its rank; None while that is not known."""
        s, m = action.stage, action.microbatch
        if action.kind == "S":
            return ended.get((stages - 1, "F", m))
        if action.kind == "T":
            return of_all("S", m)
        if action.kind == "G":
            return ended.get((0, "I", m), ended.get((0, "B", m)))
        if shares and (action.kind, s) == ("F", 0):
            return of_all("E", m)
        if shares and action.kind in "BI" and s == stages - 1:
            return of_all("T", m)
        if action.kind == "F":
            if s == 0:
                return 0.0
            before = ended.get((s - 1, "F", m))
            return None if before is None else before + (down[s - 1] if home[s - 1] != home[s] else 0.0)
        # the row's own order already puts F before I or B, and I before W
        if action.kind in "WHE" or s == stages - 1:
            return 0.0
        after = ended.get((s + 1, "I", m), ended.get((s + 1, "B", m)))
        return None if after is None else after + (up[s] if home[s + 1] != home[s] else 0.0)

    moved = True
    # rank by rank as far as it gets; start times do not depend on the order of these rounds
    while moved:
        moved = False
        for rank, row in enumerate(schedule.actions):
            while position[rank] < len(row):
                action = row[position[rank]]
                ready = ready_s(action)
                # its input comes from a rank that has not got there yet
                if ready is None:
                    break
                # the first action has none before it
                began = max(free[rank] + (durations.between_s if position[rank] else 0.0), ready)
                # nobody is helped here: see `exchange_times`
                known = seconds.get(action.kind)
                taken = known[action.stage][action.microbatch] if known else other_s.get(action.kind, 0.0)
                start[action] = began
                end[action] = ended[action.stage, action.kind, action.microbatch] = began + taken
                free[rank] = began + taken
                busy[rank] += taken
                if action.kind in SHARED:
                    shared.setdefault((action.kind, action.microbatch), []).append(end[action])
                position[rank] += 1
                moved = True
    # the head of each row that is left names the circle
    heads = enumerate(zip(schedule.actions, position, strict=True))
    stuck = [f"rank {r}: {row[p]}" for r, (row, p) in heads if p < len(row)]
    if stuck:
        raise ScheduleError(f"the schedule waits for itself at {', '.join(stuck)}")
    reduced = _reduced_s(schedule, end, _checked(durations, "all_reduce_s", (stages,), (0,)).tolist())
    return Simulation(
        makespan_s=max(*free, *reduced),
        start_s=start,
        end_s=end,
        busy_s=tuple(busy),
        reduced_s=reduced,
        peak_activation_bytes=peak_activation_bytes(
            schedule, durations.activation_bytes, durations.chunk_gradient_bytes
        ),
    )


def _reduced_s(schedule: Schedule, end: Mapping[Action, float], all_reduce_s: Sequence[float]) -> tuple[float, ...]:
    """When every rank's gradients are averaged over replicas, [P]."""
    reduced = [0.0] * schedule.ranks
    if not any(all_reduce_s):
        return tuple(reduced)
    for rank, row in enumerate(schedule.actions):
        # in the order in which stages have all their gradients
        last = {action.stage: end[action] for action in row if action.kind in ("B", "W")}
        for stage in sorted(last, key=lambda s: last[s]):
            reduced[rank] = max(reduced[rank], last[stage]) + all_reduce_s[stage]
    return tuple(reduced)


def peak_activation_bytes(
    schedule: Schedule,
    activation_bytes: Sequence[int] | Sequence[Sequence[int]],
    chunk_gradient_bytes: Sequence[int] | Sequence[Sequence[int]] = (),
    kept_bytes: Sequence[Sequence[int]] = (),
) -> tuple[int, ...]:
    """Most bytes of activations, and of their chunks' gradients, that every rank holds at once, [P].

    Follows from the order alone, not from times. A slice's backward adds to the gradients of all earlier slices' keys
    and values, so those exist beside the slice's own activations (SlimPipe leaves them out).

    Args:
        schedule: The order.
        activation_bytes: By stage, or by stage and unit.
        chunk_gradient_bytes: Likewise.
        kept_bytes: What ranks hold besides, by rank and action: chunks of others, for instance.
    """
    kept = _by_unit(schedule, "activation_bytes", activation_bytes)
    added = _by_unit(schedule, "chunk_gradient_bytes", chunk_gradient_bytes)
    if not (activation_bytes or chunk_gradient_bytes or kept_bytes):
        # a walk through long rows that would find nothing
        return (0,) * schedule.ranks
    peaks = []
    for rank, row in enumerate(schedule.actions):
        held = peak = 0
        for number, action in enumerate(row):
            stage, unit = action.stage, action.microbatch
            place = unit % schedule.slices
            if action.kind == "F":
                held += kept[stage][unit]
            elif action.kind in ("I", "B") and place == schedule.slices - 1:
                # backward goes in reverse: a microbatch's last slice adds to those of all before it
                held += sum(added[stage][unit - place : unit])
            # before anything is freed: the backward needs all of it at once
            peak = max(peak, held + (kept_bytes[rank][number] if kept_bytes else 0))
            if action.kind in ("I", "B") and place < schedule.slices - 1:
                held -= added[stage][unit]
            # with a split backward, the weight gradient still needs the activations
            if action.kind in ("B", "W"):
                held -= kept[stage][unit]
        peaks.append(peak)
    return tuple(peaks)


def _by_unit(schedule: Schedule, name: str, given: Sequence[int] | Sequence[Sequence[int]]) -> list[list[int]]:
    """Bytes that every unit keeps in every stage, [S][U], from figures by stage or by stage and unit."""
    if not given:
        return [[0] * schedule.units] * schedule.stages
    table = [[row] * schedule.units if isinstance(row, int) else list(row) for row in given]
    if len(table) != schedule.stages or any(len(row) != schedule.units for row in table):
        raise SpecError(f"{name} needs one figure per stage ({schedule.stages}), or {schedule.units} by stage and unit")
    return table
