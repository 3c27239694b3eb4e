"""The top-k gate: the library path against the definition, gradients, errors, compiled graphs; and light imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from prophet.kernels.route import route

Score = Literal["softmax", "sigmoid"]
WAYS = [(s, n, b) for s in ("softmax", "sigmoid") for n in (True, False) for b in (True, False)]


def scores(tokens: int, experts: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, experts, generator=g, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize(("score", "normalize", "biased"), WAYS)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(0, 3, 1), (9, 5, 2), (4, 3, 3), (1, 1, 1)])
def test_agrees_with_the_definition(
    score: Score, normalize: bool, biased: bool, tokens: int, experts: int, top_k: int
) -> None:
    logits = scores(tokens, experts)
    bias = torch.linspace(0.3, -0.3, experts, dtype=torch.float64) if biased else None
    results = []
    for impl in ("torch", "naive"):
        found = route(logits, top_k, score=score, normalize=normalize, scale=1.5, bias=bias, impl=impl)  # type: ignore[arg-type]
        d_weights = torch.linspace(-1, 2, tokens * top_k, dtype=torch.float64).view(tokens, top_k)
        results.append([*found, torch.autograd.grad(found.weights, logits, d_weights)[0]])
        assert int(found.counts.sum()) == tokens * top_k
        assert all(len(set(row)) == top_k for row in found.ids.tolist())
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("score", "normalize", "biased"), WAYS)
@pytest.mark.parametrize("impl", ["torch", "naive"])
def test_gradcheck(score: Score, normalize: bool, biased: bool, impl: Literal["torch", "naive"]) -> None:
    bias = torch.linspace(0.3, -0.3, 5, dtype=torch.float64) if biased else None

    def weights(logits: Tensor) -> Tensor:
        return route(logits, 2, score=score, normalize=normalize, scale=0.7, bias=bias, impl=impl).weights

    assert torch.autograd.gradcheck(weights, (scores(6, 5),))


@pytest.mark.parametrize("impl", ["torch", "naive"])
def test_no_graph_is_left_after_backward(impl: Literal["torch", "naive"]) -> None:
    """Under hooks a saved output refers to its own node: where backward never comes, both stay for ever."""
    logits = torch.randn(5, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        route(logits, 2, impl=impl).weights.square().sum().backward()
    assert logits._use_count() == 1


def test_scores_too_small_to_sum_give_finite_weights() -> None:
    logits = torch.full((2, 4), -200.0, requires_grad=True)
    found = route(logits, 2, score="sigmoid")
    found.weights.sum().backward()
    assert found.weights.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 6}, "E >= top_k >= 1"),
        ({"top_k": 0}, "E >= top_k >= 1"),
        ({"logits": torch.zeros(3)}, "logits"),
        ({"score": "tanh"}, "'softmax' or 'sigmoid', got 'tanh'"),
        ({"bias": torch.zeros(4)}, r"bias of shape \[5\]"),
        ({"impl": "fast"}, "impl must be"),
    ],
)
def test_bad_input_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route(**{"logits": torch.zeros(3, 5), "top_k": 2, **change})  # type: ignore[arg-type]


def test_compiles_to_one_graph() -> None:
    def weights(logits: Tensor) -> Tensor:
        return route(logits, 2, score="sigmoid").weights.square()

    torch._dynamo.reset()
    compiled = torch.compile(weights, fullgraph=True, backend="aot_eager")
    for tokens in (5, 9):
        logits = scores(tokens, 4)
        torch._dynamo.mark_dynamic(logits, 0)
        got, want = compiled(logits), weights(logits)
        torch.testing.assert_close(got, want)
        grads = [torch.autograd.grad(y.sum(), logits)[0] for y in (got, want)]
        torch.testing.assert_close(*grads)


def test_nothing_needs_triton_to_be_imported() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, prophet\n"
        "from prophet.kernels.grouped_ffn import grouped_ffn\n"
        "from prophet.kernels.permute import permute\n"
        "from prophet.kernels.split_apply import send_order\n"
        "from prophet.kernels.route import route\n"
        "print(route(torch.zeros(2, 3), 1).counts.sum().item())\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2"]
