"""What happens to gradients between backward and the next batch: averaged over replicas, completed, scaled, clipped.

Shape legend: R replicas, P pipeline ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.measure.meter import Meter
from pipeline_balance.pipeline.model.ownership import Ownership, local
from pipeline_balance.pipeline.run.experts import StageExperts
from pipeline_balance.pipeline.run.gradients.norm import clip_gradients_, gradient_norm
from pipeline_balance.pipeline.run.replicas import ReplicaMeans
from pipeline_balance.pipeline.run.stages import PipelineGroups
from pipeline_balance.pipeline.run.ties import sum_tied_gradients, ties_of
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError

_MARK = "_left"
# how many gradients are marked with some of their numbers, and with how many: what a step can spare
_SOME, _FEW = 8, 64
_RIGHT = (
    "To clip, write pipe.step(inputs, labels, max_norm=...); to scale, scaler = pipe.scaler() and "
    "pipe.step(inputs, labels, scaler=scaler); a loss of your own belongs into loss_fn, or into a layer by "
    "pipeline_balance.add_loss; anything else into pipe.optimizer.register_step_pre_hook"
)


class Gradients:
    """This rank's gradients, between backward and the next batch.

    Args:
        owned: The model's parameters.
        groups: The pipeline's communicators.
        experts: Layers whose shared experts' gradients stay out of the means.
        meter: Times the means.
    """

    def __init__(self, owned: Ownership, groups: PipelineGroups, experts: StageExperts, meter: Meter) -> None:
        self.owned, self.groups, self.experts = owned, groups, experts
        self._means = ReplicaMeans(groups.column, meter.noted)
        # experts' gradients are averaged apart, over the processes that have the same experts
        copies = groups.rank_assignment.copies
        self._copies = ReplicaMeans(copies) if copies is not None and copies.size > 1 else None
        self._open = False
        self._added_up: list[nn.Parameter] = []

    def open(self, *, update: bool) -> None:
        """Begin a pass; with `update`, stages that are done have all of the update's gradients."""
        self._open = update

    def leave(self) -> None:
        """Mark the gradients that a pass, an update or a move has left, see `check_left`."""
        # A mark is an attribute of the gradient, so it goes with it. It holds the gradient's version, and of some a few
        # of their numbers: `GradScaler.unscale_` and `grad.data` change no version.
        held = [p.grad for p in self.owned.parameters.values() if p.grad is not None]
        for i, grad in enumerate(held):
            vars(grad)[_MARK] = (grad._version, _numbers(grad) if i % -(-len(held) // _SOME) == 0 else None)

    def keep(self) -> None:
        """Keep the gradients of a pass without an update, which are to be there in the next one, see `check_kept`."""
        self.leave()
        self._added_up = [p for p in self.owned.parameters.values() if p.grad is not None]

    def check_left(self, *, used: bool, midway: bool) -> None:
        """Raise `SpecError` if gradients are others than this left: whatever made them so would have no effect.

        Zeros do not count, except `midway`, in an update that is under way.
        """
        changed = [
            name
            for name, p in self.owned.parameters.items()
            if p.grad is not None
            and not _as_left(p.grad)
            and (midway or bool(p.grad.any()))
            # a `PrunedLinear` that was pruned since has made another gradient of the one that was left
            and not ((used or midway) and vars(p.grad).get("pruned") == p.grad._version)
        ]
        if not changed:
            return
        named = changed[0] + (f" and {len(changed) - 1} more parameters" if len(changed) > 1 else "")
        if midway:
            raise SpecError(
                f"the gradients of {named} were changed in mid-update: the step with update=True averages them, and "
                f"scales them by the labels. {_RIGHT}; drop_gradients() gives an update up"
            )
        if used:
            raise SpecError(f"the gradients of {named} were changed after the step that has used them. {_RIGHT}")
        raise SpecError(f"{named} has a gradient that no step has made: call zero_grad() before. {_RIGHT}")

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
        """Begin to average what a stage of these units has, once it has run its last backward action of the pass."""
        if self._open:
            for unit in units:
                # a tied parameter waits for all its units, see `complete`
                names = [n for n in self.owned.of([unit]) if self.owned.units_of[n] == (unit,)]
                mine = [self.owned.parameters[n] for n in names]
                self._means.start([p for p in mine if p not in self.experts.parameters], unit)

    def complete(self, stage_map: StageMap) -> None:
        """Make every gradient that of the whole update, once the last pass has ended; collective."""
        self._open, self._added_up = False, []
        self.owned.model.settle_gradients(self.groups.rank_assignment.shards)
        ties = ties_of(self.owned)
        # means first, then sums over stages: both in one order on all holders
        mine = [t.parameter for t in ties if self.groups.rank in t.holders(stage_map)]
        mine += [p for n, p in self.owned.parameters.items() if n in self.owned.split and not p.is_meta]
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
        """Multiply the gradients by `factor`."""
        if factor != 1.0:
            for parameter in self.owned.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def clip_(self, stage_map: StageMap, max_norm: float, device: torch.device) -> float:
        """Scale the gradients so that the model's norm is at most `max_norm`; collective.

        Args:
            stage_map: Which rank runs which layers.
            max_norm: What the norm is to be at most.
            device: Where figures travel.

        Returns:
            The norm before, the same on all ranks.
        """
        owned, home, rank = self.owned, stage_map.assignment(), self.groups.rank
        # a tied parameter counts on the rank of its first unit only, rows of a split one wherever they are
        mine = [
            n for n in owned.of(stage_map.layers_on(rank)) if n in owned.split or home[owned.units_of[n][0]] == rank
        ]
        # the gradients of others are copies of replica 0's, or of the first process that has the same experts
        replica, copies = self.groups.replica, self.groups.rank_assignment.copies
        shared = self.experts.parameters if copies is None or copies.rank == 0 else set()
        mine = [n for n in mine if owned.model.measures(p := owned.parameters[n], replica) or p in shared]
        norm = gradient_norm(owned.parameters, set(mine), self.groups.world, device=device)
        clip_gradients_(owned.parameters, max_norm, norm)
        return float(norm)

    def drop(self) -> None:
        """Forget the gradients."""
        self._added_up = []
        for parameter in self.owned.parameters.values():
            parameter.grad = None

    def close(self) -> None:
        """End the thread that averages."""
        self._means.close()
        if self._copies is not None:
            self._copies.close()


def _numbers(grad: Tensor) -> Tensor:
    """The bits of a gradient's first few."""
    here = local(grad).detach()
    # without reshaping, which would copy all of a gradient that is not contiguous
    row = here[(0,) * (here.dim() - 1)] if here.dim() and here.numel() else here.reshape(-1)
    return row[:_FEW].clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _as_left(grad: Tensor) -> bool:
    version, numbers = vars(grad).get(_MARK, (None, None))
    return bool(version == grad._version and (numbers is None or torch.equal(numbers, _numbers(grad))))
