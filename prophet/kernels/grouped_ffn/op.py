"""The grouped feed-forward network as one differentiable operator over home experts and replicas.

Shape legend: T rows of all groups, G groups = m home experts then n replicas, D model dim, H hidden dim, U rows of w_in
(H, or 2H where gated), O output dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prophet.kernels.choice import Impl, choose
from prophet.kernels.grouped_ffn import blocked, naive
from prophet.kernels.grouped_ffn.blocked import GradTarget
from prophet.kernels.grouped_ffn.naive import ExpertWeights
from prophet.kernels.tables import to_device
from prophet.spec import Activation, parts_of


def grouped_ffn(
    x: Tensor,
    sizes: Sequence[int] | Tensor,
    home: ExpertWeights,
    activation: Activation,
    *,
    replicas: Sequence[ExpertWeights] = (),
    home_grads: ExpertWeights | None = None,
    replica_grads: Sequence[ExpertWeights] = (),
    grad_scale: float = 1.0,
    recompute: bool = False,
    sizes_on_device: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Apply expert g to the g-th run of `sizes[g]` consecutive rows.

    On a GPU float32 products are tf32 where `torch.backends.cuda.matmul` allows torch's own to be, and exact in other
    cases. Parameters may be wider than `x`: products run in the dtype of `x` (under autocast: in autocast's). The
    result depends on `x` and all parameters even where every group is empty. Differentiable once; `impl="naive"` as
    often as needed.

    Args:
        x: Rows of all groups, [T, D].
        sizes: m + n integers whose sum is T, as a sequence or as an int64 tensor on the device of `x`. A compiled graph
            stays valid while counts change only with a tensor.
        home: Stacked parameters of the m home experts: w_in [m, U, D], w_out [m, O, H], b_in [m, U] and b_out [m, O],
            None for a bias that no expert has.
        activation: See `naive.activate`.
        replicas: Parameters of n single experts, read where they are.
        home_grads: Buffers shaped like `home` to which the backward pass adds in place, instead of returning those
            gradients; they may differ in dtype.
        replica_grads: Likewise, by replica.
        grad_scale: Factor on the gradients of the home parameters.
        recompute: Keep `x` only, and compute the pre-activations again in the backward pass.
        sizes_on_device: A sequence of `sizes` again, as a tensor that is on the device of `x` already.
        impl: Which implementation runs, see `prophet.kernels.choice`.

    Returns:
        Answers [T, O] in the dtype of `x`.

    Raises:
        ValueError: Sizes or shapes do not fit.
    """
    # autocast knows torch's functions and not this operator, so the cast is made here
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    _check(x, sizes, home, replicas, activation)
    chosen = choose(impl, x)
    if chosen == "naive":
        return _naive(x, sizes, home, activation, replicas, home_grads, replica_grads, grad_scale)
    if not isinstance(sizes, Tensor):
        # the library path reads sizes on the host, Triton on the device: each gets them without a wait
        if chosen == "triton" and sizes_on_device is not None:
            sizes = sizes_on_device
        else:
            sizes = torch.tensor(list(sizes), dtype=torch.int64)
            sizes = to_device([sizes], x.device)[0] if chosen == "triton" else sizes
    flat_home, flat_replicas = _flat(home), [p for w in replicas for p in _flat(w)]
    biases = _biases(home)
    wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *flat_home, *flat_replicas))
    y: Tensor = _forward_op(
        x,
        sizes,
        flat_home,
        flat_replicas,
        _buffers(flat_home, [] if home_grads is None else [home_grads], biases, "home_grads"),
        _buffers(flat_replicas, replica_grads, biases, "replica_grads"),
        biases,
        activation,
        grad_scale,
        wants_grad and not recompute,
        chosen,
    )[0]
    return y


