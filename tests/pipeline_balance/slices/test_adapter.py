"""Models in slices in one process: what is read at full length, what is refused, and what slices change."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="the models are transformers'")

import prophet
from pipeline_balance.schedules.closed_forms import sliced_window_chunks
from pipeline_balance.slices.adapter import SlicedTransformers
from pipeline_balance.slices.interface import Unfit, Window, attention, mask, seeing
from pipeline_balance.slices.options import Recompute, SliceOptions
from pipeline_balance.slices.store import Unit
from prophet.errors import SpecError
from tests.helpers.sliced_models import (
    MICROBATCHES,
    alone,
    apart,
    batch_of,
    in_slices,
    model_of,
    no_update,
    pass_alone,
)
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


ROUTED: dict[str, Any] = {"output_router_logits": True, "num_experts_per_tok": 2, "sliding_window": 5}


@pytest.mark.parametrize("kind", ["plain", "silent", "padded"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_router_losses_are_those_of_whole_microbatches(family: str, kind: str) -> None:
    model = model_of(family, router_aux_loss_coef=10.0, **(ROUTED if family == "gpt_oss" else {}))
    losses, want, _ = alone(copy.deepcopy(model), [kind], make=no_update)
    loss, found = in_slices(model, 4, kind)
    assert loss == pytest.approx(losses[0], rel=1e-6)
    assert apart(found, want) <= 1e-5


REFUSED: list[tuple[str, dict[str, Any], str]] = [
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


def test_attention_that_counts_positions_by_itself_is_refused() -> None:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    shape = {"hidden_size": 16, "intermediate_size": 16, "intermediate_size_mlp": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "moe_layers": []}
    for tuned in (True, False):
        model = Llama4ForCausalLM(Llama4TextConfig(vocab_size=16, attn_temperature_tuning=tuned, **shape, **heads))
        with pytest.raises(SpecError, match="attn_temperature_tuning") if tuned else nullcontext():
            SlicedTransformers(model, SliceOptions(4))


@pytest.mark.parametrize("kind", ["plain", "packed", "padded"])
def test_a_sliding_mask_that_no_layer_uses_is_nobodys(kind: str) -> None:
    """Qwen2-MoE makes one at every forward; by default its window is 0, and no layer's."""
    model = model_of("qwen2_moe", output_router_logits=False)
    losses, want, _ = alone(copy.deepcopy(model), [kind], make=no_update)
    loss, found = in_slices(model, 4, kind)
    assert loss == pytest.approx(losses[0], rel=1e-10)
    assert apart(found, want) <= 1e-10


# family and options; in float64. Layers differ in their windows where a model can have that.
WINDOWS: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": 6}),
    ("mistral", {"sliding_window": 16}),
    # longer than each of the packed documents, and shorter than the sequence
    ("mistral", {"sliding_window": 13}),
    ("mixtral", {"sliding_window": 4, "output_router_logits": False}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 7, "output_router_logits": False}),
    ("gemma2", {"attn_logit_softcapping": 1.0, "sliding_window": 6}),
    ("gemma2", {"attn_logit_softcapping": 1.0, "sliding_window": 64}),
    ("gemma3", {"sliding_window": 6, "sliding_window_pattern": 2}),
    ("gpt_oss", {"sliding_window": 5}),
    ("gpt_oss", {"layer_types": ["full_attention"] * 3}),
]


@pytest.mark.parametrize("kind", ["plain", "packed", "padded"])
@pytest.mark.parametrize(("family", "options"), WINDOWS)
def test_windows_sinks_and_caps_are_those_of_the_whole_model(family: str, options: dict[str, Any], kind: str) -> None:
    model = model_of(family, **options)
    losses, want, _ = alone(copy.deepcopy(model), [kind], make=no_update)
    loss, found = in_slices(model, 4, kind)
    assert loss == pytest.approx(losses[0], rel=1e-10)
    for name in want:
        # models that compute in float32 whatever their type: Gemma's norms, and some routers
        single = (family.startswith("gemma") and "norm" in name) or family in ("mixtral", "qwen2_moe")
        assert apart({name: found[name]}, want) <= (1e-5 if single else 1e-10), name


