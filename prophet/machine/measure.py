"""Times operations on all ranks at once, as training runs them: all-to-all, expert products, Trans and Agg.

The all-to-all is timed over sizes, the experts' forward and backward pass over token counts and numbers of experts,
Trans and Agg over sizes. A sample is the time of the slowest rank. Sizes take turns, so that other load on the machine
meets all of them alike. Of a product's samples the lower quartile counts, since other work only adds time. Of an
exchange's samples the median counts, since waking the peers takes more or less time, and that is part of it. Sizes are
spaced evenly on a logarithmic scale over the range that layers use. Those between the fitted ones are kept out of the
fit and only compared with it.

Shape legend: R ranks, G experts (groups) that one rank computes, D model dim, H hidden dim.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from prophet.errors import SpecError
from prophet.experts.bank import Bank
from prophet.machine.fit import Point, noise_of, noise_seconds_of
from prophet.ranks.collective import Collective, Pending
from prophet.ranks.device.clocks import synchronize
from prophet.ranks.operation import Operation
from prophet.spec import BoolArray, FloatArray

# Measured figures of all of a transfer's time and more are noise
_MOST_OVERLAP_COST = 0.95
# Samples of a short run for one of the longest, at most
_OFTEN = 8
# Of a normal distribution: standard deviation over median deviation, and a median's standard error over a mean's
_DEVIATION, _MEDIANS_ERROR = 1.4826, 1.2533
# Seconds that a run takes in its turn at least, unless it has been sampled so often
_TURN_S = 0.01

# Chooses what to measure from the (size, count) pairs to be fitted and those to be held out.
Cases = list[tuple[int, int]]
Parts = Callable[[Cases, Cases], tuple[Cases, Cases]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranges:
    """What is measured: (smallest, largest), both included.

    Attributes:
        rows: Token rows that a rank sends to others in one all-to-all.
        tokens: Rows that a rank's experts compute in one call.
        groups: Numbers of experts that it computes them with.
        halves: Half experts that a rank sends to others in one Trans, which moves replicas in two chunks.
        points: Fitted sizes from end to end.
    """

    rows: tuple[int, int] = (256, 2048)
    tokens: tuple[int, int] = (256, 2048)
    groups: tuple[int, ...] = (1, 2, 4)
    halves: tuple[int, int] = (1, 8)
    points: int = 6

    def __post_init__(self) -> None:
        for name in ("rows", "tokens", "halves"):
            low, high = getattr(self, name)
            if not 1 <= low < high:
                raise SpecError(f"Ranges.{name} must be two rising numbers of at least 1, got {low}, {high}")
        if self.points < 2 or not self.groups or min(self.groups) < 1 or min(self.groups) > self.tokens[0]:
            raise SpecError(f"Ranges.points must be at least 2 and groups from 1 to the fewest tokens, got {self}")


class Probe:
    """Times operations on all ranks at once; a sample is the time of the slowest rank.

    Args:
        collective: The ranks.
        device: Where the operations run.
        repeats: Turns of every run.
        budget_s: Seconds of samples after which no further turn begins. All ranks count the slowest one's.
    """

    def __init__(
        self, collective: Collective, device: torch.device, repeats: int, *, budget_s: float = math.inf
    ) -> None:
        self.collective = collective
        self.device = device
        self.repeats = repeats
        self.budget_s = budget_s
        self._spent_s = 0.0

    def sync(self) -> None:
        """Wait until the device has done what it was given."""
        synchronize(self.device)

    def typical(self, runs: Sequence[Callable[[], float | None]]) -> tuple[FloatArray, FloatArray]:
        """Typical seconds of every run.

        Returns:
            Lower quartile and median by the slowest rank [2, runs], and lower quartiles by each rank [runs, R].
        """
        return _typical(self.samples(runs))

    def samples(self, runs: Sequence[Callable[[], float | None]]) -> list[FloatArray]:
        """Seconds of every run by rank, [n, R] each.

        A run that returns seconds has timed itself; of others the whole call counts. Runs take turns, `repeats` times;
        in its turn a short one is timed several times, since its time varies more.
        """
        for run in runs:
            # First touch of memory and connections
            run()
        first = [float(self.sample(run).max()) for run in runs]
        turn_s = max(*first, _TURN_S)
        often = [max(1, min(_OFTEN, int(turn_s / max(seconds, 1e-9)))) for seconds in first]
        samples: list[list[FloatArray]] = [[] for _ in runs]
        end_s = self._spent_s + self.budget_s - sum(first)
        for turn in range(self.repeats):
            if turn and self._spent_s > end_s:
                break
            # In turns: other load on the machine meets all runs alike
            for run, times, found in zip(runs, often, samples, strict=True):
                found.extend(self.sample(run) for _ in range(times))
        return [np.stack(found) for found in samples]

    def differences(self, first: Callable[[], float], second: Callable[[], float]) -> FloatArray:
        """By how many seconds `second` takes longer than `first` right before it, on the slowest rank, [repeats].

        Both time themselves.
        """
        # Each pair in one sample, so slow drifts of the machine cancel out.
        return np.array([self.sample(lambda: -first() + second()).max() for _ in range(self.repeats)])

    def lower(self, runs: Sequence[Callable[[], float | None]]) -> list[float]:
        """Lower-quartile seconds of every run by the slowest rank."""
        (lower, _), _ = self.typical(runs)
        found: list[float] = lower.tolist()
        return found

    def sample(self, run: Callable[[], float | None]) -> FloatArray:
        """Seconds of one call on every rank, [R]; collective."""
        # All ranks start together, as in training
        self.collective.all_gather(torch.zeros(1, device=self.device), op=Operation("start of a probe"))
        self.sync()
        before = time.perf_counter()
        own = run()
        self.sync()
        took = time.perf_counter() - before if own is None else own
        mine = torch.tensor([took], dtype=torch.float64, device=self.device)
        found: FloatArray = self.collective.all_gather(mine, op=Operation("end of a probe")).cpu().numpy().reshape(-1)
        self._spent_s += float(found.max())
        return found


def _typical(samples: Sequence[FloatArray]) -> tuple[FloatArray, FloatArray]:
    """What `Probe.typical` returns, of samples [n, R] of every run."""
    by_rank = np.stack([np.quantile(found, 0.25, axis=0) for found in samples])
    slowest = np.stack([np.quantile(found.max(axis=1), (0.25, 0.5)) for found in samples], axis=1)
    return slowest, by_rank


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one operation.

    Attributes:
        operation: Its name.
        unit: "byte" or "token", of the points' sizes.
        fitted: Points to fit a line to.
        held_out: Points to compare it with.
        by_rank: Seconds of each rank [points, R], fitted points first.
        noise, noise_s: As of `noise_of` and `noise_seconds_of`, over all samples.
    """

    operation: str
    unit: str
    fitted: tuple[Point, ...]
    held_out: tuple[Point, ...]
    by_rank: FloatArray
    noise: float = 0.0
    noise_s: float = 0.0


