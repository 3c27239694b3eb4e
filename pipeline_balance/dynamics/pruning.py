"""Gradual global magnitude pruning: schedule, an exact top-k over all ranks, and layers that stay pruned.

Shape legend: N parameters of the model, k of them kept, P ranks. The schedule is Zhu and Gupta's (2017; DynMo, Eq. 3).
The papers gather every rank's k largest magnitudes on rank 0, which is P k values on one rank; here all ranks find the
threshold together, by counting in the bits of the magnitude, and nothing but counts travels. Ties at the threshold go
to the lower rank and the lower position, so exactly k are kept, on any number of ranks the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from prophet.errors import SpecError
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation

_DIGIT_BITS = 8
_BUCKETS = 1 << _DIGIT_BITS


@dataclass(frozen=True, kw_only=True, slots=True)
class PruningSchedule:
    """Sparsity by step, a cubic curve (Zhu and Gupta 2017; DynMo, Eq. 3).

    Attributes:
        initial: Sparsity before `first_step`.
        final: Sparsity after the last pruning.
        first_step: When pruning begins.
        prunings: How many prunings follow.
        every_steps: Steps from one to the next.
    """

    initial: float = 0.0
    final: float = 0.9
    first_step: int = 0
    prunings: int = 10
    every_steps: int = 100

    def __post_init__(self) -> None:
        if not 0.0 <= self.initial <= self.final < 1.0:
            raise SpecError(f"need 0 <= initial <= final < 1, got {self.initial} and {self.final}")
        if self.prunings < 1 or self.every_steps < 1 or self.first_step < 0:
            raise SpecError("prunings and every_steps must be at least 1, first_step not negative")

    def due(self, step: int) -> bool:
        """Whether the model is pruned at this step."""
        since = step - self.first_step
        return since >= 0 and since % self.every_steps == 0 and since <= self.prunings * self.every_steps

    def sparsity(self, step: int) -> float:
        """Return the share of parameters that is zero from this step on; constant between prunings and after the
        last.
        """
        since = min(max(step - self.first_step, 0) // self.every_steps, self.prunings)
        if step < self.first_step:
            return self.initial
        return self.final + (self.initial - self.final) * (1.0 - since / self.prunings) ** 3


def _magnitude_bits(values: Tensor) -> Tensor:
    """Integers [n] ordered as the magnitudes of float32 values; not-a-number counts as the largest."""
    # without the sign, bits of IEEE floats are ordered as their magnitudes
    bits: Tensor = values.detach().float().reshape(-1).contiguous().view(torch.int32).to(torch.int64) & 0x7FFFFFFF
    return bits


def global_top_k(values: Tensor, keep: int, collective: Collective) -> Tensor:
    """Find which of this rank's values are among the largest in magnitude of all ranks; exact, collective.

    Four all-gathers of 256 counts and two of a single count. Ties go to the lower rank, then the lower position.

    Args:
        values: This rank's part, of any length and shape, none at all included.
        keep: k, how many of all ranks' values to keep.
        collective: Over all ranks.

    Returns:
        A mask in the shape of `values`.

    Raises:
        SpecError: `keep` exceeds what there is.
    """
    bits = _magnitude_bits(values)
    op = Operation("global top-k")
    total = int(collective.all_gather(torch.tensor([bits.numel()]), op=op).sum())
    if not 0 <= keep <= total:
        raise SpecError(f"cannot keep {keep} of {total} values")
    if keep == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    # Radix select from the top digit down: `wanted` counts what is still to be kept among values that share `prefix`.
    prefix, wanted = 0, keep
    candidates = bits
    for shift in range(32 - _DIGIT_BITS, -1, -_DIGIT_BITS):
        digits = (candidates >> shift) & (_BUCKETS - 1)
        counts = collective.all_gather(torch.bincount(digits, minlength=_BUCKETS).cpu(), op=op).sum(dim=0)
        # values with this digit or a larger one
        above = counts.flip(0).cumsum(0).flip(0)
        digit = int((above >= wanted).nonzero().max())
        wanted -= int(above[digit] - counts[digit])
        prefix |= digit << shift
        candidates = candidates[digits == digit]
    # All that is left equals the threshold; `wanted` of them are kept, lower ranks first.
    ties = collective.all_gather(torch.tensor([candidates.numel()]), op=op).reshape(-1).tolist()
    mine = min(max(wanted - sum(ties[: collective.rank]), 0), ties[collective.rank])
    mask = bits > prefix
    mask[(bits == prefix).nonzero().reshape(-1)[:mine]] = True
    return mask.view(values.shape)


@dataclass(frozen=True)
class _Pattern:
    """Where a matrix [O, I] keeps its entries: compressed rows of it and of its transpose.

    Attributes:
        mask: The mask that it was derived from.
        version: That mask's version.
        rows: Row of every entry.
        columns: Column of every entry.
        row_starts: [O + 1] where each row begins.
        column_starts: [I + 1] where each column begins.
        by_column: Order of the entries in the transpose.
    """

    mask: Tensor
    version: int
    rows: Tensor
    columns: Tensor
    row_starts: Tensor
    column_starts: Tensor
    by_column: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> _Pattern:
        rows, columns = mask.nonzero(as_tuple=True)
        by_column = torch.sort(columns, stable=True).indices
        starts = [
            torch.cat([torch.zeros(1, dtype=torch.int64, device=mask.device), mask.sum(dim=d).cumsum(0)])
            for d in (1, 0)
        ]
        return cls(mask, mask._version, rows, columns, starts[0], starts[1], by_column)

    def fits(self, mask: Tensor) -> bool:
        # changes in place count too, as `load_state_dict` makes them
        return self.mask is mask and self.version == mask._version

    def sparse(self, values: Tensor) -> Tensor:
        """The matrix with these entries, [O, I]."""
        return torch.sparse_csr_tensor(self.row_starts, self.columns, values, self.mask.shape, check_invariants=False)

    def sparse_transposed(self, values: Tensor) -> Tensor:
        """The transpose of the matrix with these entries, [I, O]."""
        return torch.sparse_csr_tensor(
            self.column_starts,
            self.rows[self.by_column],
            values[self.by_column],
            (self.mask.shape[1], self.mask.shape[0]),
            check_invariants=False,
        )


class PrunedLinear(nn.Linear):
    """A linear layer some of whose weights are zero for good. The mask is a buffer: it moves with the layer.

    Args:
        in_features: I.
        out_features: O.
        bias: Whether there is a bias.
        sparse_below: Once the share of weights left is at most this, forward and both gradients run as sparse products
            over a pattern that is derived once per mask. Leave it at 0 where dense ones are faster.
    """

    mask: Tensor

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, sparse_below: float = 0.0) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.sparse_below = sparse_below
        self.register_buffer("mask", torch.ones_like(self.weight, dtype=torch.bool))
        self._pattern: _Pattern | None = None

    @property
    def kept(self) -> float:
        """Share of weights that is left."""
        return self._known_pattern().rows.numel() / max(self.mask.numel(), 1)

    def _known_pattern(self) -> _Pattern:
        # a layer that moved has another tensor for its mask
        if self._pattern is None or not self._pattern.fits(self.mask):
            self._pattern = _Pattern.of(self.mask)
        return self._pattern

    @torch.no_grad()
    def prune(self, mask: Tensor) -> None:
        """Keep only where `mask` says so; what was pruned before stays pruned."""
        self.mask = self.mask & mask
        self.weight.mul_(self.mask)

    def forward(self, x: Tensor) -> Tensor:
        if self.sparse_below > 0 and self.kept <= self.sparse_below:
            flat: Tensor = _SparseProduct.apply(x.reshape(-1, self.in_features), self.weight, self._known_pattern())  # type: ignore[no-untyped-call]
            out = flat.view(*x.shape[:-1], self.out_features)
            return out + self.bias if self.bias is not None else out
        # masked here too: an optimizer with momentum would move a pruned weight away from zero
        return nn.functional.linear(x, self.weight * self.mask, self.bias)


class _SparseProduct(torch.autograd.Function):
    """x W^T with W in compressed sparse rows; the weight's gradient is formed at its remaining entries only."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor, pattern: _Pattern) -> Tensor:
        values = weight[pattern.rows, pattern.columns]
        ctx.save_for_backward(x, values)
        ctx.pattern = pattern  # type: ignore[attr-defined]
        product: Tensor = (pattern.sparse(values) @ x.t()).t().contiguous()
        return product

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        x, values = ctx.saved_tensors  # type: ignore[attr-defined]
        pattern: _Pattern = ctx.pattern  # type: ignore[attr-defined]
        grad_t = grad.t().contiguous()
        entries = torch.sparse.sampled_addmm(pattern.sparse(values), grad_t, x, beta=0.0).values()
        # dense, as the parameter is; zero where nothing is left
        weight_grad = torch.zeros(pattern.mask.shape, dtype=grad.dtype, device=grad.device)
        weight_grad[pattern.rows, pattern.columns] = entries
        return (pattern.sparse_transposed(values) @ grad_t).t().contiguous(), weight_grad, None


