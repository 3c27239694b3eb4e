"""Which form a layer's transfers take: the cheaper one by the planner's own performance model; pure.

Shape legend: R ranks, E experts.
"""

from __future__ import annotations

from typing import Literal

from prophet.planner.cost import transfer_cost
from prophet.scheduler.pieces import HALVES, Form
from prophet.spec import Placement, PlanContext

Transfers = Literal["auto", "direct", "two-phase"]


class FormChooser:
    """Chooses and remembers, by layer, the form for the placement it was last asked about.

    The choice costs some numpy on [R, R] arrays, so it is made where the placement is planned and read where it comes
    into force. It depends on values only that all ranks share.
    """

    def __init__(self, layers: int, transfers: Transfers = "auto") -> None:
        self._transfers = transfers
        self._known: list[tuple[Placement, tuple[bool, bool]] | None] = [None] * layers

    def two_phase(self, layer: int, placement: Placement, context: PlanContext) -> tuple[bool, bool]:
        """(whether Trans, whether Agg of a layer takes the two-phase form under `placement`)."""
        if self._transfers != "auto" or placement.is_static:
            return (self._transfers == "two-phase",) * 2
        known = self._known[layer]
        if known is None or known[0] is not placement:
            topology, shape = context.topology, context.shape
            trans = transfer_cost(placement, topology, shape.expert_bytes).two_phase
            same = shape.expert_bytes == shape.expert_grad_bytes
            agg = trans if same else transfer_cost(placement, topology, shape.expert_grad_bytes).two_phase
            known = self._known[layer] = (placement, (trans, agg))
        return known[1]

    def form(
        self,
        layer: int,
        placement: Placement,
        context: PlanContext,
        trans_cut: tuple[int, ...] = HALVES,
        agg_cut: tuple[int, ...] = HALVES,
        fetch_cut: tuple[int, ...] = HALVES,
    ) -> Form:
        """The form with these cuts."""
        trans, agg = self.two_phase(layer, placement, context)
        return Form(trans_cut, agg_cut, trans, agg, fetch_cut)
