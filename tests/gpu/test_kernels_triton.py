"""The Triton kernels against the definitions: on a GPU, or in Triton's interpreter where TRITON_INTERPRET=1 is set.

`tests/kernels/test_interpreter.py` runs this file in the interpreter. `python -m tests.gpu` runs it, and what else
a GPU can test, in several processes side by side: most of its time on a GPU is the compiler's. bfloat16 needs a GPU:
the interpreter rounds it wrongly.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import prophet
from prophet.kernels.grouped_ffn import ExpertWeights, grouped_ffn
from prophet.kernels.permute import permute, unpermute
from prophet.kernels.route import route
from prophet.kernels.split_apply import send_order
from prophet.spec import Activation, Bias, has_biases, parts_of

pytest.importorskip("triton", reason="Triton is not installed")
ON_GPU = torch.cuda.is_available()
if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if ON_GPU else [])
EXAMPLES = 6 if ON_GPU else 4  # every example compiles kernels of its own on a GPU


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory that a kernel forgets to write holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def normal(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return drawn.to(DEVICE, dtype).requires_grad_()


def tolerance(dtype: torch.dtype) -> float:
    """A few roundings of the stored intermediates, relative to the largest value; float32 sums are re-ordered."""
    return 2e-5 if dtype == torch.float32 else 6 * torch.finfo(dtype).eps


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape
    assert got.isfinite().all()
    if want.numel():
        error = (got.detach().double() - want.detach().double()).abs().max()
        assert error <= tolerance(dtype) * max(1.0, float(want.detach().abs().max()))


def check_ffn(
    sizes: list[int],
    *,
    homes: int,
    dim: int,
    hidden: int,
    act: Activation,
    bias: Bias,
    dtype: torch.dtype,
    buffers: bool,
    recompute: bool = False,
    out: int | None = None,
) -> None:
    """Outputs and all gradients against the definition in float64."""
    units, out = 2 * hidden if parts_of(act).gated else hidden, out or dim
    b_in, b_out = has_biases(bias)
    shapes = {"w_in": (units, dim), "w_out": (out, hidden)}
    shapes |= {name: (n,) for name, there, n in (("b_in", b_in, units), ("b_out", b_out, out)) if there}
    step = len(shapes)

    def expert(seed: int, *lead: int) -> list[Tensor]:
        return [normal(*lead, *s, dtype=dtype, seed=seed + i, scale=0.3) for i, s in enumerate(shapes.values())]

    def each(flat: list[Tensor]) -> list[ExpertWeights]:
        return [ExpertWeights(**dict(zip(shapes, flat[i : i + step], strict=True))) for i in range(0, len(flat), step)]

    params = expert(0, homes) + [p for r in range(len(sizes) - homes) for p in expert(10 * (r + 1))]
    home, *replicas = each(params)
    x = normal(sum(sizes), dim, dtype=dtype, seed=5)
    d_y = normal(sum(sizes), out, dtype=dtype, seed=6).detach()
    added = [torch.ones_like(p, dtype=torch.float32) for p in params[step:]] if buffers else []
    y = grouped_ffn(
        x,
        sizes,
        home,
        act,
        replicas=replicas,
        replica_grads=each(added),
        grad_scale=0.5,
        recompute=recompute,
        impl="triton",
    )
    wanted_from = [x, *(params[:step] if buffers else params)]
    found = [y, *torch.autograd.grad(y, wanted_from, d_y), *(a - 1 for a in added)]

    wide = [t.detach().double().requires_grad_() for t in (x, *params)]
    experts = each(wide[1:])
    exact = grouped_ffn(wide[0], sizes, experts[0], act, replicas=experts[1:], grad_scale=0.5, impl="naive")
    grads = torch.autograd.grad(exact, wide, d_y.double(), allow_unused=True, materialize_grads=True)
    for got, want in zip(found, [exact, *grads], strict=True):
        assert_near(got, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("act", "bias", "buffers", "recompute"),
    [("gelu", True, True, False), ("swiglu", True, True, False), ("swiglu", False, False, True)],
)
def test_grouped_ffn(dtype: torch.dtype, act: Activation, bias: bool, buffers: bool, recompute: bool) -> None:
    check_ffn(
        [20, 0, 3, 1], homes=3, dim=21, hidden=19, act=act, bias=bias, dtype=dtype, buffers=buffers, recompute=recompute
    )


@pytest.mark.parametrize(
    ("act", "bias", "out"),
    [
        ("identity", "out", 5),
        ("relu", "in", 9),
        ("relu2", False, 13),
        ("gelu_tanh", True, 9),
        ("silu", "in", 13),
        ("quick_gelu", "out", 9),
        ("reglu", "out", 5),
        ("geglu", "in", 9),
        ("geglu_tanh", False, 13),
        ("quick_geglu", "in", 9),
        ("swiglu_clamped", "in", 5),
        ("swiglu(limit=0.5, plus_one)", True, 9),
        ("quick_geglu(plus_one)", False, 5),
    ],
)
def test_grouped_ffn_with_other_activations_biases_and_outputs(act: Activation, bias: Bias, out: int) -> None:
    check_ffn([6, 4], homes=1, dim=9, hidden=7, act=act, bias=bias, out=out, dtype=torch.float32, buffers=True)


@settings(deadline=None, max_examples=EXAMPLES)
@given(st.sampled_from(["swiglu", "quick_geglu"]), st.floats(2**-6, 2, width=32), st.booleans())
def test_grouped_ffn_with_any_limit(gate: str, limit: float, plus_one: bool) -> None:
    act = f"{gate}(limit={limit}{', plus_one' if plus_one else ''})"
    check_ffn([6, 4], homes=1, dim=9, hidden=7, act=act, bias=True, dtype=torch.float32, buffers=True)


@pytest.mark.parametrize(
    "act", ["swiglu_clamped", "swiglu(limit=10)", "quick_geglu(limit=3)", "swiglu(limit=8, plus_one)"]
)
def test_a_clamp_holds_on_both_sides_and_treats_its_bound_as_torch_does(act: Activation) -> None:
    """Pre-activations are the rows themselves. Up to release 2.13, torch passes a gradient at the bound."""
    at_bound = torch.tensor(7.0, requires_grad=True)
    passes = bool(torch.autograd.grad(at_bound.clamp(max=7.0), at_bound)[0])
    at = parts_of(act).limit or 0.0
    past = at + 2
    edges = torch.tensor([[at, -past, past, at, -at, past]], device=DEVICE)  # three gates, three ups
    w_in = torch.eye(6, device=DEVICE)[None]
    w_out = torch.eye(3, device=DEVICE)[None]
    found = []
    for impl, dtype in (("triton", torch.float32), ("torch", torch.float64), ("naive", torch.float64)):
        x = edges.to(dtype).requires_grad_()
        home = ExpertWeights(w_in.to(dtype), w_out.to(dtype))
        y = grouped_ffn(x, [1], home, act, impl=impl)  # type: ignore[arg-type]
        found.append((y, torch.autograd.grad(y.sum(), x)[0]))
    for y, d_x in found:
        assert (d_x[0] != 0).tolist() == [passes, True, False, passes, passes, False]
        assert_near(y, found[-1][0], torch.float32)
        assert_near(d_x, found[-1][1], torch.float32)


@pytest.mark.parametrize("act", ["relu", "relu2", "reglu", "swiglu_clamped", "swiglu(limit=2)"])
@pytest.mark.parametrize("impl", ["triton", "torch", "naive"])
def test_bounds_let_nan_through(act: Activation, impl: Literal["triton", "torch", "naive"]) -> None:
    """NaN in the gate of gated ones, where `up` is 1."""
    b_in = torch.tensor([[float("nan"), float("nan"), 1.0, 1.0]], device=DEVICE)[:, : 4 if parts_of(act).gated else 2]
    w_in = torch.ones(1, b_in.shape[1], 3, device=DEVICE)
    home = ExpertWeights(w_in, torch.ones(1, 3, 2, device=DEVICE), b_in)
    assert grouped_ffn(torch.zeros(1, 3, device=DEVICE), [1], home, act, impl=impl).isnan().all()


@pytest.mark.parametrize("sizes", [[0, 0, 0], [0, 40, 0], [0, 0, 33]], ids=str)
def test_grouped_ffn_with_all_rows_in_one_group_or_none(sizes: list[int]) -> None:
    check_ffn(sizes, homes=2, dim=16, hidden=17, act="gelu", bias=True, dtype=torch.float32, buffers=True)


@settings(deadline=None, max_examples=EXAMPLES)
@given(st.lists(st.integers(0, 35), min_size=2, max_size=5), st.data())
def test_grouped_ffn_at_any_group_sizes(sizes: list[int], data: st.DataObject) -> None:
    check_ffn(
        sizes,
        homes=data.draw(st.integers(1, len(sizes))),
        dim=data.draw(st.integers(1, 20)),
        hidden=data.draw(st.integers(1, 20)),
        act=data.draw(st.sampled_from(["gelu", "swiglu"])),
        bias=data.draw(st.booleans()),
        dtype=data.draw(st.sampled_from(DTYPES)),
        buffers=data.draw(st.booleans()),
    )


@pytest.mark.parametrize("act", ["gelu", "swiglu"])
@pytest.mark.parametrize("tile", [(16, 64, 16), (32, 16, 64), (128, 128, 32)], ids=str)
def test_grouped_ffn_at_other_tile_shapes(
    act: Activation, tile: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide tiles are finished in halves; a tile may be larger than everything there is."""
    from prophet.kernels.grouped_ffn import kernel
    from prophet.kernels.tuning import Config

    rows, cols, depth = tile
    chosen = Config(rows=rows, cols=cols, depth=depth, swizzle=2, warps=4, stages=2)
    monkeypatch.setattr(kernel, "config_for", lambda *_: chosen)
    check_ffn([20, 0, 13], homes=2, dim=21, hidden=75, act=act, bias=True, dtype=torch.float32, buffers=True)


