"""Which elements of which expert travel from which rank to which: Trans and Agg as lists of pieces; pure.

An expert is a flat vector of P elements. Trans is direct, or takes two phases:

    direct      the home sends every replica all elements
    two-phase   scatter: for each group of n receivers the home cuts the vector in n parts and sends part j to the j-th;
                gather: every receiver sends its part to the n - 1 others of its group

An expert's receivers are one group, or one for every node. With relays another rank of the home's node sends each part
(`prophet.spec.Route`). There is a third exchange then:

    spread      the home sends every relay its part
    scatter     the relay sends it to a carrier in every node that has receivers, which may have no replica itself
    gather      the carrier sends it to the receivers of its node

Agg is the mirror image: direct, or reduce (every receiver sends part j of its gradient to the rank that carries part j
for its group, which adds them) and home (that rank sends the sum of part j home, of half precision in float32). With
relays the sums go to them first. Each adds those of all nodes, and hands the result home: hand-over mirrors spread.
The last exchange is the second phase, all others are the first.

Every exchange is one uneven all-to-all for all experts of a layer together. A phase cut into chunks has several.

Each rank lists only what it sends and receives itself. Both ends order a buffer alike, by peer, then expert, then
first element, so nothing but elements travels. In `reduce` a rank also sends itself its own part, and a relay its own
sum: what arrives is then ordered by source rank, and so is the sum.

Shape legend: R ranks, E experts, P parameters of one expert, C chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

from prophet.spec import Placement, Route, Routes

Phase = Literal["direct", "spread", "scatter", "gather", "reduce", "home", "hand-over"]

# a cut is given in parts of this, integers, so that all ranks cut at the same element
GRAIN = 1024
HALVES = (0, GRAIN // 2, GRAIN)


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of an expert's flat vector on its way between two ranks.

    Attributes:
        expert: Its number among all.
        start, stop: Elements of the vector.
        source, target: Ranks.
    """

    expert: int
    start: int
    stop: int
    source: int
    target: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's part of one all-to-all.

    Attributes:
        phase: Which part of a Trans or Agg it is, see above.
        sends: Pieces in the order in which they lie in the outgoing buffer.
        recvs: Pieces in the order in which they lie in the incoming buffer.
        sends_on: Whether it sends what an earlier exchange of the transfer has brought.
    """

    phase: Phase
    sends: tuple[Piece, ...]
    recvs: tuple[Piece, ...]
    sends_on: bool

    def counts(self, ranks: int) -> tuple[list[int], list[int]]:
        """Return the elements for every rank and from every rank, [R] each."""
        sent, received = [0] * ranks, [0] * ranks
        for piece in self.sends:
            sent[piece.target] += piece.size
        for piece in self.recvs:
            received[piece.source] += piece.size
        return sent, received


@dataclass(frozen=True, slots=True)
class Form:
    """How one layer's transfers of one step are cut, and whether they take the two-phase form; equal on all ranks.

    Attributes:
        trans_cut: C + 1 boundaries of C chunks, in parts of GRAIN. Trans may have one chunk more than its schedule has
            windows: what none of them hides is held back until the counts are known.
        agg_cut: As `trans_cut`, of Agg.
        two_phase_trans: Whether Trans takes the two-phase form.
        two_phase_agg: Whether Agg does.
        fetch_cut: As `trans_cut`, of parameters that are sent once more.
        trans_routes: In two phases of Trans, of the experts whose receivers are not one group.
        agg_routes: The same of Agg.
    """

    trans_cut: tuple[int, ...] = HALVES
    agg_cut: tuple[int, ...] = HALVES
    two_phase_trans: bool = False
    two_phase_agg: bool = False
    fetch_cut: tuple[int, ...] = HALVES
    trans_routes: Routes = field(default_factory=dict)
    agg_routes: Routes = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_cut(self.trans_cut)
        check_cut(self.agg_cut)
        check_cut(self.fetch_cut)


# one after the other; the later ones send on what the earlier ones brought
Chunk = tuple[Exchange, ...]


def check_cut(cut: Sequence[int]) -> tuple[int, ...]:
    """Return `cut`, the C + 1 boundaries of C chunks in parts of GRAIN, or raise ValueError."""
    bounds = tuple(int(c) for c in cut)
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != GRAIN or any(b < a for a, b in pairwise(bounds)):
        raise ValueError(f"a cut rises from 0 to {GRAIN}, with one boundary more than chunks; got {bounds}")
    return bounds


def trans_chunks(
    placement: Placement,
    rank: int,
    numel: int,
    cut: Sequence[int] = HALVES,
    *,
    two_phase: bool = False,
    routes: Routes | None = None,
) -> tuple[Chunk, ...]:
    """Return what a rank sends and receives to bring every replica its parameters, chunk by chunk.

    Args:
        placement: Where the layer's experts are.
        rank: The rank whose part it is.
        numel: P, elements of one expert's vector.
        cut: Boundaries of the chunks, see `Form`.
        two_phase: Whether to scatter and gather.
        routes: Of the experts whose receivers are not one group.
    """
    ways = _ways(placement, routes if two_phase else None, alone=not two_phase)
    listed = partial(_listed, ways, rank, numel)
    if not two_phase:
        return _chunks(cut, numel, [listed("direct", _scatter)])
    # the conditions are the same on all ranks. Where every group is one receiver, scatter has brought everything
    relays = any(way.route.relays for way in ways)
    gathers = relays or any(len(group) > 1 for way in ways for group in way.route.groups)
    first = [listed("spread", _spread)] if relays else []
    first.append(listed("scatter", _scatter))
    return _chunks(cut, numel, first, [listed("gather", _gather)] if gathers else [])


def agg_chunks(
    placement: Placement,
    rank: int,
    numel: int,
    cut: Sequence[int] = HALVES,
    *,
    two_phase: bool = False,
    routes: Routes | None = None,
) -> tuple[Chunk, ...]:
    """Return what a rank sends and receives to bring every replica's gradient home, chunk by chunk.

    Args:
        placement: Where the layer's experts are.
        rank: The rank whose part it is.
        numel: Elements of one expert's gradient.
        cut: Boundaries of the chunks, see `Form`.
        two_phase: Whether to reduce among the receivers of every group first.
        routes: Of the experts whose receivers are not one group.
    """
    ways = _ways(placement, routes if two_phase else None, alone=not two_phase)
    listed = partial(_listed, ways, rank, numel, mirrored=True)
    if not two_phase:
        return _chunks(cut, numel, [listed("direct", _scatter)])
    exchanges = [listed("reduce", _gather), listed("home", _scatter)]
    if any(way.route.relays for way in ways):
        exchanges.append(listed("hand-over", _spread))
    return _chunks(cut, numel, exchanges[:-1], exchanges[-1:])


class _Way(NamedTuple):
    """How an expert's copies travel: from its home, along its route."""

    expert: int
    home: int
    route: Route