def test_converted_experts_train_between_sinks_and_windows() -> None:
    model = model_of("gpt_oss", num_experts_per_tok=2, sliding_window=5)
    prophet.convert(model)
    losses, want, _ = alone(copy.deepcopy(model), ["plain"], make=no_update)
    loss, found = in_slices(model, 4, "plain")
    assert loss == pytest.approx(losses[0], rel=1e-10)
    assert apart(found, want) <= 1e-10


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_chunks_take_the_bytes_of_each_layer_s_window(recompute: Recompute, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss has a window in its first and third layer."""
    model = model_of("gpt_oss", sliding_window=5)
    run = SlicedTransformers(model, SliceOptions(8, recompute=recompute))
    gradients, chunks = Counter[int](), Counter[int]()
    pop, append = run.store.pop, run.store.append

    def popped(layer: int, unit: Unit) -> None:
        gradients[layer] = max(gradients[layer], run.store.line(layer, unit.microbatch).gradient_bytes)
        pop(layer, unit)

    def appended(layer: int, unit: Unit, *given: Any, **options: Any) -> Any:
        found = append(layer, unit, *given, **options)
        alive = sum(not chunk.gone for chunk in run.store.chunks(layer, unit.microbatch))
        chunks[layer] = max(chunks[layer], alive)
        return found

    monkeypatch.setattr(run.store, "pop", popped)
    monkeypatch.setattr(run.store, "append", appended)
    pass_alone(run, *batch_of())
    # keys and values of two sequences, two heads, two tokens, eight numbers each
    each = 2 * 2 * 2 * 2 * 8 * 8
    met = sliced_window_chunks(8, 2, 5)
    assert met == 3
    assert gradients == {0: met * each, 1: 7 * each, 2: met * each}
    assert chunks == {0: 8, 1: 8, 2: 8}
    chunks.clear()
    for whole in run.cut(*batch_of(), MICROBATCHES):
        for part in run.sliced(whole):
            activations: Any = ()
            with torch.no_grad(), run.working(part):
                for unit in range(len(run.units)):
                    activations = run.run(unit, activations, part)
    assert chunks == {0: met, 1: 8, 2: met}


def test_a_window_is_that_of_the_batch() -> None:
    """One model, with sequences that its window is longer than, as long as, and shorter than."""
    model = model_of("mistral", sliding_window=8)
    run = SlicedTransformers(model, SliceOptions(4))
    for tokens, hidden in ((8, False), (16, True), (4, False), (12, True)):
        losses, want, _ = alone(copy.deepcopy(model), ["plain"], make=no_update, tokens=tokens)
        batch = batch_of(tokens=tokens)
        (whole,) = run.cut(*batch, 1)
        run.sliced(whole)
        windows = {type(leaf) for call in run.recorded(whole).calls for leaf in call.leaves if isinstance(leaf, int)}
        assert (Window in windows) == hidden
        loss, found = pass_alone(run, *batch)
        assert loss == pytest.approx(losses[0], rel=1e-10)
        assert apart(found, want) <= 1e-10


def _sees(function: Any, **options: Any) -> tuple[Any, Any]:
    with seeing() as seen:
        return mask(2, function, q_length=12, **options), seen.documents


def _causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= query


def _and(*functions: Any) -> Any:
    return lambda *at: torch.stack([torch.as_tensor(f(*at)).expand(2, 12) for f in functions]).all(0)


_DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 2 + [1] * 6 + [2] * 4])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [2, 3, 6, 11, 12, 64])
def test_a_mask_s_window_is_found(window: int, packed: bool) -> None:
    functions = [_causal, lambda b, h, q, k: k > q - window]
    if packed:
        functions.append(lambda b, h, q, k: _DOCUMENTS[b, q] == _DOCUMENTS[b, k])
    found, documents = _sees(_and(*functions))
    # the longest document has 7 tokens
    assert found == (window if window < (7 if packed else 12) else None)
    assert documents is None or torch.equal(documents, _DOCUMENTS)
    assert (documents is not None) == packed


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda b, h, q, k: (k > q - 3) | (k == 0), "otherwise than by a sliding window"),
        (lambda b, h, q, k: k > q - 3 - (q > 6).long(), "otherwise than by a sliding window"),
        (lambda b, h, q, k: k < q, "from themselves"),
        (lambda b, h, q, k: k > q, "from themselves"),
    ],
)
def test_masks_that_are_no_windows_are_refused(function: Any, words: str) -> None:
    found, documents = _sees(_and(_causal, function))
    assert isinstance(found, Unfit)
    assert words in found.why
    assert documents is None


@pytest.mark.parametrize(
    "own",
    [
        # two answers behind one prefix, documents that come back, the first tokens beside a window
        lambda b, h, q, k: (k <= q) & ~((q >= 9) & (k >= 5) & (k < 9)),
        lambda b, h, q, k: (k <= q) & ((q // 3) % 2 == (k // 3) % 2),
        lambda b, h, q, k: (k <= q) & ((k < 3) | (k > q - 8)),
        # one later token, and keys of the same parity
        lambda b, h, q, k: (k <= q) | ((q == 3) & (k == 7)),
        lambda b, h, q, k: (k <= q) & (q % 2 == k % 2),
    ],
)
def test_masks_of_a_models_own_are_read_whole(own: Any) -> None:
    with seeing() as seen:
        # what transformers says where a model gives functions of its own
        assert mask(2, _causal, q_length=12, use_vmap=True) is None
        window = mask(2, lambda b, h, q, k: (k <= q) & (k > q - 4), q_length=12, use_vmap=True)
        found = mask(2, own, q_length=12, use_vmap=True)
        assert seen.masks == 2
    assert window == Window(4)
    assert isinstance(found, Unfit)


def test_masks_that_tell_other_documents_apart_are_refused() -> None:
    """As chunked attention does: its chunks are documents to those layers alone."""
    chunked = _and(_causal, lambda b, h, q, k: q // 4 == k // 4)
    with seeing() as seen:
        assert mask(2, _causal, q_length=12) is None
        found = mask(2, chunked, q_length=12)
        assert mask(2, _causal, q_length=12) is None
        assert seen.documents is None
    assert isinstance(found, Unfit)
    assert "tells other documents apart" in found.why
    found, documents = _sees(chunked)
    assert found is None
    assert documents is not None


def test_a_window_that_the_mask_does_not_have_is_refused() -> None:
    layer: Any = small("mistral").base_model.layers[0].self_attn  # type: ignore[union-attr, index]
    q = torch.zeros(1, 4, 6, 8)
    for attention_mask, window in ((Window(3), 4), (None, 4)):
        with seeing(), pytest.raises(SpecError, match="MistralAttention asks for sliding_window=4, unlike its mask"):
            attention(layer, q, q, q, attention_mask, sliding_window=window)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("family", "options"), [("llama", {}), ("gpt2", {"resid_pdrop": 0.5}), ("mixtral", {}), ("deepseek_v3", {})]
)
def test_units_that_ranks_have_parts_of_are_tried_whole_with_made_up_weights(
    family: str, options: dict[str, Any]
) -> None:
    model: Any = small(family, **options)
    plain = SlicedTransformers(model, SliceOptions(4))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(torch.nan)  # their outputs would equal nothing
    (whole,) = plain.cut(*batch_of(), 1)
    state = torch.get_rng_state()
    run = plain.over(lambda module: module, plain.units, nullcontext)
    assert len(run.sliced(whole)) == 4
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert all(p.isnan().all() for p in model.parameters())
    layer = next(iter(plain.layers.children()))
    handle = layer.register_forward_hook(_with_a_state)
    run = plain.over(lambda module: module, plain.units, nullcontext)
    with pytest.raises(SpecError, match=rf"layer 1 \({type(layer).__name__}\) computes other outputs for two slices"):
        run.sliced(whole)
    handle.remove()


def _with_a_state(layer: Any, args: Any, output: Any) -> Any:
    return output.cumsum(dim=1) if isinstance(output, torch.Tensor) else (output[0].cumsum(dim=1), *output[1:])


class _Widest(TorchDispatchMode):
    """Notes how many numbers the largest tensor of each type has that is made within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.found[made.dtype] = max(self.found[made.dtype], made.numel())
        return made


def test_made_up_weights_are_drawn_in_part_and_take_the_memory_of_the_layers_own() -> None:
    model: Any = small("llama", intermediate_size=8192).to(torch.bfloat16)
    plain = SlicedTransformers(model, SliceOptions(4))
    run = plain.over(lambda module: module, plain.units, nullcontext)
    with torch.no_grad(), _Widest() as widest:
        made = run._made_up(1)
    own = model.model.layers[0].mlp.up_proj.weight
    layers: Any = made.layers
    numbers = layers[0].mlp.up_proj.weight
    assert (numbers.shape, numbers.dtype) == (own.shape, own.dtype)
    # what is drawn is in float32, and repeated in the weights' type
    assert widest.found[torch.float32] < own.numel() / 3
    assert widest.found[torch.bfloat16] < own.numel() * 1.5
    assert numbers.float().std() * own.shape[-1] ** 0.5 == pytest.approx(1.0, rel=0.05)
    # no row of a matrix is another one's, or its outputs would be
    assert len({tuple(row) for row in numbers.tolist()}) == len(numbers)
    assert layers[1].mlp.up_proj.weight is model.model.layers[1].mlp.up_proj.weight


def test_a_split_vocabulary_is_tried_in_windows_shorter_than_the_example() -> None:
    """The loss is tried on rows of five tokens, of which a token sees three."""
    sliced = SlicedTransformers(model_of("mistral", sliding_window=3), SliceOptions(4), split_vocabulary=True)
    assert sliced.vocabulary is not None
