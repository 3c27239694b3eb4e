"""Experts that describe themselves: the flags decide the layout, trying the activation, and no family has a line."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prophet
from prophet.convert import converted
from prophet.convert.layers.routed import with_originals
from prophet.errors import ConversionError
from tests.helpers.described import (
    DIM,
    EXPERTS,
    HIDDEN,
    DescribedExperts,
    DescribedModel,
    Flags,
    described_loss,
)
from tests.helpers.moe_models import alone, batches, compare, together
from tests.helpers.support import on_threads, seeded


def drawn(seed: int) -> Flags:
    """Flags at random."""
    draw = random.Random(seed)
    gate = draw.random() < 0.8
    limit = draw.choice([None, None, 0.4, 1.5]) if gate else None
    return Flags(
        is_transposed=draw.random() < 0.5,
        is_concatenated=draw.random() < 0.5,
        has_bias=draw.random() < 0.5,
        has_gate=gate,
        limit=limit,
        slope=draw.choice([None, 1.702]),
        plus_one=gate and draw.random() < 0.5,
    )


def model_of(flags: Flags, **options: Any) -> DescribedModel:
    with seeded(3):
        return DescribedModel(flags, **options)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12))])
def test_whatever_the_flags_it_trains_as_before(seed: int) -> None:
    """Some choices mean no expert; two ranks, with placements at random."""
    model = model_of(drawn(seed))
    steps = [batches(2, s) for s in range(3)]
    copies = [copy.deepcopy(model) for _ in range(2)]
    found = on_threads(2, lambda group: together(copies[group.rank], steps, group, described_loss))
    compare(alone(model, steps, described_loss), found)
    assert all(s.extra for s in found), "no replica sent gradients home: the placements were not random"


def test_the_flags_are_all_drawn() -> None:
    flags = [drawn(seed) for seed in range(12)]
    for name in ("is_transposed", "is_concatenated", "has_bias", "has_gate", "plus_one"):
        assert {getattr(f, name) for f in flags} == {True, False}
    assert {f.limit for f in flags} > {None}
    assert {f.slope for f in flags} == {None, 1.702}


@pytest.mark.parametrize("seed", range(4))
def test_revert_and_what_libraries_see_meanwhile(seed: int) -> None:
    model = model_of(drawn(seed))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    prophet.convert(model)
    shapes = {n: p.shape for n, p in before.items()}
    with with_originals(model):
        assert {n: p.shape for n, p in model.named_parameters()} == shapes
    assert len(list(converted(model))) == 2
    prophet.revert(model)
    assert all(torch.equal(model.state_dict()[n], t) for n, t in before.items())


def test_no_choice_at_all_is_zero() -> None:
    model = model_of(Flags())
    experts: Any = model.layers[0].experts
    x, ids, weights = torch.randn(3, DIM), torch.full((3, 2), EXPERTS), torch.rand(3, 2)
    prophet.convert(model)
    layer: Any = model.layers[0].experts
    assert layer is not experts
    assert torch.equal(layer(x, ids, weights), torch.zeros(3, DIM))


class Normed(DescribedExperts):
    def __init__(self, flags: Flags) -> None:
        super().__init__(flags)
        self.norm = nn.LayerNorm(DIM)


class Softcapped(DescribedExperts):
    def _apply_gate(self, rows: Tensor) -> Tensor:
        return 5 * torch.tanh(super()._apply_gate(rows) / 5)


class Identity(DescribedExperts):
    """To which the id E means the token itself."""

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        itself = (weights * (ids == self.num_experts)).sum(dim=1, keepdim=True)
        return super().forward(tokens, ids, weights) + itself * tokens


class Doubled(DescribedExperts):
    """Which does more than it says."""

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return 2 * super().forward(tokens, ids, weights)


class Fewer(DescribedExperts):
    """Of which another library holds a part here."""

    def __init__(self, flags: Flags) -> None:
        super().__init__(flags)
        self.num_experts = 2 * EXPERTS


class Parallel(DescribedExperts):
    """Which transformers has spread."""

    def __init__(self, flags: Flags) -> None:
        super().__init__(flags)
        self._is_expert_parallel = True


class Noisy(DescribedExperts):
    """Dropout in the gate."""

    def _apply_gate(self, rows: Tensor) -> Tensor:
        return nn.functional.dropout(super()._apply_gate(rows), 0.1, self.training)


@pytest.mark.parametrize(
    ("kind", "flags", "said"),
    [
        (DescribedExperts, Flags(has_post_expert_norm=True), r"DescribedExperts\.has_post_expert_norm: .* got True"),
        (Normed, Flags(), r"Normed: expected the parameters .*norm"),
        (Softcapped, Flags(), r"Softcapped\._apply_gate .*SiLU"),
        (Softcapped, Flags(limit=1.5), r"Softcapped\._apply_gate .*limit 1\.5"),
        (Identity, Flags(), r"Identity\.forward: the id 4, .*adds to the answer"),
        (Doubled, Flags(), r"once converted it differs"),
        (Fewer, Flags(), r"Fewer\.gate_up_proj holds 4 experts, and num_experts is 8: .*[Ss]witch that off"),
        (Parallel, Flags(), r"Parallel\._is_expert_parallel: expected False, got True: .*[Ss]witch that off"),
        (Noisy, Flags(), r"Noisy\._apply_gate"),
        (DescribedExperts, Flags(has_gate=False, slope=1.5), r"DescribedExperts\.act_fn: expected .*Quick"),
        (DescribedExperts, Flags(slope=1.5), r"DescribedExperts\._apply_gate .*Quick"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_refused_is_named(kind: type[DescribedExperts], flags: Flags, said: str) -> None:
    model = model_of(flags, kind=kind, none=0.0)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConversionError, match=rf"layers\.0\.experts .*{said}"):
        prophet.convert(model)
    assert not list(converted(model))
    assert all(torch.equal(model.state_dict()[n], t) for n, t in before.items())


class OtherExperts(nn.Module):
    """Stacked in a way of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN))

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        h = torch.einsum("nd,nkdh->nkh", tokens, self.w[ids]).relu()
        return torch.einsum("nkh,nkdh,nk->nd", h, self.w[ids], weights)


