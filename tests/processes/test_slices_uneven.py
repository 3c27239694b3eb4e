"""Slices of equal cost, many stages, pruned and balanced layers, on real processes: as the whole model trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the models are transformers'")

from pipeline_balance import attach
from pipeline_balance.control.controller import ControllerConfig, MoveCost
from pipeline_balance.dynamics.pruning import PrunedLinear, note_shared
from pipeline_balance.pipeline.model.adapter import TransformersModel
from pipeline_balance.slices.options import SliceOptions
from pipeline_balance.slices.parts import Sliced
from pipeline_balance.spec import StageMap
from tests.helpers import sliced_layers as own
from tests.helpers.launch import run_gloo
from tests.helpers.sliced_models import alone, apart, batch_of, model_of, no_update, pipe_of
from tests.helpers.transformers_models import LAYERS

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
UNITS, TOKENS = LAYERS + 2, 19
EXACT, SINGLE = 1e-10, 1e-5
# family, kind of batch, slices, stages per rank, order, whether slices are of equal cost, options of the model
Case = tuple[str, str, int, int, str, str, dict[str, Any]]
FEW: list[Case] = [("qwen3", "packed", 4, 2, "aligned", "uneven", {"tied": True, "recompute": True})]
MORE: list[Case] = [
    ("llama", "silent", 5, 1, "minimal", "uneven", {"frozen": 2}),
    ("qwen2", "padded", 8, 2, "aligned", "uneven", {}),
    ("mixtral", "plain", 4, 1, "aligned", "uneven", {"router_aux_loss_coef": 3.0}),
]
WIDE: list[Case] = [
    ("qwen3", "packed", 8, 2, "aligned", "uneven", {"num_hidden_layers": 6, "tied": True}),
    ("llama", "silent", 4, 2, "minimal", "none", {"num_hidden_layers": 6, "recompute": True}),
    ("qwen3_moe", "plain", 4, 1, "minimal", "uneven", {"router_aux_loss_coef": 3.0}),
]


def _tokens(balance: str) -> int:
    return TOKENS if balance == "uneven" else 16


def _one_step(rank: int, size: int, cases: list[Case]) -> list[tuple[float, dict[str, Tensor], int]]:
    found = []
    for family, kind, slices, stages, order, balance, options in cases:
        pipe = pipe_of(model := model_of(family, **options), slices, stages=stages, order=order, balance=balance)
        loss = pipe.step(*batch_of(kind, tokens=_tokens(balance)))
        assert isinstance(pipe.model, Sliced)
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and not p.is_meta}
        found.append((loss, grads, len(pipe.model.store)))
    return found


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, FEW),
        pytest.param(1, FEW + MORE, marks=pytest.mark.slow),
        pytest.param(2, MORE, marks=pytest.mark.slow),
        pytest.param(4, WIDE, marks=pytest.mark.slow),
    ],
)
def test_slices_of_equal_cost_have_the_loss_and_gradients_of_the_whole(size: int, cases: list[Case]) -> None:
    results = run_gloo(_one_step, size, cases, timeout_s=300.0)
    for i, (family, kind, _, _, _, balance, options) in enumerate(cases):
        allowed = SINGLE if family in ("mixtral", "qwen3_moe") else EXACT
        losses, want, _ = alone(model_of(family, **options), [kind], make=no_update, tokens=_tokens(balance))
        seen: set[str] = set()
        for loss, grads, left in (said[i] for said in results):
            assert left == 0
            assert abs(loss / losses[0] - 1) <= allowed
            assert apart(grads, want) <= allowed, family
            seen |= grads.keys()
        assert seen == want.keys()


# --- twenty steps, moves by hand and by the controller ---------------------------------------------------------

STEPS = 20
MAPS = [StageMap((0, 2, 4), (1, 0)), StageMap((0, 3, 4), (0, 1)), StageMap((0, 4), (1,))]


def _twenty(rank: int, size: int, replicas: int, how: str) -> tuple[list[float], dict[str, Tensor], int]:
    cut, stage_map = SliceOptions(4, balance="uneven", crossover_tokens=4), StageMap((0, 1, 4), (0, 1))
    pipe = own.pipe(own.layers(), cut, replicas=replicas, stage_map=stage_map, seed=own.SEED)
    config = ControllerConfig(every_steps=3, measure_steps=2, min_gain=0.0, move_cost=MoveCost(fixed_s=0.0))
    controller = attach(pipe, config=config) if how == "attach" else None
    losses = []
    for update in range(STEPS):
        inputs, labels = own.batch(update, 0)
        mine = {n: t.chunk(replicas)[pipe.replica] for n, t in inputs.items()}
        step = pipe.step if controller is None else controller.step
        losses.append(step(mine, labels.chunk(replicas)[pipe.replica], max_norm=own.MAX_NORM))
        if controller is None and update % 6 == 3:
            costs = pipe.measure()
            assert all(c.forward_s > 0 for c in costs)
            pipe.rebuild(MAPS[update % len(MAPS)])
    decided = len(controller.decisions) if controller is not None else 0
    return losses, pipe.state_dict(), decided


@pytest.mark.parametrize(
    ("size", "replicas", "how"),
    [
        pytest.param(2, 1, "attach", marks=pytest.mark.slow),
        pytest.param(2, 1, "rebuild", marks=pytest.mark.slow),
        pytest.param(4, 2, "rebuild", marks=pytest.mark.slow),
    ],
)
def test_twenty_steps_of_adam_with_moves(size: int, replicas: int, how: str) -> None:
    options = SliceOptions(4, balance="uneven", crossover_tokens=4)
    losses, state = own.one_process(STEPS, own.starts_of(options), 1)
    results = run_gloo(_twenty, size, replicas, how)
    for got, _, decided in results:
        assert got == pytest.approx(losses, rel=EXACT)
        assert (decided >= 4) == (how == "attach")
    assert apart(results[0][1], state) <= 1e-8


# --- pruned layers, microbatches of different lengths ----------------------------------------------------------


def _pruned() -> Any:
    """A Llama whose feed-forward layers have lost a half of their weights; products with few are sparse."""
    model = model_of("llama")
    generator = torch.Generator().manual_seed(3)
    for layer in model.base_model.layers:
        whole = layer.mlp.up_proj
        pruned = PrunedLinear(whole.in_features, whole.out_features, bias=False, sparse_below=0.6).double()
        pruned.load_state_dict(whole.state_dict(), strict=False)
        note_shared([pruned])
        pruned.prune(torch.rand(whole.weight.shape, generator=generator) < 0.5, ())
        layer.mlp.up_proj = pruned
    return model


def _pruned_and_mixed(rank: int, size: int) -> tuple[list[float], dict[str, Tensor]]:
    pipe = pipe_of(model := _pruned(), 4, balance="uneven", make_optimizer=no_update)
    loss = pipe.step(*batch_of())
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and not p.is_meta}
    given = [batch_of(rows=2, tokens=t) for t in (19, 12)]
    return [loss, pipe.step([x for x, _ in given], [y for _, y in given])], grads


@pytest.mark.slow
def test_pruned_layers_and_microbatches_of_different_lengths() -> None:
    losses, want, _ = alone(_pruned(), ["plain"], make=no_update)
    model = _pruned()
    counting, mixed, count = TransformersModel(model), 0.0, 0.0
    for tokens in (19, 12):
        (part,) = counting.cut(*batch_of(rows=2, tokens=tokens), 1)
        mixed += float(model(**part.inputs, labels=part.labels).loss.detach()) * counting.counted(part)
        count += counting.counted(part)
    for (loss, other), grads in run_gloo(_pruned_and_mixed, 2):
        assert loss == pytest.approx(losses[0], rel=EXACT)
        assert other == pytest.approx(mixed / count, rel=EXACT)
        assert apart(grads, want) <= EXACT
