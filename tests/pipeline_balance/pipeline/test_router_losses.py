"""Router losses carried as sums are the model's own; those that cannot be are refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from pipeline_balance.pipeline.model.adapter import TransformersModel
from pipeline_balance.pipeline.model.router_losses import find_router_loss, loss_of_sums, router_sums
from prophet.errors import SpecError

pytest.importorskip("transformers", reason="the models are transformers'")

from transformers.models.mixtral import modeling_mixtral

from tests.helpers.transformers_models import batch, gradients_of, small, train_over, train_whole, without_others

MOES = ("mixtral", "qwen3_moe")


def naive_loss(layers: list[torch.Tensor], top_k: int, mask: torch.Tensor | None) -> torch.Tensor:
    """The definition: means over all rows of all layers, by one-hot masks (Fedus et al. 2021, Equations 4 to 6)."""
    probabilities = torch.cat(layers).softmax(-1)
    chosen = torch.nn.functional.one_hot(probabilities.topk(top_k).indices, probabilities.shape[-1]).sum(1).float()
    weight = torch.ones(len(probabilities)) if mask is None else mask.reshape(-1).float().repeat(len(layers))
    mean = [(x * weight[:, None]).sum(0) / weight.sum() for x in (chosen, probabilities)]
    return probabilities.shape[-1] * (mean[0] * mean[1]).sum()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (8, 1), (5, 5)])
def test_sums_give_the_loss_of_all_layers_together(experts: int, top_k: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(experts)
    layers = [torch.randn(10, experts, generator=generator) * 3 for _ in range(4)]
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]) if masked else None
    rows = None if mask is None else mask.reshape(-1).float()
    sums = sum((router_sums(one, top_k, rows) for one in layers[1:]), router_sums(layers[0], top_k, rows))
    assert float(loss_of_sums(sums)) == pytest.approx(float(naive_loss(layers, top_k, mask)), rel=1e-5)
    theirs = modeling_mixtral.load_balancing_loss_func(tuple(layers), experts, top_k, mask)
    assert float(loss_of_sums(sums)) == pytest.approx(float(theirs), rel=1e-6)


@pytest.mark.parametrize("kind", ["plain", "padded"])
@pytest.mark.parametrize("family", MOES)
def test_the_loss_contains_the_routers_part(family: str, kind: str) -> None:
    """The coefficient is large, so that the routers' part decides; their gradients are compared, and not zero."""
    model = small(family, router_aux_loss_coef=10.0)
    whole, without = copy.deepcopy(model), copy.deepcopy(model)
    without.config.output_router_logits = False
    counting = TransformersModel(whole)
    parts = counting.cut(*batch(kind), 2)
    stages = [(TransformersModel(copy.deepcopy(model)), units) for units in (range(2), range(2, 4), range(4, 5))]
    for adapted, units in stages:
        without_others(adapted, units)
    loss, want = train_over(stages, parts), train_whole(whole, counting, parts)
    plain = train_whole(without, counting, parts)
    assert abs(float(want - plain)) > 1.0
    assert abs(float(loss - want)) <= 1e-6 * float(want)
    mine = gradients_of(stages)
    for name, p in whole.named_parameters():
        if "gate.weight" in name:
            assert p.grad.abs().max() > 1e-3
            assert (mine[name] - p.grad).abs().max() <= 1e-5 * p.grad.abs().max()


def test_a_model_without_the_loss_carries_nothing() -> None:
    adapted = TransformersModel(small("mixtral", output_router_logits=False))
    part = adapted.cut(*batch(), 1)[0]
    assert [len(b) for b in adapted.activations(part)] == [0, 1, 1, 1, 1, 1]
    adapted.root.config.output_router_logits = True
    adapted.look()
    part = adapted.cut(*batch(), 1)[0]
    assert [len(b) for b in adapted.activations(part)] == [0, 1, 2, 2, 2, 1]


def test_dense_layers_before_the_first_router_carry_nothing() -> None:
    adapted = TransformersModel(small("qwen3_moe", mlp_only_layers=[0]))
    part = adapted.cut(*batch(), 1)[0]
    assert [len(b) for b in adapted.activations(part)] == [0, 1, 1, 2, 2, 1]


def test_a_recording_leaves_no_hooks() -> None:
    model = small("mixtral")
    adapted = TransformersModel(model)
    part = adapted.cut(*batch(), 1)[0]
    hooks = [len(m._forward_hooks) for m in model.modules()]
    adapted.run(1, adapted.run(0, (), part), part)
    assert hooks == [len(m._forward_hooks) for m in model.modules()]


def test_another_loss_than_the_sums_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = modeling_mixtral.load_balancing_loss_func

    def squared(*args: Any) -> torch.Tensor:
        found: torch.Tensor = theirs(*args) ** 2
        return found

    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", squared)
    with pytest.raises(
        SpecError, match=r"Mixtral.* is not the one that stages can carry.*output_router_logits = False"
    ):
        TransformersModel(small("mixtral"))


def test_a_loss_of_unknown_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("mixtral")
    monkeypatch.delattr(modeling_mixtral, "load_balancing_loss_func")
    with pytest.raises(SpecError, match="has a router loss that is not transformers'"):
        find_router_loss(model, model.model.layers)


def test_gates_that_the_model_does_not_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("mixtral")
    monkeypatch.setattr(type(model), "_can_record_outputs", {})
    with pytest.raises(SpecError, match="does not say which modules give its router logits"):
        find_router_loss(model, model.model.layers)


def test_a_loss_computed_from_something_else_is_refused() -> None:
    model = small("mixtral")
    adapted = TransformersModel(model)
    part = adapted.cut(*batch(), 1)[0]
    activations: tuple[torch.Tensor, ...] = ()
    for unit in range(4):
        activations = adapted.run(unit, activations, part)
    model.num_experts_per_tok = 1
    with pytest.raises(SpecError, match="from other experts, choices or masks"):
        adapted.run(4, activations, part)
    model.num_experts_per_tok = 2
    theirs = modeling_mixtral.load_balancing_loss_func
    adapted.run(4, activations, part)
    assert modeling_mixtral.load_balancing_loss_func is theirs