def _spaced(low: int, high: int, points: int) -> tuple[list[int], list[int]]:
    """`points` whole numbers from low to high, evenly spaced on a logarithmic scale, and those half-way between."""
    steps = np.unique(np.rint(np.geomspace(low, high, 2 * points - 1)).astype(int)).tolist()
    return steps[::2], steps[1::2]


def _measure(
    probe: Probe,
    operation: str,
    unit: str,
    run: Callable[[int, int], tuple[float, Callable[[], float | None]]],
    fitted: Sequence[tuple[int, int]],
    held_out: Sequence[tuple[int, int]],
    *,
    quartile: Literal[1, 2],
) -> Measured:
    """Time an operation at all sizes in turn.

    Args:
        probe: Times it.
        operation: Its name.
        unit: Of its sizes.
        run: Called with size and count; returns the size in units and what to call.
        fitted: Sizes and counts to fit a line to.
        held_out: Sizes and counts to compare it with.
        quartile: Which one of the samples counts: 1 the lower one, 2 the median.
    """
    cases = [(*run(size, count), count) for size, count in (*fitted, *held_out)]
    samples = probe.samples([call for _, call, _ in cases])
    (lower, median), by_rank = _typical(samples)
    points = [
        Point(size, count, (low, mid)[quartile - 1], mid / low - 1.0)
        for (size, _, count), low, mid in zip(cases, lower.tolist(), median.tolist(), strict=True)
    ]
    return Measured(
        operation,
        unit,
        tuple(points[: len(fitted)]),
        tuple(points[len(fitted) :]),
        by_rank,
        noise_of(np.concatenate(samples)),
        noise_seconds_of(np.concatenate(samples)),
    )