def prune_globally(layers: Sequence[nn.Module], sparsity: float, collective: Collective) -> float:
    """Prune all `PrunedLinear` weights of all ranks by magnitude over the whole model; collective.

    Weights pruned earlier are zero and lose every tie, so none comes back.

    Args:
        layers: This rank's layers.
        sparsity: The share of all weights that is zero afterwards.
        collective: Over all ranks.

    Returns:
        The share of this rank's weights that is left (1.0 where it has none).
    """
    if not 0.0 <= sparsity < 1.0:
        raise SpecError(f"sparsity must be from 0 to below 1, got {sparsity!r}")
    modules = [m for layer in layers for m in layer.modules() if isinstance(m, PrunedLinear)]
    # a rank without such weights takes part, too
    device = next((m.weight.device for m in modules), torch.device("cpu"))
    # masked: an optimizer with momentum may have moved a pruned weight away from zero
    flat = torch.cat([(m.weight * m.mask).reshape(-1) for m in modules] or [torch.zeros(0, device=device)])
    total = int(collective.all_gather(torch.tensor([flat.numel()]), op=Operation("pruning")).sum())
    mask = global_top_k(flat, round(total * (1.0 - sparsity)), collective)
    for module, part in zip(modules, mask.split([m.weight.numel() for m in modules]), strict=True):
        module.prune(part.view_as(module.weight))
    return float(mask.float().mean()) if mask.numel() else 1.0


