"""One rank's part in a route: what follows from the route, and from a window, without the state itself.

All of it can be found before the move: by a thread that prepares it while the state is still in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from prophet.errors import BudgetError
from prophet.spec import IntArray
from prophet.state.in_place import in_place
from prophet.state.route import Route
from prophet.state.streams import (
    CHUNK_BYTES,
    DEPTH,
    Chunks,
    Kept,
    Measures,
    Streams,
    Timetable,
    Window,
    kept,
    window_of,
)


@dataclass(frozen=True)
class Rounds:
    """Chunks that one rank sends and receives in every round of a window, by round."""

    going: Chunks
    coming: Chunks

    @cached_property
    def number(self) -> int:
        """Number of rounds."""
        # Rounds in between may be empty for this rank, so the last one that is not counts
        return max((*self.going, *self.coming), default=-1) + 1


class RouteSchedule:
    """One rank's part in a route. Each piece of it is found when it is first asked for, and kept.

    Not for two threads at the same time.
    """

    def __init__(self, route: Route, rank: int) -> None:
        self.route, self.rank = route, rank
        self._measures: dict[bool, Measures] = {}
        self._rounds: dict[tuple[Window, bool], Rounds] = {}

    @cached_property
    def digest(self) -> int:
        """Digest of the route."""
        return self.route.digest()

    @cached_property
    def streams(self) -> Streams:
        """The streams that this rank sends and receives."""
        return Streams.of(self.route, self.rank)

    @cached_property
    def kept(self) -> Kept:
        """Boxes that stay on this rank, in another piece than before."""
        return kept(self.route, self.rank)

    @cached_property
    def _order(self) -> IntArray:
        return in_place(self.route.before, self.route.after)[0]

    def waves(self, *, in_place: bool) -> IntArray | None:
        """The wave of every tensor, [T]; None where the old state stays."""
        return self._order if in_place else None

    def measures(self, *, in_place: bool) -> Measures:
        """Measures of the route over all ranks, by which a window is chosen."""
        if in_place not in self._measures:
            self._measures[in_place] = Measures.of(self.route, self.waves(in_place=in_place))
        return self._measures[in_place]

    def rounds(self, window: Window, *, in_place: bool) -> Rounds:
        """This rank's chunks in every round of a window."""
        key = window, in_place
        # A thread that prepares the move has often found them already, with the same window
        if key not in self._rounds:
            self._rounds[key] = Rounds(*Timetable(self.streams, window, self.waves(in_place=in_place)).rounds())
        return self._rounds[key]

    def precompute(
        self, budget_bytes: int, *, in_place: bool, chunk_bytes: int = CHUNK_BYTES, depth: int = DEPTH
    ) -> None:
        """Find all parts now, so that a move finds them ready.

        The window is a guess: others may have a smaller budget, and in place the state may take some of it. Then the
        rounds are found again in the move.

        Args:
            budget_bytes: Bytes that this rank can spare for buffers.
            in_place: Whether old tensors give way to new ones.
            chunk_bytes: The most that one message carries.
            depth: Rounds in flight at once.
        """
        # Cached properties: asking is what computes them
        _ = self.digest, self.route.before.on(self.rank), self.route.after.on(self.rank), self.route.link_bytes
        _ = self.streams.number, self.streams.out_bytes, self.streams.in_bytes, self.kept
        try:
            window = window_of(budget_bytes, chunk_bytes, depth, self.measures(in_place=in_place))
        except BudgetError:
            # `transition` raises it on all ranks at once; here one rank alone would
            return
        self.rounds(window, in_place=in_place)
