"""Decisions that are worked out beside a step, on a pipeline that only pretends to train."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline_balance.control.controller import Controller, ControllerConfig, MoveCost
from pipeline_balance.pipeline.measure.links import LinkTimes, Noted, gather_links
from pipeline_balance.pipeline.measure.meter import Meter, gather_costs
from pipeline_balance.pipeline.model.layers import ModuleChain
from pipeline_balance.pipeline.model.ownership import Ownership
from pipeline_balance.pipeline.move.transaction import Prepared, Switched
from pipeline_balance.pipeline.run.progress import Progress
from pipeline_balance.pipeline.run.stages import PipelineConfig
from pipeline_balance.spec import LayerCost, StageMap
from prophet.errors import SpecError
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld

NOTHING = torch.zeros(0)
LATE = [1.0, 1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0]


class _Pretended:
    """One rank of a pipeline; nothing moves. A step that `chooses` slices does not say when it begins."""

    fixed_microbatches = "it only pretends"

    in_job = False

    def __init__(self, collective: Collective, *, chooses: bool = False, timeout_s: float = 10.0) -> None:
        self.collective = collective
        self.groups = SimpleNamespace(world=collective)
        self.ranks, self.progress = collective.size, Progress(first_ranks=collective.size)
        self.failures = SimpleNamespace(during=lambda *_: nullcontext())
        self.model = ModuleChain([nn.Identity()] * 8, nn.functional.mse_loss)
        self.owned = Ownership(self.model)
        self.config = PipelineConfig(microbatches=4, timeout_s=timeout_s)
        self.stage_map = StageMap.contiguous((0, 4, 8)) if collective.size == 2 else StageMap.contiguous((0, 8))
        self.meter = Meter()
        self.chooses = chooses
        self.called_before_pass: Callable[[], None] | None = None
        # which steps were measured
        self.measured: list[bool] = []
        self.threads: set[str] = set()
        self.held_up = threading.Event()
        self.held_up.set()

    def side_collective(self) -> Collective:
        self.threads.add(threading.current_thread().name)
        assert self.held_up.wait(10.0)
        return self.collective

    def beside(self, call: Callable[[], Any]) -> Callable[[], Any]:
        return call

    def before_update(self, call: Callable[[], None]) -> None:
        self.called_before_update = call

    def before_pass(self, call: Callable[[], None] | None) -> None:
        self.called_before_pass = call

    def local_costs(self) -> dict[int, LayerCost]:
        return {i: LayerCost(forward_s=LATE[i]) for i in self.stage_map.layers_on(self.collective.rank)}

    def gather_costs(self, local: dict[int, LayerCost], collective: Collective) -> list[LayerCost]:
        return gather_costs(local, self.stage_map.layers, collective)

    def gather_links(self, noted: Noted, collective: Collective) -> LinkTimes:
        return gather_links(noted, self.stage_map, 4, collective, rows=[range(collective.size)])

    def step(self, inputs: Tensor, labels: Tensor | None, **_: Any) -> float:
        call, self.called_before_pass = self.called_before_pass, None
        if call is not None and self.chooses:
            self.meter.enabled = True
        elif call is not None:
            call()
        self.measured.append(self.meter.enabled)
        return 0.0


def _ahead(**options: Any) -> ControllerConfig:
    return ControllerConfig(
        every_steps=1, measure_steps=1, prepare_in_backward=True, move_cost=MoveCost(fixed_s=1e9), **options
    )


def _decide(collective: Collective) -> tuple[list[str], set[str]]:
    # the second rank begins after the step
    pipeline = _Pretended(collective, chooses=collective.rank == 1)
    controller = Controller(pipeline, config=_ahead())  # type: ignore[arg-type]
    for _ in range(4):
        controller.step(NOTHING, None)
    return [f"{d.current_makespan_s} {d.reason}" for d in controller.decisions], pipeline.threads


def test_all_ranks_decide_alike_whenever_they_begin() -> None:
    (first, threads), (second, _) = ThreadWorld(2).run(_decide)
    assert first == second
    # none beside the first step: no layer has been timed before
    assert len(first) == 3
    assert all("would not pay" in said for said in first)
    assert any(name == "prepares a move" for name in threads)


def test_the_first_rank_logs_what_was_decided(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "pipeline_balance.control"):
        ThreadWorld(2).run(_decide)
    said = [record.message for record in caplog.records if record.name.startswith("pipeline_balance.control")]
    # the third decision is carried out when a fifth step begins
    assert len(said) == 2
    assert all(line.startswith("step 0: ") and "would not pay" in line for line in said)


def test_a_decision_that_does_not_come_is_an_error() -> None:
    pipeline = _Pretended(ThreadWorld(1).collective(0), timeout_s=0.05)
    controller = Controller(pipeline, config=_ahead())  # type: ignore[arg-type]
    controller.step(NOTHING, None)
    pipeline.held_up.clear()
    with pytest.raises(TimeoutError, match=r"no decision was worked out within 0\.05 s"):
        controller.step(NOTHING, None)
    pipeline.held_up.set()


def test_what_goes_wrong_beside_a_step_is_raised_after_it() -> None:
    pipeline = _Pretended(ThreadWorld(1).collective(0))
    controller = Controller(pipeline, config=_ahead())  # type: ignore[arg-type]
    controller.step(NOTHING, None)
    # the model has no layer 9
    pipeline.local_costs = lambda: {9: LayerCost(forward_s=1.0)}  # type: ignore[method-assign]
    with pytest.raises(IndexError):
        controller.step(NOTHING, None)


def test_a_step_that_fails_leaves_nothing_that_another_one_would_do() -> None:
    pipeline = _Pretended(ThreadWorld(1).collective(0))
    controller = Controller(pipeline, config=_ahead())  # type: ignore[arg-type]
    controller.step(NOTHING, None)
    nothing, asked = pipeline.called_before_update, []

    def unreadable(*_: Any, **__: Any) -> float:
        asked.append(pipeline.called_before_update)
        raise SpecError("the batch cannot be read")

    pipeline.step = unreadable  # type: ignore[method-assign]
    with pytest.raises(SpecError):
        controller.step(NOTHING, None)
    assert asked[0] is not nothing
    assert pipeline.called_before_update is nothing
    assert pipeline.called_before_pass is None


def test_layers_move_only_after_an_update() -> None:
    pipeline = _Pretended(ThreadWorld(1).collective(0))
    controller = Controller(pipeline, config=ControllerConfig(every_steps=1, measure_steps=1))  # type: ignore[arg-type]
    for update, decisions in ((False, 0), (False, 0), (True, 1), (False, 1), (True, 2)):
        controller.step(NOTHING, None, update=update)
        assert len(controller.decisions) == decisions


class _Moving(_Pretended):
    """Its layers do move."""

    def prepare(self, stage_map: StageMap, collective: Collective, *, early: bool) -> Prepared:
        # nothing has travelled, as where there is no memory for it
        assert early
        return Prepared(target=stage_map)

    def rebuild(self, stage_map: StageMap, **_: Any) -> Switched:
        self.stage_map = stage_map
        return Switched(
            seconds=0.0, link_bytes={}, messages=0, sent_bytes=0, received_bytes=0, buffer_bytes=0, peak_bytes=0
        )


def _decisions_by_step(collective: Collective) -> list[int]:
    config = replace(_ahead(), move_cost=MoveCost(fixed_s=0.0))
    controller, made = Controller(_Moving(collective), config=config), []  # type: ignore[arg-type]
    for _ in range(4):
        controller.step(NOTHING, None)
        made.append(len(controller.decisions))
    assert [d.move for d in controller.decisions] == [True, False]
    return made


def test_layers_that_have_just_moved_are_timed_before_the_next_decision() -> None:
    # the move is made when the third step begins, and the fourth one finds times of the third
    assert ThreadWorld(2).run(_decisions_by_step) == [[0, 1, 1, 2]] * 2


def _after_freezing(change: Callable[[_Pretended], None]) -> list[tuple[int, list[float]]]:
    """Units and forward seconds of the decisions of two steps, before the second of which a layer is frozen."""
    pipeline = _Pretended(ThreadWorld(1).collective(0))
    pipeline.model = ModuleChain([nn.Linear(1, 1) for _ in range(8)], nn.functional.mse_loss)
    pipeline.owned = Ownership(pipeline.model)
    controller = Controller(pipeline, config=_ahead())  # type: ignore[arg-type]
    decide, seen = controller.learner.decide, list[tuple[int, list[float]]]()

    def watched(costs: Any, current: StageMap) -> Any:
        seen.append((controller.learner.microbatches, [cost.forward_s for cost in costs]))
        return decide(costs, current)

    controller.learner.decide = watched  # type: ignore[method-assign]
    for _ in range(3):
        controller.step(NOTHING, None)
    del seen[:-1]
    change(pipeline)
    for parameter in pipeline.model.units[0].parameters():
        parameter.requires_grad_(False)
    controller.step(NOTHING, None)
    return seen


def test_costs_of_before_are_those_of_other_slices() -> None:
    """A decision from costs that were not measured again counts slices that have been chosen since."""

    def cut(pipeline: _Pretended) -> None:
        pipeline.model.slicing = SimpleNamespace(slices=4, stages_per_rank=1)  # type: ignore[assignment]

    whole, sliced = _after_freezing(cut)
    assert whole == (4, LATE)
    assert sliced == (16, [s / 4 for s in LATE])


def test_costs_of_before_are_none_of_other_microbatches() -> None:
    def double(pipeline: _Pretended) -> None:
        pipeline.config = replace(pipeline.config, microbatches=8)

    # nothing is decided until layers have been measured
    assert _after_freezing(double) == [(4, LATE)]
    assert len(_after_freezing(lambda _: None)) == 2


def test_only_steps_whose_times_a_decision_sees_are_measured() -> None:
    for chooses in (False, True):
        pipeline = _Pretended(ThreadWorld(1).collective(0), chooses=chooses)
        config = replace(_ahead(), every_steps=4, measure_steps=2)
        controller = Controller(pipeline, config=config)  # type: ignore[arg-type]
        for _ in range(8):
            controller.step(NOTHING, None)
        assert len(controller.decisions) == 2
        # a step that has chosen its slices has forgotten what was measured before, and is measured itself
        assert pipeline.measured == [False, True, True, chooses] * 2


class _Freezing(_Pretended):
    """Its layers can be frozen, and a batch may be refused. What it has measured is of the last step."""

    def __init__(self, collective: Collective) -> None:
        super().__init__(collective)
        self.model = ModuleChain([nn.Linear(1, 1) for _ in range(8)], nn.functional.mse_loss)
        self.owned = Ownership(self.model)
        self.refuses = False
        self.weight_s = [1.0] * 8

    def freeze(self, layer: int, frozen: bool = True) -> None:
        for parameter in self.model.units[layer].parameters():
            parameter.requires_grad_(not frozen)

    def local_costs(self) -> dict[int, LayerCost]:
        return {i: LayerCost(forward_s=1.0, backward_weight_s=s) for i, s in enumerate(self.weight_s)}

    def step(self, inputs: Tensor, labels: Tensor | None, **_: Any) -> float:
        if self.refuses:
            raise SpecError("the batch cannot be read")
        loss = super().step(inputs, labels)
        self.weight_s = [float(next(unit.parameters()).requires_grad) for unit in self.model.units]
        return loss


def _decided_from(pipeline: _Freezing, controller: Controller) -> list[float] | None:
    """The weight gradients that this step's decision counts with; None without a decision."""
    before = len(controller.decisions)
    controller.step(NOTHING, None)
    if len(controller.decisions) == before:
        return None
    controller._carry_out(controller._decided)  # type: ignore[arg-type]
    return [cost.backward_weight_s for cost in controller.costs]


