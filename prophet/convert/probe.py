"""What does this feed-forward module compute? Found by trying: its output is compared with that of every candidate.

The comparison runs on a copy in float64 with random parameters, so a module that is taken for a plain feed-forward
network is one: another activation, a norm, a dropout in training mode or a different order of gate and up all differ.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prophet.convert.base import FfnNames
from prophet.convert.copies import trying
from prophet.errors import ConversionError
from prophet.kernels.grouped_ffn.naive import ACTIVATIONS, GATED, Activation, activate, expert_ffn

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
    tried = _Tried(expert, next(iter(linears.values())).in_features)
    for names, activation in _candidates(linears, tried.x.shape[1]):
        if tried.computes(names, activation):
            return names, activation
    raise ConversionError(
        f"{who}: its output is not that of a feed-forward network with one of the activations "
        f"{', '.join(ACTIVATIONS)} (linear layers: {', '.join(linears)})"
    )


def check_computes(expert: nn.Module, names: FfnNames, activation: Activation) -> None:
    """Raise `ConversionError` unless `expert` is this feed-forward network."""
    dim = dict(expert.named_parameters())[names.w_in[0]].shape[1]
    if not _Tried(expert, dim).computes(names, activation):
        raise ConversionError(f"{type(expert).__name__}: its output is not that of expert 0, which has {activation}")


class _Tried:
    """What a copy of an expert answers, its parameters being random."""

    def __init__(self, expert: nn.Module, dim: int) -> None:
        generator = torch.Generator().manual_seed(0)
        who = type(expert).__name__
        twin = copy.deepcopy(expert).cpu().double()
        with torch.no_grad(), trying(torch.device("cpu")):
            for p in twin.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / max(p.shape[-1], 1) ** 0.5)
            self.x = 2 * torch.randn(ROWS, dim, generator=generator, dtype=torch.float64)
            try:
                self.y, trained = (_first(twin.train(mode)(self.x)) for mode in (False, True))
            except (RuntimeError, TypeError, ValueError) as error:
                raise ConversionError(f"{who}: it cannot be called with rows {[ROWS, dim]}: {error}") from error
        if not torch.equal(self.y, trained):
            random = ", ".join(str(m) for m in twin.modules() if isinstance(m, nn.modules.dropout._DropoutNd))
            raise ConversionError(
                f"{who}: its output is not that of a feed-forward network in training ({random or 'self.training'})"
            )
        self._state = dict(twin.named_parameters())

    @torch.no_grad()
    def computes(self, names: FfnNames, activation: Activation) -> bool:
        """Whether that is what this feed-forward network answers."""
        guess = expert_ffn(self.x, names.unpack(self._state, ""), activation)
        return guess.shape == self.y.shape and torch.allclose(guess, self.y, rtol=0, atol=TOLERANCE)


def _first(y: Any) -> Tensor:
    first: Tensor = y[0] if isinstance(y, tuple) else y
    return first


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