def measure_exchange(
    probe: Probe, operation: str, peers: np.ndarray, bank: Bank, ranges: Ranges, parts: Parts
) -> Measured:
    """Time an all-to-all in which ranks send equally many rows [D] to each of their `peers`; collective.

    Args:
        probe: Times it.
        operation: Its name.
        peers: Whether this rank sends to each rank, [R].
        bank: Has the rows' width and dtype.
        ranges: Sizes to measure.
        parts: Chooses among the fitted and the held-out sizes.
    """
    op = Operation("probe of the all-to-all")
    # Where nodes are uneven, of the rank with most: both ends of a pair must say the same number
    count = max(1, _collective_max(probe.collective, int(peers.sum()), probe.device))
    row_bytes = bank.dim * bank.dtype.itemsize

    def run(rows: int, _: int) -> tuple[float, Callable[[], None]]:
        # Rounded up, so the size that counts is what is really sent
        share = -(-rows // count)
        sent = [share if p else 0 for p in peers]
        x = _zeros(bank, (sum(sent), bank.dim))
        return float(share * count * row_bytes), lambda: discard(
            probe.collective.all_to_all(x, sent, sent, op=op).wait()
        )

    fitted, held_out = _spaced(*ranges.rows, ranges.points)
    return _measure(
        probe, operation, "byte", run, *parts([(n, 1) for n in fitted], [(n, 1) for n in held_out]), quartile=2
    )


def _zeros(bank: Bank, size: int | tuple[int, ...]) -> torch.Tensor:
    """Zeros of the dtype and on the device of the bank's rows."""
    return torch.zeros(size, dtype=bank.dtype, device=bank.device)


def discard(_: object) -> None:
    """Let go of a result, so that a run returns None and the whole call counts as its time."""


def measure_experts(probe: Probe, banks: Mapping[int, Bank], ranges: Ranges, parts: Parts) -> tuple[Measured, Measured]:
    """Time forward and backward pass of `tokens` rows over G experts.

    Args:
        probe: Times them.
        banks: Of G experts, by G.
        ranges: Sizes to measure.
        parts: Chooses among the fitted and the held-out sizes.
    """
    tokens, between = _spaced(*ranges.tokens, ranges.points)
    fitted = [(n, g) for g in banks for n in tokens]
    held_out = [(n, g) for g in banks for n in between]

    def prepare(n: int, groups: int) -> tuple[torch.Tensor, list[int], Bank]:
        bank = banks[groups]
        x = _zeros(bank, (n, bank.dim)).normal_().requires_grad_()
        return x, [n // groups + (g < n % groups) for g in range(groups)], bank

    def forward(n: int, groups: int) -> tuple[float, Callable[[], None]]:
        x, sizes, bank = prepare(n, groups)
        return float(n), lambda: discard(bank.run(x, sizes))

    def backward(n: int, groups: int) -> tuple[float, Callable[[], float]]:
        x, sizes, bank = prepare(n, groups)

        def run() -> float:
            out = bank.run(x, sizes)
            grad = torch.ones_like(out)
            probe.sync()
            # The forward pass comes first each time, and is not timed here
            before = time.perf_counter()
            out.backward(grad)
            probe.sync()
            return time.perf_counter() - before

        return float(n), run

    split = parts(fitted, held_out)
    return (
        _measure(probe, "expert_forward", "token", forward, *split, quartile=1),
        _measure(probe, "expert_backward", "token", backward, *split, quartile=1),
    )


def measure_transfers(probe: Probe, bank: Bank, ranges: Ranges, parts: Parts) -> tuple[Measured, Measured]:
    """Time Trans and Agg: every rank sends half experts to the ranks after it, and takes in as many.

    Args:
        probe: Times them.
        bank: Of one expert at least.
        ranges: Sizes to measure.
        parts: Chooses among the fitted and the held-out sizes.
    """
    size, rank = probe.collective.size, probe.collective.rank
    numel = max(1, bank.expert_numel // 2)
    fitted, held_out = _spaced(*ranges.halves, ranges.points)

    def rows(halves: int) -> tuple[list[int], list[int]]:
        there, back = [0] * size, [0] * size
        for c in range(halves):
            there[(rank + 1 + c % (size - 1)) % size] += numel
            back[(rank - 1 - c % (size - 1)) % size] += numel
        return there, back

    def trans(halves: int, _: int) -> tuple[float, Callable[[], None]]:
        there, back = rows(halves)
        op, replicas = Operation("probe of Trans"), _zeros(bank, sum(back))

        def run() -> None:
            # Packing and copying are part of a Trans, so they are timed with it.
            sent = torch.cat(bank.flat_views(0, 0, numel) * halves)
            got = probe.collective.all_to_all(sent, there, back, op=op, channel="weights").wait()
            replicas.copy_(got)

        return float(halves * numel * replicas.element_size()), run

    def agg(halves: int, _: int) -> tuple[float, Callable[[], None]]:
        there, back = rows(halves)
        op, grads = Operation("probe of Agg"), _zeros(bank, (halves, numel))

        def run() -> None:
            sent = torch.cat(list(grads))
            grads.zero_()
            got = probe.collective.all_to_all(sent, there, back, op=op, channel="weights").wait()
            for piece in got.split(numel):
                bank.add_flat_grads([(0, 0, numel, piece)])

        return float(halves * numel * grads.element_size()), run

    split = parts([(n, 1) for n in fitted], [(n, 1) for n in held_out])
    return (
        _measure(probe, "trans", "byte", trans, *split, quartile=2),
        _measure(probe, "agg", "byte", agg, *split, quartile=2),
    )


def measure_overlap(probe: Probe, bank: Bank, *, rows: int, n_bytes: int) -> float:
    """Measure `Topology.overlap_cost`; collective, the same on all ranks.

    A transfer lengthens the products that run beside it; the result is by which share of the transfer's seconds. It is
    0 on one rank. It is also 0 where the median difference between products beside a transfer and the ones right
    before, alone, is within two standard errors.

    Args:
        probe: Times both.
        bank: Computes the products.
        rows: Of a product.
        n_bytes: Of a transfer per rank, about.
    """
    size = probe.collective.size
    if size == 1:
        return 0.0
    # An even all-to-all, which loads every link alike
    share = max(1, n_bytes // ((size - 1) * bank.dtype.itemsize))
    sent = [0 if r == probe.collective.rank else share for r in range(size)]
    payload, op = _zeros(bank, sum(sent)), Operation("probe of a hidden transfer")
    x = _zeros(bank, (rows, bank.dim))
    sizes = [rows // bank.experts + (e < rows % bank.experts) for e in range(bank.experts)]

    def products() -> None:
        with torch.no_grad():
            bank.run(x, sizes)

    def transfer() -> None:
        discard(probe.collective.all_to_all(payload, sent, sent, op=op, channel="weights").wait())

    transfer_s, one_s = probe.lower((transfer, products))
    # So that all of the transfer is covered
    calls = 1 + int(2.0 * transfer_s / one_s)

    def alone() -> float:
        before = time.perf_counter()
        for _ in range(calls):
            products()
        probe.sync()
        return time.perf_counter() - before

    def beside() -> float:
        work = probe.collective.all_to_all(payload, sent, sent, op=op, channel="weights")
        took = alone()
        discard(work.wait())
        return took

    difference_s = probe.differences(alone, beside)
    many, added_s = difference_s.size, float(np.median(difference_s))
    # From the median deviation: a few disturbed pairs would blow up a standard deviation.
    deviation_s = _DEVIATION * float(np.median(np.abs(difference_s - added_s)))
    certain = added_s > 2.0 * _MEDIANS_ERROR * deviation_s / math.sqrt(many)
    return min(added_s / transfer_s, _MOST_OVERLAP_COST) if certain else 0.0


def measure_duplex(probe: Probe, bank: Bank, *, ranks_per_node: int, n_bytes: int) -> float:
    """Measure `Topology.duplex_cost`; collective, the same on all ranks.

    The first rank of a node receives from the others, and then all of them send to all. Ports of nodes are left out,
    which all of a node's ranks share: where nodes have one rank, these are the ranks.

    Args:
        probe: Times both.
        bank: Has the dtype.
        ranks_per_node: Consecutive ones.
        n_bytes: That a rank sends or receives in all, about.
    """
    size, rank = probe.collective.size, probe.collective.rank
    per_node = min(size, ranks_per_node if ranks_per_node > 1 else size)
    if per_node == 1:
        return 0.0
    share = max(1, n_bytes // ((per_node - 1) * bank.dtype.itemsize))
    first = rank // per_node * per_node
    node = range(first, min(first + per_node, size))

    def run(pairs: Sequence[tuple[int, int]]) -> Callable[[], None]:
        sent, received = ([share * (p in pairs) for p in way] for way in (
            [(rank, r) for r in range(size)], [(r, rank) for r in range(size)]
        ))  # fmt: skip
        x, op = _zeros(bank, sum(sent)), Operation("probe of both directions")
        return lambda: discard(probe.collective.all_to_all(x, sent, received, op=op).wait())

    others = [r for r in node if r != first]
    every = [(a, b) for a in node for b in node if a != b]
    one, both = probe.samples([run([(r, first) for r in others]), run(every)])
    # Of ranks alike the mean: that the last one is later is their noise
    ratio = np.median(both[:, :per_node].mean(axis=1)) / np.median(one[:, 0])
    return float(np.clip(ratio - 1.0, 0.0, 1.0))


def measure_link_overlap(probe: Probe, bank: Bank, *, n_bytes: int) -> float:
    """Measure `Topology.link_overlap_cost`; collective, the same on all ranks.

    An even all-to-all and a transfer, in which every rank sends to the next one as a home does to a rank with a copy,
    are timed alone and together, until both are done. How they share the link does not matter: which of the two it
    favours depends on how many peers each of them has, while it carries all bytes of both in any case.

    Args:
        probe: Times them.
        bank: Has the dtype.
        n_bytes: That a rank sends in each of them, about.
    """
    size, rank = probe.collective.size, probe.collective.rank
    if size == 1:
        return 1.0
    share = max(1, n_bytes // ((size - 1) * bank.dtype.itemsize))
    rows = [0 if r == rank else share for r in range(size)]
    x, op = _zeros(bank, sum(rows)), Operation("probe of an all-to-all")
    there, back = [0] * size, [0] * size
    there[(rank + 1) % size] = back[(rank - 1) % size] = len(x)

    def exchange() -> None:
        discard(probe.collective.all_to_all(x, rows, rows, op=op).wait())

    def transfer() -> Pending:
        return probe.collective.all_to_all(x, there, back, op=Operation("probe of a transfer"), channel="weights")

    def together() -> None:
        under_way = transfer()
        exchange()
        discard(under_way.wait())

    runs = [exchange, lambda: discard(transfer().wait()), together]
    first_s, second_s, both_s = (np.median(s.max(axis=1)) for s in probe.samples(runs))
    return float(np.clip((both_s - max(first_s, second_s)) / min(first_s, second_s), 0.0, 1.0))


def measure_all(
    collective: Collective,
    bank_of: Callable[[int], Bank],
    ranges: Ranges,
    *,
    device: torch.device,
    ranks_per_node: int,
    repeats: int,
    parts: Parts,
) -> dict[str, Measured]:
    """Measure all operations; collective.

    Args:
        collective: The ranks.
        bank_of: Makes a bank of so many of the experts to be timed, on `device`.
        ranges: Sizes to measure.
        device: Where the operations run.
        ranks_per_node: Ranks that share a node, consecutive ones.
        repeats: Turns of every run.
        parts: Chooses among the fitted and the held-out sizes.

    Returns:
        By operation. `a2a_intra`, `a2a_inter`, `a2a_alone`, `trans` and `agg` are missing where no rank has a peer for
        them, and `a2a_alone` also where it would be `a2a_inter`.
    """
    probe = Probe(collective, device, repeats)
    size, rank = collective.size, collective.rank
    banks = {g: bank_of(g) for g in sorted(set(ranges.groups))}
    first = banks[min(banks)]
    found: list[Measured] = []
    for level, peers in peers_by_level(size, ranks_per_node, rank).items():
        # The last node may be smaller, and a rank without peers must still take part.
        if _collective_max(collective, int(peers.sum()), device):
            found.append(measure_exchange(probe, f"a2a_{level}", peers, first, ranges, parts))
    found += measure_experts(probe, banks, ranges, parts)
    if size > 1:
        found += measure_transfers(probe, first, ranges, parts)
    return {m.operation: m for m in found}


def peers_by_level(ranks: int, ranks_per_node: int, rank: int) -> dict[str, BoolArray]:
    """To whom a rank sends in every all-to-all that is measured, [R] each.

    Args:
        ranks: R.
        ranks_per_node: Ranks that share a node, consecutive ones.
        rank: The one that sends.

    Returns:
        `intra`: all others of its node. `inter`: all of other nodes. `alone`: only every node's first rank sends, to
        those of the other nodes; missing where nodes have one rank.
    """
    every = np.arange(ranks)
    node = every // ranks_per_node
    away = node != node[rank]
    peers = {"intra": ~away & (every != rank), "inter": away}
    if ranks_per_node > 1:
        first = every % ranks_per_node == 0
        peers["alone"] = away & first & first[rank]
    return peers


def _collective_max(collective: Collective, value: int, device: torch.device) -> int:
    """The largest `value` over the ranks."""
    mine = torch.tensor([value], dtype=torch.int64, device=device)
    return int(collective.all_gather(mine, op=Operation("largest value")).max())