@pytest.mark.skipif(not ON_GPU, reason="shapes of real tiles take minutes in the interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ["gelu", "swiglu"])
def test_grouped_ffn_at_real_tile_shapes(dtype: torch.dtype, act: Activation) -> None:
    sizes = [1000, 0, 3, 517, 128, 1]
    check_ffn(sizes, homes=4, dim=320, hidden=200, act=act, bias=False, dtype=dtype, buffers=True)


def test_a_graph_may_be_walked_backwards_twice() -> None:
    """The first pass leaves what was kept for it as it was."""
    home = ExpertWeights(normal(2, 14, 9, dtype=torch.float32, seed=1), normal(2, 9, 7, dtype=torch.float32, seed=2))
    x = normal(12, 9, dtype=torch.float32, seed=3)
    y = grouped_ffn(x, [5, 7], home, "swiglu", impl="triton").sum()
    first, second = (torch.autograd.grad(y, [x, *home[:2]], retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def float32_setting() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("setting", ["ieee", "tf32"])
def test_float32_products_follow_the_setting_of_torch(
    setting: str, float32_setting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prophet.kernels.grouped_ffn import kernel

    torch.backends.cuda.matmul.fp32_precision = setting
    assert kernel.float32_precision() == setting
    asked, launch = [], kernel._Launch.__init__

    def seen(self: kernel._Launch, *args: Any) -> None:
        launch(self, *args)
        asked.append(self.precision)

    monkeypatch.setattr(kernel._Launch, "__init__", seen)
    home = ExpertWeights(normal(2, 24, 32, dtype=torch.float32, seed=1), normal(2, 32, 24, dtype=torch.float32, seed=2))
    x = normal(20, 32, dtype=torch.float32, seed=3)
    d_y = normal(20, 32, dtype=torch.float32, seed=4).detach()
    y = grouped_ffn(x, [8, 12], home, "gelu", impl="triton")
    found = [y, *torch.autograd.grad(y, [x, *home[:2]], d_y)]
    assert asked == [setting, setting]
    wide = [t.detach().double().requires_grad_() for t in (x, *home[:2])]  # type: ignore[union-attr]
    exact = grouped_ffn(wide[0], [8, 12], ExpertWeights(*wide[1:]), "gelu", impl="naive")
    wanted = [exact, *torch.autograd.grad(exact, wide, d_y.double())]
    errors = [
        float((g.double() - w).detach().abs().max() / w.detach().abs().max())
        for g, w in zip(found, wanted, strict=True)
    ]
    assert max(errors) < (3e-3 if setting == "tf32" else 2e-6)
    if ON_GPU and setting == "tf32":
        assert max(errors) > 2e-5  # it was tf32


@pytest.mark.parametrize(("old", "expected"), [("highest", "ieee"), ("high", "tf32"), ("medium", "tf32")])
def test_the_older_names_of_the_setting_count_too(old: str, expected: str) -> None:
    from prophet.kernels.grouped_ffn import kernel

    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(old)
        assert kernel.float32_precision() == expected
    finally:
        torch.set_float32_matmul_precision(before)


def test_grouped_ffn_with_rows_that_are_not_contiguous() -> None:
    wide = normal(12, 40, dtype=torch.float32, seed=0)
    home = ExpertWeights(normal(2, 7, 20, dtype=torch.float32, seed=1), normal(2, 20, 7, dtype=torch.float32, seed=2))
    d_y = normal(20, 12, dtype=torch.float32, seed=3).t()
    results = []
    for impl in ("triton", "naive"):
        y = grouped_ffn(wide[:, ::2], [5, 7], home, "gelu", impl=impl)  # type: ignore[arg-type]
        results.append([y, *torch.autograd.grad(y, [wide, *home[:2]], d_y)])
    for got, want in zip(*results, strict=True):
        assert_near(got, want, torch.float32)


def routed(tokens: int, top_k: int, experts: int, seed: int) -> Tensor:
    drawn = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    return drawn.argsort(dim=1)[:, :top_k].contiguous().to(DEVICE)


def shared(ids: Tensor, kept: Tensor | None, experts: int, ranks: int, seed: int) -> Tensor:
    """A random split of the kept choices, [E, D]."""
    counts = torch.bincount((ids.reshape(-1) if kept is None else ids[kept]).cpu(), minlength=experts)
    g = torch.Generator().manual_seed(seed)
    cuts = (torch.rand(experts, ranks - 1, generator=g) * (counts[:, None] + 1)).long().sort(dim=1).values
    return torch.cat([torch.zeros(experts, 1, dtype=torch.long), cuts, counts[:, None]], dim=1).diff(dim=1).to(DEVICE)


def check_moves(
    tokens: int, top_k: int, experts: int, drop: bool, ranks: int, dim: int, dtypes: list[torch.dtype]
) -> None:
    """The send order exactly, rows, sums and gradients to a rounding, against the definitions."""
    ids = routed(tokens, top_k, experts, seed=tokens)
    kept = (torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(1)) < 0.6).to(DEVICE) if drop else None
    split = shared(ids, kept, experts, ranks, seed=2)
    plan = send_order(ids, kept, split, int(split.sum()), impl="triton")
    want = send_order(ids, kept, split, impl="naive")
    assert torch.equal(plan.order, want.order)
    assert torch.equal(plan.position, want.position)
    for dtype in dtypes:
        x = normal(tokens, dim, dtype=dtype, seed=3)
        weights = normal(tokens, top_k, dtype=torch.float32, seed=4)
        results = []
        for impl, kind in (("triton", dtype), ("naive", torch.float64)):
            a, w = (t.detach().to(kind if t is x else torch.promote_types(kind, t.dtype)) for t in (x, weights))
            a.requires_grad_(), w.requires_grad_()
            rows = permute(a, *plan, impl=impl)  # type: ignore[arg-type]
            y = unpermute(rows, *plan, w, impl=impl)  # type: ignore[arg-type]
            total = unpermute(rows, *plan, impl=impl)  # type: ignore[arg-type]
            grads = torch.autograd.grad(y.sum() + 2 * total.sum(), [a, w])
            results.append([rows, y, total, *grads])
        for got, exact in zip(*results, strict=True):
            assert_near(got, exact, dtype)


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(0, 1, 3), (1, 1, 1), (7, 2, 5), (200, 3, 17)])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("ranks", [1, 4])
def test_send_order_permute_and_unpermute(tokens: int, top_k: int, experts: int, drop: bool, ranks: int) -> None:
    check_moves(tokens, top_k, experts, drop, ranks, 19, DTYPES)


@settings(deadline=None, max_examples=EXAMPLES)
@given(st.integers(0, 140), st.integers(1, 9), st.integers(1, 5), st.booleans(), st.data())
def test_moves_of_any_size(tokens: int, experts: int, ranks: int, drop: bool, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, min(experts, 4)))
    dim = data.draw(st.integers(1, 40))
    check_moves(tokens, top_k, experts, drop, ranks, dim, [data.draw(st.sampled_from(DTYPES))])