def test_a_model_with_experts_of_another_kind_is_converted_whole_or_in_part_by_name() -> None:
    model = model_of(Flags(), none=0.0)
    model.layers[1].experts = OtherExperts()
    with pytest.raises(ConversionError) as said:
        prophet.convert(model)
    assert "layers.1.experts: OtherExperts stacks experts (w [4, 8, 6])" in str(said.value)
    line = "prophet.convert(model, experts=['layers.0.experts'])"
    assert str(said.value).endswith(line)
    report = prophet.convert(model, experts=["layers.0.experts"])
    assert [r.name for r in report.replaced] == ["layers.0.experts"]
    assert [one.name for one in report.left] == ["layers.1.experts"]


def test_where_no_experts_are_read_those_that_are_there_are_named() -> None:
    model = model_of(Flags())
    for layer in model.layers:
        layer.experts = OtherExperts()
    with pytest.raises(ConversionError, match=r"layers\.0\.experts was left alone: OtherExperts stacks experts"):
        prophet.convert(model)


def test_some_layers_alone_by_name() -> None:
    model = model_of(Flags())
    report = prophet.convert(model, experts="layers.1.*")
    assert [r.name for r in report.replaced] == ["layers.1.experts"]
    assert [(one.name, one.why) for one in report.left] == [("layers.0.experts", "experts= does not name it")]


def test_the_experts_alone_are_no_model() -> None:
    with pytest.raises(ConversionError, match="DescribedExperts holds nothing but experts"):
        prophet.convert(DescribedExperts(Flags()))
