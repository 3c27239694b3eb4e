"""The controller on real processes: it finds the slow layers, moves others away from them, and keeps the loss."""

from __future__ import annotations

import functools
import hashlib
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeline_balance
from pipeline_balance.control.controller import Controller, ControllerConfig, DecisionMismatch, MoveCost
from pipeline_balance.dynamics.freezing import Freezer, FreezingRule, freeze_prefix, gradient_rates
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld
from tests.helpers.launch import run_gloo
from tests.helpers.pipeline_model import batch, pipeline, plain_step

LAYERS, DIM, MICROBATCHES = 8, 6, 4


class _Slow(nn.Module):
    """A layer whose forward takes a known time that may change with the step; sleeping does not need a core."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.index = index
        self.linear = nn.Linear(DIM, DIM)
        self.seconds = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return torch.tanh(self.linear(x))


def make() -> ElasticPipeline:
    return ElasticPipeline.from_modules(
        [_Slow(i) for i in range(LAYERS)],
        nn.functional.mse_loss,
        make_optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
        microbatches=MICROBATCHES,
        timeout_s=60.0,
    )


def _set_times(run: ElasticPipeline, slow: set[int]) -> None:
    for i, layer in run.layers.items():
        layer.seconds = 12e-3 if i in slow else 1e-3  # type: ignore[assignment]


def _run(rank: int, size: int, balance: bool) -> dict[str, Any]:
    run = make()
    config = ControllerConfig(
        every_steps=6,
        measure_steps=3,
        min_gain=0.1,
        move_cost=MoveCost(fixed_s=1e-3) if balance else MoveCost(fixed_s=1e9),
    )
    balanced = pipeline_balance.attach(run, config=config)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * MICROBATCHES, DIM, generator=generator)
    losses, maps = [], []
    for step in range(24):
        # the load wanders from the first layers to the last
        _set_times(run, {0, 1, 2} if step < 12 else {5, 6, 7})
        losses.append(balanced.step(x, x.flip(0)))
        maps.append(run.stage_map.boundaries)
    overhead = balanced.overhead()
    assert 0 < overhead.fraction < 1
    report = balanced.report
    return {
        "losses": losses,
        "maps": maps,
        "overhead": overhead,
        "trust": balanced.learner.trust,
        "report": report,
        "said": str(report),
    }


@functools.cache
def _still() -> list[dict[str, Any]]:
    return run_gloo(_run, 2, False)


def test_layers_follow_the_load() -> None:
    moved, still = run_gloo(_run, 2, True), _still()
    maps = moved[0]["maps"]
    assert maps == moved[1]["maps"]
    assert maps[0] == (0, 4, 8)
    assert maps[6][1] < 4 < maps[-1][1]
    assert set(still[0]["maps"]) == {(0, 4, 8)}
    assert moved[1]["losses"] == pytest.approx(still[1]["losses"], rel=1e-5)
    assert moved[0]["overhead"].moves >= 2
    check_report(moved[0])
    assert still[0]["said"].startswith("no layer has moved in 24 steps: ")
    # loads stay for two decisions, so most of a gain is still there at the next one
    assert moved[0]["trust"] == moved[1]["trust"] > 0.4
    # what was not taken shows as well how long gains last
    assert still[0]["trust"] > 0.4
    # two and one slow layers in a stage, not three
    assert maps[7][1] <= 2


def check_report(run: dict[str, Any]) -> None:
    """Every change of the stage map is a move, with the time it was made and a gain that the clock has seen."""
    changes = [i for i in range(1, 24) if run["maps"][i] != run["maps"][i - 1]]
    moves = run["report"].moves
    assert [m.step for m in moves] == changes  # a move is made when the next step begins
    for m, line in zip(moves, run["said"].splitlines(), strict=True):
        before, after = run["maps"][m.step - 1], run["maps"][m.step]
        assert m.layers == StageMap.contiguous(before).moves_to(StageMap.contiguous(after))
        assert m.predicted_gain_s > 0
        assert line.startswith(f"step {m.step}: layer")
    # three slow layers of 12 ms a microbatch in one stage, or two: the layers sleep, so a busy machine adds to both
    assert moves[0].measured_gain_s is not None
    assert moves[0].measured_gain_s > 0.1 * moves[0].before_s
    assert "ms measured (" in run["said"]


def _ahead(rank: int, size: int, ahead: bool) -> dict[str, Any]:
    run = make()
    config = ControllerConfig(
        every_steps=1,
        measure_steps=1,
        min_gain=0.1,
        horizon_steps=20,
        move_cost=MoveCost(fixed_s=0.0),
        prepare_in_backward=ahead,
    )
    balanced = pipeline_balance.attach(run, config=config)
    used = []
    plain = run.rebuild

    def watched(*args: Any, **options: Any) -> Any:
        used.append(options["prepared"] is not None)
        return plain(*args, **options)

    run.rebuild = watched  # type: ignore[method-assign]
    x = torch.randn(2 * MICROBATCHES, DIM, generator=torch.Generator().manual_seed(0))
    losses, maps = [], []
    for step in range(14):
        _set_times(run, {0, 1, 2} if step < 7 else {5, 6, 7})
        losses.append(balanced.step(x, x.flip(0)))
        maps.append(run.stage_map.boundaries)
    return {"losses": losses, "maps": maps, "prepared": used, "reasons": [d.reason for d in balanced.decisions]}


def test_a_move_prepared_during_backward_changes_no_loss() -> None:
    moved, still = run_gloo(_ahead, 2, True), _still()
    assert moved[0]["maps"] == moved[1]["maps"]
    assert moved[0]["maps"][5][1] < 4 < moved[0]["maps"][-1][1]
    assert moved[1]["losses"] == pytest.approx(still[1]["losses"][:14], rel=1e-5)
    assert moved[0]["prepared"]
    assert all(moved[0]["prepared"])


FREEZING = FreezingRule(share=0.8, loss_rate=0.5, patience=2, most=5)
CPU = torch.device("cpu")


def _sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def _rows() -> Tensor:
    return torch.randn(2 * MICROBATCHES, DIM, generator=torch.Generator().manual_seed(0))


def _freeze(layers: dict[int, nn.Module], freezer: Freezer, loss: float, collective: Collective) -> int:
    """What a training loop does between two steps: it reads the gradients that the last one has left."""
    frozen = freezer.update(gradient_rates(layers, LAYERS, collective), loss)
    freeze_prefix(layers, frozen)
    return frozen


def _frozen_alone(steps: int) -> tuple[list[float], list[int]]:
    layers = dict(enumerate(_Slow(i) for i in range(LAYERS)))
    optimizer = _sgd([(f"{i}.{n}", p) for i, layer in layers.items() for n, p in layer.named_parameters()])
    freezer, losses, frozen, x = Freezer(LAYERS, FREEZING), [], [], _rows()
    for layer in layers.values():
        layer.seconds = 0.0  # type: ignore[assignment]
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(
            plain_step(
                list(layers.values()),
                x,
                x.flip(0),
                nn.functional.mse_loss,
                microbatches=MICROBATCHES,
                seed=0,
                update=step,
            )
        )
        optimizer.step()
        frozen.append(_freeze(layers, freezer, losses[-1], ThreadWorld(1).collective(0)))
    return losses, frozen


def _freezing(rank: int, size: int, steps: int, balance: bool, ahead: bool = False) -> dict[str, Any]:
    run = make()
    config = ControllerConfig(
        every_steps=4,
        measure_steps=2,
        min_gain=0.1,
        horizon_steps=20,
        move_cost=MoveCost(fixed_s=0.0 if balance else 1e9),
        prepare_in_backward=ahead,
    )
    balanced: Controller = pipeline_balance.attach(run, config=config)
    freezer, x = Freezer(LAYERS, FREEZING), _rows()
    losses, frozen, left = [], [], []
    for step in range(steps):
        if balance:  # where nothing moves, times change nothing
            _set_times(run, {0, 1, 2} if step // 10 % 2 else {5, 6, 7})
        losses.append(balanced.step(x, x.flip(0)))
        left.append(
            {
                f"{i}.{n}": hashlib.sha256(p.grad.numpy().tobytes()).hexdigest()
                for i, layer in run.layers.items()
                for n, p in layer.named_parameters()
                if p.grad is not None
            }
        )
        frozen.append(_freeze(dict(enumerate(run.model.units)), freezer, losses[-1], run.collective))
    early = [move.early for move in balanced.report.moves]
    return {"losses": losses, "frozen": frozen, "left": left, "moves": balanced.overhead().moves, "early": early}


@pytest.mark.parametrize("ahead", [False, True])
def test_a_rule_that_reads_gradients_sees_them_after_every_step(ahead: bool) -> None:
    steps = 40
    moved, still = run_gloo(_freezing, 3, steps, True, ahead), run_gloo(_freezing, 3, steps, False)
    # with momentum a frozen layer has weight and momentum, another one a gradient besides
    assert all(share >= 2 / 3 - 0.01 if ahead else share == 0 for share in moved[0]["early"])
    losses, frozen = _frozen_alone(steps)
    assert moved[0]["moves"] >= 3
    assert still[0]["moves"] == 0
    assert frozen[-1] == FREEZING.most
    assert moved[0]["frozen"] == still[0]["frozen"] == frozen
    assert moved[0]["losses"] == pytest.approx(losses, rel=1e-6)
    for step in range(steps):
        gradients = [{k: v for rank in results for k, v in rank["left"][step].items()} for results in (moved, still)]
        assert gradients[0] == gradients[1]
        assert len(gradients[0]) == 2 * (LAYERS - (frozen[step - 1] if step else 0))


def _disagree(rank: int, size: int) -> str:
    run = make()
    _set_times(run, {0, 1, 2})
    balanced = pipeline_balance.attach(run, config=ControllerConfig(every_steps=1, measure_steps=1))
    # what must be equal on all ranks is not: to this one the move costs nothing, to the other everything
    balanced.learner.move_cost = MoveCost(fixed_s=0.0 if rank == 1 else 1e9)
    x = torch.zeros(2 * MICROBATCHES, DIM)
    try:
        balanced.step(x, x)
    except DecisionMismatch as error:
        return str(error)
    return "no error"


def _to_and_fro(rank: int, size: int) -> tuple[list[float], int]:
    run = make()
    config = ControllerConfig(
        every_steps=2, measure_steps=2, min_gain=0.1, horizon_steps=40, move_cost=MoveCost(fixed_s=0.12)
    )
    balanced = pipeline_balance.attach(run, config=config)
    x = torch.zeros(2 * MICROBATCHES, DIM)
    trust = []
    for step in range(16):
        # what is slow changes with every decision
        _set_times(run, {0, 1, 2} if step // 2 % 2 else {5, 6, 7})
        balanced.step(x, x)
        trust.append(balanced.learner.trust)
    return trust, balanced.overhead().moves


def test_gains_that_do_not_last_are_believed_less() -> None:
    (trust, moves), other = run_gloo(_to_and_fro, 2)
    assert (trust, moves) == other
    assert trust[-1] < 0.3
    # each of these moves still paid: two slow steps follow, and a move takes less than one
    assert moves >= 1


def test_ranks_that_decide_differently_say_so() -> None:
    for said in run_gloo(_disagree, 2):
        assert "ranks [1] decided on another stage map" in said


def _frozen_just_now(rank: int, size: int, every: int, frozen_at: int, thawed_at: int) -> list[tuple[int, list[bool]]]:
    """Of every decision beside a step that step, and which layers' backward has been timed."""
    run = pipeline()
    controller = Controller(run, config=ControllerConfig(every_steps=every, measure_steps=1, prepare_in_backward=True))
    learner, seen = controller.learner, []
    decide = learner.decide

    def noted(costs: Any, current: StageMap) -> Any:
        seen.append((run.progress.updates, [c.backward_input_s + c.backward_weight_s > 0 for c in costs]))
        return decide(costs, current)

    learner.decide = noted  # type: ignore[method-assign]
    for step in range(8):
        if step in (frozen_at, thawed_at):
            for parameter in run.model.units[0].parameters():
                parameter.requires_grad_(step == thawed_at)
        controller.step(*batch(step))
    return seen


def test_a_decision_knows_what_was_frozen_just_now_and_waits_for_what_was_thawed() -> None:
    (seen,) = run_gloo(_frozen_just_now, 1, 1, 3, 5)
    # not in the first step, nor in the one with a layer whose gradients were never timed
    assert [step for step, _ in seen] == [1, 2, 3, 4, 6, 7]
    assert [timed[0] for _, timed in seen] == [True, True, False, False, True, True]
    assert all(all(timed[1:]) for _, timed in seen)


def test_what_was_known_of_frozen_layers_is_soon_measured() -> None:
    (seen,) = run_gloo(_frozen_just_now, 1, 4, 4, 8)
    # the next decision of the interval would come in step 8
    assert [step for step, _ in seen] == [3, 4, 6]
