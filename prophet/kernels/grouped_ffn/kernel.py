"""Grouped FFN in Triton: persistent grids over all groups' tiles, weights read through a table of addresses.

Two kernels do everything. The rows kernel multiplies each group's rows by its weight matrix, with a bias, an activation
or an activation's derivative fused behind the product. The weights kernel sums outer products over each group's rows
and writes or adds them to that group's gradient. Group sizes are read on the device: the host never waits for them.

Shape legend: T rows of all groups, G groups, D model dim, H hidden dim, U rows of w_in (H, or 2H where gated), O
output dim.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (arguments of a kernel have no Python types)

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from prophet.kernels.choice import on_its_device
from prophet.kernels.grouped_ffn.blocked import GradTarget
from prophet.kernels.grouped_ffn.naive import CLAMP_PASSES, QUICK_SLOPE, ExpertWeights
from prophet.kernels.tables import to_device
from prophet.kernels.tuning import Architecture, Config, architecture_of, config_for, rule, shape_class
from prophet.spec import Activation, ActivationParts, parts_of

# modes of the rows kernel, which compares them as numbers
PLAIN, ACT, ACT_BACKWARD = 0, 1, 2
_NO_ACTIVATION = parts_of("identity")


# globals that a kernel reads have to be constexpr
_QUICK = tl.constexpr(QUICK_SLOPE)
_PASSES = tl.constexpr(CLAMP_PASSES)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _value_and_slope(x, FUNCTION: tl.constexpr):
    """f(x) and f'(x); what nobody uses of it is not computed. NaN stays NaN."""
    if FUNCTION == "identity":
        value = x
        slope = x * 0.0 + 1.0
    elif FUNCTION == "relu":
        value = tl.where(x <= 0.0, 0.0, x)
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    elif FUNCTION == "relu2":
        above = tl.where(x <= 0.0, 0.0, x)
        value = above * above
        slope = 2.0 * above
    elif FUNCTION == "gelu":
        below = 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
        value = x * below
        slope = below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    # (1 + tanh(z)) / 2 is sigmoid(2z)
    elif FUNCTION == "gelu_tanh":
        square = 0.044715 * x * x
        below = _sigmoid(1.5957691216057308 * x * (1.0 + square))
        value = x * below
        slope = below + value * (1.0 - below) * 1.5957691216057308 * (1.0 + 3.0 * square)
    elif FUNCTION == "silu":
        below = _sigmoid(x)
        value = x * below
        slope = below + value * (1.0 - below)
    else:
        tl.static_assert(FUNCTION == "quick_gelu")
        below = _sigmoid(x * _QUICK)
        value = x * below
        slope = below + value * (1.0 - below) * _QUICK
    return value, slope


@triton.jit
def _bounded(gate, up, limit, CLAMPED: tl.constexpr, PLUS_ONE: tl.constexpr):
    """What f is taken of, and its factor, in a gated activation."""
    if CLAMPED:
        # as torch's clamp: NaN stays NaN, so that a broken step is noticed
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    if PLUS_ONE:
        up = up + 1.0
    return gate, up


