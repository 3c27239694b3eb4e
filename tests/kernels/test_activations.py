"""One table of activations: kernels, definition, documentation and the tests' own formulas agree with it.

`tests/gpu` compares the Triton kernels, `tests/convert/test_probe.py` what the conversion recognises.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prophet.kernels.grouped_ffn.blocked import _act, _act_backward
from prophet.kernels.grouped_ffn.naive import FUNCTIONS, activate
from prophet.spec import ACTIVATIONS, Activation, Function, parts_of
from tests.helpers import oracle

PAGE = Path(__file__).parents[2] / "docs" / "convert.md"
TABLE = PAGE.read_text().split("| activation | function |")[1].split("\n\n")[0]
FORMULAS = dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", TABLE, re.M))
# what the page's formulas are made of, and numbers that lie at, within and beyond every bound
WORDS: dict[str, Any] = {
    "erf": torch.erf,
    "tanh": torch.tanh,
    "sqrt": math.sqrt,
    "pi": math.pi,
    "sigmoid": torch.sigmoid,
    "min": lambda a, b: torch.clamp(a, max=b),
    "max": lambda a, b: torch.clamp(a, min=b),
}
WITH_LIMIT = ["swiglu(limit=L)", "quick_geglu(limit=L, plus_one)"]
EDGES = [-40.0, -9.0, -7.0, -2.0, -0.3, 0.0, 0.4, 1.7, 7.0, 7.5, 40.0]


def rows(activation: Activation) -> Tensor:
    """Pre-activations [n, U] in which every edge, and every pair of them, occurs; with those of the limit."""
    parts = parts_of(activation)
    limit = parts.limit or 7.0
    edges = torch.tensor([*EDGES, *(sign * limit * part for sign in (-1, 1) for part in (0.99, 1, 1.01))]).double()
    return torch.cartesian_prod(edges, edges) if parts.gated else edges[:, None]


GATES = [name for name in ACTIVATIONS if parts_of(name).gated and parts_of(name).limit is None]
limits = st.floats(2**-10, 2**10, width=32)


@st.composite
def bounded(draw: st.DrawFn) -> Activation:
    """Any gate with any limit, with 1 added to `up` or not."""
    return f"{draw(st.sampled_from(GATES))}(limit={draw(limits)}{draw(st.sampled_from(['', ', plus_one']))})"


def test_all_name_the_same_activations() -> None:
    assert set(FUNCTIONS) == set(get_args(Function)) == {parts_of(name).function for name in ACTIVATIONS}
    assert set(oracle.PLAIN) == {name for name in ACTIVATIONS if not parts_of(name).gated}
    assert set(oracle.GATED) == {*GATES, "swiglu_clamped"}
    assert list(FORMULAS) == [*ACTIVATIONS, *WITH_LIMIT]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_definition_is_the_formula_on_the_page_and_that_of_the_tests(activation: Activation) -> None:
    h = rows(activation)
    for other in (on_the_page(activation, h), oracle.activate(h, activation)):
        torch.testing.assert_close(activate(h, activation), other, rtol=1e-13, atol=1e-13)


def on_the_page(row: str, h: Tensor, **more: float) -> Tensor:
    """The formula of a row of the page's table, of pre-activations [n, 1] or [n, 2]."""
    names = ("x",) if h.shape[1] == 1 else ("gate", "up")
    values = WORDS | more | dict(zip(names, h.split(1, dim=1), strict=True))
    written: Tensor = eval(FORMULAS[row], {"__builtins__": {}}, values)
    return written


@pytest.mark.parametrize("row", WITH_LIMIT)
@given(limits)
def test_a_limit_is_that_of_the_formula_on_the_page(row: str, limit: float) -> None:
    activation = row.replace("L", str(limit))
    h = rows(activation)
    torch.testing.assert_close(activate(h, activation), on_the_page(row, h, L=limit), rtol=1e-13, atol=1e-13)


@given(bounded())
def test_any_limit_is_that_of_the_tests_own_formula(activation: Activation) -> None:
    h = rows(activation)
    torch.testing.assert_close(activate(h, activation), oracle.activate(h, activation), rtol=1e-13, atol=1e-13)
    check_library_path(activation)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *oracle.LIMITED])
def test_the_library_paths_derivatives_are_those_of_the_definition(activation: Activation) -> None:
    check_library_path(activation)


def check_library_path(activation: Activation) -> None:
    h = rows(activation).requires_grad_()
    d_act = torch.linspace(-2, 3, len(h), dtype=torch.float64)[:, None]
    wanted = activate(h, activation)
    d_wanted = torch.autograd.grad(wanted, h, d_act)[0]
    plain = h.detach()
    torch.testing.assert_close(_act(plain, activation, torch.empty_like(d_act)), wanted, rtol=1e-13, atol=1e-13)
    act, d_hidden = torch.empty_like(d_act), torch.empty_like(plain)
    given = d_act.clone() if parts_of(activation).gated else d_hidden.copy_(d_act)
    _act_backward(plain, given, activation, act, d_hidden)
    torch.testing.assert_close(act, wanted, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(d_hidden, d_wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ["swiglu_clamped", "swiglu(limit=10)", "quick_geglu(limit=3)"])
def test_a_bound_passes_the_gradient_at_it_where_the_installed_torch_does(activation: Activation) -> None:
    bound = torch.tensor(7.0, requires_grad=True)
    bound.clamp(max=7.0).backward()  # not from release 2.14 on
    passes = bool(bound.grad)
    at = parts_of(activation).limit or 0.0
    past = at + 0.1
    h = torch.tensor([[at, at], [at, -at], [past, past], [1.0, -past]], dtype=torch.float64).requires_grad_()
    d_hidden = torch.autograd.grad(activate(h, activation).sum(), h)[0]
    assert (d_hidden != 0).tolist() == [[passes, passes], [passes, passes], [False, False], [True, False]]
