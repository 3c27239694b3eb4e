"""A model's sizes: what follows from them, and options that win over them."""

from __future__ import annotations

import argparse

import pytest

from prophet.commands.arguments import add_model, model_sizes
from prophet.errors import SpecError, UsageError
from prophet.machine.models import MODELS, model_named
from prophet.machine.sizes import ModelSizes
from prophet.spec import LayerShape

# In billions, as their pages and reports say: all, and of which a token meets.
STATED = {
    "Mixtral-8x7B": 46.7,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235,
    "DeepSeek-V3": 671,
    "LLaMA2-7B": 6.74,
    "LLaMA2-13B": 13.0,
    "LLaMA2-70B": 69.0,
    "GPT3-6.7B": 6.7,
}


@pytest.mark.parametrize("name", STATED)
def test_named_models_are_as_large_as_stated(name: str) -> None:
    assert MODELS[name].parameters().total / 1e9 == pytest.approx(STATED[name], rel=0.005 if name[0] != "G" else 0.03)


def test_weights_are_counted_block_by_block() -> None:
    sizes = ModelSizes(
        name="m",
        dim=8,
        hidden=6,
        layers=5,
        experts=4,
        moe_layers=3,
        dense_hidden=20,
        shared_hidden=10,
        activation="gelu",
        bias=True,
        heads=4,
        kv_heads=2,
        head_dim=3,
        vocabulary=100,
    )
    attention = 8 * 12 + 2 * 8 * 6 + 12 * 8
    expert = 2 * 8 * 6 + 6 + 8
    assert sizes.parameters().routed == 3 * 4 * expert
    dense, shared, router = 2 * 2 * 8 * 20, 3 * 2 * 8 * 10, 3 * 4 * 8
    assert sizes.parameters().total == 2 * 100 * 8 + 5 * attention + dense + shared + router + 3 * 4 * expert
    assert sizes.shape(2) == LayerShape.feed_forward(
        dim=8, hidden=6, param_bytes=2, grad_bytes=2, token_element_bytes=2
    )
    assert sizes.with_options({"tied": True}).parameters().total == sizes.parameters().total - 800


@pytest.mark.parametrize("text", ["mixtral-8x7b", "MIXTRAL-8X7B", "Mixtral-8x7B"])
def test_names_are_known_in_any_capitals(text: str) -> None:
    assert model_named(text) is MODELS["Mixtral-8x7B"]


def asked(*arguments: str, base: ModelSizes | None = None) -> ModelSizes:
    parser = argparse.ArgumentParser()
    add_model(parser)
    return model_sizes(parser.parse_args(arguments), base)


def test_options_win_over_the_model_and_the_model_over_what_is_usual() -> None:
    usual = MODELS["Mixtral-8x7B"]
    assert asked(base=usual) is usual or asked(base=usual) == usual
    found = asked("--model", "qwen3-30b-a3b", "--experts", "64", "--top-k", "4", base=usual)
    assert found == MODELS["Qwen3-30B-A3B"].with_options({"experts": 64, "top_k": 4})
    assert (found.experts, found.top_k, found.dim, found.assumed) == (64, 4, 2048, ())


def test_what_follows_from_a_size_follows_from_the_new_one() -> None:
    deepseek = MODELS["DeepSeek-V3"]
    few = asked("--model", "DeepSeek-V3", "--layers", "20")
    assert few.blocks_with_experts == 19
    assert few.assumed == ("experts in 19 of 20 layers: as many in a hundred as before",)
    narrow = asked("--model", "DeepSeek-V3", "--dim", "1024", "--heads", "8")
    assert narrow.attention == 4 * 1024 * 8 * 128
    assert narrow.assumed == ("attention of four projections: its ranks are of other sizes",)
    assert asked("--model", "DeepSeek-V3", "--dim", "7168") == deepseek  # nothing changes
    odd = asked("--model", "Mixtral-8x7B", "--dim", "1000", "--heads", "10")
    assert odd.kv_heads == 10
    assert "8 do not divide the heads" in odd.assumed[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--model: expected a model by name"),
        (("--model", "Mixtral"), "--model: there is no model 'Mixtral'; did you mean 'Mixtral-8x7B'"),
        (("--model", "Mixtral-8x7B", "--top-k", "9"), "--model: Mixtral-8x7B: top_k: expected at most the 8 experts"),
        (("--model", "Mixtral-8x7B", "--heads", "7"), "heads: expected a divisor of dim 4096, got 7"),
        (("--model", "absent/config.json"), "absent/config.json: expected a model's configuration"),
    ],
)
def test_what_cannot_be_is_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        asked(*arguments)
    assert "\n" not in str(caught.value)


def test_unknown_sizes_are_refused() -> None:
    with pytest.raises(SpecError, match="no sizes of a model: colour, weight"):
        MODELS["Mixtral-8x7B"].with_options({"weight": 1, "colour": 2, "dim": 8})