def test_moves_of_rows_and_weights_that_are_not_contiguous() -> None:
    ids = routed(9, 2, 5, seed=0)
    plan = send_order(ids.t().contiguous().t(), None, shared(ids, None, 5, 2, seed=1), impl="triton")
    x, rows = normal(21, 9, dtype=torch.float32, seed=1), normal(18, 42, dtype=torch.float32, seed=2)
    weights, d_y = normal(2, 9, dtype=torch.float32, seed=3), normal(21, 9, dtype=torch.float32, seed=4).detach()
    d_rows = normal(21, 18, dtype=torch.float32, seed=5).detach()
    results = []
    for impl in ("triton", "naive"):
        sent = permute(x.t(), *plan, impl=impl)  # type: ignore[arg-type]
        y = unpermute(rows[:, ::2], *plan, weights.t(), impl=impl)  # type: ignore[arg-type]
        grads = [*torch.autograd.grad(sent, [x], d_rows.t()), *torch.autograd.grad(y, [rows, weights], d_y.t())]
        results.append([sent, y, *grads])
    for got, want in zip(*results, strict=True):
        assert_near(got, want, torch.float32)


@settings(deadline=None, max_examples=EXAMPLES)
@given(st.integers(0, 70), st.integers(1, 20), st.booleans(), st.data())
def test_route_never_chooses_an_expert_twice(tokens: int, experts: int, sigmoid: bool, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, min(experts, 5)))
    values = normal(experts, max(tokens, 1), dtype=torch.float32, seed=tokens).detach().t()[:tokens]
    logits = (values * 2).round() if data.draw(st.booleans()) else values  # rounded: scores that are equal
    found = route(logits, top_k, score="sigmoid" if sigmoid else "softmax", impl="triton")
    assert all(len(set(row)) == top_k for row in found.ids.tolist())
    assert torch.equal(found.counts, torch.bincount(found.ids.reshape(-1).cpu(), minlength=experts).to(DEVICE))
    chosen = logits.gather(1, found.ids)
    assert (chosen[:, :-1] >= chosen[:, 1:]).all()
    assert torch.equal(chosen, logits.topk(top_k, dim=-1).values)
    for row, picked in zip(logits.tolist(), found.ids.tolist(), strict=True):  # of equal ones the lowest
        assert picked == sorted(range(experts), key=lambda e: (-row[e], e))[:top_k]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(0, 4, 1), (5, 6, 6), (70, 13, 3), (1, 1, 1)])
