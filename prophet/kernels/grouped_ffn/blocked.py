"""Grouped FFN with library matrix products on slices: what runs on CPU, and on a GPU without Triton.

Rows are visited in tiles of consecutive rows. A tile holds many small groups or a part of a large one; its element-wise
work is done in one call for all its groups, on scratch that is reused and stays in cache, and each group costs one
matrix product per weight, straight into its slice of the result. Nothing is padded, stacked or copied.

Shape legend: T rows of all groups, G groups, D model dim, H hidden dim, U rows of w_in (H, or 2H where gated), O output
dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from prophet.kernels.grouped_ffn.naive import CLAMP_PASSES, QUICK_SLOPE, ExpertWeights, bounded
from prophet.spec import Activation, Function, parts_of

# per scratch buffer; past the caches larger tiles gain nothing
SCRATCH_BYTES = 8 << 20


class Piece(NamedTuple):
    """Rows of a tile, all of one group.

    Attributes:
        group: Whose rows they are.
        start, stop: Which rows, of all.
        first: Whether no earlier piece belongs to the group.
    """

    group: int
    start: int
    stop: int
    first: bool


def tiles(sizes: Sequence[int], rows: int, *, split: bool = True) -> list[list[Piece]]:
    """Cut consecutive groups into tiles of at most `rows` rows, each a list of pieces; O(G + T / rows).

    Args:
        sizes: Rows of every group.
        rows: Most rows of a tile.
        split: Whether a group may be cut; if not, a tile may be as large as the largest group.
    """
    found: list[list[Piece]] = []
    tile: list[Piece] = []
    base, room = 0, rows
    for group, size in enumerate(sizes):
        start, end = base, base + size
        base = end
        first = True
        # a group that may not be cut begins a new tile where it would overfill this one
        if tile and not split and size > room:
            found.append(tile)
            tile, room = [], rows
        while start < end:
            if room <= 0:
                found.append(tile)
                tile, room = [], rows
            stop = min(end, start + room) if split else end
            tile.append(Piece(group, start, stop, first))
            room -= stop - start
            start, first = stop, False
    if tile:
        found.append(tile)
    return found


def _tile_plan(sizes: Sequence[int], hidden: int, dtype: torch.dtype) -> tuple[list[list[Piece]], int]:
    """Return the tiles, and the rows of the largest."""
    rows = min(4096, max(512, SCRATCH_BYTES // (hidden * dtype.itemsize)))
    # half-precision groups are not cut: their sums stay inside one product, which accumulates in float32
    plan = tiles(sizes, rows, split=dtype.itemsize >= 4)
    return plan, max((tile[-1].stop - tile[0].start for tile in plan), default=0)


_GELU = {"gelu": "none", "gelu_tanh": "tanh"}


def _value(x: Tensor, function: Function, out: Tensor) -> None:
    """Compute out = f(x)."""
    if function == "identity":
        out.copy_(x)
    elif function == "relu":
        torch.clamp(x, min=0, out=out)
    elif function == "relu2":
        torch.clamp(x, min=0, out=out).square_()
    elif function == "silu":
        torch.ops.aten.silu.out(x, out=out)
    elif function == "quick_gelu":
        torch.mul(x, QUICK_SLOPE, out=out).sigmoid_().mul_(x)
    else:
        torch.ops.aten.gelu.out(x, approximate=_GELU[function], out=out)


def _derivative(x: Tensor, d: Tensor, function: Function, out: Tensor) -> None:
    """Compute out = d · f'(x); `out` may be `d` itself."""
    if function == "identity":
        # f' is 1: in place there is nothing to do
        if out.data_ptr() != d.data_ptr():
            out.copy_(d)
    elif function == "relu":
        torch.mul(d, x > 0, out=out)
    elif function == "relu2":
        torch.mul(d, x.clamp(min=0).mul_(2), out=out)
    elif function == "silu":
        torch.ops.aten.silu_backward.grad_input(d, x, grad_input=out)
    elif function == "quick_gelu":
        sigmoid = torch.mul(x, QUICK_SLOPE).sigmoid_()
        slope = (1 - sigmoid).mul_(x).mul_(QUICK_SLOPE).add_(1).mul_(sigmoid)
        torch.mul(d, slope, out=out)
    else:
        torch.ops.aten.gelu_backward.grad_input(d, x, approximate=_GELU[function], grad_input=out)


