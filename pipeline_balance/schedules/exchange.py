"""Attention exchange: which rank computes which part of another's attention (SlimPipe, 4.2).

Late slices attend to more than early ones. In the aligned order all ranks run the same kind of pass at the same time,
so a rank with a late slice can hand some of its earlier chunks to ranks with an early slice, or with none.

Shape legend: P ranks, S stages, M microbatches, N slices, U = M N units. A slot is what all ranks do at one time. A
piece is half a chunk: pieces 2c and 2c + 1 are those of slice c's keys and values. A slice's attention to itself never
moves. A position counts the layers of a stage in the order in which a pass runs them. A rank that has no layer there
can only help. A quantity "in slices" is in units of the queries of one slice in one layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, combinations, count, islice, pairwise
from math import floor

from pipeline_balance.schedules.actions import Schedule, ScheduleError

# Ranks up to which all plans that move as little as possible are compared
_FEW = 4


@dataclass(frozen=True, slots=True)
class Slot:
    """What all ranks do at one time.

    Attributes:
        forward: Whether its passes are forward ones.
        passes: Stage and unit by rank [P]; None: the rank has no pass and may help.
    """

    forward: bool
    passes: tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class Help:
    """A part of one rank's attention that another one computes.

    Attributes:
        donor: The rank whose slice it is.
        helper: The rank that computes.
        pieces: Numbers of the pieces that are attended to, in ascending order.
        sent: Those of them whose keys and values travel now; the helper has kept the others.
        freed: Those that the helper lets go afterwards. In a backward pass their gradients return then.
    """

    donor: int
    helper: int
    pieces: Sequence[int]
    sent: Sequence[int]
    freed: Sequence[int]


def slots_of(schedule: Schedule) -> tuple[Slot, ...]:
    """The slots of a schedule whose ranks help each other: see `sliced`."""
    found = []
    for number, actions in enumerate(zip(*schedule.actions, strict=True)):
        kinds = {a.kind for a in actions} - {"H"}
        if len(kinds) != 1 or any(a.kind == "H" and a.microbatch != number for a in actions):
            raise ScheduleError(f"slot {number} is none of one kind of pass: {', '.join(map(str, actions))}")
        passes = tuple(None if a.kind == "H" else (a.stage, a.microbatch) for a in actions)
        found.append(Slot(kinds == {"F"}, passes))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Who helps whom in every slot and position.

    Attributes:
        slots: What all ranks do.
        layers: How many layers with attention every stage has [S].
        slices: N.
        pieces: Those of earlier chunks that unit u's slice sees [U].
        diagonal: What a slice's attention to itself costs, in pieces.
        helps: By slot, and by each run of positions in which the same stages have a layer.
        runs: How many positions each of these runs has.
        gradients: What a piece's gradients take, in pieces.
    """

    slots: tuple[Slot, ...]
    layers: tuple[int, ...]
    slices: int
    pieces: tuple[Sequence[int], ...]
    diagonal: int
    helps: tuple[tuple[tuple[Help, ...], ...], ...]
    runs: tuple[int, ...]
    gradients: int = 1
    _run_of: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        run_of = tuple(run for run, positions in enumerate(self.runs) for _ in range(positions))
        object.__setattr__(self, "_run_of", run_of)

    @property
    def ranks(self) -> int:
        """P."""
        return len(self.slots[0].passes)

    def at(self, slot: int, position: int) -> tuple[Help, ...]:
        """Who helps whom there."""
        return self.helps[slot][self._run_of[position]]

    def positions(self, slot: int) -> int:
        """How many layers the passes of a slot run at most."""
        return max((self.layers[one[0]] for one in self.slots[slot].passes if one is not None), default=0)

    def every(self) -> Iterator[tuple[int, int, Help]]:
        """Every help with its slot, and in how many positions it is given."""
        for number, by_run in enumerate(self.helps):
            for positions, helps in zip(self.runs, by_run, strict=True):
                for one in helps:
                    yield number, positions, one

    def slices_moved(self, kv_share: float = 1.0) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """What travels for every donor in its forward and in its backward passes, there and back, in slices [P].

        Args:
            kv_share: Key heads over query heads.
        """
        moved = [[0.0] * self.ranks, [0.0] * self.ranks]
        for number, positions, one in self.every():
            if self.slots[number].forward:
                # queries and outputs; a piece is half a slice of keys, and half a slice of values
                found, backward = 2 + kv_share * len(one.sent), 0
            else:
                # queries, outputs, and both their gradients; gradients of keys and values return
                found, backward = 4 + kv_share * (len(one.sent) + len(one.freed)), 1
            moved[backward][one.donor] += positions * found
        return tuple(moved[0]), tuple(moved[1])

    def held_pieces(self) -> tuple[tuple[int, ...], ...]:
        """Pieces of others that every rank holds in every slot, of all layers together [P, slots].

        In a backward pass a piece's gradients are held as well.
        """
        held = [0] * self.ranks
        found: list[list[int]] = [[] for _ in held]
        for slot, by_run in zip(self.slots, self.helps, strict=True):
            each = 1 if slot.forward else 1 + self.gradients
            more, less, passing = [0] * self.ranks, [0] * self.ranks, [0] * self.ranks
            for positions, helps in zip(self.runs, by_run, strict=True):
                here = [0] * self.ranks
                for one in helps:
                    sent, freed = set(one.sent), set(one.freed)
                    more[one.helper] += each * positions * len(sent - freed)
                    less[one.helper] += each * positions * len(freed - sent)
                    # gone before the next layer's come
                    here[one.helper] += each * len(sent & freed)
                passing = [max(a, b) for a, b in zip(passing, here, strict=True)]
            for rank in range(self.ranks):
                found[rank].append(held[rank] + more[rank] + passing[rank])
                held[rank] += more[rank] - less[rank]
        return tuple(tuple(row) for row in found)


