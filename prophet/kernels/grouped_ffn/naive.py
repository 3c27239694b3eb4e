"""The definition of the grouped feed-forward network: one expert after another.

Shape legend: T rows of all groups, G groups, D model dim, H hidden dim, U rows of w_in (H, or 2H where gated), O output
dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from prophet.spec import Activation, ActivationParts, Function, parts_of

# of the sigmoid that stands for the normal distribution in quick GELU
QUICK_SLOPE = 1.702


def _passes_at_its_bound() -> bool:
    """Return whether a `clamp` of the installed PyTorch passes the gradient of a value that is at its bound."""
    # asked and not looked up by version: builds between two releases differ
    with torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        (grad,) = torch.autograd.grad(x.clamp(max=1.0).sum(), x)
    return bool(grad.item())


# true up to release 2.13; kernels follow, as models that are converted would
CLAMP_PASSES = _passes_at_its_bound()


class ExpertWeights(NamedTuple):
    """One expert's parameters, or those of several, stacked.

    Attributes:
        w_in: [U, D]; gated: [2H, D], gate rows first.
        w_out: [O, H].
        b_in: [U]; None without.
        b_out: [O]; None without.
    """

    w_in: Tensor
    w_out: Tensor
    b_in: Tensor | None = None
    b_out: Tensor | None = None


FUNCTIONS: Mapping[Function, Callable[[Tensor], Tensor]] = {
    "identity": lambda h: h,
    "relu": F.relu,
    # So et al. 2021 (Primer)
    "relu2": lambda h: F.relu(h).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "silu": F.silu,
    # Hendrycks and Gimpel 2016
    "quick_gelu": lambda h: h * torch.sigmoid(QUICK_SLOPE * h),
}


def activate(h: Tensor, activation: Activation) -> Tensor:
    """Return the activation [n, H] of pre-activations `h` [n, U].

    Gated ones are f(gate)·up (Shazeer 2020, Eq. 5 and 6), of what `bounded` returns.
    """
    parts = parts_of(activation)
    function = FUNCTIONS[parts.function]
    if not parts.gated:
        return function(h)
    gate, up = bounded(h, parts)
    return function(gate) * up


def bounded(h: Tensor, parts: ActivationParts) -> tuple[Tensor, Tensor]:
    """Return what f is taken of, and its factor, each [n, H], from pre-activations `h` [n, 2H] of a gated activation.

    With a limit L they are min(gate, L) and min(max(up, -L), L); at a bound the gradient is what torch's `clamp` makes
    of it. With `plus_one` 1 is added to the factor (GPT-OSS, OpenAI 2025).
    """
    gate, up = h.chunk(2, dim=-1)
    if parts.limit is not None:
        gate, up = gate.clamp(max=parts.limit), up.clamp(-parts.limit, parts.limit)
    return gate, up + 1 if parts.plus_one else up


def expert_ffn(x: Tensor, weights: ExpertWeights, activation: Activation) -> Tensor:
    """Return one expert's answers: w_out · act(w_in · x + b_in) + b_out.

    Args:
        x: Its rows [n, D].
        weights: Its parameters.
        activation: A name from `prophet.spec.ACTIVATIONS`, or one with a limit.
    """
    h = activate(F.linear(x, weights.w_in, weights.b_in), activation)
    return F.linear(h, weights.w_out, weights.b_out)


def grouped_ffn(x: Tensor, sizes: Sequence[int], weights: Sequence[ExpertWeights], activation: Activation) -> Tensor:
    """Apply expert g to the g-th run of consecutive rows.

    Empty groups cost nothing, but the first group is always run, so that the result depends on `x` and on some weight
    even where no rank sent a token: the backward pass then has the same collectives on every rank.

    Args:
        x: Rows of all groups, [T, D].
        sizes: Rows of every group, [G].
        weights: The experts' parameters, by group.
        activation: A name from `prophet.spec.ACTIVATIONS`, or one with a limit.

    Returns:
        Answers [T, O].

    Raises:
        ValueError: Numbers of groups, experts and rows do not fit.
    """
    if sum(sizes) != x.shape[0] or len(sizes) != len(weights):
        raise ValueError(
            f"{len(sizes)} groups of {sum(sizes)} rows do not match {len(weights)} experts, {x.shape[0]} rows"
        )
    parts = [
        expert_ffn(rows, w, activation)
        for g, (rows, w) in enumerate(zip(x.split(list(sizes)), weights, strict=True))
        # the first also where it is empty: see above
        if g == 0 or rows.shape[0]
    ]
    return torch.cat(parts)