def _act(hidden: Tensor, activation: Activation, out: Tensor) -> Tensor:
    """Compute the activation of pre-activations `hidden` [n, U] into `out` [n, H], and return it."""
    parts = parts_of(activation)
    if not parts.gated:
        _value(hidden, parts.function, out)
        return out
    gate, up = bounded(hidden, parts)
    _value(gate, parts.function, out)
    return out.mul_(up)


def _act_backward(hidden: Tensor, d_act: Tensor, activation: Activation, act: Tensor, d_hidden: Tensor) -> None:
    """Compute the activation, and the gradient of `hidden`, from `hidden` [n, U] and the activation's gradient.

    Writes `act` [n, H] and `d_hidden` [n, U]; overwrites `d_act` [n, H], which is `d_hidden` itself where nothing is
    gated.
    """
    parts = parts_of(activation)
    if not parts.gated:
        _value(hidden, parts.function, act)
        _derivative(hidden, d_act, parts.function, d_hidden)
        return
    gate, up = bounded(hidden, parts)
    d_gate, d_up = d_hidden.chunk(2, dim=1)
    _value(gate, parts.function, act)
    # the order spares a buffer: `act` holds f(gate) until `up` is multiplied in, `d_act` is free after
    torch.mul(act, d_act, out=d_up)
    act.mul_(up)
    d_act.mul_(up)
    _derivative(gate, d_act, parts.function, d_gate)
    if parts.limit is not None:
        # no gradient passes a bound; whether one passes at it is the installed torch's choice
        stops = torch.gt if CLAMP_PASSES else torch.ge
        raw_gate, raw_up = hidden.chunk(2, dim=1)
        d_gate.masked_fill_(stops(raw_gate, parts.limit), 0)
        d_up.masked_fill_(stops(raw_up.abs(), parts.limit), 0)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    # asking costs less than a call that does nothing
    return x if x.dtype == dtype else x.to(dtype)