def plan(
    schedule: Schedule,
    layers: Sequence[int] | None = None,
    *,
    pieces: Sequence[Sequence[int]] | None = None,
    heads: tuple[int, int] = (1, 1),
    diagonal: int = 1,
    call: float = 0.0,
    keep: int = 0,
    gradients: int = 1,
) -> Exchange:
    """Plan the exchange of a schedule whose ranks help each other: see `sliced`.

    After it the ranks' attention in a position differs by one piece at most, where their own diagonals allow. Among
    such plans one with few bytes, and then few messages, is taken: the fewest of all for up to 4 ranks. A donor's
    earliest pieces go first: they have been there longest.

    Args:
        schedule: The order.
        layers: How many layers with attention every stage has [S]; None: one.
        pieces: Those that each unit's slice sees [U], ascending; None: all of the chunks before it.
        heads: Of queries, and of keys.
        diagonal: What a slice's attention to itself costs, in pieces.
        call: What a further call of the kernel costs, in pieces. Then no help makes any rank later.
        keep: Pieces, of all layers together, that a rank may keep for later passes of a microbatch.
        gradients: What a piece's gradients take, in pieces: one, or two where sums are of twice the width.
    """
    slices, slots = schedule.slices, slots_of(schedule)
    layers = tuple(layers) if layers is not None else (1,) * schedule.stages
    if pieces is None:
        pieces = [range(2 * (unit % slices)) for unit in range(schedule.units)]
    # positions between two of these numbers are alike
    bounds = sorted({0, *layers})
    runs = tuple(b - a for a, b in pairwise(bounds))
    keeping = _Keeping(slots, slices, runs, keep, gradients)
    helps: list[tuple[tuple[Help, ...], ...]] = []
    for number, slot in enumerate(slots):
        by_run = []
        for run, first in enumerate(bounds[:-1]):
            there = [one if one is not None and layers[one[0]] > first else None for one in slot.passes]
            movable = tuple(0 if one is None else len(pieces[one[1]]) for one in there)
            fixed = tuple(0 if one is None else diagonal for one in there)
            moves = levelled(movable, fixed, heads, call)
            left = {rank: pieces[one[1]] for rank, one in enumerate(there) if one is not None}
            by_run.append(keeping.helps(number, run, moves, left))
        helps.append(tuple(by_run))
    return Exchange(
        slots=slots,
        layers=layers,
        slices=slices,
        pieces=tuple(pieces),
        diagonal=diagonal,
        helps=keeping.freed(helps) if keep else tuple(helps),
        runs=runs,
        gradients=gradients,
    )


Moves = tuple[tuple[int, int, int], ...]
"""Donor, helper, and how many pieces."""