def test_route(
    score: Literal["softmax", "sigmoid"], normalize: bool, biased: bool, tokens: int, experts: int, top_k: int
) -> None:
    logits = normal(tokens, experts, dtype=torch.float32, seed=1)
    bias = normal(experts, dtype=torch.float32, seed=2, scale=0.1).detach() if biased else None
    found = route(logits, top_k, score=score, normalize=normalize, scale=1.5, bias=bias, impl="triton")
    wide = logits.detach().double().requires_grad_()
    exact = route(wide, top_k, score=score, normalize=normalize, scale=1.5, bias=bias, impl="naive")
    assert torch.equal(found.ids, exact.ids)
    assert torch.equal(found.counts, exact.counts)
    assert_near(found.weights, exact.weights, torch.float32)
    d_weights = normal(tokens, top_k, dtype=torch.float32, seed=3).detach()
    got = torch.autograd.grad(found.weights, logits, d_weights)[0]
    assert_near(got, torch.autograd.grad(exact.weights, wide, d_weights.double())[0], torch.float32)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_scores_that_are_nan_choose_experts_that_exist(score: Literal["softmax", "sigmoid"]) -> None:
    """Whoever finds the NaN reports it; until then ids are used as indices."""
    logits = torch.full((5, 3), float("nan"), device=DEVICE)
    logits[1:, 0] = 1.0
    found = route(logits, 2, score=score, impl="triton")
    assert int(found.ids.min()) >= 0
    assert int(found.ids.max()) < 3