def _project(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Compute out = rows · weightᵀ + bias in the dtype of `rows`."""
    matrix = _cast(weight, rows.dtype).t()
    if bias is None:
        torch.mm(rows, matrix, out=out)
    else:
        torch.addmm(_cast(bias, rows.dtype), rows, matrix, out=out)


def _add_product(out: Tensor, left: Tensor, right: Tensor, scale: float, fresh: bool) -> None:
    """Compute out += scale · leftᵀ · right, or `=` if fresh; `out` may be of another dtype than the factors."""
    if out.dtype == left.dtype:
        # beta = 0 ignores what is in `out`, NaN included: fresh buffers need no zeros
        out.addmm_(left.t(), right, beta=0 if fresh else 1, alpha=scale)
        return
    product = torch.mm(left.t(), right)
    if fresh:
        out.copy_(product).mul_(scale)
    else:
        out.add_(product, alpha=scale)


def _add_sum(out: Tensor, rows: Tensor, scale: float, fresh: bool) -> None:
    """Compute out += scale · sum over `rows`, or `=` if fresh; summed in float32 at least."""
    total = rows.sum(dim=0, dtype=torch.promote_types(rows.dtype, torch.float32))
    if fresh:
        out.copy_(total.mul_(scale))
    else:
        out.add_(total, alpha=scale)


def forward(
    x: Tensor, sizes: Sequence[int], weights: Sequence[ExpertWeights], activation: Activation, *, keep: bool
) -> tuple[Tensor, Tensor]:
    """Compute the outputs and, if asked to, keep pre-activations for the backward pass.

    Args:
        x: Rows of all groups, [T, D].
        sizes: Rows of every group, [G].
        weights: The experts' parameters, by group.
        activation: A name from `prophet.spec.ACTIVATIONS`, or one with a limit.
        keep: Whether to return pre-activations.

    Returns:
        Outputs [T, O], and pre-activations [T, U] or an empty tensor.
    """
    first = weights[0]
    units = first.w_in.shape[0]
    width = units // 2 if parts_of(activation).gated else units
    y = x.new_empty((x.shape[0], first.w_out.shape[0]))
    plan, most = _tile_plan(sizes, width, x.dtype)
    kept = x.new_empty((x.shape[0], units) if keep else (0, units))
    # kept values are written where they stay; others share one buffer over all tiles
    hidden_scratch = kept if keep else x.new_empty((most, units))
    act_scratch = x.new_empty((most, width))
    for tile in plan:
        base, end = tile[0].start, tile[-1].stop
        hidden = kept[base:end] if keep else hidden_scratch[: end - base]
        lengths = [piece.stop - piece.start for piece in tile]
        for piece, rows, h in zip(tile, x[base:end].split(lengths), hidden.split(lengths), strict=True):
            w = weights[piece.group]
            _project(rows, w.w_in, w.b_in, h)
        act = _act(hidden, activation, act_scratch[: end - base])
        for piece, a, out in zip(tile, act.split(lengths), y[base:end].split(lengths), strict=True):
            w = weights[piece.group]
            _project(a, w.w_out, w.b_out, out)
    return y, kept


class GradTarget(NamedTuple):
    """Where the gradients of one expert's parameters go, None where none is wanted.

    Attributes:
        w_in, w_out, b_in, b_out: As in `ExpertWeights`.
        fresh: Whether they are written, and not added to.
        scale: Factor on what is written or added.
    """

    w_in: Tensor | None
    w_out: Tensor | None
    b_in: Tensor | None
    b_out: Tensor | None
    fresh: bool
    scale: float

    def clear(self) -> None:
        """Zero what is to be written fresh."""
        if self.fresh:
            for grad in self[:4]:
                if grad is not None:
                    grad.zero_()


def backward(
    d_y: Tensor,
    x: Tensor,
    kept: Tensor,
    sizes: Sequence[int],
    weights: Sequence[ExpertWeights],
    targets: Sequence[GradTarget],
    activation: Activation,
    *,
    d_x: Tensor | None,
) -> None:
    """Fill the experts' gradients, and that of `x` if it is wanted.

    Args:
        d_y: Gradient of the outputs, [T, O].
        x: Rows of all groups, [T, D].
        kept: Pre-activations [T, U] from `forward`, or an empty tensor: they are then computed again.
        sizes: Rows of every group, [G].
        weights: The experts' parameters, by group.
        targets: Where their gradients go, by group.
        activation: A name from `prophet.spec.ACTIVATIONS`, or one with a limit.
        d_x: Where the gradient of `x` goes, [T, D]; None for nowhere.
    """
    units = weights[0].w_in.shape[0]
    width = units // 2 if parts_of(activation).gated else units
    plan, most = _tile_plan(sizes, width, x.dtype)
    recompute = kept.shape[0] != x.shape[0]
    d_act_all, act_all = x.new_empty((most, width)), x.new_empty((most, width))
    # without a gate both have H columns, and the derivative is taken in place
    d_hidden_all = x.new_empty((most, units)) if parts_of(activation).gated else d_act_all
    again = x.new_empty((most, units)) if recompute else kept
    for size, target in zip(sizes, targets, strict=True):
        # no product writes the gradients of an expert without rows
        if size == 0:
            target.clear()
    for tile in plan:
        base, end = tile[0].start, tile[-1].stop
        n = end - base
        hidden = again[:n] if recompute else kept[base:end]
        d_act, act, d_hidden = d_act_all[:n], act_all[:n], d_hidden_all[:n]
        lengths = [piece.stop - piece.start for piece in tile]
        parts = x[base:end].split(lengths), d_y[base:end].split(lengths), d_hidden.split(lengths), act.split(lengths)
        if recompute:
            for piece, rows, h in zip(tile, parts[0], hidden.split(lengths), strict=True):
                _project(rows, weights[piece.group].w_in, weights[piece.group].b_in, h)
        for piece, d_rows, d_a in zip(tile, parts[1], d_act.split(lengths), strict=True):
            torch.mm(d_rows, _cast(weights[piece.group].w_out, x.dtype), out=d_a)
        _act_backward(hidden, d_act, activation, act, d_hidden)
        if d_x is not None:
            for piece, d_h, out in zip(tile, parts[2], d_x[base:end].split(lengths), strict=True):
                torch.mm(d_h, _cast(weights[piece.group].w_in, x.dtype), out=out)
        for piece, rows, d_rows, d_h, a in zip(tile, *parts, strict=True):
            grad = targets[piece.group]
            # a group that was cut into several tiles writes once, then adds
            fresh = grad.fresh and piece.first
            if grad.w_in is not None:
                _add_product(grad.w_in, d_h, rows, grad.scale, fresh)
            if grad.w_out is not None:
                _add_product(grad.w_out, d_rows, a, grad.scale, fresh)
            if grad.b_in is not None:
                _add_sum(grad.b_in, d_h, grad.scale, fresh)
            if grad.b_out is not None:
                _add_sum(grad.b_out, d_rows, grad.scale, fresh)
