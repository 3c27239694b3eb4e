"""Models of transformers, cut between their layers, train as they do whole; what cannot is refused by name."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.model.adapter import TransformersModel
from prophet.errors import SpecError

pytest.importorskip("transformers", reason="the models are transformers'")

from transformers import ViTConfig, ViTForImageClassification

from tests.helpers.transformers_models import (
    FAMILIES,
    LAYERS,
    OTHERS,
    batch,
    gradients_of,
    small,
    train_over,
    train_whole,
    without_others,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")  # older versions have no other name
UNITS = LAYERS + 2
VIT = {"image_size": 16, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
THREE = (0, 1, 3, UNITS)


def over(model: nn.Module, cuts: tuple[int, ...]) -> list[tuple[TransformersModel, range]]:
    """One copy of the model per stage, each without the parameters of the others."""
    stages = [(TransformersModel(copy.deepcopy(model)), range(a, b)) for a, b in pairwise(cuts)]
    for adapted, units in stages:
        without_others(adapted, units)
    return stages


def assert_trains_alike(model: nn.Module, cuts: tuple[int, ...], *kinds: str) -> None:
    stages, whole = over(model, cuts), copy.deepcopy(model)
    counting = TransformersModel(whole)
    for kind in kinds:
        for one in (whole, *(adapted.root for adapted, _ in stages)):
            one.zero_grad()
        parts = counting.cut(*batch(kind), 2)
        loss, want = train_over(stages, parts), train_whole(whole, counting, parts)
        assert abs(float(loss - want)) <= 1e-6, kind
        mine, theirs = gradients_of(stages), {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
        assert mine.keys() == theirs.keys()
        for name, grad in theirs.items():
            scale = float(grad.abs().max())
            assert float((mine[name] - grad).abs().max()) <= 1e-5 * max(scale, 1e-3), (kind, name)


# what is tied is one parameter of two units, in every family
TIED = [
    pytest.param(family, tied, marks=pytest.mark.slow if tied and family not in ("gpt2", "llama") else [])
    for family in FAMILIES
    for tied in (False, True)
]


@pytest.mark.parametrize(("family", "tied"), TIED)
def test_every_family_trains_as_it_does_whole(family: str, tied: bool) -> None:
    assert_trains_alike(small(family, tied=tied), THREE, "plain", "packed", "padded")


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_families_beyond_the_seven_need_no_code_either(family: str) -> None:
    assert_trains_alike(small(family), THREE, "plain", "padded")


def test_images_need_an_example() -> None:
    model = ViTForImageClassification(ViTConfig(**VIT))
    inputs, labels = {"pixel_values": torch.randn(4, 3, 16, 16)}, torch.tensor([0, 1, 1, 0])
    with pytest.raises(SpecError, match=r"cannot run on example inputs \['input_ids'\]"):
        TransformersModel(model)
    adapted = TransformersModel(model, example=inputs)
    part = adapted.cut(inputs, labels, 1)[0]
    activations: tuple[Tensor, ...] = ()
    for unit in range(len(adapted.units)):
        activations = adapted.run(unit, activations, part)
    assert torch.equal(activations[0], model(**inputs, labels=labels).loss)
    assert adapted.counted(part) == 4


def test_adapters_may_be_put_in_while_it_trains() -> None:
    peft = pytest.importorskip("peft", reason="the adapters are peft's")
    model = small("gpt2")
    adapted = TransformersModel(model)
    held = [len(list(unit.parameters())) for unit in adapted.units]
    config = peft.LoraConfig(r=2, target_modules=["c_attn", "wte"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    adapted.look()
    assert [len(list(unit.parameters())) for unit in adapted.units] == [held[0] + 2, *(n + 2 for n in held[1:-1]), 3]
    assert_trains_alike(model, THREE, "plain")


@pytest.mark.parametrize("cuts", [*((0, c, UNITS) for c in range(1, UNITS)), tuple(range(UNITS + 1))], ids=str)
def test_every_cut_gives_the_same(cuts: tuple[int, ...]) -> None:
    assert_trains_alike(small("mixtral", tied=True), cuts, "padded")


def test_tied_embeddings_are_one_parameter_in_two_units() -> None:
    model = TransformersModel(small("llama", tied=True))
    first, last = ([id(p) for p in model.units[u].parameters()] for u in (0, -1))
    assert set(first) == {id(model.root.model.embed_tokens.weight)} <= set(last)
    apart = TransformersModel(small("llama"))
    assert not {id(p) for p in apart.units[0].parameters()} & {id(p) for p in apart.units[-1].parameters()}


def test_units_hold_every_parameter() -> None:
    for family in FAMILIES:
        model = TransformersModel(small(family))
        held = [id(p) for unit in model.units for p in unit.parameters()]
        assert sorted(held) == sorted(id(p) for p in model.root.parameters()), family


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_layers_may_be_checkpointed(family: str) -> None:
    model = small(family)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_trains_alike(model, THREE, "plain")


def test_reentrant_checkpointing_is_refused_whenever_it_is_switched_on() -> None:
    model = small("llama")
    adapted = TransformersModel(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(SpecError, match="use_reentrant"):
        adapted.look()
    with pytest.raises(SpecError, match="use_reentrant"):
        TransformersModel(model)


def test_lengths_may_differ_by_microbatch() -> None:
    model, whole = small("mixtral"), small("mixtral")
    stages = over(model, (0, 2, UNITS))
    counting = TransformersModel(whole)
    parts = [counting.cut(*batch("padded", 2, tokens), 1, i)[0] for i, tokens in enumerate((16, 24, 8))]
    assert abs(float(train_over(stages, parts) - train_whole(whole, counting, parts))) <= 1e-6


def test_labels_count_as_the_models_losses_count_them() -> None:
    """A causal model's first label belongs to no output; a masked one's does; a class belongs to a row."""
    ids = torch.randint(1, 40, (2, 6))
    labels = ids.clone()
    labels[0, :2], labels[1, 3] = -100, -100
    for family, count in (("llama", 8), ("bert", 9)):
        adapted = TransformersModel(small(family))
        part = adapted.cut(ids, labels, 1)[0]
        assert adapted.counted(part) == count
        whole = adapted.root(input_ids=ids, labels=labels).loss
        logits = adapted.root(input_ids=ids).logits
        shift = int(family == "llama")
        wanted, its = labels[:, shift:], logits[:, : 6 - shift]
        total = nn.functional.cross_entropy(its.flatten(0, 1), wanted.flatten(), reduction="sum")
        assert float(whole) * count == pytest.approx(float(total), rel=1e-5)


def test_an_input_of_one_row_goes_to_every_microbatch() -> None:
    (inputs, labels) = batch()
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    parts = TransformersModel(small("llama")).cut({**inputs, "position_ids": positions}, labels, 2)
    assert all(torch.equal(p.inputs["position_ids"], positions) for p in parts)
    assert [p.number for p in parts] == [0, 1]


def test_a_microbatch_without_labels_that_count_adds_nothing() -> None:
    model = small("mixtral")
    inputs, labels = batch()
    labels[2:] = -100
    assert_nothing = over(model, (0, 2, UNITS))
    parts = assert_nothing[0][0].cut(inputs, labels, 2)
    with_it = train_over(assert_nothing, parts)
    alone = over(model, (0, 2, UNITS))
    assert torch.equal(with_it, train_over(alone, parts[:1]))
    one, two = gradients_of(assert_nothing), gradients_of(alone)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_dropout_draws_as_the_units_do_whatever_stands_around() -> None:
    """The front's dropout runs behind stand-ins too: it must not take numbers from the units that follow."""
    model = small("gpt2", embd_pdrop=0.5, resid_pdrop=0.3)
    adapted = TransformersModel(model)
    part = adapted.cut(*batch(), 1)[0]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    adapted.activations(part)
    adapted.recorded(part)
    assert torch.equal(torch.get_rng_state(), before)
    hidden = adapted.run(0, (), part)
    moved = torch.get_rng_state()
    assert not torch.equal(moved, before)
    adapted.run(UNITS - 1, hidden, part)
    assert torch.equal(torch.get_rng_state(), moved), "what follows the layers has no dropout of its own"


