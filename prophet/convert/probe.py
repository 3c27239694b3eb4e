"""What does this feed-forward module compute? Found by trying: its output is compared with that of every candidate.

The comparison runs on a copy in float64 with random parameters, so a module that is taken for a plain feed-forward
network is one: another activation, a norm, a dropout in training mode or a different order of gate and up all differ.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prophet.convert.base import FfnNames
from prophet.errors import ConversionError
from prophet.kernels.grouped_ffn.naive import activate, expert_ffn
from prophet.spec import ACTIVATIONS, GATED, Activation

ROWS = 6
TOLERANCE = 1e-9


def identify(expert: nn.Module) -> tuple[FfnNames, Activation]:
    """Names of the parameters of `expert` and its activation. Raises `ConversionError` where nothing fits."""
    linears = {name: m for name, m in expert.named_modules() if isinstance(m, nn.Linear)}
    known = {f"{name}.{part}" for name in linears for part in ("weight", "bias")}
    foreign = [name for name, _ in expert.named_parameters() if name not in known]
    who = type(expert).__name__
    if foreign or len(linears) not in (2, 3):
        raise ConversionError(
            f"{who}: expected an expert of two linear layers, or three where it is gated, got "
            f"{len(linears)} ({', '.join(linears) or 'none'}) and the other parameters {foreign}"
        )
    generator = torch.Generator().manual_seed(0)
    twin = copy.deepcopy(expert).cpu().double()
    with torch.no_grad():
        for p in twin.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / max(p.shape[-1], 1) ** 0.5)
        x = 2 * torch.randn(ROWS, next(iter(linears.values())).in_features, generator=generator, dtype=torch.float64)
        try:
            y = twin(x)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConversionError(f"{who}: it cannot be called with rows {list(x.shape)}: {error}") from error
        y = y[0] if isinstance(y, tuple) else y
        state = dict(twin.named_parameters())
        for names, activation in _candidates(linears, x.shape[1]):
            guess = expert_ffn(x, names.unpack(state, ""), activation)
            if guess.shape == y.shape and torch.allclose(guess, y, rtol=0, atol=TOLERANCE):
                return names, activation
    raise ConversionError(
        f"{who}: its output is not that of a feed-forward network with one of the activations "
        f"{', '.join(ACTIVATIONS)} (linear layers: {', '.join(linears)})"
    )


def _candidates(linears: dict[str, nn.Linear], dim: int) -> Iterator[tuple[FfnNames, Activation]]:
    for order in itertools.permutations(linears.items()):
        *first, last = order
        if any(m.in_features != dim for _, m in first) or last[1].out_features != dim:
            continue
        if any(m.out_features != last[1].in_features for _, m in first):
            continue
        biased = {m.bias is not None for _, m in order}
        if len(biased) != 1:
            continue  # the library's experts have both biases or none
        bias = biased.pop()
        names = FfnNames(
            tuple(f"{n}.weight" for n, _ in first),
            f"{last[0]}.weight",
            tuple(f"{n}.bias" for n, _ in first) if bias else None,
            f"{last[0]}.bias" if bias else None,
        )
        for activation in ACTIVATIONS:
            if (activation in GATED) == (len(first) == 2):
                yield names, activation


def is_silu(act_fn: object) -> bool:
    """Whether a function of tensors is silu, so that a gated module with it is SwiGLU."""
    return callable(act_fn) and _alike(act_fn, F.silu)


def plain_activation(function: Callable[[Tensor], Tensor]) -> Activation:
    """The name of an element-wise activation. Raises `ConversionError` for one that the layer does not have."""
    plain = [name for name in ACTIVATIONS if name not in GATED]
    for name in plain:
        if _alike(function, functools.partial(activate, activation=name)):
            return name
    raise ConversionError(f"activation_fn: expected one of {', '.join(plain)}, got another function")


@torch.no_grad()
def _alike(function: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]) -> bool:
    x = torch.linspace(-8, 8, 65, dtype=torch.float64)
    return torch.allclose(function(x.clone()), other(x), rtol=0, atol=1e-12)