def _ways(placement: Placement, routes: Routes | None, *, alone: bool) -> list[_Way]:
    """Return the ways of all replicated experts; `alone`: every receiver is a group."""
    found = []
    for expert, receivers in placement.receivers().items():
        whole = tuple((r,) for r in receivers) if alone else (tuple(receivers),)
        found.append(_Way(expert, int(placement.home[expert]), (routes or {}).get(expert) or Route(whole)))
    return found


# from, to, of
Fraction = tuple[int, int, int]


def _carried(bounds: Sequence[int], numel: int, two_phase: bool) -> Iterator[tuple[Fraction | None, Fraction | None]]:
    """Yield which fraction of the first and of the second phase every chunk carries; a direct transfer has one phase.

    A chunk without elements carries nothing, on any rank.
    """
    if two_phase:
        yield from _phases(bounds)
        return
    for low, high in pairwise(bounds):
        start, stop = _part(numel, 0, 1, (low, high, GRAIN))
        yield ((low, high, GRAIN) if start < stop else None), None


def _phases(bounds: Sequence[int]) -> Iterator[tuple[Fraction | None, Fraction | None]]:
    """Yield which fraction of the first and of the second phase every chunk carries.

    The phases meet at the boundary next to the middle, since both move as much: no chunk then waits for itself. A
    single chunk has to carry both, one after the other.
    """
    chunks = len(bounds) - 1
    if chunks == 1:
        yield (0, 1, 1), (0, 1, 1)
        return
    middle = _middle(bounds)
    for c in range(chunks):
        first = c < middle
        low, high = (0, bounds[middle]) if first else (bounds[middle], GRAIN)
        last = c == (middle if first else chunks) - 1
        # a phase whose chunks are all empty goes with the last of them
        part = (bounds[c] - low, bounds[c + 1] - low, high - low) if high > low else (0, int(last), 1)
        carried = part if part[0] < part[1] else None
        yield (carried, None) if first else (None, carried)


def _middle(bounds: Sequence[int]) -> int:
    """Return the index of the inner boundary next to the middle; the lower of two."""
    return min(range(1, len(bounds) - 1), key=lambda s: (abs(2 * bounds[s] - GRAIN), s))


def meeting(cut: Sequence[int]) -> int:
    """Return where the two phases meet, in parts of GRAIN; all of it for a single chunk, which has no second place."""
    bounds = check_cut(cut)
    return bounds[_middle(bounds)] if len(bounds) > 2 else GRAIN


def phase_shares(cut: Sequence[int]) -> list[tuple[float, float]]:
    """Return, by chunk of a two-phase transfer, the shares of its first and second phase that the chunk carries."""

    def share(fraction: Fraction | None) -> float:
        return 0.0 if fraction is None else (fraction[1] - fraction[0]) / fraction[2]

    return [(share(first), share(second)) for first, second in _phases(check_cut(cut))]


def _part(numel: int, j: int, n: int, fraction: Fraction) -> tuple[int, int]:
    """Return the elements of a fraction of the j-th of n parts of a vector."""
    # rounded down at both ends alike, so that neighbouring parts and chunks meet without gap or overlap
    start, stop = numel * j // n, numel * (j + 1) // n
    low, high, of = fraction
    return start + (stop - start) * low // of, start + (stop - start) * high // of