def _rare() -> ControllerConfig:
    return replace(_ahead(), every_steps=8)


def test_layers_frozen_before_a_batch_that_is_refused_are_still_known_in_the_next_step() -> None:
    pipeline = _Freezing(ThreadWorld(1).collective(0))
    controller = Controller(pipeline, config=_rare())  # type: ignore[arg-type]
    assert [_decided_from(pipeline, controller) for _ in range(8)][-1] == [1.0] * 8
    pipeline.freeze(0)
    pipeline.refuses = True
    with pytest.raises(SpecError):
        controller.step(NOTHING, None)
    pipeline.refuses = False
    assert _decided_from(pipeline, controller) == [0.0] + [1.0] * 7


def test_what_a_thawed_layer_costs_is_not_foreseen_from_when_it_was_frozen() -> None:
    pipeline = _Freezing(ThreadWorld(1).collective(0))
    controller = Controller(pipeline, config=_rare())  # type: ignore[arg-type]
    pipeline.freeze(0)
    assert [_decided_from(pipeline, controller) for _ in range(2)] == [None, [0.0] + [1.0] * 7]
    pipeline.freeze(0, frozen=False)
    assert _decided_from(pipeline, controller) is None
    pipeline.freeze(1)
    found = [_decided_from(pipeline, controller) for _ in range(3)]
    assert [one for one in found if one] == [[1.0, 0.0] + [1.0] * 6]
