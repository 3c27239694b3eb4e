"""What a schedule would take: the lists that the runtime carries out, played under given durations.

Each rank has a compute stream, which also waits for the all-to-alls of dispatch and combine, and a stream for weights,
on which Trans and Agg chunks run one after the other. A collective starts when its last rank is there. Where both
streams use one link (`shared_link`), an all-to-all and a chunk that run together get half of it each; so hiding a
transfer under an all-to-all gains nothing, as in the paper's Eq. 8, which counts only compute as cover.

    for every block        exchange of counts, dispatch, wait for Trans, FEC, combine, FNEC
    for every block, back  BNEC, combine back, BEC, dispatch back
    then                   wait for Agg, wait for the plan of the next step

Shape legend: R ranks, L blocks, C chunks per transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prophet.scheduler.actions import Action, TransferKind, Window
from prophet.scheduler.blockwise import by_window
from prophet.scheduler.timeline import Span
from prophet.spec import FloatArray, Placement, PlanContext, SpecError, Split, Topology

DISPATCH, COMBINE, COMBINE_BACK, DISPATCH_BACK = range(4)
_A2A_NAMES = ("dispatch", "combine", "combine back", "dispatch back")


def _seconds(name: str, values: npt.ArrayLike, shape: tuple[int, ...]) -> FloatArray:
    array = np.array(values, dtype=np.float64)
    if array.shape != shape:
        raise SpecError(f"StepDurations.{name} must have shape {list(shape)}, got {list(array.shape)}")
    if not np.isfinite(array).all() or (array < 0).any():
        raise SpecError(f"StepDurations.{name} must hold finite seconds, none negative")
    array.setflags(write=False)
    return array


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class StepDurations:
    """How long each operation takes on each rank, alone; seconds.

    a2a_s: [L, 4, R] dispatch, combine, combine backward, dispatch backward. fec_s, bec_s, fnec_s, bnec_s: [L, R].
    trans_s, agg_s: [L, C, R] chunks; a chunk of all zeros is not sent. plan_s: [L] host time to plan a block.
    counts_s: the exchange of counts, per block. start_s, end_s: [R] compute before the first block and, backward,
    after it.
    """

    a2a_s: FloatArray
    fec_s: FloatArray
    fnec_s: FloatArray
    bnec_s: FloatArray
    bec_s: FloatArray
    trans_s: FloatArray
    agg_s: FloatArray
    plan_s: FloatArray
    start_s: FloatArray
    end_s: FloatArray
    counts_s: float = 0.0

    def __post_init__(self) -> None:
        shape = np.shape(self.a2a_s)
        if len(shape) != 3 or shape[1] != 4 or min(shape) < 1:
            raise SpecError(f"StepDurations.a2a_s must have shape [blocks, 4, ranks], got {list(shape)}")
        blocks, _, ranks = shape
        chunks = np.shape(self.trans_s)[1] if np.ndim(self.trans_s) == 3 else 1
        shapes: dict[str, tuple[int, ...]] = {"a2a_s": shape, "plan_s": (blocks,)}
        shapes |= dict.fromkeys(("fec_s", "fnec_s", "bnec_s", "bec_s"), (blocks, ranks))
        shapes |= dict.fromkeys(("trans_s", "agg_s"), (blocks, chunks, ranks))
        shapes |= dict.fromkeys(("start_s", "end_s"), (ranks,))
        for name, expected in shapes.items():
            object.__setattr__(self, name, _seconds(name, getattr(self, name), expected))
        if not 0 <= self.counts_s < float("inf"):
            raise SpecError(f"StepDurations.counts_s must be finite and not negative, got {self.counts_s!r}")

    @classmethod
    def uniform(
        cls,
        blocks: int,
        ranks: int,
        *,
        a2a_s: float = 0.0,
        fec_s: float = 0.0,
        fnec_s: float = 0.0,
        bnec_s: float = 0.0,
        bec_s: float = 0.0,
        trans_s: Sequence[float] = (0.0, 0.0),
        agg_s: Sequence[float] = (0.0, 0.0),
        plan_s: float = 0.0,
        start_s: float = 0.0,
        end_s: float = 0.0,
        counts_s: float = 0.0,
    ) -> StepDurations:
        """All blocks and ranks alike; trans_s and agg_s give seconds by chunk."""

        def per_rank(seconds: float) -> FloatArray:
            return np.full((blocks, ranks), seconds)

        def chunks(seconds: Sequence[float]) -> FloatArray:
            return np.broadcast_to(np.array(seconds, dtype=np.float64)[None, :, None], (blocks, len(seconds), ranks))

        return cls(
            a2a_s=np.full((blocks, 4, ranks), a2a_s),
            fec_s=per_rank(fec_s),
            fnec_s=per_rank(fnec_s),
            bnec_s=per_rank(bnec_s),
            bec_s=per_rank(bec_s),
            trans_s=chunks(trans_s),
            agg_s=chunks(agg_s),
            plan_s=np.full(blocks, plan_s),
            start_s=np.full(ranks, start_s),
            end_s=np.full(ranks, end_s),
            counts_s=counts_s,
        )

    @property
    def blocks(self) -> int:
        return int(self.a2a_s.shape[0])

    @property
    def chunks(self) -> int:
        return int(self.trans_s.shape[1])

    @property
    def ranks(self) -> int:
        return int(self.a2a_s.shape[2])

    def compute_s(self) -> FloatArray:
        """Compute of every rank, [R]."""
        blocks: FloatArray = (self.fec_s + self.fnec_s + self.bnec_s + self.bec_s).sum(axis=0)
        total: FloatArray = blocks + self.start_s + self.end_s
        return total

    def transfer_s(self, kind: TransferKind) -> FloatArray:
        """[L, C, R] seconds of Trans or Agg."""
        return self.trans_s if kind == "TRANS" else self.agg_s


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SimulatedStep:
    """One simulated step; all arrays are [R] seconds.

    For every rank: compute + a2a + shared + exposed Trans + exposed Agg + exposed Plan + idle = makespan. shared_s is
    what all-to-alls lost to transfers on the same link; idle_s is waiting for slower ranks. spans is empty unless
    asked for.
    """

    makespan_s: float
    compute_s: FloatArray
    a2a_s: FloatArray
    shared_s: FloatArray
    exposed_trans_s: FloatArray
    exposed_agg_s: FloatArray
    exposed_plan_s: FloatArray
    idle_s: FloatArray
    spans: tuple[Span, ...] = ()

    @property
    def exposed_s(self) -> dict[str, float]:
        """Mean over ranks, by operation."""
        return {
            "plan": float(self.exposed_plan_s.mean()),
            "trans": float(self.exposed_trans_s.mean()),
            "agg": float(self.exposed_agg_s.mean()),
        }


@dataclass(slots=True)
class _Transfer:
    start: FloatArray
    finish: FloatArray
    name: str


@dataclass(slots=True)
class _Clock:
    """The state of all ranks while a step is played."""

    durations: StepDurations
    shared_link: bool
    record: bool
    now: FloatArray
    busy: FloatArray  # when the stream for weights is free
    sums: dict[str, FloatArray]
    sent: dict[tuple[TransferKind, int, int], _Transfer] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def span(self, name: str, stream: str, start: FloatArray, end: FloatArray) -> None:
        if self.record:
            for r in np.flatnonzero(end > start).tolist():
                self.spans.append(Span(float(start[r]), float(end[r]), r, stream, name))

    def compute(self, name: str, seconds: FloatArray) -> None:
        before = self.now
        self.now = before + seconds
        self.sums["compute"] += seconds
        self.span(name, "compute", before, self.now)

    def meet(self) -> float:
        """All ranks wait for the last one."""
        last = float(self.now.max())
        self.sums["idle"] += last - self.now
        self.now = np.full_like(self.now, last)
        return last

    def all_to_all(self, name: str, seconds: FloatArray) -> None:
        before = self.meet()
        lost = np.minimum(seconds, np.maximum(self.busy - before, 0.0)) if self.shared_link else np.zeros_like(seconds)
        if self.shared_link:
            for transfer in self.sent.values():
                for times in (transfer.start, transfer.finish):
                    np.add(times, np.clip(times - before, 0.0, seconds), out=times)
            self.busy = self.busy + np.clip(self.busy - before, 0.0, seconds)
        start = self.now
        self.now = start + seconds + lost
        self.sums["a2a"] += seconds
        self.sums["shared"] += lost
        self.span(name, "tokens", start, self.now)

    def launch(self, kind: TransferKind, block: int, chunk: int) -> None:
        key, seconds = (kind, block, chunk), self.durations.transfer_s(kind)[block, chunk]
        if key in self.sent:
            return
        # a chunk needs all ranks: it starts once the last has launched it and the stream is free
        start = np.maximum(self.busy, self.now.max()) if seconds.any() else self.now.copy()
        finish = start + seconds
        if seconds.any():
            self.busy = finish.copy()
        self.sent[key] = _Transfer(start, finish, f"{kind.capitalize()}({block},{chunk})")

    def wait(self, kind: TransferKind, block: int) -> None:
        """Launch what was not, then wait for all chunks of a block."""
        finish = self.now
        for chunk in range(self.durations.chunks):
            self.launch(kind, block, chunk)
            finish = np.maximum(finish, self.sent[kind, block, chunk].finish)
        self.sums[f"exposed_{kind.lower()}"] += finish - self.now
        self.now = finish


def check_schedule(schedule: Iterable[Action], blocks: int, chunks: int) -> None:
    """Raise ValueError for an action outside the step, launched twice, or an Agg before its gradients exist."""
    seen = set()
    for action in schedule:
        key = (action.kind, action.block, action.chunk)
        if not (action.block < blocks and action.chunk < chunks):
            raise ValueError(f"{action} is outside a step of {blocks} blocks and {chunks} chunks")
        if key in seen:
            raise ValueError(f"{action.kind}({action.block},{action.chunk}) is launched twice")
        seen.add(key)
        window = action.window
        if window.block is not None and window.block >= blocks:
            raise ValueError(f"{action} names a window outside a step of {blocks} blocks")
        if action.kind == "AGG":
            backward = window.kind in ("BNEC", "BEC") and window.block is not None and window.block < action.block
            if not (backward or window.kind == "END"):
                raise ValueError(f"{action} comes before the backward pass of its own experts")


def simulate(
    schedule: Sequence[Action], durations: StepDurations, *, shared_link: bool = True, record: bool = False
) -> SimulatedStep:
    """Play one step of `schedule` under `durations`; pure. ValueError where the schedule does not fit the step.

    Transfers that the schedule leaves out, or comes too late with, are launched when they are needed.
    """
    check_schedule(schedule, durations.blocks, durations.chunks)
    table = by_window(schedule)
    d, ranks = durations, durations.ranks
    names = ("compute", "a2a", "shared", "exposed_trans", "exposed_agg", "exposed_plan", "idle")
    clock = _Clock(d, shared_link, record, np.zeros(ranks), np.zeros(ranks), {n: np.zeros(ranks) for n in names})
    planned = np.zeros(ranks)

    def enter(window: Window) -> None:
        for action in table.get(window, ()):
            clock.launch(action.kind, action.block, action.chunk)

    enter(Window("START"))
    clock.compute("start", d.start_s)
    for i in range(d.blocks):
        clock.all_to_all(f"counts({i})", np.full(ranks, d.counts_s))
        started = np.maximum(planned, clock.now)
        planned = started + d.plan_s[i]
        clock.span(f"plan({i})", "plan", started, planned)
        clock.all_to_all(f"{_A2A_NAMES[DISPATCH]}({i})", d.a2a_s[i, DISPATCH])
        clock.wait("TRANS", i)
        enter(Window("FEC", i))
        clock.compute(f"FEC({i})", d.fec_s[i])
        clock.all_to_all(f"{_A2A_NAMES[COMBINE]}({i})", d.a2a_s[i, COMBINE])
        enter(Window("FNEC", i))
        clock.compute(f"FNEC({i})", d.fnec_s[i])
    for i in reversed(range(d.blocks)):
        enter(Window("BNEC", i))
        clock.compute(f"BNEC({i})", d.bnec_s[i])
        clock.all_to_all(f"{_A2A_NAMES[COMBINE_BACK]}({i})", d.a2a_s[i, COMBINE_BACK])
        enter(Window("BEC", i))
        clock.compute(f"BEC({i})", d.bec_s[i])
        clock.all_to_all(f"{_A2A_NAMES[DISPATCH_BACK]}({i})", d.a2a_s[i, DISPATCH_BACK])
    clock.compute("end", d.end_s)
    enter(Window("END"))
    for i in reversed(range(d.blocks)):
        clock.wait("AGG", i)
    clock.sums["exposed_plan"] += np.maximum(planned - clock.now, 0.0)
    clock.now = np.maximum(planned, clock.now)
    clock.meet()
    for transfer in clock.sent.values():
        clock.span(transfer.name, "weights", transfer.start, transfer.finish)
    return SimulatedStep(
        makespan_s=float(clock.now.max()),
        spans=tuple(sorted(clock.spans)),
        **{f"{name}_s": values for name, values in clock.sums.items()},
    )


# --- durations from the performance model ---


def exchange_by_rank(pairs: FloatArray, topology: Topology) -> FloatArray:
    """Seconds until each rank is done with an all-to-all of `pairs[r, d]` bytes, [R].

    A rank is done when its own link has carried what it sends and receives, and when those that send to it have sent
    all that they send: their links serve all peers at the same time.
    """
    node = topology.node_ids()
    same_node = node[:, None] == node[None, :]
    off_rank = ~np.eye(topology.ranks, dtype=np.bool_)
    done: FloatArray = np.zeros(topology.ranks)
    for link, mask in ((topology.intra, same_node & off_rank), (topology.inter, ~same_node)):
        moved = np.where(mask, pairs, 0.0)
        own = np.maximum(moved.sum(axis=0), moved.sum(axis=1)) / link.bytes_per_s
        own += np.where(own > 0, link.latency_s, 0.0)
        done = np.maximum(done, own)
        senders = np.where(moved > 0, (moved.sum(axis=1) / link.bytes_per_s + link.latency_s)[:, None], 0.0)
        done = np.maximum(done, senders.max(axis=0))
    return done


def predicted_durations(
    placements: Sequence[Placement],
    splits: Sequence[Split],
    contexts: Sequence[PlanContext],
    *,
    first_chunk: float = 0.5,
    start_s: float = 0.0,
    end_s: float = 0.0,
    plan_s: float = 0.0,
    counts_s: float = 0.0,
) -> StepDurations:
    """Durations of a step of L blocks under the calibrated `contexts` (topology, sizes, windows).

    Trans and Agg are sent directly from home to replica and back, as the runtime does, in two chunks of which the
    first is the part `first_chunk`. Raises `SpecError` where the sequences differ in length or do not fit.
    """
    if not len(placements) == len(splits) == len(contexts) or not contexts:
        raise SpecError(
            f"expected as many placements and splits as contexts, got {len(placements)}, {len(splits)}, {len(contexts)}"
        )
    if not 0 <= first_chunk <= 1:
        raise SpecError(f"first_chunk must be in [0, 1], got {first_chunk!r}")
    a2a, fec, trans, agg, speeds = [], [], [], [], []
    for placement, split, context in zip(placements, splits, contexts, strict=True):
        topology, shape = context.topology, context.shape
        if split.ranks != topology.ranks or placement.ranks != topology.ranks:
            raise SpecError(f"topology has {topology.ranks} ranks, split {split.ranks}, placement {placement.ranks}")
        pairs = split.tokens.sum(axis=1).astype(np.float64) * shape.token_bytes
        there, back = exchange_by_rank(pairs, topology), exchange_by_rank(pairs.T, topology)
        a2a.append([there, back, there, back])
        load_ED = split.tokens.sum(axis=0)
        rate = np.asarray(topology.flops_per_s) / shape.forward_flops_per_token
        groups = np.count_nonzero(load_ED, axis=0)
        fec.append(load_ED.sum(axis=0) / rate + groups * topology.expert_overhead_s)
        copies = np.zeros((topology.ranks, topology.ranks))
        for expert, rank in placement.replicas():
            copies[placement.home[expert], rank] += 1.0
        parts = np.array([first_chunk, 1.0 - first_chunk])[:, None]
        trans.append(parts * exchange_by_rank(copies * shape.expert_bytes, topology))
        agg.append(parts * exchange_by_rank(copies.T * shape.expert_grad_bytes, topology))
        # windows are given for the fastest rank; the others take longer
        speeds.append(1.0 / topology.relative_speed())
    slow = np.array(speeds)
    fec_s = np.array(fec)
    return StepDurations(
        a2a_s=np.array(a2a),
        fec_s=fec_s,
        bec_s=2.0 * fec_s,
        fnec_s=slow * np.array([[c.windows.fnec_s] for c in contexts]),
        bnec_s=slow * np.array([[c.windows.bnec_s] for c in contexts]),
        trans_s=np.array(trans),
        agg_s=np.array(agg),
        plan_s=np.full(len(contexts), plan_s),
        start_s=slow[0] * start_s,
        end_s=slow[0] * end_s,
        counts_s=counts_s,
    )