# what a rank sends and receives of a fraction of a phase
_Lister = Callable[[Fraction, bool], Exchange]


def _listed(
    ways: Sequence[_Way],
    rank: int,
    numel: int,
    phase: Phase,
    pieces: Callable[..., Iterator[Piece]],
    *,
    mirrored: bool = False,
) -> _Lister:
    """Return a function that lists one exchange; `mirrored`: every piece travels the other way, as in Agg."""

    def exchange(fraction: Fraction, sends_on: bool) -> Exchange:
        # vectors shorter than the number of parts leave some of them empty
        listed = [p for p in pieces(ways, rank, numel, fraction, own=mirrored) if p.size]
        if mirrored:
            listed = [Piece(p.expert, p.start, p.stop, p.target, p.source) for p in listed]
        # both ends sort alike, by peer, expert and element: nothing but elements has to travel
        sends = sorted((p for p in listed if p.source == rank), key=lambda p: (p.target, p.expert, p.start))
        recvs = sorted((p for p in listed if p.target == rank), key=lambda p: (p.source, p.expert, p.start))
        return Exchange(phase, tuple(sends), tuple(recvs), sends_on)

    return exchange


def _chunks(
    cut: Sequence[int], numel: int, first: Sequence[_Lister], second: Sequence[_Lister] | None = None
) -> tuple[Chunk, ...]:
    """Return the exchanges of every chunk.

    Args:
        cut: Boundaries of the chunks, see `Form`.
        numel: Elements of one expert's vector.
        first: The exchanges of the first phase, in order.
        second: Those of the second phase, one or none; None for a direct transfer, which has one phase.
    """
    chunks = []
    for of_first, of_second in _carried(check_cut(cut), numel, second is not None):
        chunk = [] if of_first is None else [listed(of_first, i > 0) for i, listed in enumerate(first)]
        chunk += [] if of_second is None else [listed(of_second, True) for listed in second or ()]
        chunks.append(tuple(chunk))
    return tuple(chunks)


def _spread(ways: Iterable[_Way], rank: int, numel: int, fraction: Fraction, *, own: bool) -> Iterator[Piece]:
    del own  # what the home sends for itself stays where it is
    for expert, home, route in ways:
        for j, relay in enumerate(route.relays):
            if relay != home and rank in (home, relay):
                yield Piece(expert, *_part(numel, j, len(route.relays), fraction), home, relay)


def _scatter(ways: Iterable[_Way], rank: int, numel: int, fraction: Fraction, *, own: bool) -> Iterator[Piece]:
    for expert, home, route in ways:
        for _, parts in route.copies(home):
            # other ranks' pieces are theirs to list: all of them would cost R times as much
            for j, (sender, carrier) in enumerate(parts):
                # a relay sends itself its own sum as well
                if rank in (sender, carrier) and (sender != carrier or own):
                    yield Piece(expert, *_part(numel, j, len(parts), fraction), sender, carrier)


def _gather(ways: Iterable[_Way], rank: int, numel: int, fraction: Fraction, *, own: bool) -> Iterator[Piece]:
    for expert, home, route in ways:
        for group, parts in route.copies(home):
            receives = (rank,) if rank in group else ()
            for j, (_, carrier) in enumerate(parts):
                for target in group if carrier == rank else receives:
                    # `reduce` sends a rank's own part to itself as well, so that the sum runs in rank order
                    if target != carrier or own:
                        yield Piece(expert, *_part(numel, j, len(parts), fraction), carrier, target)


def held_back(cut: Sequence[int], share: float, *, two_phase: bool = False) -> tuple[int, ...]:
    """Return `cut` with one chunk more at its end; the others keep their proportions.

    In the two-phase form the share is one of the second phase: the first is never held back, since the second has to
    wait for it. The phases then meet in the middle, where they stay.

    Args:
        cut: Boundaries of the chunks, see `Form`.
        share: Share of the whole that the last chunk takes.
        two_phase: Whether the transfer has two phases.
    """
    bounds, kept = check_cut(cut), GRAIN - int(GRAIN * share)
    if not two_phase:
        return (*(b * kept // GRAIN for b in bounds), GRAIN)
    # the middle as a boundary, so that `_middle` finds it again whatever the last chunk's length
    half, met = GRAIN // 2, meeting(bounds)
    middle = _middle(bounds) if len(bounds) > 2 else 1
    first = (b * half // max(met, 1) for b in bounds[:middle])
    second = ((b - met) * half // max(GRAIN - met, 1) * kept // GRAIN for b in bounds[middle + 1 :])
    return (*first, half, *(half + b for b in second), GRAIN)


def cut_by_weights(weights: Sequence[int]) -> tuple[int, ...]:
    """Return boundaries of chunks in proportion to their windows' lengths, in integers; equal ones without lengths."""
    lengths = [int(w) for w in weights]
    if not lengths or min(lengths) < 0:
        raise ValueError(f"expected the length of one window or more, none negative, got {list(weights)}")
    if not any(lengths):
        lengths = [1] * len(lengths)
    total = sum(lengths)
    return tuple(sum(lengths[:c]) * GRAIN // total for c in range(len(lengths) + 1))
