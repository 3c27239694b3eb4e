"""Slices of equal cost: their lengths come from the layers, and what they train is what whole sequences train."""

from __future__ import annotations

import copy
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the models are transformers'")

from pipeline_balance.pipeline.model.layers import Microbatch
from pipeline_balance.schedules.sliced import slice_starts
from pipeline_balance.slices import attend
from pipeline_balance.slices.adapter import SlicedTransformers
from pipeline_balance.slices.chain import SlicedChain
from pipeline_balance.slices.options import SliceOptions
from pipeline_balance.slices.parts import part_of
from prophet.errors import SpecError
from tests.helpers import sliced_layers as own
from tests.helpers.sliced_models import MICROBATCHES, alone, apart, batch_of, model_of, no_update, pass_alone
from tests.helpers.transformers_models import LAYERS


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
        ("mistral", "padded", 23, {"sliding_window": 6}, 2),
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


def test_windows_leave_later_slices_less_to_do() -> None:
    """Layers may differ: in gpt-oss every other one sees all tokens."""

    def lengths(family: str, **options: Any) -> list[int]:
        run = SlicedTransformers(model_of(family, **options), SliceOptions(4, balance="uneven", crossover_tokens=2))
        (whole, *_) = run.cut(*batch_of("plain", tokens=32), MICROBATCHES)
        return [part_of(part).tokens for part in run.sliced(whole)]

    def cut(*windows: int | None) -> list[int]:
        return [b - a for a, b in pairwise(slice_starts(32, 4, 2, windows))]

    assert lengths("llama") == lengths("mistral", sliding_window=32) == cut() == [15, 7, 5, 5]
    assert lengths("mistral", sliding_window=3) == cut(3) == [8, 8, 8, 8]
    kinds = ["sliding_attention", "full_attention"]
    mixed = [kinds[layer % 2] for layer in range(LAYERS)]
    found = lengths("gpt_oss", sliding_window=3, layer_types=mixed)
    assert found == cut(*(3 if kind == kinds[0] else None for kind in mixed)) not in (cut(), cut(3))


def test_windows_of_layers_of_ones_own_count_too() -> None:
    layers = own.layers()
    for block in layers[1:-1]:
        block.attention = partial(attend, window=2)  # type: ignore[assignment]
    options = SliceOptions(3, balance="uneven", crossover_tokens=0)
    chain = SlicedChain(layers, own.loss_fn, options, counted=own.counted)
    for _ in range(2):
        (whole,) = chain.cut(*own.batch(0, 0), 1)
        # a token sees one before it, whichever it is
        assert [part.inputs["ids"].shape[1] for part in chain.sliced(whole)] == [4, 4, 4]


def test_a_loss_of_ones_own_weighs_slices_by_their_tokens() -> None:
    chain = SlicedChain([nn.Linear(2, 1)], nn.functional.mse_loss, SliceOptions(4))
    counts = [chain.counted(Microbatch(0, {}, torch.zeros(2, tokens))) for tokens in (5, 3)]
    assert counts == [10, 6]
