"""A backward pass in two halves gives what one pass gives, over the graphs of people's layers; else it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline_balance.pipeline.model import halves, halves_tried
from pipeline_balance.pipeline.model.added_loss import add_loss
from pipeline_balance.pipeline.model.halves import first_half
from pipeline_balance.pipeline.model.halves_tried import GRAPHS, Graph, check_halves, differing
from pipeline_balance.pipeline.run.stages import PipelineConfig
from prophet.errors import SpecError

D = 4


def _modules(kind: Any, *args: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = kind(*args, **options).double()
    return made


def _checkpointed(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    inner = checkpoint(lambda y: torch.tanh(y @ a) @ b, x, use_reentrant=False)
    return x + checkpoint(lambda y: torch.tanh(y @ a + c) @ a, inner, use_reentrant=False)


MORE: dict[str, Graph] = {
    "checkpoints": _checkpointed,
    "a loss that a layer adds": lambda x, a, b, c: add_loss(torch.tanh(x @ a), (x @ b).softmax(-1).square().sum()) @ b,
    "a loss of weights alone": lambda x, a, b, c: add_loss(torch.tanh(x @ a), (a * b).sum() + c.sum()) @ b,
    "convolutions": lambda x, a, b, c: nn.functional.conv1d(nn.functional.conv1d(x[None], a[..., None]), a[..., None]),
    "weights that go on": lambda x, a, b, c: (x @ a, a, torch.tanh(x @ (a * c))),
    "the input alone": lambda x, a, b, c: (x, x * 2),
    "nothing of the input": lambda x, a, b, c: (a @ b, c.sum()),
    "both of unbind": lambda x, a, b, c: torch.stack([(h := (x @ a).unbind(1))[0] * h[1], torch.tanh(h[1]) * h[2]], 1),
    "einsum of stacked experts": lambda x, a, b, c: torch.einsum("nd,edh->neh", x, torch.stack([a, b, a])).sum(1) * c,
}


@pytest.mark.parametrize("name", [*GRAPHS, *MORE])
def test_two_halves_are_one_pass(name: str) -> None:
    assert not differing({name: {**GRAPHS, **MORE}[name]})


@pytest.mark.parametrize(
    "layer",
    [
        _modules(nn.TransformerEncoderLayer, D, 2, 8, 0.0, batch_first=True, norm_first=True),
        _modules(nn.GRU, D, D, 2),
        _modules(nn.MultiheadAttention, D, 2),
        nn.utils.parametrizations.weight_norm(_modules(nn.Linear, D, D)),
        nn.utils.parametrizations.orthogonal(_modules(nn.Linear, D, D)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_modules_of_torch(layer: nn.Module) -> None:
    """Beside what is seen of them in `grad`, hooks on parameters run once per pass."""
    weights, seen = list(layer.parameters()), 0
    weights[0].requires_grad_(False)
    weights = weights[1:]

    def count(_: Tensor) -> None:
        nonlocal seen
        seen += 1

    def run(*, split: bool) -> list[Tensor]:
        found = []
        for number in range(2):
            x = (torch.arange(3 * D, dtype=torch.float64).view(3, D) + number).sin().requires_grad_()
            out = layer(x, x, x)[0] if isinstance(layer, nn.MultiheadAttention) else layer(x)
            out = (out[0] if isinstance(out, tuple) else out).square()
            if split:
                (grad,), second = first_half([out], [torch.ones_like(out)], [x], weights)
                assert all(w.grad is None for w in weights) or number
                second.run()
                assert grad is not None
                found.append(grad)
            else:
                out.sum().backward()
                assert x.grad is not None
                found.append(x.grad)
        found += [w.grad for w in weights if w.grad is not None]
        layer.zero_grad()
        return found

    handles = [w.register_post_accumulate_grad_hook(count) for w in weights]
    want, once = run(split=False), seen
    got = run(split=True)
    assert once
    assert seen == 2 * once
    for handle in handles:
        handle.remove()
    assert len(want) == len(got)
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-13) for a, b in zip(want, got, strict=True))


def test_inputs_that_no_output_depends_on_have_no_gradient() -> None:
    w, x, unused = (torch.ones(D, requires_grad=True) for _ in range(3))
    found, second = first_half([x * w], [torch.ones(D)], [x, unused], [w])
    second.run()
    assert found[1] is None
    assert torch.equal(w.grad, torch.ones(D)) if w.grad is not None else False


def test_the_look_draws_nothing_and_depends_on_no_setting() -> None:
    """Users make pipelines under all kinds of settings, and seed before they do."""
    before = torch.get_rng_state()
    was = torch.get_default_device() if torch.get_default_device().type != "cpu" else None
    try:
        torch.set_default_device("meta")
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert not differing(GRAPHS)
    finally:
        torch.set_default_device(was)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        # what torch 2.11's own halves do: a path between two uses counts twice
        (lambda m: m.setattr(halves._Site, "again", lambda site, grads: grads), "a tied weight"),
        (lambda m: m.setattr(halves, "GradientEdge", None), "a weight used once"),
        (lambda m: m.setattr(halves._Site, "note", lambda site, grads: None), "experts"),
    ],
)
def test_a_release_whose_halves_differ_is_refused(monkeypatch: pytest.MonkeyPatch, fault: Any, seen: str) -> None:
    fault(monkeypatch)
    check_halves.cache_clear()
    words = rf"with torch {torch.__version__.split('+')[0]}.* in two halves .*{seen}.*: write split_backward=False"
    with pytest.raises(SpecError, match=words):
        PipelineConfig(microbatches=2, split_backward=True)
    PipelineConfig(microbatches=2)


def test_it_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(halves_tried, "differing", lambda graphs: looks.append(1) or [])
    check_halves.cache_clear()
    for _ in range(3):
        PipelineConfig(microbatches=2, split_backward=True)
    assert len(looks) == 1