def test_autocast_is_in_the_activations() -> None:
    adapted = TransformersModel(Odd("none"))
    part = adapted.cut(*batch(), 1)[0]
    plain = adapted.activations(part)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        said, activations = adapted.activations(part), ()
        for unit in range(5):
            activations = adapted.run(unit, activations, part)
            assert [t.dtype for t in activations] == [t.dtype for t in said[unit + 1]]
    assert [b[0].dtype for b in said[1:]] == [torch.float32, *[torch.bfloat16] * 3, torch.float32]
    assert all(t.dtype == torch.float32 for b in plain for t in b)


def test_frozen_layers_leave_activations_without_gradient() -> None:
    model = small("mixtral")
    adapted = TransformersModel(model)
    part = adapted.cut(*batch(), 1)[0]
    for unit in adapted.units[:3]:
        unit.requires_grad_(False)
    assert [[t.requires_grad for t in b] for b in adapted.activations(part)] == [
        *([], [False], [False, False], [False, False], [True, True], [True])
    ]
    with torch.no_grad():
        assert not any(t.requires_grad for b in adapted.activations(part) for t in b)


def test_the_model_is_not_touched() -> None:
    model = small("mixtral")
    ran: list[str] = []
    model.model.layers[0].register_forward_hook(lambda *_: ran.append("layer"))
    model.model.embed_tokens.register_forward_hook(lambda *_: ran.append("embedding"))
    names, modules = list(model.state_dict()), [id(m) for m in model.modules()]
    adapted = TransformersModel(model)
    part = adapted.cut(*batch(), 1)[0]
    activations = adapted.activations(part)[0]
    assert ran == []
    for unit in range(UNITS):
        activations = adapted.run(unit, activations, part)
    assert ran == ["embedding", "layer"]
    assert names == list(model.state_dict())
    assert modules == [id(m) for m in model.modules()]


