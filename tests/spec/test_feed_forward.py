"""Names of activations: what each one means, that parts have one name, and who takes a name with a limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prophet.errors import SpecError
from prophet.experts.feed_forward import FeedForwardBank
from prophet.machine.recorded import recorded_sizes
from prophet.machine.sizes import ModelSizes
from prophet.spec import ACTIVATIONS, ActivationParts, LayerShape, activation_named, parts_of


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("swiglu", ActivationParts(function="silu", gated=True)),
        ("swiglu_clamped", ActivationParts(function="quick_gelu", gated=True, limit=7, plus_one=True)),
        ("swiglu(limit=10)", ActivationParts(function="silu", gated=True, limit=10.0)),
        ("swiglu(plus_one)", ActivationParts(function="silu", gated=True, plus_one=True)),
        ("quick_geglu(limit=0.1)", ActivationParts(function="quick_gelu", gated=True, limit=0.1)),
        ("quick_geglu(limit=7)", ActivationParts(function="quick_gelu", gated=True, limit=7.0)),
        ("geglu(limit=1e-05, plus_one)", ActivationParts(function="gelu", gated=True, limit=1e-5, plus_one=True)),
    ],
)
def test_a_name_means_its_parts(name: str, parts: ActivationParts) -> None:
    assert parts_of(name) == parts
    assert activation_named(parts) == name


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("quick_geglu(limit=7, plus_one)", "swiglu_clamped"),
        ("quick_geglu(limit=7.0,plus_one)", "swiglu_clamped"),
        ("swiglu(limit=1e1)", "swiglu(limit=10)"),
        ("swiglu(limit=+10.50)", "swiglu(limit=10.5)"),
    ],
)
def test_of_several_spellings_one_is_written(name: str, canonical: str) -> None:
    assert activation_named(parts_of(name)) == canonical
    assert FeedForwardBank(3, 5, 2, activation=name).activation == canonical


@given(
    st.sampled_from([name for name in ACTIVATIONS if parts_of(name).gated]),
    st.none() | st.floats(0, exclude_min=True, allow_infinity=False),
    st.booleans(),
)
def test_the_name_of_parts_means_them(name: str, limit: float | None, plus_one: bool) -> None:
    parts = ActivationParts(function=parts_of(name).function, gated=True, limit=limit, plus_one=plus_one)
    assert parts_of(activation_named(parts)) == parts


@pytest.mark.parametrize(
    "name",
    [
        "tanh",
        "",
        "swiglu()",
        "swiglu(10)",
        "swiglu(limit=0)",
        "swiglu(limit=-1)",
        "swiglu(limit=nan)",
        "swiglu(limit=inf)",
        "swiglu(limit=1e999)",
        "swiglu(limit=1e)",
        "swiglu(limit=10",
        "swiglu(limit=10) ",
        "swiglu(plus_one, limit=10)",
        "swiglu(limit=10, plus_two)",
        "silu(limit=10)",
        "silu(plus_one)",
        "tanh(limit=10)",
        "swiglu_clamped(limit=10)",
        "swiglu_clamped(plus_one)",
        3,
        None,
        ["swiglu"],
    ],
)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(
        SpecError, match=r"activation: expected one of identity, .*, or a gated one with a positive limit"
    ):
        parts_of(name)


def test_a_long_name_is_not_repeated_in_full() -> None:
    with pytest.raises(SpecError) as caught:
        parts_of("swiglu" * 1000)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_is_positive_and_finite(limit: float) -> None:
    with pytest.raises(SpecError, match="limit: expected a positive and finite number"):
        ActivationParts(function="silu", gated=True, limit=limit)


def test_options_are_for_gated_ones() -> None:
    for options in ({"limit": 7.0}, {"plus_one": True}):
        with pytest.raises(SpecError, match="limit and plus_one belong to gated activations"):
            ActivationParts(function="silu", **options)  # type: ignore[arg-type]


def test_a_function_that_no_gate_has_is_refused() -> None:
    with pytest.raises(SpecError, match=r"function: expected one of relu, .*, got .*relu2"):
        activation_named(ActivationParts(function="relu2", gated=True, limit=7.0))


def test_a_name_with_a_limit_is_taken_wherever_sizes_are() -> None:
    """A gated expert of the same sizes, whatever its limit."""
    name = "swiglu(limit=10)"
    plain = LayerShape.feed_forward(dim=3, hidden=5, activation="swiglu")
    assert LayerShape.feed_forward(dim=3, hidden=5, activation=name) == plain
    assert FeedForwardBank(3, 5, 2, activation=name).shape() == plain
    assert FeedForwardBank(3, 5, 2, activation=name).w_in.shape == (2, 10, 3)
    assert ModelSizes(name="m", dim=4, hidden=5, activation=name).matrices == 3
    assert recorded_sizes({"activation": name}, "trace") == {"activation": name}


def test_a_refusal_says_where_the_name_is_from() -> None:
    with pytest.raises(SpecError, match="m: activation: expected one of identity"):
        ModelSizes(name="m", dim=4, hidden=5, activation="swiglu(limit=0)")
    with pytest.raises(SpecError, match="trace: meta: activation: expected one of identity"):
        recorded_sizes({"activation": "swiglu(limit=0)"}, "trace")
