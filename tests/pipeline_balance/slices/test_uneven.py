"""Slices of equal cost: their lengths come from the layers, and what they train is what whole sequences train."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the models are transformers'")

from pipeline_balance.pipeline.model.layers import Microbatch
from pipeline_balance.slices.adapter import SlicedTransformers
from pipeline_balance.slices.chain import SlicedChain
from pipeline_balance.slices.options import SliceOptions
from prophet.errors import SpecError
from tests.helpers import sliced_layers as own
from tests.helpers.sliced_models import alone, apart, batch_of, model_of, no_update, pass_alone


def test_the_crossover_by_hand() -> None:
    hidden, heads, kv_heads, wide, inner = 32, 4, 2, 8, 40
    attention = hidden * wide * (heads + 2 * kv_heads) + heads * wide * hidden
    dense = attention + 3 * hidden * inner + 2 * hidden  # and two norms
    met = heads * 2 * wide
    assert SlicedTransformers(model_of("llama"), SliceOptions(4)).crossover_tokens() == round(dense / met)
    # two of four experts, and the router
    experts = attention + 2 * 3 * hidden * inner + 4 * hidden + 2 * hidden
    assert SlicedTransformers(model_of("mixtral"), SliceOptions(4)).crossover_tokens() == round(experts / met)


@pytest.mark.parametrize(
    ("family", "kind", "tokens", "options", "crossover"),
    [
        ("llama", "silent", 16, {}, 0),
        ("qwen2", "padded", 17, {"recompute": True}, 4),
        ("qwen3", "packed", 19, {"tied": True, "frozen": 2}, 0),
        ("mixtral", "plain", 21, {"router_aux_loss_coef": 3.0}, None),
    ],
)
def test_uneven_slices_train_what_even_ones_and_the_whole_train(
    family: str, kind: str, tokens: int, options: dict[str, Any], crossover: int | None
) -> None:
    allowed = 1e-5 if family == "mixtral" else 1e-10
    model = model_of(family, **options)
    losses, want, _ = alone(copy.deepcopy(model), [kind], make=no_update, tokens=tokens)
    sliced = SliceOptions(4, balance="uneven", crossover_tokens=crossover)
    run = SlicedTransformers(model, sliced)
    starts = run.starts(tokens)
    assert len({b - a for a, b in pairwise(starts)}) > 1
    loss, found = pass_alone(run, *batch_of(kind, tokens=tokens))
    assert loss == pytest.approx(losses[0], rel=allowed)
    assert apart(found, want) <= allowed
    if tokens % 4 == 0:
        loss, even = pass_alone(SlicedTransformers(model, SliceOptions(4)), *batch_of(kind, tokens=tokens))
        assert loss == pytest.approx(losses[0], rel=allowed)
        assert apart(found, even) <= allowed


def test_layers_of_ones_own_say_where_attention_costs_as_much() -> None:
    def parts(crossover: int | None) -> list[int]:
        options = SliceOptions(3, balance="uneven", crossover_tokens=crossover)
        chain = SlicedChain(own.layers(), own.loss_fn, options, counted=own.counted)
        (whole,) = chain.cut(*own.batch(0, 0), 1)
        return [part.inputs["ids"].shape[1] for part in chain.sliced(whole)]

    assert parts(0) == [7, 3, 2]
    assert parts(10**6) == [4, 4, 4]
    with pytest.raises(SpecError, match="needs crossover_tokens for layers of one's own"):
        parts(None)


def test_a_loss_of_ones_own_weighs_slices_by_their_tokens() -> None:
    chain = SlicedChain([nn.Linear(2, 1)], nn.functional.mse_loss, SliceOptions(4))
    counts = [chain.counted(Microbatch(0, {}, torch.zeros(2, tokens))) for tokens in (5, 3)]
    assert counts == [10, 6]
