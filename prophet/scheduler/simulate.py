"""What a schedule would take: the lists that the runtime carries out, played under given durations.

Each rank has a compute stream, which also waits for the all-to-alls of dispatch and combine, and a stream for weights,
on which Trans and Agg chunks run one after the other. All ranks wait for each other's counts, and a chunk starts when
its last rank is there. In an all-to-all of tokens each pair of ranks starts when both are there. Where both streams use
one link (`shared_link`), an all-to-all and a chunk that run together get half of it each; so hiding a transfer under an
all-to-all gains nothing, as in the paper's Eq. 8, which counts only compute as cover. They share it only where they go
the same way: what a rank sends takes nothing from what it receives, but for `duplex_cost`. Of a measured machine
`link_overlap_cost` says how much they really cost each other.

Each rank's time is a mean. Where it is known by how much ranks vary, they meet when the last one is expected.

Shape legend: R ranks, L blocks, C chunks per transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt

from prophet.errors import SpecError
from prophet.scheduler.actions import A2A_NAMES, Action, Launch, TransferKind, Window
from prophet.scheduler.pieces import Form, phase_shares
from prophet.scheduler.schedules import by_window, program
from prophet.scheduler.timeline import Span
from prophet.spec import (
    FloatArray,
    Placement,
    PlanContext,
    Routes,
    Split,
    Topology,
    expected_last,
    transfer_pairs,
)

# moments at which pairs of ranks may begin within one all-to-all
_MOST_STARTS = 32


def _seconds(name: str, values: npt.ArrayLike, shape: tuple[int, ...]) -> FloatArray:
    """Return `values` as a read-only array; `SpecError` unless it has this shape and holds finite seconds."""
    array = np.array(values, dtype=np.float64)
    if array.shape != shape:
        raise SpecError(f"StepDurations.{name} must have shape {list(shape)}, got {list(array.shape)}")
    if not np.isfinite(array).all() or (array < 0).any():
        raise SpecError(f"StepDurations.{name} must hold finite seconds, none negative")
    array.setflags(write=False)
    return array


@dataclass(frozen=True, eq=False, slots=True)
class Dispatched:
    """What a block's dispatch moves, and over which links; its combine moves it back.

    Attributes:
        pairs: Bytes from rank to rank, [R, R].
        topology: The machine.
    """

    pairs: FloatArray
    topology: Topology


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class StepDurations:
    """How long each operation takes on each rank, alone; seconds.

    Attributes:
        a2a_s: Dispatch, combine, combine backward, dispatch backward, [L, 4, R].
        fec_s, fnec_s, bnec_s, bec_s: Compute of the windows, [L, R].
        copies_s: Of `fec_s`, what replicas take where they run apart from the experts at home: after them forward, as
            Trans arrives meanwhile, and before them backward, [L, R]. None where all run together.
        trans_s, agg_s: Chunks, [L, C, R]; a chunk of all zeros is not sent.
        plan_s: Host time to plan a block, [L].
        start_s, end_s: Compute before the first block and, backward, after it, [R].
        update_s: What follows once all gradients are complete, [R].
        counts_s: The exchange of counts until the last rank has them, per block.
        counts_behind_s: By how much longer it takes, at most, behind what is under way of a chunk.
        overlap_cost: By how much of its seconds a chunk lengthens the compute beside it, a share below 1.
        link_overlap_cost: As in `Topology`.
        compute_noise, exchange_noise_s: As in `Topology`.
        dispatched: By block. Where it is not known, an all-to-all starts when its last rank is there.
        trans_pairs, agg_pairs: Bytes of a chunk from rank to rank [R, R], by block and chunk. Where they are not known,
            it goes the way of the all-to-all beside it.
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
    update_s: FloatArray
    counts_s: float = 0.0
    counts_behind_s: float = 0.0
    overlap_cost: float = 0.0
    link_overlap_cost: float = 1.0
    compute_noise: float = 0.0
    exchange_noise_s: float = 0.0
    dispatched: tuple[Dispatched, ...] = ()
    copies_s: FloatArray | None = None
    trans_pairs: Mapping[tuple[int, int], FloatArray] = field(default_factory=dict)
    agg_pairs: Mapping[tuple[int, int], FloatArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = np.shape(self.a2a_s)
        if len(shape) != 3 or shape[1] != 4 or min(shape) < 1:
            raise SpecError(f"StepDurations.a2a_s must have shape [blocks, 4, ranks], got {list(shape)}")
        blocks, _, ranks = shape
        chunks = np.shape(self.trans_s)[1] if np.ndim(self.trans_s) == 3 else 1
        shapes: dict[str, tuple[int, ...]] = {"a2a_s": shape, "plan_s": (blocks,)}
        shapes |= dict.fromkeys(("fec_s", "fnec_s", "bnec_s", "bec_s"), (blocks, ranks))
        shapes |= dict.fromkeys(("trans_s", "agg_s"), (blocks, chunks, ranks))
        shapes |= dict.fromkeys(("start_s", "end_s", "update_s"), (ranks,))
        shapes |= {} if self.copies_s is None else {"copies_s": (blocks, ranks)}
        for name, expected in shapes.items():
            # the dataclass is frozen, and takes lists as well as arrays
            object.__setattr__(self, name, _seconds(name, getattr(self, name), expected))
        for name in ("counts_s", "counts_behind_s", "link_overlap_cost", "compute_noise", "exchange_noise_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise SpecError(f"StepDurations.{name} must be finite and not negative, got {getattr(self, name)!r}")
        if self.dispatched and [d.pairs.shape for d in self.dispatched] != [(ranks, ranks)] * blocks:
            raise SpecError(f"StepDurations.dispatched must hold bytes [{ranks}, {ranks}] of {blocks} blocks")
        if self.copies_s is not None and (self.copies_s > self.fec_s).any():
            raise SpecError("StepDurations.copies_s must be a part of fec_s")
        if not 0 <= self.overlap_cost < 1:
            raise SpecError(f"StepDurations.overlap_cost must be at least 0 and below 1, got {self.overlap_cost!r}")

    @property
    def blocks(self) -> int:
        return int(self.a2a_s.shape[0])

    @property
    def chunks(self) -> int:
        return int(self.trans_s.shape[1])

    @property
    def ranks(self) -> int:
        return int(self.a2a_s.shape[2])

    def apart(self, block: int) -> bool:
        """Whether a block's replicas run apart from its experts at home."""
        return self.copies_s is not None and bool(self.copies_s[block].any())

    def window_s(self, kind: str, block: int | None) -> FloatArray:
        """Return the compute of a window, or after the step's gradients are complete ("UPDATE"), by rank, [R]."""
        seconds: FloatArray = getattr(self, f"{kind.lower()}_s")
        return seconds if block is None else seconds[block]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SimulatedStep:
    """One simulated step.

    For every rank: compute + slowed + a2a + shared + exposed Trans + exposed Agg + exposed Plan + idle = makespan.

    Attributes:
        makespan_s: When the last rank is done.
        compute_s: Compute alone, [R].
        a2a_s: All-to-alls of tokens alone, [R].
        slowed_s: What compute lost to transfers beside it, [R].
        shared_s: What all-to-alls lost to transfers on the same link, [R].
        exposed_trans_s, exposed_agg_s, exposed_plan_s: Waiting for them, [R].
        idle_s: Waiting for slower ranks, [R].
        spans: Empty unless asked for.
    """

    makespan_s: float
    compute_s: FloatArray
    a2a_s: FloatArray
    slowed_s: FloatArray
    shared_s: FloatArray
    exposed_trans_s: FloatArray
    exposed_agg_s: FloatArray
    exposed_plan_s: FloatArray
    idle_s: FloatArray
    spans: tuple[Span, ...] = ()

    @property
    def exposed_s(self) -> dict[str, float]:
        """Exposed seconds by operation, the mean over ranks."""
        return {
            "plan": float(self.exposed_plan_s.mean()),
            "trans": float(self.exposed_trans_s.mean()),
            "agg": float(self.exposed_agg_s.mean()),
        }


@dataclass(slots=True)
class _Transfer:
    """A chunk under way: when it starts and finishes on each rank, [R], and its bytes [R, R], if they are known."""

    start: FloatArray
    finish: FloatArray
    name: str
    pairs: FloatArray | None = None

    def left(self, at: FloatArray) -> FloatArray:
        """Return the bytes that are left when ranks are at `at` [R]; a pair is done when its receiver is."""
        assert self.pairs is not None
        length = self.finish - self.start
        rest = self.finish - np.maximum(np.maximum(at[:, None], at), self.start)
        share: FloatArray = np.clip(rest, 0.0, None) / np.where(length > 0, length, np.inf)
        return self.pairs * share


@dataclass(slots=True)
class _Clock:
    """The state of all ranks while a step is played."""

    durations: StepDurations
    shared_link: bool
    record: bool
    now: FloatArray
    # of `now`, since the ranks have met
    variance: FloatArray
    # when the stream for weights is free
    busy: FloatArray
    sums: dict[str, FloatArray]
    sent: dict[tuple[TransferKind, int, int], _Transfer] = field(default_factory=dict)
    # all that are under way, and some that are over
    under_way: list[_Transfer] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def span(self, name: str, stream: str, start: FloatArray, end: FloatArray) -> None:
        if self.record:
            for r in np.flatnonzero(end > start).tolist():
                self.spans.append(Span(float(start[r]), float(end[r]), r, stream, name))

    def compute(self, name: str, seconds: FloatArray, of: FloatArray | None = None) -> None:
        """Compute for so long; `of` is all of it where this is a part, which varies as the whole does."""
        before = self.now
        lost = self.lost(seconds)
        self.now = before + seconds + lost
        noise = self.durations.compute_noise
        self.variance += np.square(noise * seconds) if of is None else noise**2 * seconds * of
        self.sums["compute"] += seconds
        self.sums["slowed"] += lost
        self.span(name, "compute", before, self.now)

    def lost(self, seconds: FloatArray) -> FloatArray:
        """Return by how much the transfers under way lengthen compute that takes `seconds` alone."""
        taken = self.durations.overlap_cost
        if taken == 0.0:
            return np.zeros_like(seconds)
        # when the compute ends if all of it runs beside transfers
        latest = self.now + seconds / (1.0 - taken)
        beside = np.zeros_like(seconds)
        for transfer in self.under_way:
            beside += np.maximum(np.minimum(transfer.finish, latest) - np.maximum(transfer.start, self.now), 0.0)
        return taken * beside

    def wait_for_last(self) -> float:
        """Let all ranks wait for the last one, and return when it is expected."""
        last = expected_last(self.now, np.sqrt(self.variance))
        self.sums["idle"] += last - self.now
        self.now = np.full_like(self.now, last)
        # one that has come late makes all late, and none of them later than the others
        self.variance = np.zeros_like(self.now)
        return last

    def counts(self, name: str) -> None:
        start = np.full_like(self.now, self.wait_for_last())
        # what is under way goes on meanwhile: counts are few bytes, which wait behind it in a queue
        behind = max(0.0, min(self.durations.counts_behind_s, float(self.busy.max() - start[0])))
        self.sums["shared"] += behind
        self.sums["a2a"] += self.durations.counts_s
        for taken in (behind, self.durations.counts_s):
            self.now = start + taken
            self.span(name, "tokens", start, self.now)
            start = self.now

    def wait_for_peers(self, pairs: FloatArray, topology: Topology, seconds: FloatArray) -> FloatArray:
        """Let each rank wait until an all-to-all goes on to its end without another wait.

        Args:
            pairs: Bytes from rank to rank, [R, R].
            topology: The machine.
            seconds: How long it lasts where all are there, [R].

        Returns:
            How long it lasts, at most `seconds`, [R].
        """
        deviations = np.sqrt(self.variance)
        left_KR = left_by_rank(pairs, topology, self.now)
        # a rank's own arrival always counts
        takes_part_KR = (left_KR > 0) | np.eye(len(self.now), dtype=np.bool_)
        ends_KR = self.now[:, None] + left_KR
        done = np.array([expected_last(ends_KR[part, r], deviations[part]) for r, part in enumerate(takes_part_KR.T)])
        taken = np.minimum(seconds, done - self.now)
        self.sums["idle"] += done - taken - self.now
        self.now = done - taken
        # as after `wait_for_last`
        self.variance = np.zeros_like(self.now)
        return taken

    def all_to_all(
        self, name: str, seconds: FloatArray, dispatched: Dispatched | None = None, *, back: bool = False
    ) -> None:
        alone = seconds
        if dispatched is None:
            pairs = None
            self.wait_for_last()
        else:
            pairs = dispatched.pairs.T if back else dispatched.pairs
            seconds = self.wait_for_peers(pairs, dispatched.topology, seconds)
        before = self.now
        taken = self.durations.link_overlap_cost if self.shared_link else 0.0
        lost = np.zeros_like(seconds)
        if taken:
            self.under_way = [transfer for transfer in self.under_way if (transfer.finish > before).any()]
            # with half of the link each while both run, each loses as long as they run together, at most its own length
            lost = np.minimum(seconds, np.maximum(self.busy - before, 0.0))
            if (
                dispatched is not None
                and pairs is not None
                and lost.any()
                and all(t.pairs is not None for t in self.under_way)
            ):
                # the link carries the bytes of both, however they share it: where they go opposite ways, it may well
                # take no longer than for one of them
                left = np.sum([transfer.left(before) for transfer in self.under_way], axis=0)
                together = exchange_by_rank(pairs + left, dispatched.topology)
                lost = np.clip(together - np.maximum(alone, self.busy - before), 0.0, lost)
            for transfer in self.under_way:
                # transfers under way lose as much to the all-to-all; one that has not started begins later
                for times in (transfer.start, transfer.finish):
                    np.add(times, taken * np.clip(times - before, 0.0, lost), out=times)
            self.busy = self.busy + taken * np.clip(self.busy - before, 0.0, lost)
            lost = taken * lost
        start = self.now
        self.now = start + seconds + lost
        # however long it takes; who exchanges nothing does not vary
        self.variance += np.square(np.where(seconds > 0, self.durations.exchange_noise_s, 0.0))
        self.sums["a2a"] += seconds
        self.sums["shared"] += lost
        self.span(name, "tokens", start, self.now)

    def launch(self, kind: TransferKind, block: int, chunk: int) -> None:
        key = (kind, block, chunk)
        if key in self.sent:
            return
        # what is fetched again takes as long as Trans
        d, agg = self.durations, kind == "AGG"
        seconds = (d.agg_s if agg else d.trans_s)[block, chunk]
        pairs = (d.agg_pairs if agg else d.trans_pairs).get((block, chunk))
        # a chunk needs all ranks: it starts once the last has launched it and the stream is free
        start = np.maximum(self.busy, self.now.max()) if seconds.any() else self.now.copy()
        finish = start + seconds
        self.sent[key] = _Transfer(start, finish, f"{kind.capitalize()}({block},{chunk})", pairs)
        if seconds.any():
            self.busy = finish.copy()
            self.under_way.append(self.sent[key])

    def launch_rest(self, block: int) -> None:
        """Launch what was held back of a Trans that is under way: the counts are known."""
        if any(("TRANS", block, chunk) in self.sent for chunk in range(self.durations.chunks)):
            for chunk in range(self.durations.chunks):
                self.launch("TRANS", block, chunk)

    def forward_apart(self, name: str, block: int) -> None:
        """Compute a block's experts at home while Trans arrives, then its replicas."""
        d = self.durations
        whole = d.fec_s[block]
        copies = whole - whole if d.copies_s is None else d.copies_s[block]
        self.compute(name, whole - copies, whole)
        self.wait("TRANS", block)
        self.compute(name, copies, whole)

    def backward_apart(self, name: str, block: int, last: Iterable[Launch]) -> None:
        """Compute a block's replicas backward, launch what waits for these alone, then compute its experts at home."""
        d = self.durations
        whole, forward = d.bec_s[block], d.fec_s[block]
        share = np.zeros_like(whole) if d.copies_s is None else d.copies_s[block] / np.where(forward > 0, forward, 1.0)
        self.compute(name, whole * share, whole)
        for launch in last:
            self.launch(launch.kind, launch.block, launch.chunk)
        self.compute(name, whole * (1.0 - share), whole)

    def wait(self, kind: TransferKind, block: int) -> None:
        """Launch what was not, then wait for all chunks of a block."""
        finish = self.now
        for chunk in range(self.durations.chunks):
            self.launch(kind, block, chunk)
            finish = np.maximum(finish, self.sent[kind, block, chunk].finish)
        self.sums["exposed_agg" if kind == "AGG" else "exposed_trans"] += finish - self.now
        self.now = finish


def check_schedule(schedule: Iterable[Action], blocks: int, chunks: int) -> None:
    """Raise ValueError for a transfer outside the step, launched twice, or where it cannot run.

    An Agg cannot begin before its gradients exist, nor a FETCH outside the backward pass before its own experts.

    Args:
        schedule: The transfers.
        blocks: L, of the step.
        chunks: C, of every transfer.
    """
    seen = set()
    for action in schedule:
        launch = Launch.of(action)
        key = (launch.kind, launch.block, launch.chunk)
        if not (launch.block < blocks and launch.chunk < chunks):
            raise ValueError(f"{action} is outside a step of {blocks} blocks and {chunks} chunks")
        if key in seen:
            raise ValueError(f"{launch.kind}({launch.block},{launch.chunk}) is launched twice")
        seen.add(key)
        window = launch.window
        backward = window.kind in ("BNEC", "BEC") and window.block is not None
        # gradients of block i exist once BEC(i) is over: in the backward windows of lower blocks, or after all of them
        if launch.kind == "AGG" and not (
            (backward and (window.block or 0) < launch.block) or window.kind in ("END", "UPDATE")
        ):
            raise ValueError(f"{action} comes before the backward pass of its own experts")
        if launch.kind == "FETCH" and not (backward and (window.block or 0) >= launch.block):
            raise ValueError(f"{action} is not in the backward pass before its own experts")


def simulate(
    schedule: Sequence[Action], durations: StepDurations, *, shared_link: bool = True, record: bool = False
) -> SimulatedStep:
    """Play one step; pure.

    Transfers that the schedule leaves out, or comes too late with, are launched when they are needed.

    Args:
        schedule: What is launched where.
        durations: How long each operation takes alone.
        shared_link: Whether all-to-alls and transfers use one link.
        record: Whether to keep spans.

    Raises:
        ValueError: The schedule does not fit the step.
    """
    d, ranks = durations, durations.ranks
    check_schedule(schedule, d.blocks, d.chunks)
    names = ("compute", "slowed", "a2a", "shared", "exposed_trans", "exposed_agg", "exposed_plan", "idle")
    now, variance, busy = np.zeros((3, ranks))
    clock = _Clock(d, shared_link, record, now, variance, busy, {n: np.zeros(ranks) for n in names})
    planned = np.zeros(ranks)
    # the first phase of the Agg that otherwise waits for the end; see `Step.copies_done`
    at_end = [Launch.of(a) for a in by_window(schedule).get(Window("END"), ()) if a.kind == "AGG"]
    for action in program(schedule, d.blocks):
        kind, block = action.kind, action.block
        apart = block is not None and d.apart(block)
        if action.is_transfer:
            launch = Launch.of(action)
            clock.launch(launch.kind, launch.block, launch.chunk)
        elif kind == "COUNTS":
            clock.counts(f"counts({block})")
        elif kind == "PLAN":
            if not apart:
                clock.launch_rest(block or 0)
            # the host plans one block after the other, beside the ranks' own clock
            started = np.maximum(planned, clock.now)
            planned = started + d.plan_s[block or 0]
            clock.span(f"plan({block})", "plan", started, planned)
        elif kind == "A2A":
            clock.all_to_all(
                f"{A2A_NAMES[action.chunk or 0].replace('-', ' ')}({block})",
                d.a2a_s[block or 0, action.chunk or 0],
                d.dispatched[block or 0] if d.dispatched else None,
                # combine goes back, and so do the gradients of what was dispatched
                back=(action.chunk or 0) % 2 == 1,
            )
        elif kind == "WAIT_PLAN":
            clock.sums["exposed_plan"] += np.maximum(planned - clock.now, 0.0)
            clock.now = np.maximum(planned, clock.now)
        elif kind == "WAIT_TRANS" and apart:
            # waited for within FEC; launched before the next block's
            for chunk in range(d.chunks):
                clock.launch("TRANS", block or 0, chunk)
        elif kind == "FEC" and apart:
            clock.forward_apart(str(action), block or 0)
        elif kind == "BEC" and apart:
            clock.backward_apart(str(action), block or 0, [x for x in at_end if x.block == block][:1])
        elif kind.startswith("WAIT_"):
            clock.wait(cast(TransferKind, kind.removeprefix("WAIT_")), block or 0)
        else:
            label = kind.lower() if block is None else str(action)
            clock.compute(label, d.window_s(kind, block))
    # a step ends together: who is done early is idle until then
    clock.wait_for_last()
    for transfer in clock.sent.values():
        clock.span(transfer.name, "weights", transfer.start, transfer.finish)
    return SimulatedStep(
        makespan_s=float(clock.now.max()),
        spans=tuple(sorted(clock.spans)),
        **{f"{name}_s": values for name, values in clock.sums.items()},
    )


# --- durations from the performance model ---

# fields of `StepDurations` that are those of the machine
_OF_TOPOLOGY = ("overlap_cost", "link_overlap_cost", "compute_noise", "exchange_noise_s")


def exchange_by_rank(pairs: FloatArray, topology: Topology) -> FloatArray:
    """Return the seconds until each rank is done with an all-to-all of `pairs[r, d]` bytes, [R].

    A rank is done when its link has carried what it sends and receives, and when those that send to it have sent all
    that they send: their links serve all peers at the same time. A node's port serves all its ranks at the same time,
    so whoever sends or receives through one is done when it is.

    These are means. Links have the rates of exchanges both ways, and are faster where one direction is busy, by what
    `duplex_cost` says.
    """
    node = topology.node_ids()
    same_node = node[:, None] == node[None, :]
    off_rank = ~np.eye(topology.ranks, dtype=np.bool_)
    done: FloatArray = np.zeros(topology.ranks)
    for link, mask in ((topology.intra, same_node & off_rank), (topology.inter, ~same_node)):
        moved = np.where(mask, pairs, 0.0)
        # with what the other direction adds
        both = topology.duplex_cost * np.minimum(moved.sum(axis=0), moved.sum(axis=1))
        received, sent = (np.divide(moved.sum(axis=a) + both, 1.0 + topology.duplex_cost) for a in (0, 1))
        own = np.maximum(received, sent) / link.bytes_per_s
        own += np.where(own > 0, link.latency_s, 0.0)
        done = np.maximum(done, own)
        senders = np.where(moved > 0, (sent / link.bytes_per_s + link.latency_s)[:, None], 0.0)
        done = np.maximum(done, senders.max(axis=0))
    # The last level's: what passes between nodes
    sent, received = moved.sum(axis=1), moved.sum(axis=0)
    out_s, in_s = (topology.port_seconds(bytes_R)[node] for bytes_R in (sent, received))
    done = np.maximum(done, np.where(sent > 0, out_s, 0.0))
    done = np.maximum(done, np.where(received > 0, in_s, 0.0))
    done = np.maximum(done, np.where(moved > 0, out_s[:, None], 0.0).max(axis=0))
    return done


def left_by_rank(pairs: FloatArray, topology: Topology, arrived: FloatArray) -> FloatArray:
    """Return how much of an all-to-all of `pairs[r, d]` bytes is left for each rank when each rank arrives.

    Links never rest while a pair is there that could use them. So a rank is done when the last rank it depends on has
    come and all that begins then or later is through: row k has the seconds of the pairs that begin with rank k or
    after it, zero for ranks that none of them concerns. That is exact where one rank's link is the only one that
    limits.

    Args:
        pairs: Bytes, [R, R].
        topology: The machine.
        arrived: When each rank arrives, [R].

    Returns:
        Seconds [K, R], for each rank k that arrives.
    """
    left = np.zeros((len(arrived), len(arrived)))
    begins = np.maximum(arrived[:, None], arrived[None, :])
    order = np.argsort(arrived, kind="stable")
    # of very many ranks some are taken together: for each of them counts what begins with the first of these
    for some in np.array_split(order, min(len(order), _MOST_STARTS)):
        left[some] = exchange_by_rank(np.where(begins >= arrived[some[0]], pairs, 0.0), topology)
    return left


def exchanges_by_chunk(
    placement: Placement,
    n_bytes: float,
    cut: Sequence[int],
    *,
    two_phase: bool,
    routes: Routes,
    sum_bytes: float | None = None,
) -> list[list[FloatArray]]:
    """Return what every chunk of a Trans or Agg moves: bytes [R, R] of its exchanges, which follow one another.

    Args:
        placement: Where the layer's experts are.
        n_bytes: Bytes per expert.
        cut: Boundaries of the chunks, see `Form`.
        two_phase: Whether it takes the two-phase form.
        routes: Of the experts whose replicas are not one group.
        sum_bytes: Of Agg, the mirror image of Trans, bytes of a sum of gradients. None for Trans.
    """
    if placement.is_static:
        return [[]] * (len(cut) - 1)
    direct, exchanges = transfer_pairs(placement, routes, n_bytes, sum_bytes)
    if sum_bytes is not None:
        direct, exchanges = direct.T, [pairs.T for pairs in exchanges]
    if not two_phase:
        return [[share * direct] for share in np.diff(np.asarray(cut)) / cut[-1]]
    *first, second = exchanges
    return [[*(share * pairs for pairs in first), other * second] for share, other in phase_shares(cut)]


def transfer_by_chunk(chunks: Sequence[Sequence[FloatArray]], topology: Topology) -> FloatArray:
    """Return the seconds of every chunk of a Trans or Agg on every rank, [C, R], each alone.

    Args:
        chunks: What they move, as of `exchanges_by_chunk`.
        topology: The machine.
    """
    found = []
    for moved in chunks:
        done, *later = [exchange_by_rank(pairs, topology) for pairs in moved] or [np.zeros(topology.ranks)]
        for seconds in later:
            # relays and carriers wait for what they send on, so for the slowest
            done = done + seconds if len(later) == 1 else np.where(seconds > 0, done.max() + seconds, done)
        found.append(done)
    return np.array(found)


def predicted_durations(
    placements: Sequence[Placement],
    splits: Sequence[Split],
    contexts: Sequence[PlanContext],
    *,
    forms: Sequence[Form] | None = None,
    start_s: float = 0.0,
    end_s: float = 0.0,
    update_s: float = 0.0,
    plan_s: float = 0.0,
    counts_s: float = 0.0,
    counts_behind_s: float = 0.0,
    apart: Sequence[bool] = (),
) -> StepDurations:
    """Return durations of a step of L blocks by the performance model.

    Args:
        placements: By block.
        splits: By block.
        contexts: The calibrated machine and layer (topology, sizes, windows), by block.
        forms: How each block's transfers are cut and sent, as the runtime's; None for direct and in halves.
        start_s: Compute before the first block, on the fastest rank.
        end_s: Compute after its backward pass, on the fastest rank.
        update_s: What follows once all gradients are complete, on the fastest rank.
        plan_s: Host time to plan a block.
        counts_s: The exchange of counts, per block.
        counts_behind_s: By how much longer it takes, at most, behind what is under way of a chunk.
        apart: Whether replicas run apart from the experts at home, by block; empty where none do.

    Raises:
        SpecError: The sequences differ in length or do not fit.
    """
    forms = forms if forms is not None else [Form()] * len(contexts)
    lengths = [len(x) for x in (placements, splits, contexts, forms)]
    if len(set(lengths)) != 1 or not contexts:
        raise SpecError(f"expected as many placements, splits and forms as contexts, got {lengths}")
    a2a, dispatched, fec, bec, speeds = [], [], [], [], []
    copies: list[FloatArray] = []
    trans: list[FloatArray] = []
    agg: list[FloatArray] = []
    trans_pairs: dict[tuple[int, int], FloatArray] = {}
    agg_pairs: dict[tuple[int, int], FloatArray] = {}
    for placement, split, context, form in zip(placements, splits, contexts, forms, strict=True):
        topology, shape = context.topology, context.shape
        if split.ranks != topology.ranks or placement.ranks != topology.ranks:
            raise SpecError(f"topology has {topology.ranks} ranks, split {split.ranks}, placement {placement.ranks}")
        pairs = split.pairs().astype(np.float64) * shape.token_bytes
        there, back = exchange_by_rank(pairs, topology), exchange_by_rank(pairs.T, topology)
        a2a.append([there, back, there, back])
        dispatched.append(Dispatched(pairs, topology))
        load_ED = split.by_expert()
        rate = np.asarray(topology.flops_per_s) / shape.forward_flops_per_token
        at_home_ED = np.arange(placement.ranks) == placement.home[:, None]
        # `expert_overhead_s` is spent on every expert that has rows on the rank, however few
        both_s = [
            load.sum(axis=0) / rate + np.count_nonzero(load, axis=0) * topology.expert_overhead_s
            for load in (load_ED, np.where(at_home_ED, 0, load_ED))
        ]
        third_s = both_s[0] + np.where(load_ED.any(axis=0), topology.call_overhead_s, 0.0)
        # the backward pass has products for the rows' gradients and for the weights'
        forward = 3.0 / (1.0 + topology.backward_ratio)
        fec.append(third_s * forward)
        copies.append(both_s[1] * forward * (len(apart) > len(copies) and apart[len(copies)]))
        bec.append(topology.backward_ratio * fec[-1])
        for chunks, pairs_of, cut, two_phase, routes, n_bytes, sum_bytes in (
            (trans, trans_pairs, form.trans_cut, form.two_phase_trans, form.trans_routes, context.trans_bytes, None),
            (
                agg,
                agg_pairs,
                form.agg_cut,
                form.two_phase_agg,
                form.agg_routes,
                context.agg_bytes,
                context.agg_sum_bytes,
            ),
        ):
            moved = exchanges_by_chunk(placement, n_bytes, cut, two_phase=two_phase, routes=routes, sum_bytes=sum_bytes)
            pairs_of.update(((len(chunks), c), np.sum(x, axis=0)) for c, x in enumerate(moved) if x)
            chunks.append(transfer_by_chunk(moved, topology))
        # windows are given for the fastest rank; the others take longer
        speeds.append(1.0 / topology.relative_speed())
    # how much slower each rank is than the fastest, [L, R]
    slow = np.array(speeds)
    most = max(len(chunks) for chunks in (*trans, *agg))

    def padded(by_block: Sequence[FloatArray]) -> FloatArray:
        """Return [L, C, R] from chunks [C_i, R] of every block; those that a block does not have are not sent."""
        return np.array([np.pad(chunks, ((0, most - len(chunks)), (0, 0))) for chunks in by_block])

    return StepDurations(
        a2a_s=np.array(a2a),
        fec_s=np.array(fec),
        bec_s=np.array(bec),
        fnec_s=slow * np.array([[c.windows.fnec_s] for c in contexts]),
        bnec_s=slow * np.array([[c.windows.bnec_s] for c in contexts]),
        trans_s=padded(trans),
        agg_s=padded(agg),
        trans_pairs=trans_pairs,
        agg_pairs=agg_pairs,
        plan_s=np.full(len(contexts), plan_s),
        start_s=slow[0] * start_s,
        end_s=slow[0] * end_s,
        update_s=slow[0] * update_s,
        counts_s=counts_s,
        counts_behind_s=counts_behind_s,
        dispatched=tuple(dispatched),
        copies_s=np.array(copies) if any(apart) else None,
        **{name: max(getattr(c.topology, name) for c in contexts) for name in _OF_TOPOLOGY},
    )
