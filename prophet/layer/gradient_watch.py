"""Have all ranks' optimizers used the same gradients? A wrong clip is noticed in the step that comes after it.

The opposite is expected of experts, which `prophet.layer.expert_watch` compares.

Ranks share all parameters but the experts', so a shared gradient has the same bits on all of them once it is averaged.
`torch.nn.utils.clip_grad_norm_` takes the norm of one rank's experts. It multiplies every rank's gradients by another
factor, and from then on the shared parameters drift apart. Adam's first step even hides that in the parameters, since
it divides the factor out. So each optimizer step leaves a digest of the gradients that it used, and the digests travel
with the next step's counts.

Shape legend: R ranks, W gradients that are watched.
"""

from __future__ import annotations

import warnings
import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prophet.errors import GradientMismatch
from prophet.spec import FloatArray, IntArray, odd_ones_out

# gradients that are watched: what makes ranks drift apart changes all of them
WATCHED = 8
# elements of one gradient: a digest costs as much for a large parameter as for a small one
_ELEMENTS = 65_536
# by gradient: its bits, its projection, its norm, the parameter's bits
_FIGURES = 4
# the first says which gradients they are of
DIGEST_NUMBERS = 1 + WATCHED * _FIGURES
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CLIP = "Clip by engine.clip_grad_norm_(parameters, max_norm)"
# by how many roundings of its dtype a clipped gradient may miss the exact product
_ROUNDINGS = 16.0


@dataclass(frozen=True, eq=False, slots=True)
class _Digests:
    """What all ranks' optimizers used.

    Attributes:
        bits: Sums of the gradients' bits as integers, [R, W].
        projection: Sums of the gradients with fixed random signs, [R, W], in float64.
        norm: Norms of the gradients, [R, W], in float64.
        parameters: Sums of the parameters' bits as integers, [R, W].
    """

    bits: IntArray
    projection: FloatArray
    norm: FloatArray
    parameters: IntArray

    @classmethod
    def read(cls, table: IntArray, watched: int) -> _Digests:
        """Read what came with the counts, [R, DIGEST_NUMBERS]."""
        bits, projection, norm, parameters = (
            np.ascontiguousarray(table[:, 1 + i * WATCHED : 1 + i * WATCHED + watched]) for i in range(_FIGURES)
        )
        # the message holds integers only: floats travel as their bits
        return cls(bits, projection.view(np.float64), norm.view(np.float64), parameters)

    def clipped_apart(self, rank: int, like: int, tolerance: float) -> bool:
        """Return whether one rank's gradients are those of another times one factor other than 1.

        Args:
            rank: The rank in question.
            like: The rank that it is compared with.
            tolerance: Relative error that rounding may leave in a product.
        """
        norm, projection = self.norm[rank], self.projection[rank]
        norm_there, projection_there = self.norm[like], self.projection[like]
        square = float((norm_there**2).sum())
        if not np.isfinite([*norm, *norm_there]).all() or square == 0.0:
            return False
        # least squares over the watched gradients: one factor for all of them
        factor = float((norm * norm_there).sum()) / square
        # the norm alone does not tell gradients of one length apart, so the projections have to fit as well
        most = tolerance * max(factor, 1.0) * norm_there
        return bool(
            abs(factor - 1.0) > tolerance
            and factor > 0.0
            and (np.abs(norm - factor * norm_there) <= most).all()
            and (np.abs(projection - factor * projection_there) <= most).all()
        )


