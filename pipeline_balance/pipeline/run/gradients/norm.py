"""One norm of all gradients, over stages, replicas and tied parameters, and clipping by it.

Every gradient is measured on a rank that holds it. The ranks then gather one figure per parameter, so all of them take
the norm of the same figures in the same order: the order of the unsplit model, whatever the stage map. For parameters
of one dtype these are the bits that `torch.nn.utils.clip_grad_norm_` finds in one process with the same gradients.

Shape legend: R ranks, N parameters of the unsplit model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import reduce
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.model.ownership import local
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation

# no norm is negative
_ABSENT = -1.0


@torch.no_grad()
def gradient_norm(
    parameters: Mapping[str, nn.Parameter], counted: Collection[str], world: Collective, *, device: torch.device
) -> Tensor:
    """Compute the 2-norm of all gradients, with the same bits on every rank; collective over `world`.

    Of equal copies one rank counts its own. Where several ranks count a name, as they do for experts that share it,
    their gradients are parts of one.

    Args:
        parameters: All N of the unsplit model by name, in its order, the same on all ranks; a tied one has one name.
        counted: The names whose gradients this rank measures.
        world: Over all ranks.
        device: Where the norm is returned.

    Returns:
        A scalar of the dtype that the parameters' dtypes promote to; 0 without any gradient.
    """
    op = Operation("norm of all gradients")
    mine = torch.full((len(parameters),), _ABSENT, dtype=torch.float64)
    held = [(i, p.grad) for i, (name, p) in enumerate(parameters.items()) if name in counted and p.grad is not None]
    if held:
        norms = [torch.linalg.vector_norm(_values(grad)) for _, grad in held]
        mine[[i for i, _ in held]] = world.on_host(torch.stack([n.double() for n in norms]), op=op, limited=False)
    every = world.all_gather(mine, op=op)  # [R, N]
    # also where the norm is not a number, which compares as false
    present = ~(every < 0)
    figures, owners = every.where(present, 0.0), present.sum(dim=0)
    # the sum of one figure and zeros is that figure, bit for bit; a root of its square need not be
    found = figures.sum(dim=0).where(owners == 1, torch.linalg.vector_norm(figures, dim=0))[owners > 0]
    # torch takes the norm of norms in this type, and its rounding is part of the result
    dtype = reduce(torch.promote_types, [p.dtype for p in parameters.values()])
    norm: Tensor = torch.linalg.vector_norm(found.to(dtype))
    return norm.to(device)


def clip_gradients_(
    parameters: Mapping[str, nn.Parameter], max_norm: float, total_norm: Tensor, *, error_if_nonfinite: bool = False
) -> None:
    """Scale this rank's gradients as `torch.nn.utils.clip_grad_norm_` does where it has found `total_norm`.

    Nothing is sent.

    Args:
        parameters: Parameters by name; those without a gradient are passed over.
        max_norm: What the norm is to be at most.
        total_norm: The norm of all gradients, a scalar.
        error_if_nonfinite: Whether to raise where the norm is infinite or not a number; else all gradients become so.

    Raises:
        RuntimeError: On every rank, as the norm is the same, where `error_if_nonfinite` asks for it.
    """
    if error_if_nonfinite and not bool(total_norm.isfinite()):
        raise RuntimeError(f"the norm of all gradients is {float(total_norm)}, so they cannot be clipped")
    # torch multiplies what has a `grad`; a shard is scaled as it lies here
    here: Any = [SimpleNamespace(grad=local(p.grad)) for p in parameters.values() if p.grad is not None]
    torch.nn.utils.clip_grads_with_norm_(here, max_norm, total_norm)


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else local(grad)
