"""Router losses of other libraries beside ours: the scale at even routing, and what becomes of it over microbatches.

docs/engine.md has the table; a row of it that changes with a library's release fails here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import prophet
from prophet.experts.gate import Gate
from tests.helpers.small_sft import small_sft
from tests.helpers.small_trainer import small_mixtral, small_trainer

EXPERTS, TOP_K, TOKENS = 8, 2, 32


def logits(even: bool) -> Tensor:
    """[N, E]: all experts are chosen equally often, with equal scores; or all tokens choose the first two, by half."""
    first = torch.arange(TOKENS) % EXPERTS if even else torch.zeros(TOKENS, dtype=torch.long)
    made = torch.full((TOKENS, EXPERTS), -30.0)
    made.scatter_(1, torch.stack((first, (first + 1) % EXPERTS), dim=1), 30.0)
    return made + 1e-3 * torch.nn.functional.one_hot(first, EXPERTS)  # else the order of equals decides


EVEN, ON_TWO = logits(True), logits(False)


def of_transformers(layers: list[Tensor]) -> float:
    pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    return float(load_balancing_loss_func(tuple(layers), EXPERTS, TOP_K))


def of_deepspeed(layers: list[Tensor]) -> float:
    gating: Any = pytest.importorskip("deepspeed.moe.sharded_moe")
    losses = [gating.topkgating(one, TOP_K, capacity_factor=float(EXPERTS), min_capacity=1)[0] for one in layers]
    return sum(float(loss) for loss in losses)


def ours(kind: Any) -> Any:
    def loss(layers: list[Tensor]) -> float:
        x = torch.eye(TOKENS)  # the scores are then the weight's columns
        model = torch.nn.ModuleList(
            prophet.MoE(TOKENS, 4, EXPERTS, top_k=TOP_K, gate=prophet.GateConfig(aux_loss=kind, aux_loss_weight=1.0))
            for _ in layers
        )
        with prophet.collect_losses(model) as losses, torch.no_grad():
            for layer, one in zip(model, layers, strict=True):
                next(m for m in layer.modules() if isinstance(m, Gate)).weight.copy_(one.t())
                layer(x)
            return float(losses.total())

    return loss


@pytest.mark.parametrize(
    ("loss", "even", "all_on_two", "three_layers", "each_on_its_two"),
    [
        pytest.param(of_transformers, 2.0, 8.0, 2.0, 2.0, id="transformers"),
        pytest.param(of_deepspeed, 1.0, 4.0, 3.0, 16.0, id="deepspeed"),
        pytest.param(ours("switch"), 1.0, 4.0, 3.0, 16.0, id="switch"),
        pytest.param(ours("gshard"), 1.0, 4.0, 3.0, 16.0, id="gshard"),
    ],
)
def test_the_scale_at_two_of_eight(
    loss: Any, even: float, all_on_two: float, three_layers: float, each_on_its_two: float
) -> None:
    assert loss([EVEN]) == pytest.approx(even, rel=1e-2)
    assert loss([ON_TWO]) == pytest.approx(all_on_two, rel=1e-2)
    assert loss([EVEN] * 3) == pytest.approx(three_layers, rel=1e-2)
    # Together they use all eight, though none of them does
    assert loss([ON_TWO.roll(shift, dims=1) for shift in (0, 2, 4, 6)]) == pytest.approx(each_on_its_two, rel=1e-2)


def router_part(loss_of: Any, accumulate: int) -> float:
    """The logged loss of a step of 8 sequences with the router's loss, minus that without."""
    return float(loss_of(1.0, accumulate) - loss_of(0.0, accumulate))


def trainers_loss(folder: Path, coefficient: float, accumulate: int = 1, **settings: Any) -> Any:
    """A Trainer of one step of 8 sequences with the router's loss."""
    settings |= {"per_device_train_batch_size": 8 // accumulate, "gradient_accumulation_steps": accumulate}
    trainer = small_trainer(folder, None, max_steps=1, save_strategy="no", learning_rate=0.0, **settings)
    trainer.model.config.output_router_logits = True
    trainer.model.router_aux_loss_coef = coefficient
    trainer.train()
    return trainer


def test_trainer_sums_over_microbatches(tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def loss_of(coefficient: float, accumulate: int) -> float:
        return float(trainers_loss(tmp_path, coefficient, accumulate).state.log_history[0]["loss"])

    one, four = (router_part(loss_of, accumulate) for accumulate in (1, 4))
    assert one == pytest.approx(2.0, rel=0.2)
    assert four == pytest.approx(4 * one, rel=0.1)


def test_trainer_evaluates_with_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    on, off = (trainers_loss(tmp_path, coefficient).evaluate()["eval_loss"] for coefficient in (1.0, 0.0))
    assert on - off == pytest.approx(2.0, rel=0.2)


def test_label_smoothing_drops_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    on, off = (trainers_loss(tmp_path, c, label_smoothing_factor=0.1).state.log_history[0] for c in (1.0, 0.0))
    assert on["loss"] == off["loss"]
    assert on["grad_norm"] == off["grad_norm"]


def test_reentrant_checkpointing_drops_its_gradient(tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def of(reentrant: bool, coefficient: float) -> Any:
        settings: Any = {"gradient_checkpointing": True}
        settings["gradient_checkpointing_kwargs"] = {"use_reentrant": reentrant}
        return trainers_loss(tmp_path, coefficient, **settings).state.log_history[0]

    for reentrant in (True, False):
        on, off = of(reentrant, 1.0), of(reentrant, 0.0)
        assert on["loss"] - off["loss"] == pytest.approx(2.0, rel=0.2)
        assert (on["grad_norm"] == pytest.approx(off["grad_norm"], rel=1e-6)) == reentrant


def test_a_classifier_has_none() -> None:
    transformers = pytest.importorskip("transformers")
    config = small_mixtral().config
    config.output_router_logits, config.router_aux_loss_coef, config.pad_token_id = True, 1e3, 0
    model = transformers.MixtralForSequenceClassification(config)
    with torch.no_grad():
        answer = model(input_ids=torch.ones(1, 4).long(), labels=torch.ones(1).long())
    assert float(answer.loss) < 100
    assert "aux_loss" not in answer


def test_trl_averages_over_microbatches_and_switches_it_on(tmp_path: Path) -> None:
    pytest.importorskip("trl")

    def loss_of(coefficient: float | None, accumulate: int) -> float:
        settings = {"per_device_train_batch_size": 8 // accumulate, "gradient_accumulation_steps": accumulate}
        more = {} if coefficient is None else {"router_aux_loss_coef": coefficient}
        trainer = small_sft(tmp_path, None, max_steps=1, save_strategy="no", **settings, **more)
        assert trainer.model.config.output_router_logits == (coefficient != 0.0)  # it was False
        trainer.train()
        return float(trainer.state.log_history[0]["loss"])

    one, four = (router_part(loss_of, accumulate) for accumulate in (1, 4))
    assert one == pytest.approx(2.0, rel=0.2)
    assert four == pytest.approx(one, rel=0.1)
    assert loss_of(None, 1) > loss_of(0.0, 1)  # by the coefficient of the model's config