def test_a_parameter_added_around_the_layers_is_found() -> None:
    model = small("llama")
    adapted = TransformersModel(model)
    wider = nn.Sequential(model.model.embed_tokens, nn.Linear(32, 32))
    model.model.embed_tokens = wider
    adapted.look()
    assert {id(p) for p in adapted.units[0].parameters()} == {id(p) for p in wider.parameters()}


# ------------------------------------------------------------------------------------- models that are refused


class Odd(nn.Module):
    """A chain with a fault of one kind."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.embed = nn.Embedding(48, 8)
        self.layers = nn.ModuleList(_OddLayer() for _ in range(3))
        self.head = nn.Linear(8, 48)
        if fault == "two lists":
            self.other = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        h = start = self.embed(input_ids)
        kept = []
        for i, layer in enumerate(self.layers):
            if self.fault == "computes between" and i == 1:
                h = h * 2
            shared = start if self.fault == "shared input" else None
            shared = start.detach() if self.fault == "depends on weights" else shared
            h = layer(h, shared)
            kept.append(h)
        if self.fault == "skips":
            h = h + kept[0]
        if self.fault == "reads the front behind":
            h = h @ (self.embed.weight.T @ self.embed.weight)
        if self.fault == "reads it by an attribute":
            h = h + self.embed.weight.T.sum(1)
        logits = self.head(h)
        return (nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class _OddLayer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor, shared: Tensor | None = None) -> Tensor:
        return super().forward(x) + (0 if shared is None else shared)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("computes between", "the output of layer 0"),
        ("shared input", "layer 1 takes a tensor of shape .* its gradient would be lost"),
        ("depends on weights", "layer 0 takes a tensor of shape .* depends on parameters"),
        ("two lists", "has 2 lists of modules: layers, other; name the one"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_by_name(fault: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        TransformersModel(Odd(fault))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("skips", "the output of layer 0"),
        ("reads the front behind", "embed.weight"),
        ("reads it by an attribute", "embed.weight"),
    ],
)
def test_what_follows_the_layers_reads_only_what_is_there(fault: str, says: str) -> None:
    adapted = TransformersModel(Odd(fault))
    part = adapted.cut(*batch(), 1)[0]
    activations: tuple[Tensor, ...] = ()
    for unit in range(4):
        activations = adapted.run(unit, activations, part)
    with pytest.raises(SpecError, match=says):
        adapted.run(4, activations, part)


def test_the_way_out_of_several_lists_works() -> None:
    model = Odd("two lists")
    assert len(TransformersModel(model, layers="layers").units) == 5
    with pytest.raises(SpecError, match="must name a ModuleList"):
        TransformersModel(model, layers="head")
    with pytest.raises(SpecError, match="has no list of modules"):
        TransformersModel(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda i, t: (i, None), "give them on every rank"),
        (
            lambda i, t: ({"inputs_embeds": torch.zeros(4, 12, 32, requires_grad=True)}, t),
            "inputs_embeds requires grad",
        ),
        (lambda i, t: ({"input_ids": i["input_ids"][:3]}, t), "labels have 4 rows"),
        (lambda i, t: ({"input_ids": i["input_ids"][:1]}, t[:1]), "cannot be cut into 2"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(change: Any, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        TransformersModel(small("llama")).cut(*change(*batch()), 2)


def test_a_forward_set_on_the_object_is_refused() -> None:
    model = small("llama")
    model.model.forward = model.model.forward
    with pytest.raises(SpecError, match="model has a forward that was set on the object"):
        TransformersModel(model)


def test_a_buffer_without_memory_is_refused() -> None:
    model = small("llama")
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.to("meta")
    with pytest.raises(SpecError, match=r"the buffer model\.rotary_emb\.inv_freq is on meta"):
        TransformersModel(model)


def test_shapes_that_were_found_while_evaluating_serve_training() -> None:
    # in evaluation mode, as models come from a file
    adapted = TransformersModel(small("llama").eval())
    part = adapted.cut(*batch("plain"), 2)[0]
    with torch.inference_mode():
        assert not any(t.requires_grad for b in adapted.activations(part) for t in b)
    assert all(t.requires_grad for b in adapted.activations(part) for t in b if t.is_floating_point())
