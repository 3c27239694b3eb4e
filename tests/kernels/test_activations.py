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
from torch import Tensor

from prophet.kernels.grouped_ffn.blocked import _act, _act_backward
from prophet.kernels.grouped_ffn.naive import FUNCTIONS, activate
from prophet.spec import ACTIVATION_PARTS, ACTIVATIONS, GATED, Activation, Function
from tests.helpers import oracle

PAGE = Path(__file__).parents[2] / "docs" / "convert.md"
TABLE = PAGE.read_text().split("| activation | function |")[1].split("\n\n")[0]
FORMULAS = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", TABLE, re.M))
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
EDGES = [-40.0, -9.0, -7.0, -2.0, -0.3, 0.0, 0.4, 1.7, 7.0, 7.5, 40.0]


def rows(activation: Activation) -> Tensor:
    """Pre-activations [n, U] in which every edge, and every pair of them, occurs."""
    edges = torch.tensor(EDGES, dtype=torch.float64)
    return torch.cartesian_prod(edges, edges) if activation in GATED else edges[:, None]


def test_all_name_the_same_activations() -> None:
    assert get_args(Activation) == ACTIVATIONS == tuple(ACTIVATION_PARTS)
    assert set(FUNCTIONS) == set(get_args(Function)) == {parts.function for parts in ACTIVATION_PARTS.values()}
    assert set(oracle.PLAIN) == set(ACTIVATIONS) - set(GATED)
    assert set(oracle.GATED) == set(GATED)
    assert list(FORMULAS) == list(ACTIVATIONS)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_definition_is_the_formula_on_the_page_and_that_of_the_tests(activation: Activation) -> None:
    h = rows(activation)
    names = ("gate", "up") if activation in GATED else ("x",)
    written = eval(FORMULAS[activation], {"__builtins__": {}}, WORDS | dict(zip(names, h.split(1, dim=1), strict=True)))
    for other in (written, oracle.activate(h, activation)):
        torch.testing.assert_close(activate(h, activation), other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_library_paths_derivatives_are_those_of_the_definition(activation: Activation) -> None:
    h = rows(activation).requires_grad_()
    d_act = torch.linspace(-2, 3, len(h), dtype=torch.float64)[:, None]
    wanted = activate(h, activation)
    d_wanted = torch.autograd.grad(wanted, h, d_act)[0]
    plain = h.detach()
    torch.testing.assert_close(_act(plain, activation, torch.empty_like(d_act)), wanted, rtol=1e-13, atol=1e-13)
    act, d_hidden = torch.empty_like(d_act), torch.empty_like(plain)
    given = d_act.clone() if activation in GATED else d_hidden.copy_(d_act)
    _act_backward(plain, given, activation, act, d_hidden)
    torch.testing.assert_close(act, wanted, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(d_hidden, d_wanted, rtol=1e-12, atol=1e-12)


def test_a_bound_passes_the_gradient_at_it_where_the_installed_torch_does() -> None:
    bound = torch.tensor(7.0, requires_grad=True)
    bound.clamp(max=7.0).backward()  # not from release 2.14 on
    passes = bool(bound.grad)
    h = torch.tensor([[7.0, 7.0], [7.0, -7.0], [7.1, 7.1], [1.0, -7.1]], dtype=torch.float64).requires_grad_()
    d_hidden = torch.autograd.grad(activate(h, "swiglu_clamped").sum(), h)[0]
    assert (d_hidden != 0).tolist() == [[passes, passes], [passes, passes], [False, False], [True, False]]