def test_triton_refuses_float64() -> None:
    with pytest.raises(ValueError, match="float32, float16 and bfloat16"):
        route(torch.zeros(2, 3, dtype=torch.float64, device=DEVICE), 1, impl="triton")


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_nothing_makes_the_host_wait() -> None:
    home = ExpertWeights(
        normal(2, 64, 32, dtype=torch.bfloat16, seed=1), normal(2, 32, 64, dtype=torch.bfloat16, seed=2)
    )
    ids = routed(64, 2, 2, seed=0)
    split = shared(ids, None, 2, 1, seed=0)
    sizes = torch.tensor([64, 64], device=DEVICE)
    x = normal(64, 32, dtype=torch.bfloat16, seed=3)
    logits = normal(64, 2, dtype=torch.float32, seed=4)

    def layer() -> None:
        weights = route(logits, 2).weights
        plan = send_order(ids, None, split)
        rows = grouped_ffn(permute(x, *plan), sizes, home, "gelu")
        unpermute(rows, *plan, weights).sum().backward()

    layer()  # compiles
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("loss", ["none", "gshard"])
def test_a_layer_waits_once_for_the_counts_that_the_uneven_exchange_needs(loss: Literal["none", "gshard"]) -> None:
    layer = prophet.MoE(64, 128, 8, 2, gate=prophet.GateConfig(aux_loss=loss)).to("cuda", torch.bfloat16)
    x = normal(300, 64, dtype=torch.bfloat16, seed=0)

    def step() -> None:
        with prophet.collect_losses(layer) as losses:
            y = layer(x).float().sum()
        (y + losses.total() if losses.entries else y).backward()

    torch.use_deterministic_algorithms(False)
    step()  # compiles
    step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in found if "synchroniz" in str(w.message)]
    assert len(waits) == 1, waits
