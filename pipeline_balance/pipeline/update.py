"""What happens to gradients between backward and the next batch: scaled, clipped, used.

Shape legend: N parameters of the model, P ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.ownership import Ownership
from prophet.ranks.collective import Collective, Operation

_CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


def gradients(owned: Ownership) -> dict[str, Tensor]:
    """This rank's gradients by name."""
    return {n: p.grad for n, p in owned.parameters.items() if p.grad is not None}


def total_norm(owned: Ownership, collective: Collective, device: torch.device) -> float:
    """The 2-norm of all gradients of the model, the same bits on all ranks and for every stage map; collective.

    One all-gather of [N] squares. They are added in the model's order, a tied parameter's once.
    """
    mine = gradients(owned)
    squares = torch.zeros(len(owned.parameters), dtype=torch.float64, device=device)
    for i, name in enumerate(owned.parameters):
        if name in mine:
            squares[i] = torch.linalg.vector_norm(mine[name], dtype=torch.float64) ** 2
    every = collective.all_gather(squares, op=Operation("the gradients' norm")).cpu()
    return float(every.amax(dim=0).sum().sqrt())


def scale_(owned: Ownership, factor: float) -> None:
    """Multiply this rank's gradients by `factor`."""
    if factor != 1.0:
        for grad in gradients(owned).values():
            grad.mul_(factor)


def clip_(owned: Ownership, norm: float, max_norm: float) -> None:
    """Scale this rank's gradients so that the model's norm is at most `max_norm`, as torch's own clipping does."""
    factor = max_norm / (norm + _CLIP_EPSILON)
    if not factor >= 1.0:  # also where the norm is no number
        scale_(owned, factor)


def drop(parameters: dict[str, nn.Parameter]) -> None:
    """Forget all gradients."""
    for parameter in parameters.values():
        parameter.grad = None
