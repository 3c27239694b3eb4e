"""A matrix that keeps few of its entries: where they are, as compressed rows (CSR), and products with it.

Shape legend: O rows, I columns, K entries that are kept, N rows of an input. Entries are in the order of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from prophet.errors import SpecError


@dataclass(frozen=True)
class Pattern:
    """Where a matrix keeps its entries; indices of four bytes, as the products take them.

    Attributes:
        shape: (O, I).
        row_starts: [O + 1] int32, where each row begins among the entries, and the end.
        columns: [K] int32, the column of every entry.
    """

    shape: tuple[int, int]
    row_starts: Tensor
    columns: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> Pattern:
        """The entries at which `mask` [O, I] is true."""
        starts = torch.zeros(mask.shape[0] + 1, dtype=torch.int32, device=mask.device)
        starts[1:] = mask.sum(dim=1).cumsum(0)
        return cls((mask.shape[0], mask.shape[1]), starts, mask.nonzero()[:, 1].to(torch.int32))

    @classmethod
    def unpack(cls, packed: Tensor, shape: tuple[int, int]) -> Pattern:
        """Read what `packed` has made; shares its memory."""
        return cls(shape, packed[: shape[0] + 1], packed[shape[0] + 1 :])

    def packed(self) -> Tensor:
        """Row starts and columns in one tensor [O + 1 + K], which travels as one."""
        return torch.cat([self.row_starts, self.columns])

    def places(self) -> Tensor:
        """[K] the entries' places in the matrix, counted row by row."""
        rows = torch.arange(self.shape[0], device=self.columns.device).repeat_interleave(self.row_starts.diff())
        return rows * self.shape[1] + self.columns

    def pick(self, dense: Tensor) -> Tensor:
        """The entries [K] of a tensor [O, I]."""
        return dense.reshape(-1)[self.places()]

    def dense(self, values: Tensor) -> Tensor:
        """A tensor [O, I] with these entries, and zeros elsewhere."""
        found = torch.zeros(self.shape[0] * self.shape[1], dtype=values.dtype, device=values.device)
        found[self.places()] = values
        return found.view(self.shape)

    def mask(self) -> Tensor:
        """[O, I] where entries are."""
        return self.dense(torch.ones_like(self.columns, dtype=torch.bool))

    def only(self, left: Tensor) -> Pattern:
        """The pattern without the entries that `left` [K] leaves out."""
        before = torch.zeros(len(left) + 1, dtype=torch.int32, device=left.device)
        before[1:] = left.cumsum(0)
        return Pattern(self.shape, before[self.row_starts], self.columns[left])

    def matrix(self, values: Tensor) -> Tensor:
        """The matrix with these entries, in torch's layout of compressed rows."""
        # torch's products trust what they get, and would read elsewhere in memory
        if values.shape != self.columns.shape:
            text = f"a pattern of {len(self.columns)} entries cannot hold values of {list(values.shape)}"
            raise SpecError(f"{text}: prune between updates")
        return torch.sparse_csr_tensor(self.row_starts, self.columns, values, self.shape, check_invariants=False)

    @cached_property
    def transposed(self) -> tuple[Pattern, Tensor]:
        """The transpose's pattern, and for each of its entries which one it is here [K]."""
        order = torch.sort(self.columns, stable=True).indices.to(torch.int32)
        rows = torch.arange(self.shape[0], dtype=torch.int32, device=self.columns.device)
        rows = rows.repeat_interleave(self.row_starts.diff())
        starts = torch.zeros(self.shape[1] + 1, dtype=torch.int32, device=self.columns.device)
        starts[1:] = torch.bincount(self.columns, minlength=self.shape[1]).cumsum(0)
        return Pattern((self.shape[1], self.shape[0]), starts, rows[order]), order


# an operator, since torch cannot make compressed rows of tensors without values: the pipeline asks layers for shapes
@torch.library.custom_op("pipeline_balance::csr_product", mutates_args=())
def _times(row_starts: Tensor, columns: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """The product [N, O] of rows x [N, I] and the transpose of the matrix."""
    pattern = Pattern((len(row_starts) - 1, x.shape[1]), row_starts, columns)
    product: Tensor = (pattern.matrix(values) @ x.t()).t().contiguous()
    return product


@_times.register_fake
def _(row_starts: Tensor, columns: Tensor, values: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], len(row_starts) - 1)


class _Product(torch.autograd.Function):
    """x W^T with W's entries alone; their gradient is formed where they are and nowhere else."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, values: Tensor, pattern: Pattern) -> Tensor:
        # a frozen layer holds no input
        held: Any = x if ctx.needs_input_grad[1] else None  # type: ignore[attr-defined]
        ctx.save_for_backward(held, values)
        ctx.pattern = pattern  # type: ignore[attr-defined]
        product: Tensor = _times(pattern.row_starts, pattern.columns, values, x)
        return product

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, values = ctx.saved_tensors  # type: ignore[attr-defined]
        pattern: Pattern = ctx.pattern  # type: ignore[attr-defined]
        grad_t = grads[0].t().contiguous()
        x_grad = values_grad = None
        # torch has sparse products in the types of the weights alone, and a backward pass may run under autocast
        with torch.autocast(grad_t.device.type, enabled=False):
            if ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
                transposed, order = pattern.transposed
                x_grad = (transposed.matrix(values[order]) @ grad_t).t().contiguous()
            if ctx.needs_input_grad[1]:  # type: ignore[attr-defined]
                values_grad = torch.sparse.sampled_addmm(pattern.matrix(values), grad_t, x, beta=0.0).values()
        return x_grad, values_grad, None


def product(x: Tensor, values: Tensor, pattern: Pattern) -> Tensor:
    """Multiply rows by the transpose of a matrix that keeps few entries, as `nn.functional.linear` does.

    Args:
        x: [N, I], in the type of `values`.
        values: [K] the entries.
        pattern: Where they are.

    Returns:
        [N, O]. Gradients of both tensors have their shapes.

    Raises:
        SpecError: There are more or fewer values than entries.
    """
    found: Tensor = _Product.apply(x, values, pattern)  # type: ignore[no-untyped-call]
    return found
