"""What happens to gradients between backward and the next batch: averaged over replicas, completed, scaled, clipped.

Shape legend: R replicas, P pipeline ranks.
"""

from __future__ import annotations

import torch
from torch import nn

from pipeline_balance.pipeline.experts import StageExperts
from pipeline_balance.pipeline.norm import clip_gradients_, gradient_norm
from pipeline_balance.pipeline.ownership import Ownership
from pipeline_balance.pipeline.replicas import ReplicaMeans
from pipeline_balance.pipeline.stages import PipelineGroups
from pipeline_balance.pipeline.ties import sum_tied_gradients, ties_of
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError


class Gradients:
    """This rank's gradients of the parameters in `owned`; those that `experts` share stay out of the means."""

    def __init__(self, owned: Ownership, groups: PipelineGroups, experts: StageExperts) -> None:
        self.owned, self.groups, self.experts = owned, groups, experts
        self._means = ReplicaMeans(groups.column)
        copies = groups.seats.copies
        self._copies = ReplicaMeans(copies) if copies is not None and copies.size > 1 else None
        self._open = False
        self._added_up: list[nn.Parameter] = []

    def open(self, *, update: bool) -> None:
        """A pass begins; with `update`, stages that are done have all of the update's gradients."""
        self._open = update

    def keep(self) -> None:
        """A pass without an update has ended: its gradients are to be there in the next one, see `check_kept`."""
        self._added_up = [p for p in self.owned.parameters.values() if p.grad is not None]

    def check_kept(self, same_scaler: bool, same_trainable: bool) -> None:
        """Raise `SpecError` if another pass cannot be added to those so far, or their gradients are gone."""
        if not same_scaler:
            raise SpecError("all calls of an update need the same scaler, as its gradients are added up")
        if not same_trainable:
            raise SpecError("layers were frozen, thawed or added in mid-update: do it after update=True")
        if any(p.grad is None and not p.is_meta for p in self._added_up):
            raise SpecError(
                "gradients of the update under way are gone: zero_grad belongs after a step with update=True; "
                "drop_gradients() gives an update up"
            )

    def stage_done(self, units: range) -> None:
        """A stage of these units has run its last backward action of the pass: begin to average what it has."""
        if self._open:
            for unit in units:
                names = [n for n in self.owned.of([unit]) if self.owned.units_of[n] == (unit,)]
                mine = [self.owned.parameters[n] for n in names]
                self._means.start([p for p in mine if p not in self.experts.parameters], unit)

    def complete(self, stage_map: StageMap) -> None:
        """Once the last pass has ended: every gradient is that of the whole update. Collective."""
        self._open, self._added_up = False, []
        ties = ties_of(self.owned)
        mine = [t.parameter for t in ties if self.groups.rank in t.holders(stage_map)]
        self._means.start(mine, 0)
        self._means.finish()
        sum_tied_gradients(ties, stage_map, self.groups.collective)
        self.experts.complete()
        if self._copies is not None:
            for unit in stage_map.layers_on(self.groups.rank):
                mine = [self.owned.parameters[name] for name in self.owned.of([unit])]
                self._copies.start([p for p in mine if p in self.experts.parameters], unit)
            self._copies.finish()

    def scale_(self, factor: float) -> None:
        """Multiply them by `factor`."""
        if factor != 1.0:
            for parameter in self.owned.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def clip_(self, stage_map: StageMap, max_norm: float, device: torch.device) -> float:
        """Scale them so that the model's norm is at most `max_norm`; the norm before, the same on all ranks."""
        owned, home, rank = self.owned, stage_map.assignment(), self.groups.rank
        mine = [n for n in owned.of(stage_map.layers_on(rank)) if home[owned.units_of[n][0]] == rank]
        replica = self.groups.replica  # the gradients of others are copies of replica 0's, or of the first with experts
        shared = self.experts.parameters if self.groups.seats.copies is None or replica < self.groups.grid.ep else set()
        mine = [n for n in mine if owned.model.measures(p := owned.parameters[n], replica) or p in shared]
        norm = gradient_norm(owned.parameters, set(mine), self.groups.world, device=device)
        clip_gradients_(owned.parameters, max_norm, norm)
        return float(norm)

    def drop(self) -> None:
        """Forget them."""
        self._added_up = []
        for parameter in self.owned.parameters.values():
            parameter.grad = None

    def close(self) -> None:
        """End the thread that averages."""
        self._means.close()
        if self._copies is not None:
            self._copies.close()