def _check(
    x: Tensor, sizes: Sequence[int] | Tensor, home: ExpertWeights, replicas: Sequence[ExpertWeights], activation: str
) -> None:
    """Raise ValueError for sizes or shapes that do not fit."""
    gated = parts_of(activation).gated
    if x.ndim != 2 or home.w_in.ndim != 3 or home.w_out.ndim != 3:
        raise ValueError(
            f"expected x [T, D], w_in [m, U, D] and w_out [m, O, H], got shapes {list(x.shape)}, "
            f"{list(home.w_in.shape)} and {list(home.w_out.shape)}"
        )
    m, units, dim = home.w_in.shape
    hidden, out = units // 2 if gated else units, home.w_out.shape[1]
    expected = ExpertWeights((m, units, dim), (m, out, hidden), (m, units), (m, out))  # type: ignore[arg-type]
    for name, shape, *parts in zip(ExpertWeights._fields, expected, home, *replicas, strict=True):
        for i, p in enumerate(parts):
            if (p is None) != (parts[0] is None):
                raise ValueError(f"expected all experts to have {name} or none, and replica {i - 1} differs from home")
            wanted = tuple(shape)[1:] if i else tuple(shape)
            if p is not None and tuple(p.shape) != wanted:
                who = f"replica {i - 1}" if i else "home"
                raise ValueError(f"{who} {name}: expected shape {list(wanted)}, got {list(p.shape)}")
    if x.shape[1] != dim:
        raise ValueError(f"experts of dim {dim} cannot run on rows of shape {list(x.shape)}")
    groups = m + len(replicas)
    if isinstance(sizes, Tensor):
        if sizes.shape != (groups,) or sizes.dtype != torch.int64:
            raise ValueError(f"sizes must be {groups} int64, got {list(sizes.shape)} {sizes.dtype}")
    elif len(sizes) != groups or sum(sizes) != x.shape[0] or min(sizes, default=0) < 0:
        raise ValueError(f"{len(sizes)} groups of {sum(sizes)} rows do not match {groups} experts, {x.shape[0]} rows")


def _flat(weights: ExpertWeights) -> list[Tensor]:
    return [p for p in weights if p is not None]


# which of an expert's four parameters are in a flat list, by the biases it has
_COLUMNS = {"": (0, 1), "in": (0, 1, 2), "out": (0, 1, 3), "in, out": (0, 1, 2, 3)}


def _biases(weights: ExpertWeights) -> str:
    return ", ".join(name[2:] for name in ("b_in", "b_out") if getattr(weights, name) is not None)


def _unflat(parts: Sequence[Tensor | None], biases: str) -> ExpertWeights:
    """Return the inverse of `_flat`, for one expert or for the stacked ones."""
    slots: list[Any] = [None] * 4
    for column, part in zip(_COLUMNS[biases], parts, strict=True):
        slots[column] = part
    return ExpertWeights(*slots)


def _buffers(params: list[Tensor], grads: Sequence[ExpertWeights], biases: str, name: str) -> list[Tensor]:
    """Return the buffers of `params`, or none at all; a parameter without one has an empty tensor in its place."""
    if not grads:
        return []
    columns = _COLUMNS[biases]
    flat = [weights[c] for weights in grads for c in columns]
    if len(flat) != len(params):
        raise ValueError(f"{name}: expected one buffer for each of {len(params)} parameters, got {len(flat)}")
    for p, g in zip(params, flat, strict=True):
        if g is None and p.requires_grad:
            raise ValueError(f"{name}: a parameter of shape {list(p.shape)} requires a gradient but has no buffer")
        if g is not None and g.shape != p.shape:
            raise ValueError(f"{name}: expected a buffer of shape {list(p.shape)}, got {list(g.shape)}")
    # custom operators take lists of tensors, without None
    return [p.new_empty(0) if g is None else g.detach() for p, g in zip(params, flat, strict=True)]


# --- the definition ---------------------------------------------------------------------------------------------------