class GradientWatch:
    """Compares over the ranks what one optimizer used of the gradients that ranks share.

    Gradients that FSDP cuts, and those that DistributedDataParallel was told to leave alone, are not watched.
    Neighbours are watched in pairs from all over the model, and a gradient that was zero makes room for another: of a
    LoRA pair one is zero at first.

    Args:
        model: The model whose parameters they are, by whose names messages call them; None where nobody knows it, and
            the optimizer's groups have to name them.
        optimizer: Whose gradients are watched.
        advice: How messages say to clip.
    """

    def __init__(self, model: nn.Module | None, optimizer: torch.optim.Optimizer, advice: str = CLIP) -> None:
        shared = [(n, p) for n, p in _named(model, optimizer) if _is_shared(p) and p.is_floating_point()]
        self._advice = advice
        self._waiting = deque(_spread(shared))
        self._watched = [self._waiting.popleft() for _ in range(min(WATCHED, len(self._waiting)))]
        self._signs: dict[torch.device, Tensor] = {}
        self._digest: Tensor | None = None
        self._step = 0
        self._warned = False

    @property
    def pending(self) -> bool:
        """Whether there is a digest that nobody has taken."""
        return self._digest is not None

    @torch.no_grad()
    def look(self, step: int) -> bool:
        """Remember what the optimizer is about to use in this step; the host waits for nothing.

        Args:
            step: Number of the step, for messages.

        Returns:
            False, with nothing remembered, where a watched parameter is not shared any more: cut, frozen or moved.
        """
        figures = [self._figures(p) for _, p in self._watched if _is_shared(p)]
        self._step, self._digest = step, None
        if len(figures) < len(self._watched):
            return False
        if figures:
            device = figures[0].device
            columns = torch.stack([f.to(device, non_blocking=True) for f in figures], dim=1)
            padded = columns.new_zeros((_FIGURES, WATCHED))
            padded[:, : len(figures)] = columns
            # ranks whose optimizers hold other parameters have another mark, and `compare` leaves them alone
            which = columns.new_full((1,), mark_of((n, p.shape, p.dtype) for n, p in self._watched))
            self._digest = torch.cat([which, padded.reshape(-1)])
        return True

    def _figures(self, p: nn.Parameter) -> Tensor:
        """Return the four figures of a parameter as 64-bit integers [_FIGURES], on its device."""
        mine = p.detach().reshape(-1)[:_ELEMENTS]
        parameter = mine.view(_BITS[p.element_size()]).sum(dtype=torch.int64)
        if p.grad is None or p.grad.is_sparse:
            zero = torch.zeros_like(parameter)
            return torch.stack([zero, zero, zero, parameter])
        grad = p.grad.detach().reshape(-1)[:_ELEMENTS]
        # in double, so that the sums' own rounding stays below that of the gradient's dtype
        exact = grad.double()
        signs = self._signs.get(grad.device)
        if signs is None:
            # the same signs on every rank, whatever its random state: a fixed seed
            drawn = torch.randint(0, 2, (_ELEMENTS,), generator=torch.Generator().manual_seed(0)) * 2 - 1
            signs = self._signs[grad.device] = drawn.to(grad.device, torch.float64)
        projections = torch.stack([(exact * signs[: exact.numel()]).sum(), exact.square().sum().sqrt()])
        bits = grad.view(_BITS[grad.element_size()]).sum(dtype=torch.int64)
        return torch.cat([bits.view(1), projections.view(torch.int64), parameter.view(1)])

    def take(self, device: torch.device) -> Tensor:
        """Return the digest of the last step, [DIGEST_NUMBERS] on `device`; zeros where it was taken already."""
        digest, self._digest = self._digest, None
        return nothing(DIGEST_NUMBERS, device) if digest is None else digest.to(device, non_blocking=True)

    def compare(self, table: IntArray) -> None:
        """Judge what all ranks have sent; zeros say nothing, and so do digests of other parameters.

        Warns, once, where gradients differ in another way than by a factor, which is no mistake in local SGD.

        Args:
            table: What `take` returned on every rank, [R, DIGEST_NUMBERS].

        Raises:
            GradientMismatch: Ranks' gradients differ by one factor: each has clipped by another norm.
        """
        if not comparable(table):
            return
        found = _Digests.read(table, len(self._watched))
        names = [n for n, _ in self._watched]
        apart = [odd_ones_out(column) for column in found.bits.T]
        if any(apart):
            self._judge(found, next((n, a) for n, a in zip(names, apart, strict=True) if a))
        drifted = [(n, a) for n, a in zip(names, map(odd_ones_out, found.parameters.T), strict=True) if a]
        # gradients that differ explain parameters that do, and have their own message
        if drifted and not any(apart):
            self._warn(
                f"{drifted[0][0]} of rank(s) {drifted[0][1]} differs from the other ranks', though ranks share all "
                f"parameters but the experts' and step {self._step} has used the same gradients. "
                f"Do all ranks start alike, and does the optimizer treat each parameter by itself? One that computes a "
                f"figure from all of them, as LBFGS does, finds another on every rank"
            )
        self._rotate(found.norm)

    def _judge(self, found: _Digests, first: tuple[str, list[int]]) -> None:
        name, odd = first
        ranks = range(len(found.bits))
        like = next(r for r in ranks if r not in odd)
        others = [r for r in ranks if (found.bits[r] != found.bits[like]).any()]
        tolerance = _ROUNDINGS * max(torch.finfo(p.dtype).eps for _, p in self._watched)
        if all(found.clipped_apart(r, like, tolerance) for r in others):
            raise GradientMismatch(
                f"step {self._step}: rank(s) {odd} used gradients of {name} and others that are those of rank {like} "
                f"times a factor: every rank has clipped by another norm, that of its own experts, so the parameters "
                f"that ranks share drift apart. {self._advice} in place of torch.nn.utils.clip_grad_norm_, and start "
                f"again from the last checkpoint before step {self._step}"
            )
        self._warn(
            f"the gradient of {name} that step {self._step} used on rank(s) {odd} differs from the other ranks', "
            f"though ranks share all parameters but the experts'. Are gradients averaged (DistributedDataParallel or "
            f"FSDP), and do all ranks start alike?"
        )

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(message, stacklevel=2)

    def _rotate(self, norm: FloatArray) -> None:
        """Watch another gradient in place of each that was zero on all ranks; the same one on all ranks."""
        for i in np.flatnonzero((norm == 0.0).all(axis=0)):
            if self._waiting:
                self._waiting.append(self._watched[i])
                self._watched[i] = self._waiting.popleft()