@triton.jit
def _finish_backward(
    d_act, pre, out, extra, row, col, live, n_cols, out_stride, extra_stride, limit,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """From pre-activations `pre` and the activation's gradient: the activation to `out`, and the gradient with respect
    to the pre-activations to `extra`, which may be `pre` itself."""
    mask = live[:, None] & (col < n_cols)[None, :]
    out_at = out + row[:, None] * out_stride + col[None, :]
    within = row[:, None] * extra_stride + col[None, :]
    gate = tl.load(pre + within, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(pre + within + n_cols, mask=mask, other=0.0).to(tl.float32)
        inner, factor = _bounded(gate, up, limit, CLAMPED, PLUS_ONE)
        value, slope = _value_and_slope(inner, FUNCTION)
        tl.store(out_at, value * factor, mask=mask)
        d_gate = d_act * factor * slope
        d_up = d_act * value
        if CLAMPED:
            if _PASSES:
                d_gate = tl.where(gate > limit, 0.0, d_gate)
                d_up = tl.where(tl.abs(up) > limit, 0.0, d_up)
            else:
                d_gate = tl.where(gate >= limit, 0.0, d_gate)
                d_up = tl.where(tl.abs(up) >= limit, 0.0, d_up)
        tl.store(extra + within, d_gate, mask=mask)
        tl.store(extra + within + n_cols, d_up, mask=mask)
    else:
        value, slope = _value_and_slope(gate, FUNCTION)
        tl.store(out_at, value, mask=mask)
        tl.store(extra + within, d_act * slope, mask=mask)


@triton.jit
def _rows_kernel(
    a, out, extra, pre, sizes, w_table, b_table, w_like,
    groups, n_cols, depth, a_stride, out_stride, extra_stride, w_stride_n, w_stride_k, limit,
    MODE: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, PLUS_ONE: tl.constexpr,
    BIASED: tl.constexpr, KEEP: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWIZZLE: tl.constexpr,
):  # fmt: skip
    """out[rows of g, n] = a[rows of g, :] · w_g[n, :], for n < n_cols, then what MODE says.

    ACT: out is the activation of the product (gated: of columns n and n + n_cols); extra, if KEEP, the product itself.
    ACT_BACKWARD: the product is the activation's gradient; `pre` holds pre-activations, extra becomes the gradient with
    respect to them, and out the activation itself, computed again.
    """
    tile = tl.program_id(0)
    programs = tl.num_programs(0)
    n_tiles = tl.cdiv(n_cols, BN)
    first_tile = 0
    # 64 bits: rows times columns may pass 2^31
    first_row = tl.zeros((), tl.int64)
    for g in range(groups):
        size = tl.load(sizes + g)
        m_tiles = tl.cdiv(size, BM).to(tl.int32)
        after = first_tile + m_tiles * n_tiles
        while tile < after:
            # tiles in bands of SWIZZLE row tiles, so that concurrent programs share weights in cache
            local = tile - first_tile
            band = local // (SWIZZLE * n_tiles)
            high = tl.minimum(m_tiles - band * SWIZZLE, SWIZZLE)
            within = local - band * SWIZZLE * n_tiles
            m = band * SWIZZLE + within % high
            n = within // high
            row_in = m * BM + tl.arange(0, BM)
            row = first_row + row_in
            live = row_in < size
            col = n * BN + tl.arange(0, BN)
            inside = col < n_cols
            k = tl.arange(0, BK)
            w = tl.load(w_table + g).to(tl.pointer_type(w_like.dtype.element_ty))
            # what the compiler cannot see in a table, and needs to copy tiles asynchronously
            if ALIGNED:
                w = tl.multiple_of(w, 16)
            a_at = a + row[:, None] * a_stride + k[None, :]
            w_at = w + col[None, :].to(tl.int64) * w_stride_n + k[:, None].to(tl.int64) * w_stride_k
            total = tl.zeros((BM, BN), tl.float32)
            if GATED and MODE == 1:
                # cast, since `n_cols` is a constant where it is 1
                up_at = w_at + tl.cast(n_cols, tl.int64) * w_stride_n
                total_up = tl.zeros((BM, BN), tl.float32)
            for start in range(0, depth, BK):
                deep = k < depth - start
                left = tl.load(a_at, mask=live[:, None] & deep[None, :], other=0.0)
                w_mask = deep[:, None] & inside[None, :]
                # weights may be wider than the rows, as under autocast: products run in the rows' dtype
                right = tl.load(w_at, mask=w_mask, other=0.0).to(left.dtype)
                total = tl.dot(left, right, total, input_precision=PRECISION)
                if GATED and MODE == 1:
                    right_up = tl.load(up_at, mask=w_mask, other=0.0).to(left.dtype)
                    total_up = tl.dot(left, right_up, total_up, input_precision=PRECISION)
                    up_at += BK * w_stride_k
                a_at += BK
                w_at += BK * w_stride_k
            if BIASED:
                b = tl.load(b_table + g).to(tl.pointer_type(w_like.dtype.element_ty))
                total += tl.load(b + col, mask=inside, other=0.0).to(tl.float32)[None, :]
                if GATED and MODE == 1:
                    total_up += tl.load(b + n_cols + col, mask=inside, other=0.0).to(tl.float32)[None, :]
            mask = live[:, None] & inside[None, :]
            out_at = out + row[:, None] * out_stride + col[None, :]
            extra_at = extra + row[:, None] * extra_stride + col[None, :]
            if MODE == 0:
                tl.store(out_at, total, mask=mask)
            elif MODE == 1:
                if KEEP:
                    tl.store(extra_at, total, mask=mask)
                if GATED:
                    if KEEP:
                        tl.store(extra_at + n_cols, total_up, mask=mask)
                    total, total_up = _bounded(total, total_up, limit, CLAMPED, PLUS_ONE)
                value, _ = _value_and_slope(total, FUNCTION)
                if GATED:
                    value = value * total_up
                tl.store(out_at, value, mask=mask)
            # in two halves: a whole tile of each of these values would not fit into registers
            elif BN >= 64:
                lower, upper = total.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
                half = n * BN + tl.arange(0, BN // 2)
                _finish_backward(
                    lower, pre, out, extra, row, half, live, n_cols, out_stride, extra_stride, limit,
                    FUNCTION, GATED, CLAMPED, PLUS_ONE,
                )  # fmt: skip
                _finish_backward(
                    upper, pre, out, extra, row, half + BN // 2, live, n_cols, out_stride, extra_stride, limit,
                    FUNCTION, GATED, CLAMPED, PLUS_ONE,
                )  # fmt: skip
            else:
                _finish_backward(
                    total, pre, out, extra, row, col, live, n_cols, out_stride, extra_stride, limit,
                    FUNCTION, GATED, CLAMPED, PLUS_ONE,
                )  # fmt: skip
            # persistent: each program takes every `programs`-th tile of all groups
            tile += programs
        first_tile = after
        first_row += size


@triton.jit
def _weights_kernel(
    left, right, ends, table, b_table, modes, scales, grad_like,
    groups, n_rows, n_cols, left_stride, right_stride,
    BIASED: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWIZZLE: tl.constexpr,
):  # fmt: skip
    """grad_g[m, n] (+)= scale_g · sum over rows r of group g of left[r, m] · right[r, n]; bias: sums of left[r, m].

    table, b_table: addresses of the gradients, 0 for none. modes: 1 to write, 0 to add. scales: bits of float64. ends:
    rows up to and with g.
    """
    m_tiles, n_tiles = tl.cdiv(n_rows, BM), tl.cdiv(n_cols, BN)
    each = m_tiles * n_tiles
    # each tile of a gradient belongs to one program, so that every run sums in the same order
    for tile in range(tl.program_id(0), groups * each, tl.num_programs(0)):
        g = tile // each
        local = tile - g * each
        band = local // (SWIZZLE * n_tiles)
        high = tl.minimum(m_tiles - band * SWIZZLE, SWIZZLE)
        within = local - band * SWIZZLE * n_tiles
        m = band * SWIZZLE + within % high
        n = within // high
        address = tl.load(table + g)
        b_address = tl.load(b_table + g)
        end = tl.load(ends + g)
        begin = tl.load(ends + g - 1, mask=g > 0, other=0)
        fresh = tl.load(modes + g) != 0
        # where gradients are written an expert without rows gets zeros; where they are added it is left alone
        if ((address != 0) | (b_address != 0)) & (fresh | (end > begin)):
            row = m * BM + tl.arange(0, BM)
            col = n * BN + tl.arange(0, BN)
            r = tl.arange(0, BK)
            total = tl.zeros((BM, BN), tl.float32)
            total_b = tl.zeros((BM,), tl.float32)
            for start in range(begin, end, BK):
                at = start + r
                live = at < end
                l_mask = live[:, None] & (row < n_rows)[None, :]
                lhs = tl.load(left + at[:, None] * left_stride + row[None, :], mask=l_mask, other=0.0)
                r_mask = live[:, None] & (col < n_cols)[None, :]
                rhs = tl.load(right + at[:, None] * right_stride + col[None, :], mask=r_mask, other=0.0)
                total = tl.dot(tl.trans(lhs), rhs, total, input_precision=PRECISION)
                if BIASED:
                    total_b += tl.sum(lhs.to(tl.float32), axis=0)
            scale = tl.load(scales + g).to(tl.float64, bitcast=True).to(tl.float32)
            if address != 0:
                grad = address.to(tl.pointer_type(grad_like.dtype.element_ty))
                mask = (row < n_rows)[:, None] & (col < n_cols)[None, :]
                place = grad + row[:, None].to(tl.int64) * n_cols + col[None, :]
                value = total * scale
                if fresh:
                    tl.store(place, value, mask=mask)
                else:
                    tl.store(place, tl.load(place, mask=mask, other=0.0).to(tl.float32) + value, mask=mask)
            # sums of `left` do not depend on the column tile: one of them writes
            if BIASED and (b_address != 0) & (n == 0):
                grad_b = b_address.to(tl.pointer_type(grad_like.dtype.element_ty))
                value_b = total_b * scale
                if fresh:
                    tl.store(grad_b + row, value_b, mask=row < n_rows)
                else:
                    before = tl.load(grad_b + row, mask=row < n_rows, other=0.0).to(tl.float32)
                    tl.store(grad_b + row, before + value_b, mask=row < n_rows)


def fitting(
    c: Config, mode: int, gated: bool, arch: Architecture | None, *, item_bytes: int = 2, weight_bytes: int = 2
) -> Config:
    """Return the tile shape that is launched where `c` is chosen: one that fits the registers and the shared memory.

    Args:
        c: What the rule or a file says.
        mode: Of the rows kernel.
        gated: Whether the activation is gated.
        arch: Where it runs; None where nothing has to fit.
        item_bytes: Of an element of the rows.
        weight_bytes: Of an element of the weights.
    """
    weights = 2 if mode == ACT and gated else 1
    # exact float32 products spill sooner on sm_80 than on any other
    exact = item_bytes == 4 and arch is not None and arch.capability == 80 and mode != PLAIN
    if weights == 2 or exact:
        # Two accumulators share the registers. Hopper's matrix instructions leave room for a whole square tile, and
        # elsewhere one spills 72 to 268 bytes
        most = 64 * 32 if exact else 128 * 128 if arch is None or arch.capability == 90 else 128 * 64
        while c.rows * c.cols > most and c.cols > 16:
            c = replace(c, cols=c.cols // 2)
        # with four warps these still spill 44 and 72 bytes
        if arch is not None and (arch.capability >= 100 or exact) and c.rows * c.cols == most:
            c = replace(c, warps=max(c.warps, 8))
    while (
        arch is not None
        and c.stages > 1
        and _shared_bytes(c, weights, arch, item_bytes, weight_bytes) > arch.shared_bytes
    ):
        c = replace(c, stages=c.stages - 1)
    return c


def _shared_bytes(c: Config, weights: int, arch: Architecture, item_bytes: int, weight_bytes: int) -> int:
    """Return what a program of the rows kernel takes of shared memory, as Triton 3.9 lays it out."""
    stage = c.rows * c.depth * item_bytes + weights * c.depth * c.cols * weight_bytes
    # From Hopper on, matrix instructions of 64 rows read operands from shared memory, so each stage has a buffer;
    # before, the tile in use is in registers
    from_shared = arch.capability >= 90 and c.rows >= 64 and item_bytes == 2
    # and a few words for barriers
    return stage * c.stages + 64 if from_shared else stage * (c.stages - 1)


@lru_cache(maxsize=16)
def _programs(device: torch.device) -> int:
    """Return the programs of a persistent grid: one per multiprocessor, or a few for the interpreter on CPU."""
    if device.type != "cuda":
        return 3
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def float32_precision() -> str:
    """Return how float32 products are computed: "tf32" where torch's own products may be, else "ieee".

    torch's setting is asked in its newer form, which sees both: `torch.backends.cuda.matmul.fp32_precision` itself and
    `allow_tf32` or `torch.set_float32_matmul_precision`. Asking by the older names raises once the newer one was set.
    """
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


@lru_cache(maxsize=512)
def _table(rows: tuple[tuple[int, ...], ...], device: torch.device, stream: int) -> Tensor:
    """Return a small table of integers on the device, made in `stream`; addresses mostly come again step by step."""
    return to_device([torch.tensor(rows, device="cpu")], device)[0]


def _contiguous(p: Tensor | None) -> Any:
    return None if p is None else p.contiguous()


class _Launch:
    """What the launches of one pass share: sizes, addresses and strides of the weights, and the tile shapes.

    Args:
        x: Rows of all groups, [T, D].
        sizes: Rows of every group, [G] int64 on the device.
        home: Stacked parameters of the m home experts.
        replicas: Parameters of single experts.
        more: Further rows of G integers, which come to the device in the same copy.

    Attributes:
        more: Those rows, on the device.
    """

    def __init__(
        self,
        x: Tensor,
        sizes: Tensor,
        home: ExpertWeights,
        replicas: Sequence[ExpertWeights],
        more: Sequence[list[int]] = (),
    ) -> None:
        m = home.w_in.shape[0]
        self.groups = m + len(replicas)
        self.device, self.dtype = x.device, x.dtype
        self.sizes = sizes.contiguous()
        # kept by this object: a contiguous copy must live until the kernels that read its address have been queued
        self.home = ExpertWeights(*map(_contiguous, home))
        self.replicas = [ExpertWeights(*map(_contiguous, w)) for w in replicas]
        dtypes = {p.dtype for w in (home, *replicas) for p in w if p is not None}
        if len(dtypes) > 1:
            raise ValueError(f"expected all experts' parameters in one dtype, got {sorted(map(str, dtypes))}")
        rows: list[list[int]] = []
        self.row_of: dict[str, int] = {}
        for name, stacked, *single in zip(ExpertWeights._fields, self.home, *self.replicas, strict=True):
            if stacked is not None:
                self.row_of[name] = len(rows)
                stride = stacked.stride(0) * stacked.element_size()
                rows.append([stacked.data_ptr() + e * stride for e in range(m)] + [p.data_ptr() for p in single])
        # not read in other streams, which would have to wait for the copy
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.device.type == "cuda" else 0
        table = _table(tuple(map(tuple, (*rows, *more))), x.device, stream)
        self.table, self.more = table.split([len(rows), len(more)])
        self.aligned = [all(a % 16 == 0 for a in addresses) for addresses in rows]
        self.like = self.home.w_in
        # other dtypes have one precision only
        self.precision = float32_precision() if x.dtype == torch.float32 else "ieee"

    def rows(
        self,
        mode: int,
        a: Tensor,
        out: Tensor,
        extra: Tensor,
        *,
        weight: str,
        strides: tuple[int, int],
        cols: int,
        act: ActivationParts = _NO_ACTIVATION,
        bias: str = "",
        keep: bool = False,
        pre: Tensor | None = None,
    ) -> None:
        """Launch the rows kernel with each expert's `weight`, whose [n, k] strides are given, and its `bias` if any."""
        if a.shape[0] == 0:
            return
        shape = a.shape[0] // self.groups, cols, a.shape[1]
        if self.like.dtype == self.dtype:
            c = config_for("rows", self.device, self.dtype, *shape)
        # wider weights take more shared memory than what was measured
        else:
            c = rule("rows", self.device, self.dtype, shape_class(*shape))
        c = fitting(
            c,
            mode,
            act.gated,
            architecture_of(self.device),
            item_bytes=self.dtype.itemsize,
            weight_bytes=self.like.dtype.itemsize,
        )
        row, b_row = self.row_of[weight], self.row_of.get(bias)
        tables = self.table[row], self.table[b_row or 0], self.like
        _rows_kernel[(_programs(self.device),)](
            a, out, extra, extra if pre is None else pre, self.sizes, *tables,
            self.groups, cols, a.shape[1], a.stride(0), out.stride(0), extra.stride(0), *strides,
            # as a float it is never a constant, for which a kernel would be compiled
            float(act.limit or 0),
            MODE=mode, FUNCTION=act.function, GATED=act.gated, CLAMPED=act.limit is not None, PLUS_ONE=act.plus_one,
            BIASED=b_row is not None, KEEP=keep, ALIGNED=self.aligned[row], PRECISION=self.precision,
            BM=c.rows, BN=c.cols, BK=c.depth, SWIZZLE=c.swizzle, num_warps=c.warps, num_stages=c.stages,
        )  # fmt: skip

    def weights(self, left: Tensor, right: Tensor, ends: Tensor, gradients: Sequence[_Gradients], first: int) -> None:
        """Launch the weights kernel: gradients of one weight (and bias) of every expert.

        Args:
            left: Gradients of what the weight has computed, [T, M].
            right: What it has computed that of, [T, N].
            ends: Rows up to and with each group, [G].
            gradients: Where the gradients go, those of each dtype.
            first: Row of `more` that has the first address of `gradients`.
        """
        cols, depth = left.shape[1], right.shape[1]
        c = config_for("weights", self.device, self.dtype, left.shape[0] // self.groups, cols, depth)
        for i, one in enumerate(gradients):
            at = first + 2 * i
            _weights_kernel[(_programs(self.device),)](
                left, right, ends, self.more[at], self.more[at + 1], self.more[0], self.more[1], one.like,
                self.groups, cols, depth, left.stride(0), right.stride(0),
                BIASED=one.biased, PRECISION=self.precision,
                BM=c.rows, BN=c.cols, BK=c.depth, SWIZZLE=c.swizzle, num_warps=c.warps, num_stages=c.stages,
            )  # fmt: skip


class _Gradients:
    """The buffers of one dtype for the gradients of one weight (and bias) of every expert.

    Args:
        grads: By group; None where there is none, or of another dtype.
        biases: Likewise.

    Attributes:
        rows: Addresses of `grads` and of `biases`, 0 for none, [2][G].
        like: One of them.
        biased: Whether a bias is among them.
    """

    def __init__(self, grads: Sequence[Tensor | None], biases: Sequence[Tensor | None]) -> None:
        some = [g for g in (*grads, *biases) if g is not None]
        if not all(g.is_contiguous() for g in some):
            raise ValueError("expected contiguous gradient buffers")
        self.like, self.biased = some[0], any(b is not None for b in biases)
        self.rows = [[0 if g is None else g.data_ptr() for g in part] for part in (grads, biases)]

    @classmethod
    def by_dtype(cls, grads: Sequence[Tensor | None], biases: Sequence[Tensor | None]) -> list[_Gradients]:
        """Return the buffers of each dtype: a kernel writes one, and replicas' may have another than the home's."""

        def pick(found: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
            return [g if g is not None and g.dtype == dtype else None for g in found]

        dtypes = sorted({g.dtype for g in (*grads, *biases) if g is not None}, key=str)
        return [cls(pick(grads, dtype), pick(biases, dtype)) for dtype in dtypes]


@on_its_device
def forward(
    x: Tensor,
    sizes: Tensor,
    home: ExpertWeights,
    replicas: Sequence[ExpertWeights],
    activation: Activation,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the outputs and, if asked to, keep pre-activations for the backward pass.

    Args:
        x: Rows of all groups, [T, D].
        sizes: Rows of every group, [G] int64 on the device.
        home: Stacked parameters of the m home experts.
        replicas: Parameters of single experts.
        activation: A name from `prophet.spec.ACTIVATIONS`, or one with a limit.
        keep: Whether to return pre-activations.

    Returns:
        Outputs [T, O], and pre-activations [T, U] or an empty tensor.
    """
    launch = _Launch(x, sizes, home, replicas)
    # kernels step through columns one by one; rows may lie apart
    x = x if x.stride(1) == 1 else x.contiguous()
    out, hidden = home.w_out.shape[1:]
    y = x.new_empty((x.shape[0], out))
    act, kept = _activations(launch, x, parts_of(activation), keep=keep)
    launch.rows(PLAIN, act, y, y, weight="w_out", strides=(hidden, 1), cols=out, bias="b_out")
    return y, kept


def _activations(launch: _Launch, x: Tensor, parts: ActivationParts, *, keep: bool) -> tuple[Tensor, Tensor]:
    """Return activations [T, H], and pre-activations [T, U] if `keep`."""
    (units, dim), hidden = launch.home.w_in.shape[1:], launch.home.w_out.shape[2]
    act = x.new_empty((x.shape[0], hidden))
    kept = x.new_empty((x.shape[0] if keep else 0, units))
    launch.rows(ACT, x, act, kept, weight="w_in", strides=(dim, 1), cols=hidden, act=parts, bias="b_in", keep=keep)
    return act, kept


@on_its_device
def backward(
    d_y: Tensor,
    x: Tensor,
    kept: Tensor,
    sizes: Tensor,
    home: ExpertWeights,
    replicas: Sequence[ExpertWeights],
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
        sizes: Rows of every group, [G] int64 on the device.
        home: Stacked parameters of the m home experts.
        replicas: Parameters of single experts.
        targets: Where gradients go, by group, homes first.
        activation: A name from `prophet.spec.ACTIVATIONS`, or one with a limit.
        d_x: Where the gradient of `x` goes, [T, D]; None for nowhere.
    """
    parts = parts_of(activation)
    into_in = _Gradients.by_dtype([t.w_in for t in targets], [t.b_in for t in targets])
    into_out = _Gradients.by_dtype([t.w_out for t in targets], [t.b_out for t in targets])
    # whether gradients are written or added to, and their factors
    how = [[int(t.fresh) for t in targets], [_bits(t.scale) for t in targets]]
    addresses = [row for one in (*into_in, *into_out) for row in one.rows]
    launch = _Launch(x, sizes, home, replicas, [*how, *addresses])
    x = x if x.stride(1) == 1 else x.contiguous()
    d_y = d_y if d_y.stride(1) == 1 else d_y.contiguous()
    dim, hidden = home.w_in.shape[2], home.w_out.shape[2]
    if kept.shape[0] != x.shape[0]:
        act, kept = _activations(launch, x, parts, keep=True)
        # in place: nobody else has these pre-activations
        d_hidden = kept
    # a second backward pass through the same graph needs what was kept
    else:
        act, d_hidden = x.new_empty((x.shape[0], hidden)), torch.empty_like(kept)
    # d_act[r, h] = sum over o of d_y[r, o] w_out[o, h]
    launch.rows(ACT_BACKWARD, d_y, act, d_hidden, weight="w_out", strides=(1, hidden), cols=hidden, act=parts, pre=kept)
    if d_x is not None:
        launch.rows(PLAIN, d_hidden, d_x, d_x, weight="w_in", strides=(1, dim), cols=dim)
    ends = launch.sizes.cumsum(0)
    launch.weights(d_hidden, x, ends, into_in, len(how))
    launch.weights(d_y, act, ends, into_out, len(how) + 2 * len(into_in))


def _bits(x: float) -> int:
    """Return the bits of a float64 as an integer, which can stand among addresses."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])