@torch.no_grad()
def global_unstructured(parameters: Sequence[tuple[nn.Module, str]], amount: float, collective: Collective) -> None:
    """Prune by magnitude as `torch.nn.utils.prune.global_unstructured` does, over all ranks of a pipeline; collective.

    The masks are those of torch: a parameter is split into `weight_orig` and `weight_mask`, and `prune.remove` makes
    it permanent. Call it on every rank with the same parameters of the whole model, between two steps.

    Args:
        parameters: Modules, each with the name of one of its parameters. What other ranks run is on `meta`.
        amount: The share of the weights left so far that is pruned.
        collective: Over the ranks of the pipeline.

    Raises:
        SpecError: `amount` is no share.
    """
    if not 0.0 <= amount <= 1.0:
        raise SpecError(f"amount must be from 0 to 1, got {amount!r}")
    here = [(m, n) for m, n in parameters if not _values(m, n).is_meta]
    # what was pruned before neither counts nor comes back
    left = [getattr(m, f"{n}_mask", torch.ones_like(_values(m, n))) != 0 for m, n in here]
    device = next((mask.device for mask in left), torch.device("cpu"))
    flat = torch.cat(
        [_values(m, n)[mask] for (m, n), mask in zip(here, left, strict=True)] or [torch.zeros(0, device=device)]
    )
    total = int(collective.all_gather(torch.tensor([flat.numel()]), op=Operation("pruning")).sum())
    kept = iter(global_top_k(flat, total - round(amount * total), collective).split([int(m.sum()) for m in left]))
    masks = iter(left)
    for module, name in parameters:
        values = _values(module, name)
        mask = torch.ones_like(values)
        if not values.is_meta:
            mask[next(masks)] = next(kept).to(mask.dtype)
        # on `meta` too: all ranks have the same parameters and buffers
        prune.custom_from_mask(module, name, mask)


def _values(module: nn.Module, name: str) -> Tensor:
    """A parameter, without the mask that it may have."""
    found: Tensor = getattr(module, f"{name}_orig", None)  # type: ignore[assignment]
    return (found if found is not None else getattr(module, name)).detach()