def mark_of(parts: Iterable[Any]) -> int:
    """Return a number other than zero that differs where any of `parts` does; the same in every process."""
    # `hash` is salted per process; the bit above 32 keeps it from zero, which stands for no digest
    return zlib.crc32(repr(list(parts)).encode()) | 1 << 32


def comparable(table: IntArray) -> bool:
    """Return whether all ranks have sent digests [R, ...] of the same parameters: one mark, and nobody's zero."""
    return bool(table[0, 0]) and bool((table[:, 0] == table[0, 0]).all())


@cache
def nothing(numbers: int, device: torch.device) -> Tensor:
    """Return zeros in place of a digest; one tensor for all, not to be written to."""
    # it is kept: made in inference mode it would be an inference tensor for good, in training passes too
    with torch.inference_mode(False):
        return torch.zeros(numbers, dtype=torch.int64, device=device)


def _named(model: nn.Module | None, optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    """Return what the optimizer holds of the model's parameters, in the model's order; of any model without one."""
    if model is None:
        return [
            (names[i] if (names := group.get("param_names")) else f"parameter {i} of group {g}", p)
            for g, group in enumerate(optimizer.param_groups)
            for i, p in enumerate(group["params"])
        ]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left_alone = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    return [(n, p) for n, p in model.named_parameters() if id(p) in held and n not in left_alone]


def _is_shared(p: nn.Parameter) -> bool:
    """Return whether every rank has the whole parameter, and the same."""
    return (
        # `full_tensor` is a DTensor's, of which each rank holds a part
        p.requires_grad and not p.is_meta and not getattr(p, "prophet_expert", False) and not hasattr(p, "full_tensor")
    )


def _spread(named: list[tuple[str, nn.Parameter]]) -> Iterable[tuple[str, nn.Parameter]]:
    """Return all of them: first pairs of neighbours from all over the list, then the rest."""
    starts = [i * max(len(named) - 2, 0) // max(WATCHED // 2 - 1, 1) for i in range(WATCHED // 2)]
    first = list(dict.fromkeys(i for start in starts for i in (start, start + 1) if i < len(named)))
    rest = [i for i in range(len(named)) if i not in set(first)]
    return [named[i] for i in (*first, *rest)]
