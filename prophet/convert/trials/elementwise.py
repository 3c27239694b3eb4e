"""Is an optimizer's step element by element? Found by trying it on small tensors, whole and in pieces.

Lamb scales by norms of whole parameters, Muon makes a matrix orthogonal, Adafactor sums over rows: for them a stacked
parameter is something else than its parts.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from prophet.trials import trying

# The second step meets a state that is not empty
STEPS = 2
# Whatever the scheduler has set: a warm-up may be at 0
LR = 0.01
# Of a piece's largest change: vectorised loops round the ends of tensors differently than their middle.
TOLERANCE = 1e-3


def is_elementwise(optimizer: torch.optim.Optimizer, group: int, like: Tensor) -> bool:
    """Whether an optimizer's step treats a tensor as it treats its pieces.

    The optimizer, its hooks and the random state are left alone.

    Args:
        optimizer: Whose class and settings are tried.
        group: Number of the group with the settings.
        like: A parameter, on whose device it is tried.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn() -> Tensor:
        """Two experts, each of a gate and an `up` of [3, 4]."""
        return torch.randn(2, 6, 4, generator=generator).to(like.device)

    start = drawn()
    whole = nn.Parameter(start.clone())
    pieces = [nn.Parameter(piece.clone()) for piece in _cut(start)]
    twin = _twin(optimizer, group, [whole], pieces)
    # Past hooks and profilers, which would count the trial
    step = inspect.unwrap(type(optimizer).step)
    with torch.no_grad(), trying():
        for _ in range(STEPS):
            whole.grad = drawn()
            for piece, grad in zip(pieces, _cut(whole.grad), strict=True):
                piece.grad = grad.clone()
            try:
                step(twin)
            except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError, AttributeError):
                # It takes no tensors of three dimensions, or no pieces
                return False
        return all(
            (piece - part).abs().max() <= TOLERANCE * (part - before).abs().max()
            for piece, part, before in zip(pieces, _cut(whole), _cut(start), strict=True)
        )


def _cut(whole: Tensor) -> list[Tensor]:
    return [piece for expert in whole.detach() for piece in expert.chunk(2)]


def _twin(optimizer: torch.optim.Optimizer, group: int, *params: list[nn.Parameter]) -> Any:
    """Make such an optimizer without a state: one group for each of `params`, with the settings of group `group`."""
    twin: Any = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        # Without `__init__`, which may need arguments that nothing keeps
        twin.__dict__[name] = value.copy() if isinstance(value, dict | list | set) else value
    settings = {name: value for name, value in optimizer.param_groups[group].items() if name != "param_names"}
    if "lr" in settings:
        settings["lr"] = torch.full_like(settings["lr"], LR) if isinstance(settings["lr"], Tensor) else LR
    twin.state = defaultdict(dict)
    twin.param_groups = [{**settings, "params": group_params} for group_params in params]
    return twin
