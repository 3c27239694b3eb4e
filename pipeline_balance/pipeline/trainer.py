"""`PipelineTrainer`: training over pipeline stages that can be cut anew between steps.

Shape legend: L layers, P ranks, M microbatches. `stages` builds what runs a stage map, `rebuild` moves the training
state to another map, and this module runs the steps in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline_balance.control.measure import Meter, PipelineLayer, RankTimes, gather_costs, local_costs
from pipeline_balance.pipeline.rebuild import Prepared, Rebuilt, StateMover
from pipeline_balance.pipeline.stages import (
    BuildLayer,
    LossFn,
    MakeOptimizer,
    PipelineConfig,
    PipelineGroups,
    StageBuilder,
)
from pipeline_balance.pipeline.training_state import gather_json
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import LayerCost, StageMap
from prophet.errors import SpecError
from prophet.ranks.collective import Collective, Operation
from prophet.state.transition import State

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class PipelineTrainer:
    """A model of L layers in a row, trained over the ranks of `group`, with stages that may change between steps.

    `build_layer(i)` makes layer i, a module from one tensor to one tensor, equal on every rank that calls it;
    `make_optimizer` makes an optimizer for a list of parameters, with the learning rate then in force.
    `loss_fn(output, target)` is the mean over a microbatch; a step's gradient is the mean over microbatches.
    `boundaries` are L + 1 example tensors of one microbatch: the input of every layer in turn, and the output of the
    last; shapes and types matter, values do not.

    `stage_map` is None for a process that enters a group whose others call `change_group`: it starts without layers and
    takes the map from them. `meter` takes the place of one with the wall clock.
    """

    def __init__(
        self,
        build_layer: BuildLayer,
        stage_map: StageMap | None,
        *,
        loss_fn: LossFn,
        make_optimizer: MakeOptimizer,
        boundaries: Sequence[Tensor],
        config: PipelineConfig,
        group: ProcessGroup | None = None,
        meter: Meter | None = None,
    ) -> None:
        if stage_map is not None and len(boundaries) != stage_map.layers + 1:
            raise SpecError(f"boundaries needs {stage_map.layers + 1} example tensors, got {len(boundaries)}")
        self.config = config
        self.meter = meter if meter is not None else Meter()
        self.refreshed = 0
        self.groups = PipelineGroups(group, config.timeout_s)
        self.builder = StageBuilder(
            build_layer=build_layer,
            loss_fn=loss_fn,
            make_optimizer=make_optimizer,
            boundaries=[b.detach().to("meta") for b in boundaries],
            config=config,
            groups=self.groups,
            meter=self.meter,
        )
        self.mover = StateMover(self.builder, config.budget_bytes)
        layers: dict[int, PipelineLayer] = {}
        if stage_map is None:
            stage_map = self._shared_map(None)
        else:
            self.builder.check_map(stage_map)
            layers = self.builder.new_layers(stage_map)
        parameters = [p for i in sorted(layers) for p in layers[i].parameters()]
        optimizer = make_optimizer(parameters) if parameters else None
        self._stages = self.builder.build(stage_map, layers, optimizer)

    # --- what is in force -------------------------------------------------------------------------------------

    @property
    def stage_map(self) -> StageMap:
        """The stage map in force."""
        return self._stages.stage_map

    @property
    def layers(self) -> dict[int, PipelineLayer]:
        """This rank's layers by number; empty without a stage."""
        return self._stages.layers

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of this rank's layers; None without a stage."""
        return self._stages.optimizer

    @property
    def collective(self) -> Collective:
        """Communication among all ranks, whether they run a stage or not."""
        return self.groups.collective

    @property
    def rank(self) -> int:
        return self.groups.rank

    @property
    def ranks(self) -> int:
        """Ranks that could run a stage, whether they do or not."""
        return self.groups.collective.size

    # --- training ---------------------------------------------------------------------------------------------

    def forward_backward(self, inputs: Tensor | None, target: Tensor | None) -> float | None:
        """All microbatches forward and backward; gradients are left in place.

        `inputs` [M * microbatch, ...] matters on the rank of the first stage, `target` on that of the last, which
        returns the mean loss; all others return None.
        """
        if self._stages.runtime is None:
            return None
        first = self.stage_map.ranks[0] == self.rank
        last = self.stage_map.ranks[-1] == self.rank
        if (first and inputs is None) or (last and target is None):
            raise SpecError("the first stage needs inputs and the last one a target")
        losses: list[Tensor] = []
        self.meter.begin_step()
        # PyTorch 2.11 compares strides of microbatches with those of the example, which is contiguous
        args = (inputs.contiguous(),) if first and inputs is not None else ()
        options: dict[str, Any] = {"target": target, "losses": losses} if last else {}
        self._stages.runtime.step(*args, **options, return_outputs=False)
        self.meter.end_step()
        return float(torch.stack([x.detach() for x in losses]).mean()) if last else None

    def step(self, inputs: Tensor | None, target: Tensor | None) -> float | None:
        """One training step: forward, backward, optimizer. Returns the mean loss where the last stage runs."""
        self.drop_gradients()
        loss = self.forward_backward(inputs, target)
        if self.optimizer is not None:
            self.optimizer.step()
        return loss

    def drop_gradients(self) -> None:
        """Forget gradients that the optimizer has used, so that they do not travel."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    # --- measuring --------------------------------------------------------------------------------------------

    def measure(self) -> list[LayerCost]:
        """Costs of all layers since the last rebuild or `meter.reset()`; collective over all ranks, equal on all."""
        return gather_costs(self.local_costs(), self.stage_map.layers, self.collective, self.config.device)

    def local_costs(self) -> dict[int, LayerCost]:
        """Costs of this rank's layers."""
        stages = {s: self.stage_map.layers_of(s) for s in self.stage_map.stages_on(self.rank)}
        return local_costs(self.layers, stages, self.meter, self.optimizer)

    def times(self) -> RankTimes:
        """Where this rank's time went since the last rebuild."""
        return self.meter.times()

    # --- changing stages --------------------------------------------------------------------------------------

    def prepare(self, stage_map: StageMap, collective: Collective) -> Prepared:
        """Do ahead what a change to `stage_map` needs besides the state itself; collective over all ranks.

        With the `side_collective` it may run in another thread while a step is under way.
        """
        return self.mover.prepare(self._stages, stage_map, collective)

    def side_collective(self) -> Collective:
        """A separate communicator over all ranks, for use beside a step; made at the first call, by all ranks."""
        return self.groups.side()

    def rebuild(
        self, stage_map: StageMap, *, durations: Durations | None = None, prepared: Prepared | None = None
    ) -> Rebuilt:
        """Change to `stage_map`, between steps; collective over all ranks, whether they run a stage or not.

        `durations` of the new stages, equal on all ranks, let the schedule order what is ready by when it will be.
        `prepared` is what `prepare` made for this map; where a rank's state has another shape by now it is not used.
        Raises `TransitionError` on every rank, with the old stages still in force, if the state cannot be moved.
        """
        self._stages, done = self.mover.rebuild(self._stages, stage_map, durations=durations, prepared=prepared)
        return done

    def refresh(self) -> Rebuilt:
        """Build the stages anew, after layers were frozen or thawed (`requires_grad_`); collective, between steps."""
        self.refreshed += 1
        return self.rebuild(self.stage_map)

    def adopt(
        self, layers: dict[int, PipelineLayer], state: State, scalars: Mapping[str, Any], frozen: set[str]
    ) -> None:
        """Go on with these layers of the map in force and their state, named as `collect` does; collective."""
        self._stages = self.mover.adopt(self.stage_map, layers, state, scalars, frozen)

    # --- changing groups --------------------------------------------------------------------------------------

    def leave_group(self) -> None:
        """Let go of the present group's communicators, before it is destroyed; `change_group` goes on in another."""
        self._stages = replace(self._stages, runtime=None)
        self.groups.leave()

    def change_group(self, group: ProcessGroup | None, number: Mapping[int, int] | None) -> None:
        """Go on in another group (None: all processes); collective over its members, between steps.

        `number` maps this rank's old group's ranks to the new one's and must hold every rank that runs a stage; None
        where this process comes back and knows no stages. `leave.membership.Membership` calls this.
        """
        now, known = self._stages, None
        if number is not None:
            lost = sorted(set(now.stage_map.used_ranks) - set(number))
            if lost:
                raise SpecError(f"ranks {lost} still run stages and cannot leave: rebuild without them first")
            known = StageMap(now.stage_map.boundaries, tuple(number[r] for r in now.stage_map.ranks))
        self.groups.enter(group)
        self._stages = self.builder.build(self._shared_map(known), now.layers, now.optimizer, now.durations)

    def _shared_map(self, known: StageMap | None) -> StageMap:
        """The stage map of the first rank that knows it; collective."""
        mine = [list(known.boundaries), list(known.ranks)] if known is not None else None
        said = gather_json(mine, self.collective, self.config.device, Operation("adopting the stage map"))
        found = next((s for s in said if s is not None), None)
        if found is None:
            raise SpecError("no rank of the group knows the stage map")
        return StageMap(tuple(found[0]), tuple(found[1]))
