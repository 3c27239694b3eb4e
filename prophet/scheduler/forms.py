"""Which form a block's transfers take: the cheaper one by the performance model, unless it would hide less; pure.

Shape legend: R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from prophet.scheduler.actions import Window
from prophet.scheduler.pieces import GRAIN, HALVES, Form, held_back, meeting
from prophet.scheduler.schedules import Schedule, cover_of, cut_of
from prophet.scheduler.simulate import transfer_by_chunk
from prophet.spec import Placement, PlanContext

Transfers = Literal["auto", "direct", "two-phase"]
LEAST_HELD_BACK = 1 / 16  # of a Trans: less is not worth a message of its own


class Seconds(NamedTuple):
    """What a transfer takes directly, and in each of its two phases."""

    direct: float
    first: float
    second: float

    def seconds(self, two_phase: bool) -> float:
        """All of it in one form."""
        return self.first + self.second if two_phase else self.direct

    def two_phase(self, cut: tuple[int, ...], cover_s: float) -> bool:
        """Whether the two-phase form is cheaper (as `planner.model.cost.transfer_cost` has it) and hides as well.

        cover_s: compute under which the transfer runs, shared out by `cut`. The second phase cannot start before the
        first is over, so each has its own part of the cover; a direct transfer has all of it.
        """
        if self.first + self.second >= self.direct:
            return False
        first_cover = cover_s * meeting(cut) / GRAIN
        exposed = max(0.0, self.first - first_cover) + max(0.0, self.second - (cover_s - first_cover))
        return exposed <= max(0.0, self.direct - cover_s)


def _seconds(placement: Placement, context: PlanContext, n_bytes: float, *, agg: bool) -> Seconds:
    def slowest(cut: tuple[int, ...], two_phase: bool) -> list[float]:
        chunks = transfer_by_chunk(placement, context.topology, n_bytes, cut, two_phase=two_phase, agg=agg)
        return [float(x) for x in chunks.max(axis=1)]

    return Seconds(*slowest((0, GRAIN), False), *slowest(HALVES, True))


class FormChooser:
    """Chooses one block's form, and remembers what the placement it was last asked about takes.

    That costs some numpy on [R, R] arrays, so it is computed where the placement is planned and read where it comes
    into force. The choice depends on values only that all ranks share.
    """

    def __init__(self, transfers: Transfers = "auto") -> None:
        self._transfers = transfers
        self._known: tuple[Placement, Seconds, Seconds] | None = None

    def prepare(self, placement: Placement, context: PlanContext) -> tuple[Seconds, Seconds]:
        """What Trans and Agg take under `placement`, in either form."""
        known = self._known
        if known is None or known[0] is not placement:
            trans = _seconds(placement, context, context.trans_bytes, agg=False)
            known = self._known = (placement, trans, _seconds(placement, context, context.agg_bytes, agg=True))
        return known[1], known[2]

    def form(
        self,
        placement: Placement,
        context: PlanContext,
        *,
        trans_cut: tuple[int, ...] = HALVES,
        agg_cut: tuple[int, ...] = HALVES,
        fetch_cut: tuple[int, ...] = HALVES,
        trans_cover_s: float = 0.0,
        agg_cover_s: float = 0.0,
    ) -> Form:
        """The form of the block's transfers with these cuts, under compute of these lengths (0: none, or not known).

        Of a Trans that starts under some, what it does not hide is held back until the block's counts are known.
        """
        trans = agg = self._transfers == "two-phase"
        if placement.is_static:
            return Form(trans_cut, agg_cut, trans, agg, fetch_cut)
        there, back = self.prepare(placement, context)
        if self._transfers == "auto":
            trans, agg = there.two_phase(trans_cut, trans_cover_s), back.two_phase(agg_cut, agg_cover_s)
        trans_s = there.seconds(trans)
        if trans_cover_s > 0.0 and trans_s - trans_cover_s > LEAST_HELD_BACK * trans_s:
            trans_cut = held_back(trans_cut, 1.0 - trans_cover_s / trans_s)
        return Form(trans_cut, agg_cut, trans, agg, fetch_cut)

    def form_under(
        self,
        schedule: Schedule,
        block: int,
        placement: Placement,
        context: PlanContext,
        window_us: Mapping[Window, int],
    ) -> Form:
        """The form of block `block`'s transfers under the windows that `schedule` gives them, of these lengths."""
        return self.form(
            placement,
            context,
            trans_cut=cut_of(schedule, "TRANS", block, window_us),
            agg_cut=cut_of(schedule, "AGG", block, window_us),
            fetch_cut=cut_of(schedule, "FETCH", block, window_us),
            trans_cover_s=1e-6 * cover_of(schedule, "TRANS", block, window_us),
            agg_cover_s=1e-6 * cover_of(schedule, "AGG", block, window_us),
        )

    def cheapest(self, placement: Placement, context: PlanContext) -> tuple[float, float]:
        """Seconds of Trans and of Agg alone, in the form that takes less of those allowed; from values only."""
        there, back = self.prepare(placement, context)
        forms = {"auto": (False, True), "direct": (False,), "two-phase": (True,)}[self._transfers]
        return min(map(there.seconds, forms)), min(map(back.seconds, forms))
