"""Modules that are plain feed-forward networks: where they keep their parameters, and how kernels take these.

A kernel takes the parameters of m experts stacked. They are stacked already where they lie one behind the other in one
storage, which `lay_out` sees to; wherever else they are, they are copied.

Shape legend: m experts of this rank, D model dim, H hidden dim, U rows of w_in (H, or 2H where gated).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prophet.kernels.grouped_ffn import ExpertWeights
from prophet.spec import Activation


@dataclass(frozen=True, slots=True)
class RowOrder:
    """How one matrix or bias of a gated expert holds the rows of its gate and of `up`.

    Attributes:
        up_first: Those of `up` come first.
        interleaved: They take turns, row by row.
    """

    up_first: bool = False
    interleaved: bool = False

    def gate_first(self, rows: Tensor, dim: int = 0) -> Tensor:
        """Return all rows of the gate, then all of `up`: the library's order.

        Args:
            rows: [2H, ...], or with 2H at `dim`.
            dim: Where the rows are.
        """
        gate, up = rows.unflatten(dim, (-1, 2)).unbind(dim + 1) if self.interleaved else rows.chunk(2, dim)
        return torch.cat((up, gate) if self.up_first else (gate, up), dim)

    def back(self, rows: Tensor) -> Tensor:
        """Return the rows [2H, ...] in the module's order; the inverse of `gate_first`."""
        gate, up = rows.chunk(2)
        parts = (up, gate) if self.up_first else (gate, up)
        return torch.stack(parts, dim=1).flatten(0, 1) if self.interleaved else torch.cat(parts)


@dataclass(frozen=True, slots=True)
class FfnNames:
    """Where a feed-forward module keeps its parameters, as names relative to it.

    Attributes:
        w_in: One name, or two for a gated module, the gate's first.
        w_out: Name of the second matrix.
        b_in: As `w_in`; None where the module has no such bias.
        b_out: None where the module has no such bias.
        rows: Where one matrix holds gate and `up`, in which order.
    """

    w_in: tuple[str, ...]
    w_out: str
    b_in: tuple[str, ...] | None = None
    b_out: str | None = None
    rows: RowOrder = RowOrder()

    def all(self) -> tuple[str, ...]:
        """Return every name, in the order of a flat vector."""
        return tuple(name for names in self.by_field().values() for name in names)

    def by_field(self) -> dict[str, tuple[str, ...]]:
        """Return the names of each field of `ExpertWeights` that the module has, in the order of a flat vector."""
        found = {"w_in": self.w_in, "b_in": self.b_in or (), "w_out": (self.w_out,)}
        found["b_out"] = () if self.b_out is None else (self.b_out,)
        return {field: names for field, names in found.items() if names}

    def unpack(self, state: Mapping[str, Tensor], prefix: str) -> ExpertWeights:
        """Return the parameters under `prefix`, in the library's layout."""

        def joined(names: tuple[str, ...]) -> Tensor:
            parts = [state[prefix + name] for name in names]
            if len(parts) > 1:
                return torch.cat(parts)
            return parts[0] if self.rows == RowOrder() else self.rows.gate_first(parts[0])

        return ExpertWeights(
            joined(self.w_in),
            state[prefix + self.w_out],
            None if self.b_in is None else joined(self.b_in),
            None if self.b_out is None else state[prefix + self.b_out],
        )

    def pack(self, weights: ExpertWeights, prefix: str) -> dict[str, Tensor]:
        """Return the parameters by name under `prefix`, in the module's layout; the inverse of `unpack`."""

        def separate(rows: Tensor, names: tuple[str, ...]) -> tuple[Tensor, ...]:
            if len(names) == 1 and self.rows != RowOrder():
                return (self.rows.back(rows),)
            return rows.chunk(len(names))

        # in the order of `all`, with which they are zipped
        parts = [*separate(weights.w_in, self.w_in)]
        if self.b_in is not None and weights.b_in is not None:
            parts += separate(weights.b_in, self.b_in)
        parts.append(weights.w_out)
        if self.b_out is not None and weights.b_out is not None:
            parts.append(weights.b_out)
        return {prefix + name: part for name, part in zip(self.all(), parts, strict=True)}


@dataclass(frozen=True, slots=True)
class Network:
    """What modules that are feed-forward networks compute, and from which of their parameters.

    Attributes:
        names: Where a module keeps its parameters.
        activation: A name from `prophet.spec.ACTIVATIONS`, or one with a limit.
    """

    names: FfnNames
    activation: Activation

    def weights(self, fields: Mapping[str, Tensor | None], dim: int = 0) -> ExpertWeights:
        """Return what kernels take, from the fields as the modules order their rows.

        Args:
            fields: Tensors by field of `ExpertWeights`.
            dim: Where the rows are in `w_in` and `b_in`.
        """
        found = dict(fields)
        # the library's own order costs no copy
        if self.names.rows != RowOrder():
            for field in ("w_in", "b_in"):
                rows = found.get(field)
                if rows is not None:
                    found[field] = self.names.rows.gate_first(rows, dim)
        return ExpertWeights(**{name: found.get(name) for name in ExpertWeights._fields})  # type: ignore[arg-type]