class _Into(torch.autograd.Function):
    """Identity; its gradient is scaled, and added to a buffer instead of being passed on if there is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, buffer: Tensor | None) -> Tensor:
        ctx.scale, ctx.buffer = scale, buffer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        scaled = grads[0] * ctx.scale
        if ctx.buffer is None:
            return scaled, None, None
        ctx.buffer.add_(scaled)
        return None, None, None


def _naive(
    x: Tensor,
    sizes: Sequence[int] | Tensor,
    home: ExpertWeights,
    activation: Activation,
    replicas: Sequence[ExpertWeights],
    home_grads: ExpertWeights | None,
    replica_grads: Sequence[ExpertWeights],
    grad_scale: float,
) -> Tensor:
    """Run the definition, gradients scaled and added to buffers as the operators do."""

    def wrap(weights: ExpertWeights, grads: ExpertWeights | None, scale: float) -> ExpertWeights:
        # nothing to scale and no buffer: no node in the graph
        if scale == 1.0 and grads is None:
            return weights

        def one(p: Tensor | None, buffer: Tensor | None) -> Any:
            return None if p is None else _Into.apply(p, scale, buffer)  # type: ignore[no-untyped-call]

        buffers = (None,) * 4 if grads is None else grads
        return ExpertWeights(*(one(p, b) for p, b in zip(weights, buffers, strict=True)))

    stacked = wrap(home, home_grads, grad_scale)
    parts = [(None,) * stacked.w_in.shape[0] if p is None else p.unbind(0) for p in stacked]
    experts = [ExpertWeights(*p) for p in zip(*parts, strict=True)]
    grads = list(replica_grads) if replica_grads else [None] * len(replicas)
    experts += [wrap(w, g, 1.0) for w, g in zip(replicas, grads, strict=True)]
    cast: list[list[Any]] = [[None if p is None else p.to(x.dtype) for p in w] for w in experts]
    experts = [ExpertWeights(*parts) for parts in cast]
    return naive.grouped_ffn(x, sizes.tolist() if isinstance(sizes, Tensor) else sizes, experts, activation)


# --- the operators ----------------------------------------------------------------------------------------------------


def _each(replicas: Sequence[Any], biases: str) -> list[ExpertWeights]:
    """Return single experts from their parameters in a row."""
    step = len(_COLUMNS[biases])
    return [_unflat(replicas[i : i + step], biases) for i in range(0, len(replicas), step)]


def _experts(home: Sequence[Tensor], replicas: Sequence[Tensor], biases: str) -> list[ExpertWeights]:
    """Return the parameters of every group, homes first, as views."""
    return [_unflat(p, biases) for p in zip(*(p.unbind(0) for p in home), strict=True)] + _each(replicas, biases)


def _targets(
    home: Sequence[Tensor | None],
    replicas: Sequence[Tensor | None],
    biases: str,
    m: int,
    fresh: tuple[bool, bool],
    scale: float,
) -> list[GradTarget]:
    """Return where every group's gradients go, homes first."""
    rows = zip(*([None] * m if p is None else p.unbind(0) for p in home), strict=True)
    homes = [GradTarget(*_unflat(row, biases), fresh[0], scale) for row in rows]
    return homes + [GradTarget(*grads, fresh[1], 1.0) for grads in _each(replicas, biases)]


def _host(sizes: Tensor, rows: int) -> list[int]:
    """Return the sizes on the host; ValueError where they do not match the rows."""
    # checked here and not in `_check`: only the library path may wait for a device's values
    found: list[int] = sizes.tolist()
    if sum(found) != rows or min(found, default=0) < 0:
        raise ValueError(f"groups of {found} rows, {sum(found)} in all, do not match {rows} rows")
    return found


