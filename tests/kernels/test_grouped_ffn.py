"""Grouped FFN: the library path against the definition, gradients, buffers, dtypes, errors and compiled graphs."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from prophet.kernels.grouped_ffn import ExpertWeights, grouped_ffn
from prophet.kernels.grouped_ffn.blocked import tiles
from prophet.spec import ACTIVATIONS, Activation, Bias, has_biases, parts_of
from tests.helpers.oracle import LIMITED

D, H = 5, 7


def expert(
    *lead: int, act: Activation, bias: Bias, out: int = D, dtype: torch.dtype = torch.float64, seed: int
) -> ExpertWeights:
    g = torch.Generator().manual_seed(seed)
    u = 2 * H if parts_of(act).gated else H
    present = True, True, *has_biases(bias)
    made = [
        torch.randn(*lead, *s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() if there else None
        for there, s in zip(present, [(u, D), (out, H), (u,), (out,)], strict=True)
    ]
    return ExpertWeights(*made)  # type: ignore[arg-type]


def build(
    act: Activation, bias: Bias, out: int = D, *, homes: int = 3, replicas: int = 2, dtype: torch.dtype = torch.float64
) -> tuple[ExpertWeights, list[ExpertWeights]]:
    home = expert(homes, act=act, bias=bias, out=out, dtype=dtype, seed=1)
    return home, [expert(act=act, bias=bias, out=out, dtype=dtype, seed=2 + r) for r in range(replicas)]


def flat(home: ExpertWeights, replicas: list[ExpertWeights]) -> list[Tensor]:
    return [p for w in (home, *replicas) for p in w if p is not None]


def rows(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype).requires_grad_()


def grads(y: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    d_y = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y).to(y.dtype)
    return torch.autograd.grad(y, inputs, d_y, allow_unused=True, materialize_grads=True)


SIZES = [[2, 0, 3, 1, 0], [0, 0, 0, 0, 0], [0, 9, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 4]]
# every activation, some with options, every choice of biases with and without a gate, outputs of another size
CASES: list[tuple[Activation, Bias, int]] = [("gelu", True, D), ("gelu", False, D), ("swiglu", True, D)]
CASES += [("swiglu", False, D), ("swiglu_clamped", True, D), ("identity", True, 3), ("relu", "in", D)]
CASES += [("relu2", "out", D), ("gelu_tanh", False, 8), ("silu", "in", 3), ("quick_gelu", True, D)]
CASES += [("reglu", "in", D), ("geglu", "out", 3), ("geglu_tanh", False, D), ("swiglu_clamped", "out", 8)]
CASES += [("quick_geglu", False, 3), *((act, "in", D) for act in LIMITED)]


def test_the_cases_cover_the_table() -> None:
    assert {act for act, _, _ in CASES} == {*ACTIVATIONS, *LIMITED}
    for gated in (True, False):
        assert {bias for act, bias, _ in CASES if parts_of(act).gated == gated} == {True, False, "in", "out"}


# the definition's gradients in every case; those of torch's products are compared with them below
CHECKED = [
    pytest.param(impl, *case, marks=[] if impl == "naive" or case in CASES[:3] else pytest.mark.slow)
    for impl in ("naive", "torch")
    for case in CASES
]


@pytest.mark.parametrize(("impl", "act", "bias", "out"), CHECKED)
def test_gradcheck(impl: Literal["torch", "naive"], act: Activation, bias: Bias, out: int) -> None:
    home, replicas = build(act, bias, out)
    names = [name for name, p in zip(ExpertWeights._fields, home, strict=True) if p is not None]
    step = len(names)

    def run(x: Tensor, *params: Tensor) -> Tensor:
        ws = [ExpertWeights(**dict(zip(names, params[i : i + step], strict=True))) for i in range(0, len(params), step)]
        return grouped_ffn(x, [2, 0, 1, 1, 0], ws[0], act, replicas=ws[1:], impl=impl)

    assert torch.autograd.gradcheck(run, (rows(4), *flat(home, replicas)))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    ("act", "bias", "out", "how"),
    [(*case, how) for case in CASES[:5] for how in ("list", "tensor", "recompute")]
    + [(*case, how) for case, how in zip(CASES[5:], itertools.cycle(["list", "recompute"]))],
)
def test_agrees_with_the_definition(sizes: list[int], act: Activation, bias: Bias, out: int, how: str) -> None:
    home, replicas = build(act, bias, out)
    x = rows(sum(sizes))
    inputs = [x, *flat(home, replicas)]
    given = torch.tensor(sizes) if how == "tensor" else sizes
    y = grouped_ffn(x, given, home, act, replicas=replicas, grad_scale=0.25, recompute=how == "recompute")
    wanted = grouped_ffn(x, sizes, home, act, replicas=replicas, grad_scale=0.25, impl="naive")
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    for got, want in zip(grads(y, inputs), grads(wanted, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("act", ["swiglu_clamped", "swiglu(limit=10)", "quick_geglu(limit=3)"])
def test_the_clamp_holds_in_both_directions(act: Activation) -> None:
    home, replicas = build(act, True)
    far = (rows(6) * 20).detach().requires_grad_()
    inputs = [far, *flat(home, replicas)]
    y, wanted = (
        grouped_ffn(far, [2, 0, 3, 1, 0], home, act, replicas=replicas, impl=impl) for impl in ("torch", "naive")
    )
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    for got, want in zip(grads(y, inputs), grads(wanted, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    at_seven = torch.tensor([7.0], requires_grad=True)
    at_seven.clamp(-7.0, 7.0).backward()
    assert at_seven.grad is not None
    passes = bool(at_seven.grad)  # from release 2.14 on it does not
    one = ExpertWeights(torch.eye(2)[None], torch.tensor([[[1.0], [2.0]]]))
    at = parts_of(act).limit or 0.0
    past = at + 1
    edges = torch.tensor([[at, 3.0], [3.0, at], [3.0, -at], [past, 3.0], [3.0, past], [3.0, -past], [-past, 3.0]])
    for impl in ("torch", "naive"):
        x = edges.clone().requires_grad_()
        grouped_ffn(x, [len(edges)], one, act, impl=impl).sum().backward()
        assert x.grad is not None
        got = [bool(row[at]) for row, at in zip(x.grad, (0, 1, 1, 0, 1, 1, 0), strict=True)]
        assert got == [passes, passes, passes, False, False, False, True], impl


@pytest.mark.parametrize("impl", ["torch", "naive"])
@pytest.mark.parametrize(("act", "bias", "out"), CASES)
def test_buffers_are_added_to_in_place(impl: Literal["torch", "naive"], act: Activation, bias: Bias, out: int) -> None:
    home, replicas = build(act, bias, out)
    sizes = [2, 0, 3, 1, 0]
    x = rows(6)
    params = flat(home, replicas)
    wanted = grads(grouped_ffn(x, sizes, home, act, replicas=replicas, grad_scale=0.5, impl="naive"), [x, *params])
    ones = [ExpertWeights(*(None if p is None else torch.ones_like(p) for p in w)) for w in (home, *replicas)]
    y = grouped_ffn(
        x,
        sizes,
        home,
        act,
        replicas=replicas,
        grad_scale=0.5,
        home_grads=ones[0],
        replica_grads=ones[1:],
        impl=impl,
    )
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y))
    assert all(p.grad is None for p in params)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, wanted[0])
    for buffer, want in zip(flat(ones[0], ones[1:]), wanted[1:], strict=True):
        torch.testing.assert_close(buffer, want + 1)


def test_adding_to_the_same_buffers_from_two_passes_before_either_runs_backward() -> None:
    home, replicas = build("gelu", True)
    buffers = [ExpertWeights(*(torch.zeros_like(p) for p in w)) for w in replicas]  # type: ignore[arg-type]
    x = rows(6)
    ys = [grouped_ffn(x, [1, 1, 1, 2, 1], home, "gelu", replicas=replicas, replica_grads=buffers) for _ in range(2)]
    for y in ys:
        y.sum().backward()
    single = torch.autograd.grad(
        grouped_ffn(x, [1, 1, 1, 2, 1], home, "gelu", replicas=replicas, impl="naive").sum(),
        flat(home, replicas)[4:],
    )
    for buffer, want in zip([b for w in buffers for b in w], single, strict=True):
        torch.testing.assert_close(buffer, 2 * want)


def test_frozen_parameters_get_no_gradient_and_cost_none() -> None:
    home, replicas = build("swiglu", True)
    for p in flat(home, replicas):
        p.requires_grad_(False)
    x = rows(6)
    grouped_ffn(x, [2, 0, 3, 1, 0], home, "swiglu", replicas=replicas).sum().backward()
    assert x.grad is not None
    assert all(p.grad is None for p in flat(home, replicas))
    home.w_out.requires_grad_()
    grouped_ffn(x.detach(), [2, 0, 3, 1, 0], home, "swiglu", replicas=replicas).sum().backward()
    assert home.w_out.grad is not None
    assert home.w_in.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("act", "bias", "out"), CASES)
def test_lower_precision_stays_close_to_float64(dtype: torch.dtype, act: Activation, bias: Bias, out: int) -> None:
    home, replicas = build(act, bias, out, dtype=dtype)
    # times 0.8 no pre-activation is within two roundings of a limit, where the gradient jumps: in torch 2.15 already at
    # the limit itself, in torch 2.13 only beyond
    x = (0.8 * rows(40)).detach().to(dtype).requires_grad_()
    sizes = [17, 0, 20, 3, 0]
    y = grouped_ffn(x, sizes, home, act, replicas=replicas)
    got = [y, *grads(y, [x, *flat(home, replicas)])]
    wide = [
        ExpertWeights(*(None if p is None else p.detach().double().requires_grad_() for p in w))
        for w in (home, *replicas)
    ]
    wide_x = x.detach().double().requires_grad_()
    exact = grouped_ffn(wide_x, sizes, wide[0], act, replicas=wide[1:], impl="naive")
    want = [exact, *grads(exact, [wide_x, *flat(wide[0], wide[1:])])]
    # a few roundings of values up to the largest: output, pre-activation and its gradient are stored in `dtype`
    tolerance = 8 * torch.finfo(dtype).eps
    for g, w in zip(got, want, strict=True):
        assert g.dtype == dtype
        assert (g.double() - w).detach().abs().max() <= tolerance * max(1.0, float(w.detach().abs().max()))


def test_parameters_may_be_wider_than_rows_and_buffers_wider_still() -> None:
    home, replicas = build("swiglu", True, dtype=torch.float32)
    buffers = [ExpertWeights(*(torch.zeros_like(p, dtype=torch.float64) for p in w)) for w in replicas]  # type: ignore[arg-type]
    x = rows(6, torch.bfloat16)
    y = grouped_ffn(x, [2, 0, 3, 1, 0], home, "swiglu", replicas=replicas, replica_grads=buffers)
    wanted = grouped_ffn(x, [2, 0, 3, 1, 0], home, "swiglu", replicas=replicas, impl="naive")
    assert y.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(y, wanted, rtol=0.03, atol=0.05)
    y.sum().backward()
    assert home.w_in.grad is not None
    assert home.w_in.grad.dtype == torch.float32
    assert buffers[0].w_in.abs().sum() > 0


def test_autocast_sets_the_dtype_of_the_products() -> None:
    home, replicas = build("gelu", True, dtype=torch.float32)
    x = rows(6, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = grouped_ffn(x, [2, 0, 3, 1, 0], home, "gelu", replicas=replicas)
        wanted = grouped_ffn(x, [2, 0, 3, 1, 0], home, "gelu", replicas=replicas, impl="naive")
    assert y.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(y, wanted, rtol=0.03, atol=0.05)


def test_rows_and_output_gradients_need_not_be_contiguous() -> None:
    home, replicas = build("swiglu", True)
    wide = torch.randn(6, 2 * D, dtype=torch.float64)
    x = wide[:, ::2].detach().requires_grad_()
    d_y = torch.randn(D, 6, dtype=torch.float64).t()
    inputs = [x, *flat(home, replicas)]
    results = []
    for impl in ("torch", "naive"):
        y = grouped_ffn(x, [2, 0, 3, 1, 0], home, "swiglu", replicas=replicas, impl=impl)  # type: ignore[arg-type]
        results.append(torch.autograd.grad(y, inputs, d_y, allow_unused=True, materialize_grads=True))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_memory_that_holds_nan_does_not_reach_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    home, replicas = build("swiglu", True)
    x = rows(6)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        y = grouped_ffn(x, [2, 0, 3, 1, 0], home, "swiglu", replicas=replicas)
        found = [y, *grads(y, [x, *flat(home, replicas)])]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(t.isfinite().all() for t in found)


def test_the_result_depends_on_everything_even_when_no_row_arrives() -> None:
    home, replicas = build("gelu", True)
    x = torch.zeros(0, D, dtype=torch.float64, requires_grad=True)
    grouped_ffn(x, [0] * 5, home, "gelu", replicas=replicas).sum().backward()
    for p in [x, *flat(home, replicas)]:
        assert p.grad is not None
        assert not p.grad.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": [1, 1]}, "2 groups of 2 rows do not match 5 experts, 6 rows"),
        ({"sizes": [2, 0, 3, 2, -1]}, "groups"),
        ({"sizes": torch.tensor([2, 0, 3, 1, 1])}, "7 in all, do not match 6 rows"),
        ({"sizes": torch.tensor([2.0, 0, 3, 1, 0])}, "int64"),
        ({"activation": "tanh"}, "one of identity, .*, got 'tanh'"),
        ({"impl": "cuda"}, "impl must be"),
        ({"x": torch.zeros(6, D + 1, dtype=torch.float64)}, "experts of dim 5"),
        ({"replicas": build("gelu", False)[1]}, "expected all experts to have b_in or none, and replica 0 differs"),
        ({"replicas": build("gelu", "in")[1]}, "expected all experts to have b_out or none, and replica 0 differs"),
        ({"replicas": build("gelu", True, 3)[1]}, r"replica 0 w_out: expected shape \[5, 7\], got \[3, 7\]"),
        ({"replicas": build("swiglu", True)[1]}, "replica 0 w_in: expected shape"),
        ({"replica_grads": [build("gelu", True)[1][0]]}, "one buffer for each"),
    ],
)
def test_bad_input_is_refused(change: dict[str, object], message: str) -> None:
    home, replicas = build("gelu", True)
    arguments: dict[str, object] = {
        "x": rows(6), "sizes": [2, 0, 3, 1, 0], "home": home, "activation": "gelu", "replicas": replicas
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        grouped_ffn(**{**arguments, **change})  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error:Dynamo")
@pytest.mark.parametrize(("buffered", "act"), [(False, "swiglu"), (True, "swiglu"), (False, "swiglu(limit=4)")])
def test_compiles_to_one_graph_that_serves_all_counts(buffered: bool, act: Activation) -> None:
    home, replicas = build(act, "in", 4)
    params = flat(home, replicas)
    buffers = [ExpertWeights(*(None if p is None else torch.zeros_like(p) for p in w)) for w in replicas]  # type: ignore[arg-type]
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    def layer(x: Tensor, sizes: Tensor) -> Tensor:
        given = buffers if buffered else []
        return grouped_ffn(x * 2, sizes, home, act, replicas=replicas, replica_grads=given).tanh()

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for sizes in ([2, 1, 0, 3, 0], [0, 0, 6, 0, 0], [0, 4, 1, 2, 4], [40, 0, 0, 0, 0]):
        x = rows(sum(sizes))
        torch._dynamo.mark_dynamic(x, 0)
        results = []
        for run in (compiled, layer):
            for b in (t for w in buffers for t in w if t is not None):
                b.zero_()
            for p in (x, *params):
                p.grad = None
            y = run(x, torch.tensor(sizes))
            y.square().sum().backward()
            results.append(
                [
                    y,
                    *(p.grad for p in (x, *params)),
                    *(b.clone() for w in buffers for b in w if b is not None),
                ]
            )
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want)
    assert len(graphs) == 1


def test_the_sizes_of_outputs_are_known_without_running() -> None:
    with FakeTensorMode():
        home = ExpertWeights(torch.empty(2, 2 * H, D), torch.empty(2, 3, H))
        y = grouped_ffn(torch.empty(6, D), torch.empty(2, dtype=torch.int64), home, "geglu")
    assert y.shape == (6, 3)


def test_tiles_cover_every_row_once_and_respect_the_limit() -> None:
    sizes = [0, 3, 0, 10, 1, 1, 4, 0]
    for limit in range(1, 12):
        for split in (True, False):
            plan = tiles(sizes, limit, split=split)
            pieces = [p for tile in plan for p in tile]
            assert [i for p in pieces for i in range(p.start, p.stop)] == list(range(sum(sizes)))
            assert [p.group for p in pieces if p.first] == [g for g, n in enumerate(sizes) if n]
            spans = [tile[-1].stop - tile[0].start for tile in plan]
            assert max(spans) <= (limit if split else max(limit, 10))
            if not split:
                assert all(p.first for p in pieces)
