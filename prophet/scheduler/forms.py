"""Which form a block's transfers take, by the rule of the performance model under the windows that they get; pure.

Shape legend: R ranks, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from prophet.scheduler.actions import Window
from prophet.scheduler.pieces import GRAIN, HALVES, Form, held_back, meeting
from prophet.scheduler.schedules import Schedule, cover_of, cut_of
from prophet.scheduler.simulate import exchanges_by_chunk, transfer_by_chunk
from prophet.spec import (
    FORM_NAMES,
    Cover,
    FormName,
    Placement,
    PlanContext,
    Route,
    Routes,
    Topology,
    TransferSeconds,
    by_node,
    relayed,
    routes_of,
)

Transfers = Literal["auto", FormName]
# share of a Trans: less is not worth another message
LEAST_HELD_BACK = 1 / 16


def phase_cover(cut: tuple[int, ...], cover_s: float) -> Cover:
    """Return what covers each phase of a transfer.

    Args:
        cut: Boundaries of its chunks, see `Form`.
        cover_s: Seconds of compute under which it runs, shared out by `cut`.
    """
    first_s = cover_s * meeting(cut) / GRAIN
    return Cover(first_s, cover_s - first_s)


def _seconds(
    placement: Placement,
    topology: Topology,
    routes: Mapping[FormName, Routes],
    n_bytes: float,
    sum_bytes: float | None = None,
) -> TransferSeconds:
    def slowest(cut: tuple[int, ...], routes: Routes, *, two_phase: bool) -> list[float]:
        moved = exchanges_by_chunk(placement, n_bytes, cut, two_phase=two_phase, routes=routes, sum_bytes=sum_bytes)
        return [float(x) for x in transfer_by_chunk(moved, topology).max(axis=1)]

    found = slowest((0, GRAIN), {}, two_phase=False) + slowest(HALVES, {}, two_phase=True)
    for form in FORM_NAMES[2:]:
        found += slowest(HALVES, routes[form], two_phase=True) if routes.get(form) else (math.inf, math.inf)
    return TransferSeconds(*found)


class Known(NamedTuple):
    """What is known of a placement's transfers, in the forms allowed.

    Attributes:
        routes: By form, of the experts whose replicas are not one group.
        trans: Seconds of Trans.
        agg: Seconds of Agg.
    """

    routes: Mapping[FormName, Routes]
    trans: TransferSeconds
    agg: TransferSeconds


class FormChooser:
    """Chooses one block's form, and remembers what the last placement's transfers take.

    That costs some numpy on [R, R] arrays, so it is computed where the placement is planned and read where it comes
    into force. The choice depends on values only that all ranks share.

    Args:
        transfers: Which forms are allowed; several of them as a tuple.
    """

    def __init__(self, transfers: Transfers | tuple[FormName, ...] = "auto") -> None:
        some = FORM_NAMES if transfers == "auto" else transfers
        self._forms: tuple[FormName, ...] = some if isinstance(some, tuple) else (some,)
        self._known: tuple[Placement, Known] | None = None

    def prepare(self, placement: Placement, context: PlanContext) -> Known:
        """Return what Trans and Agg take under `placement`; from values only."""
        known = self._known
        # by identity: comparing placements would cost what is saved here
        if known is None or known[0] is not placement:
            topology, routes = context.topology, self._routes(placement, context.topology)
            trans = _seconds(placement, topology, routes, context.trans_bytes)
            agg = _seconds(placement, topology, routes, context.agg_bytes, context.agg_sum_bytes)
            known = self._known = (placement, Known(routes, self._allowed(trans), self._allowed(agg)))
        return known[1]

    def _routes(self, placement: Placement, topology: Topology) -> Mapping[FormName, Routes]:
        if not {"node-once", "spread"} & set(self._forms):
            return {}
        if len(self._forms) > 1:
            return {f: routes for f, routes in routes_of(placement, topology).items() if f in self._forms}
        # a single form is that of all, whether or not they gain by it; without levels it is the two-phase form
        (form,), receivers = self._forms, placement.receivers()
        whole = {expert: Route((tuple(found),)) for expert, found in receivers.items()}
        if not topology.has_levels:
            return {form: whole}
        apart = {expert: Route(by_node(found, topology)) for expert, found in receivers.items()}
        if form == "spread":
            apart = {e: relayed(int(placement.home[e]), found, topology) for e, found in receivers.items()}
        return {form: apart}

    def spreads(self, topology: Topology) -> bool:
        """Return whether ranks may pass on parts of experts that they have no replica of."""
        alone = self._forms == ("spread",)
        return "spread" in self._forms and topology.has_levels and (alone or topology.port_share < 1.0)

    def _allowed(self, seconds: TransferSeconds) -> TransferSeconds:
        # a form that takes for ever is never chosen: no second rule is needed
        phases = [seconds.phases(form) if form in self._forms else (math.inf, math.inf) for form in FORM_NAMES]
        (direct, _), *others = phases
        return TransferSeconds(direct, *(seconds for both in others for seconds in both))

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
        """Return the form of the block's transfers.

        Of a Trans that starts under some compute, what it does not hide is held back until the block's counts are
        known.

        Args:
            placement: Where the block's experts are.
            context: The machine and the layer.
            trans_cut: Boundaries of Trans' chunks by its schedule.
            agg_cut: Boundaries of Agg's chunks.
            fetch_cut: Boundaries of the chunks of a second Trans.
            trans_cover_s: Seconds of compute over Trans; 0 for none, or not known.
            agg_cover_s: Seconds of compute over Agg; 0 for none, or not known.
        """
        # nothing travels: no times are needed to choose
        if placement.is_static:
            two_phase = "direct" not in self._forms
            return Form(trans_cut, agg_cut, two_phase, two_phase, fetch_cut)
        (routes, there, back), taken = self.prepare(placement, context), context.topology.overlap_cost
        over_trans, over_agg = phase_cover(trans_cut, trans_cover_s), phase_cover(agg_cut, agg_cover_s)
        trans, agg = there.form(over_trans, taken), back.form(over_agg, taken)
        if trans_cover_s > 0.0:
            # a first phase is never held back: the second one has to wait for it
            # the part that the compute does not cover: sent before the counts, it would be in vain if replicas are
            # withdrawn
            first_s, second_s = there.phases(trans)
            two_phase = trans != "direct"
            waits_s = max(0.0, second_s - over_trans.second) if two_phase else there.exposed(over_trans, trans)
            if waits_s > LEAST_HELD_BACK * there.seconds(trans):
                trans_cut = held_back(trans_cut, waits_s / (second_s if two_phase else first_s), two_phase=two_phase)
        of_trans, of_agg = (routes.get(form, {}) for form in (trans, agg))
        return Form(trans_cut, agg_cut, trans != "direct", agg != "direct", fetch_cut, of_trans, of_agg)

    def form_under(
        self,
        schedule: Schedule,
        block: int,
        placement: Placement,
        context: PlanContext,
        window_us: Mapping[Window, int],
    ) -> Form:
        """Return the form of a block's transfers under the windows that a schedule gives them.

        Args:
            schedule: What is launched where.
            block: The block's place in the order of execution.
            placement: Where its experts are.
            context: The machine and the layer.
            window_us: Lengths of the windows in microseconds, equal on all ranks.
        """
        return self.form(
            placement,
            context,
            trans_cut=cut_of(schedule, "TRANS", block, window_us),
            agg_cut=cut_of(schedule, "AGG", block, window_us),
            fetch_cut=cut_of(schedule, "FETCH", block, window_us),
            trans_cover_s=1e-6 * cover_of(schedule, "TRANS", block, window_us),
            agg_cover_s=1e-6 * cover_of(schedule, "AGG", block, window_us),
        )