@torch.library.custom_op("prophet::grouped_ffn", mutates_args=())
def _forward_op(
    x: Tensor,
    sizes: Tensor,
    home: list[Tensor],
    replicas: list[Tensor],
    home_grads: list[Tensor],
    replica_grads: list[Tensor],
    biases: str,
    activation: str,
    grad_scale: float,
    keep: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Return outputs [T, O] and pre-activations [T, U] (none unless `keep`). Buffers are for the backward pass only.

    `biases` says which of them `home` and `replicas` have, see `_COLUMNS`.
    """
    if impl == "triton":
        # imported when it runs: Triton is optional
        import prophet.kernels.grouped_ffn.kernel as triton_path

        return triton_path.forward(x, sizes, _unflat(home, biases), _each(replicas, biases), activation, keep=keep)
    return blocked.forward(
        x.contiguous(), _host(sizes, x.shape[0]), _experts(home, replicas, biases), activation, keep=keep
    )


@_forward_op.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor]:
    x, _, home, *_, keep, _ = given
    return x.new_empty((x.shape[0], home[1].shape[1])), x.new_empty((x.shape[0] if keep else 0, home[0].shape[1]))


@torch.library.custom_op("prophet::grouped_ffn_backward", mutates_args=("d_x", "d_home", "d_replicas"))
def _backward_op(
    d_y: Tensor,
    x: Tensor,
    kept: Tensor,
    sizes: Tensor,
    home: list[Tensor],
    replicas: list[Tensor],
    d_x: Tensor,
    d_home: list[Tensor],
    d_replicas: list[Tensor],
    fresh_home: bool,
    fresh_replicas: bool,
    biases: str,
    activation: str,
    grad_scale: float,
    impl: str,
) -> None:
    """Fill `d_x`, and write (fresh) or add to the parameters' gradients; an empty tensor: no such gradient."""

    # shapes tell, as lists of an operator's arguments cannot hold None
    def wanted(grads: list[Tensor], params: list[Tensor]) -> list[Tensor | None]:
        return [g if g.shape == p.shape else None for g, p in zip(grads, params, strict=True)]

    m = home[0].shape[0]
    fresh = fresh_home, fresh_replicas
    targets = _targets(wanted(d_home, home), wanted(d_replicas, replicas), biases, m, fresh, grad_scale)
    into = d_x if d_x.shape == x.shape else None
    if impl == "triton":
        import prophet.kernels.grouped_ffn.kernel as triton_path

        stacked, single = _unflat(home, biases), _each(replicas, biases)
        triton_path.backward(d_y, x, kept, sizes, stacked, single, targets, activation, d_x=into)
        return
    hosted, experts = _host(sizes, x.shape[0]), _experts(home, replicas, biases)
    blocked.backward(d_y.contiguous(), x.contiguous(), kept, hosted, experts, targets, activation, d_x=into)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, sizes, home, replicas, home_grads, replica_grads, *plain, keep, impl = inputs
    # so that an output nobody used costs no backward pass over zeros
    ctx.set_materialize_grads(False)
    kept = output[1] if keep else x.new_empty((0, home[0].shape[1]))
    ctx.save_for_backward(x, kept, sizes, *home, *replicas)
    # not saved as inputs: other passes may add to these buffers before this one does
    ctx.buffers = home_grads, replica_grads
    ctx.plain = len(home), *plain, impl


def _backward(ctx: Any, d_y: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    # under create_graph; what is filled in place has no graph, so terms would be missing
    if torch.is_grad_enabled():
        raise RuntimeError("grouped_ffn is differentiated once: leave create_graph out, or take impl='naive'")
    x, kept, sizes, *params = ctx.saved_tensors
    step, *how = ctx.plain
    home_grads, replica_grads = ctx.buffers
    home, replicas = params[:step], params[step:]
    needs = ctx.needs_input_grad
    blank = [None] * len(home_grads), [None] * len(replica_grads), None, None, None, None, None
    if d_y is None:
        return None, None, [None] * step, [None] * len(replicas), *blank
    d_x = x.new_empty(x.shape if needs[0] else 0)
    d_home = _destinations(home, needs[2], home_grads)
    d_replicas = _destinations(replicas, needs[3], replica_grads)
    fresh = not home_grads, not replica_grads
    _backward_op(d_y, x, kept, sizes, home, replicas, d_x, d_home, d_replicas, *fresh, *how)

    def returned(grads: list[Tensor], needed: Sequence[bool], fresh: bool) -> list[Tensor | None]:
        # added in place they are where they belong: returned as well they would count twice
        return [g if n and fresh else None for g, n in zip(grads, needed, strict=True)]

    return (
        d_x if needs[0] else None,
        None,
        returned(d_home, needs[2], fresh[0]),
        returned(d_replicas, needs[3], fresh[1]),
        *blank,
    )


def _destinations(params: list[Tensor], needed: Sequence[bool], buffers: list[Tensor]) -> list[Tensor]:
    """Return where the gradients of `params` go: their buffers, or new memory; an empty tensor for those not needed."""
    if buffers:
        return [b if n else p.new_empty(0) for p, n, b in zip(params, needed, buffers, strict=True)]
    return [p.new_empty(p.shape if n else 0) for p, n in zip(params, needed, strict=True)]


_forward_op.register_autograd(_backward, setup_context=_setup)