@lru_cache(maxsize=1 << 14)
def levelled(
    movable: tuple[int, ...], fixed: tuple[int, ...], heads: tuple[int, int] = (1, 1), call: float = 0.0
) -> Moves:
    """How many pieces move from whom to whom, so that no rank has more than it must.

    Args:
        movable: Pieces that every rank could give away [P].
        fixed: What stays with it in any case, in pieces [P].
        heads: Of queries, and of keys: what a donor and a helper cost beside what a piece costs.
        call: What a further call of the kernel costs a helper, in pieces.
    """
    total = [a + b for a, b in zip(movable, fixed, strict=True)]
    # The lowest number that ranks keep to unless what stays with them is more already: as in vessels of unequal floors,
    # some of the lowest ones take all that can move.
    floors = accumulate(sorted(fixed))
    level = min(-(-(sum(movable) + floor) // ranks) for ranks, floor in enumerate(floors, start=1))
    if call > 0:
        return next(found for at in count(level) if (found := _below(total, movable, at, call)) is not None)
    low = [rank for rank, own in enumerate(fixed) if own < level]
    # so many of them have one piece less than the others
    short = sum(level - fixed[rank] for rank in low) - sum(movable)
    if len(total) <= _FEW:
        choices = list(combinations(low, short))
    else:
        # pieces stay where most are
        choices = [tuple(sorted(low, key=lambda rank: (total[rank], rank))[:short])]
    best: tuple[tuple[int, int], Moves] | None = None
    for fewer in choices:
        target = [max(level, own) for own in fixed]
        for rank in fewer:
            target[rank] -= 1
        moves = _matched([a - b for a, b in zip(total, target, strict=True)])
        cost = 2 * heads[0] * len(moves) + heads[1] * sum(pieces for _, _, pieces in moves)
        if best is None or (cost, len(moves)) < best[0]:
            best = (cost, len(moves)), moves
    assert best is not None
    return best[1]


def _matched(excess: Sequence[int]) -> Moves:
    """Move what ranks have too much to those that have too little: exact pairs first, then the largest with each other.

    Every move but the last ends a rank's need, so among up to 4 ranks there are as few moves as can be.
    """
    give = {rank: x for rank, x in enumerate(excess) if x > 0}
    need = {rank: -x for rank, x in enumerate(excess) if x < 0}
    found = []
    for donor in sorted(give, key=lambda rank: (-give[rank], rank)):
        for helper in [rank for rank, x in need.items() if x == give[donor]][:1]:
            found.append((donor, helper, give.pop(donor)))
            del need[helper]
    while give:
        donor, helper = (max(some, key=lambda rank: (some[rank], -rank)) for some in (give, need))
        pieces = min(give[donor], need[helper])
        found.append((donor, helper, pieces))
        for some, rank in ((give, donor), (need, helper)):
            some[rank] -= pieces
            if not some[rank]:
                del some[rank]
    return tuple(sorted(found))


def _below(total: Sequence[int], movable: Sequence[int], level: int, call: float) -> Moves | None:
    """Moves after which no rank has more than `level`, calls of helpers included; None where none are found."""
    give = {rank: min(x - level, movable[rank]) for rank, x in enumerate(total) if x > level and movable[rank]}
    room = {rank: float(level - x) for rank, x in enumerate(total) if x < level}
    found = []
    for donor in sorted(give, key=lambda rank: (-give[rank], rank)):
        left = give[donor]
        while left:
            most = {rank: floor(x - call) for rank, x in room.items() if x - call >= 1}
            if not most:
                return None
            # the tightest that takes all of it, or else the widest
            fitting = [rank for rank, x in most.items() if x >= left]
            helper = min(fitting, key=lambda r: (most[r], r)) if fitting else max(most, key=lambda r: (most[r], -r))
            pieces = min(left, most[helper])
            found.append((donor, helper, pieces))
            room[helper] -= pieces + call
            left -= pieces
    return tuple(sorted(found))


# Run of positions, whether forward, stage of the donor, microbatch
_Kept = tuple[int, bool, int, int]


class _Keeping:
    """Which pieces move with every help, and what helpers keep from one slot to later ones.

    Args:
        slots: What all ranks do.
        slices: N.
        runs: Positions of each run.
        keep: Pieces that a rank may keep.
        gradients: What a piece's gradients take.
    """

    def __init__(self, slots: Sequence[Slot], slices: int, runs: Sequence[int], keep: int, gradients: int) -> None:
        self._slots, self._slices, self._runs, self._keep = slots, slices, runs, keep
        self._gradients = gradients
        ranks = len(slots[0].passes)
        self._held = [0] * ranks
        # pieces by helper
        self._kept: dict[_Kept, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))

    def helps(self, slot: int, run: int, moves: Moves, left: dict[int, Sequence[int]]) -> tuple[Help, ...]:
        """The helps of one slot and run; `left` has the pieces that each donor could give."""
        found = []
        for donor, helper, number in moves:
            if not self._keep:
                pieces, left[donor] = left[donor][:number], left[donor][number:]
                found.append(Help(donor, helper, pieces, pieces, pieces))
                continue
            kept = self._kept[self._key(slot, run, donor)][helper]
            # what is there already costs no bytes
            there = sorted(kept.intersection(left[donor]))[:number]
            sent = list(islice((piece for piece in left[donor] if piece not in kept), number - len(there)))
            chosen = {*there, *sent}
            left[donor] = [piece for piece in left[donor] if piece not in chosen]
            self._remember(slot, run, donor, helper, sent)
            found.append(Help(donor, helper, sorted(chosen), sent, ()))
        if self._keep:
            self._forget(slot, run)
        return tuple(found)

    def _remember(self, slot: int, run: int, donor: int, helper: int, sent: Sequence[int]) -> None:
        """Keep what later passes may use, as far as the limit allows."""
        kept, each = self._kept[self._key(slot, run, donor)][helper], self._bytes(slot, run)
        useful = self._useful(slot, donor)
        for piece in sent:
            if piece < useful and self._held[helper] + each <= self._keep:
                kept.add(piece)
                self._held[helper] += each

    def _forget(self, slot: int, run: int) -> None:
        """Let go of what no later pass uses."""
        for donor, one in enumerate(self._slots[slot].passes):
            if one is None:
                continue
            useful, kept_by = self._useful(slot, donor), self._kept[self._key(slot, run, donor)]
            # forward, nothing goes before a microbatch's last slice
            for helper, kept in kept_by.items() if useful < 2 * self._slices else ():
                if gone := {piece for piece in kept if piece >= useful}:
                    kept.difference_update(gone)
                    self._held[helper] -= self._bytes(slot, run) * len(gone)

    def _useful(self, slot: int, donor: int) -> int:
        """Passes of the donor's microbatch after this one see pieces below this number alone."""
        one = self._slots[slot].passes[donor]
        assert one is not None
        number = one[1] % self._slices
        if self._slots[slot].forward:
            return 2 * self._slices if number < self._slices - 1 else 0
        # slices go backward in reverse: the one before sees the chunks before itself alone
        return 2 * (number - 1)

    def _bytes(self, slot: int, run: int) -> int:
        """What keeping a piece takes: in a backward pass its gradients are kept, too."""
        return self._runs[run] * (1 if self._slots[slot].forward else 1 + self._gradients)

    def _key(self, slot: int, run: int, donor: int) -> _Kept:
        one = self._slots[slot].passes[donor]
        assert one is not None
        return run, self._slots[slot].forward, one[0], one[1] // self._slices

    def freed(self, helps: Sequence[Sequence[Sequence[Help]]]) -> tuple[tuple[tuple[Help, ...], ...], ...]:
        """The same helps, which free every piece at the last use of what was sent."""
        # pieces that are used again without being sent again
        wanted: set[tuple[int, _Kept, int]] = set()
        found = []
        for slot in reversed(range(len(helps))):
            by_run = []
            for run, some in enumerate(helps[slot]):
                new = []
                for one in some:
                    key, sent = self._key(slot, run, one.donor), set(one.sent)
                    freed = [piece for piece in one.pieces if (one.helper, key, piece) not in wanted]
                    wanted |= {(one.helper, key, piece) for piece in one.pieces if piece not in sent}
                    wanted -= {(one.helper, key, piece) for piece in sent}
                    new.append(Help(one.donor, one.helper, one.pieces, one.sent, freed))
                by_run.append(tuple(new))
            found.append(tuple(by_run))
        return tuple(reversed(found))