@torch.no_grad()
def lay_out(experts: Sequence[Sequence[nn.Parameter]]) -> None:
    """Lay one field's parameters end to end in one storage, expert by expert; they stay the same objects."""
    every = [p for parts in experts for p in parts]
    # stacked without a copy only if all are of one kind; others are copied in every pass
    if any(p.is_meta for p in every) or _as_one(experts) is not None:
        return
    if len({(p.dtype, p.device, p.shape) for p in every}) > 1:
        return
    # one copy now saves one in every pass
    whole = torch.cat([p.detach() for p in every])
    for p, view in zip(every, whole.split(every[0].shape[0]), strict=True):
        # by `.data`: optimizers and users hold the parameter objects
        p.data = view


def _as_one(experts: Sequence[Sequence[nn.Parameter]]) -> Tensor | None:
    """Return one field's parameters as one tensor [m, U, ...] over their storage; None where they do not lie so."""
    every = [p for parts in experts for p in parts]
    first = every[0]
    at, step = first.data_ptr(), first.numel() * first.element_size()
    if any(p.data_ptr() != at + i * step or not p.is_contiguous() for i, p in enumerate(every)):
        return None
    storage = first.untyped_storage()
    # separate storages may be neighbours by chance, and a view must not reach over the end of one
    if at + len(every) * step > storage.data_ptr() + storage.nbytes():
        return None
    shape = (len(experts), len(experts[0]) * first.shape[0], *first.shape[1:])
    strides = [shape[1] * (first.numel() // first.shape[0]), *first.stride()]
    # from `.data` and not a view: each parameter keeps its version counter, by which autograd sees changes
    return first.data.as_strided(shape, strides)


def stacked(experts: Sequence[Sequence[nn.Parameter]], called: Sequence[bool]) -> Tensor:
    """Return one field of all m experts, [m, U, ...], differentiably.

    Args:
        experts: The field's parameters, by expert.
        called: By expert, whether its parameters get a gradient.
    """
    every = [p for parts in experts for p in parts]
    found: Tensor = _Stacked.apply(experts, called, *every)  # type: ignore[no-untyped-call]
    return found


class _Stacked(torch.autograd.Function):
    """Parameters of m experts as one tensor; nothing is copied where they lie in one storage."""

    @staticmethod
    def forward(ctx: Any, experts: Sequence[Sequence[nn.Parameter]], called: Sequence[bool], *every: Tensor) -> Tensor:
        # `every` are inputs beside `experts`, since autograd sees tensors in a list only if they are arguments
        ctx.called, ctx.parts = called, len(experts[0])
        one = _as_one(experts)
        if one is not None:
            return one
        return torch.cat([p.detach() for p in every]).view(len(experts), -1, *every[0].shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[2:]
        parts = grads[0].reshape(len(needs), -1, *grads[0].shape[2:]).unbind(0)
        # None, and not zeros, for experts that were not called: Adam skips a parameter without a gradient
        wanted = [needed and ctx.called[at // ctx.parts] for at, needed in enumerate(needs)]
        return None, None, *(part if want else None for part, want in zip(parts, wanted, strict=True))


def unchanged_until_backward(out: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Return `out`; its backward pass raises torch's error where one of `params` was changed in place meanwhile.

    The kernels read them through another tensor, of which torch does not know that it is the same.
    """
    # without a backward pass there is nothing to guard, and saving would keep memory
    if not params or not (torch.is_grad_enabled() and out.requires_grad):
        return out
    found: Tensor = _Unchanged.apply(out, *params)  # type: ignore[no-untyped-call]
    return found


class _Unchanged(torch.autograd.Function):
    """Identity of its first input; the others are saved, and compared when they are unpacked."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *params: Tensor) -> Tensor:
        ctx.save_for_backward(*params)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # reading `saved_tensors` is what compares the versions
        return grads[0], *(None for _ in ctx.saved_tensors)


def with_zeros(out: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Return `out`; the gradients of `params`, which it does not depend on, become zero and not None."""
    if not params or not torch.is_grad_enabled():
        return out
    found: Tensor = _WithZeros.apply(out, *params)  # type: ignore[no-untyped-call]
    return found


class _WithZeros(torch.autograd.Function):
    """Identity of its first input; the gradient of all others is zero."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *params: Tensor) -> Tensor:
        ctx.params = params
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], *(torch.zeros_like(p) for p in ctx.params)


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return `x`, whose gradient is multiplied by `factor`."""
    if factor == 1.0 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    found: Tensor = _Scaled.apply(x, factor)  # type: ignore[no-untyped-call]
    return found


class _Scaled(torch.autograd.Function):
    """Identity; its gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None
