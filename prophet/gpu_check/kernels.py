"""The Triton kernels against their definitions in float64; in Triton's interpreter where there is no GPU.

Shape legend: N tokens, K top-k, E experts, R ranks, D model dim, H hidden dim, T rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from prophet.doctor.check import Check, finding, sound, unseen
from prophet.gpu_check.checks import Answer, Place
from prophet.kernels.choice import Impl, triton_available
from prophet.kernels.grouped_ffn import ExpertWeights, grouped_ffn
from prophet.kernels.permute import permute, unpermute
from prophet.kernels.route import route
from prophet.kernels.split_apply import send_order
from prophet.spec import Activation, parts_of

# By device and dtype, what is computed and what it should be
Compare = Callable[[str, torch.dtype], list[tuple[Tensor, Tensor]]]
_MEND = "`prophet.MoE(..., impl='naive')` computes without Triton; please send the JSON below"


def kernels(place: Place) -> Answer:
    """Compare every kernel on this rank's device with its definition."""
    if not triton_available():
        return Answer(checks=[unseen("kernels", "Triton is not installed, and library products run in its place")])
    # Memory that a kernel forgets to write holds NaN
    torch.use_deterministic_algorithms(True, warn_only=True)
    small = (3, 0, 5, 1)
    calls: dict[str, Compare] = {
        "route": _route,
        "permute": _permute,
        "grouped_ffn swiglu": lambda device, dtype: _ffn(device, dtype, "swiglu", small, 19, 13),
        "grouped_ffn gelu": lambda device, dtype: _ffn(device, dtype, "gelu", small, 19, 13),
    }
    dtypes = [torch.float32]
    if place.on_gpu:
        dtypes += [torch.bfloat16, torch.float16]
        # Real tiles, which would take minutes in the interpreter
        real = (1000, 0, 517, 128)
        calls["grouped_ffn in real tiles"] = lambda device, dtype: _ffn(device, dtype, "swiglu", real, 320, 200)
    checks = [compared(name, call, place.device, dtypes, _MEND) for name, call in calls.items()]
    return Answer(checks=checks)


def compared(name: str, call: Compare, device: str, dtypes: Sequence[torch.dtype], mend: str) -> Check:
    """Compare what is computed on a device with what it should be.

    Args:
        name: Of the check.
        call: Returns both, by device and dtype.
        device: Where.
        dtypes: In which it is computed.
        mend: What helps if they differ.
    """
    errors = {}
    for dtype in dtypes:
        short = str(dtype).removeprefix("torch.")
        try:
            errors[short] = max(distance(got, want) for got, want in call(device, dtype)) / tolerance(dtype)
        # A kernel that does not compile is one line, and the next kernel is compared all the same
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            return finding(name, f"{short}: {type(error).__name__}: {text}", mend)
    return judged(name, errors, mend)


def judged(name: str, errors: dict[str, float], mend: str = _MEND) -> Check:
    """Judge a kernel by its errors.

    Args:
        name: Of the check.
        errors: By dtype, as shares of what is allowed.
        mend: What helps if they are larger.
    """
    wrong = [f"{dtype} by {share:.3g}" for dtype, share in errors.items() if not share <= 1]
    if wrong:
        return finding(name, f"errors times the allowed ones: {', '.join(wrong)}", mend)
    return sound(
        name, f"in {', '.join(errors)}: as defined, errors at most {max(errors.values()):.2f} of those allowed"
    )


def tolerance(dtype: torch.dtype) -> float:
    """Some roundings of the stored intermediates; sums in float32 are re-ordered."""
    return 2e-5 if dtype == torch.float32 else 6 * torch.finfo(dtype).eps


def distance(got: Tensor, want: Tensor) -> float:
    """The largest difference relative to the largest value, or to 1; infinite where one of them is not finite."""
    if got.shape != want.shape or not (got.isfinite().all() and want.isfinite().all()):
        return float("inf")
    if not want.numel():
        return 0.0
    wide = want.detach().double()
    return float((got.detach().double() - wide).abs().max()) / max(1.0, float(wide.abs().max()))


def _normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def _placed(values: Sequence[Tensor], device: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves on the device, and the same numbers in float64."""
    got = [value.to(device, dtype).requires_grad_() for value in values]
    return got, [value.detach().double().requires_grad_() for value in got]


def _ffn(
    device: str, dtype: torch.dtype, activation: Activation, sizes: Sequence[int], dim: int, hidden: int
) -> list[tuple[Tensor, Tensor]]:
    """Outputs and gradients, of home experts and the last one as a replica."""
    units, homes = hidden * (2 if parts_of(activation).gated else 1), len(sizes) - 1
    shapes = [(units, dim), (dim, hidden), (units,), (dim,)]
    drawn = [_normal(homes, *shape, seed=i, scale=0.3) for i, shape in enumerate(shapes)]
    drawn += [_normal(*shape, seed=10 + i, scale=0.3) for i, shape in enumerate(shapes)]
    drawn.append(_normal(sum(sizes), dim, seed=20))
    d_y = _normal(sum(sizes), dim, seed=21).to(device, dtype)
    found = []
    how: tuple[Impl, ...] = ("triton", "naive")
    for impl, leaves in zip(how, _placed(drawn, device, dtype), strict=True):
        home, replica, x = ExpertWeights(*leaves[:4]), ExpertWeights(*leaves[4:8]), leaves[8]
        y = grouped_ffn(x, list(sizes), home, activation, replicas=[replica], impl=impl)
        found.append([y, *torch.autograd.grad(y, leaves, d_y.to(y.dtype))])
    return list(zip(*found, strict=True))


def _route(device: str, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Choices, weights and the gradient of the logits; a gate's logits are float32 whatever the layer computes in."""
    found = []
    how: tuple[Impl, ...] = ("triton", "naive")
    for impl, (logits,) in zip(how, _placed([_normal(70, 13, seed=1)], device, torch.float32), strict=True):
        routed = route(logits, 3, impl=impl)
        d_weights = _normal(70, 3, seed=2).to(device, routed.weights.dtype)
        grads = torch.autograd.grad(routed.weights, logits, d_weights)
        found.append([routed.ids, routed.counts, routed.weights, *grads])
    return list(zip(*found, strict=True))


def _permute(device: str, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """The order of sending, rows, weighted sums and gradients."""
    N, K, E, R, D = 40, 2, 7, 4, 19
    ids = torch.rand(N, E, generator=torch.Generator().manual_seed(3)).argsort(dim=1)[:, :K].contiguous()
    counts = torch.bincount(ids.reshape(-1), minlength=E)
    split_ED = torch.stack([counts // R + (counts % R > rank) for rank in range(R)], dim=1).to(device)
    ids = ids.to(device)
    found = []
    how: tuple[Impl, ...] = ("triton", "naive")
    drawn = [_normal(N, D, seed=4), _normal(N, K, seed=5)]
    for impl, (x, weights) in zip(how, _placed(drawn, device, dtype), strict=True):
        order = send_order(ids, None, split_ED, N * K, impl=impl)
        rows = permute(x, *order, impl=impl)
        y = unpermute(rows, *order, weights, impl=impl)
        found.append([*order, rows, y, *torch.autograd.grad(y.sum(), [x, weights])])
    return list(zip(*found, strict=True))
