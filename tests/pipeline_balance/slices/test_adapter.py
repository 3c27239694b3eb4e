"""Models in slices in one process: what is read at full length, what is refused, and what slices change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the models are transformers'")

from pipeline_balance.slices.adapter import SlicedTransformers
from pipeline_balance.slices.interface import attention
from pipeline_balance.slices.options import SliceOptions
from prophet.errors import SpecError
from tests.helpers.sliced_models import alone, apart, batch_of, in_slices, model_of, no_update
from tests.helpers.transformers_models import small

LONG = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 8}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
ROPES: dict[str, dict[str, Any]] = {
    "longrope": {"rope_parameters": LONG, "max_position_embeddings": 64},
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        "max_position_embeddings": 8,
    },
}


@pytest.mark.parametrize(("rope", "kind"), [("longrope", "plain"), ("longrope", "packed"), ("dynamic", "plain")])
def test_positions_are_those_of_whole_sequences(rope: str, kind: str) -> None:
    """Both kinds of angles depend on the longest position, which is above the original length here."""
    model = model_of("llama", **copy.deepcopy(ROPES[rope]))
    losses, want, _ = alone(copy.deepcopy(model), [kind], make=no_update)
    loss, found = in_slices(model, 4, kind)
    assert loss == pytest.approx(losses[0], rel=1e-10)
    assert apart(found, want) <= 1e-10


@pytest.mark.parametrize("kind", ["plain", "silent", "padded"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_router_losses_are_those_of_whole_microbatches(family: str, kind: str) -> None:
    model = model_of(family, router_aux_loss_coef=10.0)
    losses, want, _ = alone(copy.deepcopy(model), [kind], make=no_update)
    loss, found = in_slices(model, 4, kind)
    assert loss == pytest.approx(losses[0], rel=1e-6)
    assert apart(found, want) <= 1e-5


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gemma2", {"attn_logit_softcapping": 1.0, "sliding_window": 64}, "softcap"),
    ("gpt_oss", {"sliding_window": 64, "layer_types": ["full_attention"] * 3}, "s_aux"),
    ("mixtral", {"sliding_window": 4}, "MixtralAttention asks for sliding_window"),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 4}, "MoeAttention of layer 0 hides earlier tokens"),
    ("gemma3", {}, "Gemma3Attention asks for sliding_window"),
    ("llama", {"attention_dropout": 0.1}, "dropout=0.1"),
    ("mamba", {}, "does not call transformers' attention functions"),
    ("bert", {}, "ForMaskedLM"),
]


@pytest.mark.parametrize(("family", "options", "words"), REFUSED)
def test_what_slices_would_get_wrong_is_refused_by_name(family: str, options: dict[str, Any], words: str) -> None:
    model = small(family, **options)
    before = model.config._attn_implementation
    with pytest.raises(SpecError, match=words):
        SlicedTransformers(model, SliceOptions(4))
    assert model.config._attn_implementation == before  # and the model is as it was


@pytest.mark.parametrize("kind", ["plain", "packed", "padded"])
def test_a_sliding_mask_that_no_layer_uses_is_nobodys(kind: str) -> None:
    """Qwen2-MoE makes one at every forward; by default its window is 0, and no layer's."""
    model = model_of("qwen2_moe", output_router_logits=False)
    losses, want, _ = alone(copy.deepcopy(model), [kind], make=no_update)
    loss, found = in_slices(model, 4, kind)
    assert loss == pytest.approx(losses[0], rel=1e-10)
    assert apart(found, want) <= 1e-10


def test_a_window_that_only_longer_sequences_feel_is_refused_with_them() -> None:
    run = SlicedTransformers(model_of("qwen2_moe", use_sliding_window=True, sliding_window=8), SliceOptions(4))
    (short,) = run.cut(*batch_of(tokens=8), 1)
    assert len(run.sliced(short)) == 4
    (long,) = run.cut(*batch_of(tokens=16), 1)
    with pytest.raises(SpecError, match="layer 0 hides earlier tokens"):
        run.sliced(long)


def test_attention_that_sees_later_tokens_is_refused() -> None:
    model = small("llama")
    for layer in model.base_model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(SpecError, match="is_causal=False"):
        SlicedTransformers(model, SliceOptions(4))


def test_options_that_cannot_be_are_refused() -> None:
    for wrong, words in (
        ({"slices": 0}, "slices must be"),
        ({"slices": 4, "order": "other"}, "minimal, aligned"),
        ({"slices": 4, "balance": "other"}, "none, uneven, exchange"),
        ({"slices": 4, "balance": "exchange"}, 'needs order="aligned"'),
        ({"slices": 4, "balance": "uneven", "crossover_tokens": -1}, "number of tokens, got -1"),
        ({"slices": 4, "crossover_tokens": 8}, 'needs balance="uneven"'),
        ({"slices": 4, "recompute": "most"}, "none, selective, full"),
    ):
        with pytest.raises(SpecError, match=words):
            SliceOptions(**wrong)  # type: ignore[arg-type]


class Mixing(torch.nn.Embedding):
    """Every token's embedding, and a part of that of the token before it."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = super().forward(ids)
        return found + found.roll(1, dims=1)


def test_a_model_whose_front_mixes_tokens_is_refused() -> None:
    model = small("llama")
    model.model.embed_tokens.__class__ = Mixing
    with pytest.raises(SpecError, match="layer 0 computes other outputs for two slices in turn"):
        in_slices(model, 4, "plain")


def test_attention_to_another_sequence_is_refused() -> None:
    layer = small("llama").base_model.layers[0].self_attn  # type: ignore[union-attr, index]
    q, kv = torch.zeros(1, 4, 6, 8), torch.zeros(1, 2, 9, 8)
    with pytest.raises(SpecError, match="LlamaAttention asks for cross-attention"):
        attention(layer, q, kv, kv)
    layer.is_cross_attention = True
    with pytest.raises(SpecError, match="cross-attention"):
        attention(layer, q, kv[:, :, :6], kv[:, :, :6])


@pytest.mark.parametrize("rows", [1, 4])
def test_labels_behind_padding_are_refused(rows: int) -> None:
    """A mask may have one row for all."""
    inputs, labels = batch_of()
    mask = torch.ones(rows, labels.shape[1], dtype=torch.long)
    mask[:, -2:] = 0
    run = SlicedTransformers(model_of("llama"), SliceOptions(4))
    (whole,) = run.cut({**inputs, "attention_mask": mask}, labels, 1)
    with pytest.raises(SpecError, match="labels count behind padding"):
        run.sliced(whole)
    labels[:, -2:] = -100
    (whole,) = run.cut({**inputs, "attention_mask": mask}, labels, 1)
    assert len(run.sliced(whole)) == 4
