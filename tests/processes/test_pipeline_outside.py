"""What loops do with gradients, optimizers and losses beside `pipe.step` is refused by name, not without effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipeline_balance import add_loss
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError, StageFailed
from tests.helpers.launch import run_gloo

DIM, RANKS = 4, 2
Named = list[tuple[str, nn.Parameter]]


def _adam(named: Named) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in named], lr=0.01)


def _of(layers: list[nn.Module], loss_fn: Any = mse_loss, **options: Any) -> ElasticPipeline:
    given: dict[str, Any] = {"make_optimizer": _adam, "microbatches": 2, "timeout_s": 30.0, **options}
    return ElasticPipeline.from_modules(layers, loss_fn, **given)


def _pipe(**options: Any) -> ElasticPipeline:
    torch.manual_seed(0)
    return _of([nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(4)], **options)


def _batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 4, DIM, generator=torch.Generator().manual_seed(seed))
    return x, y


def _said(call: Callable[[], Any]) -> str:
    """What is refused; a failure in a stage ends the run, and says what the stage has raised."""
    with pytest.raises((SpecError, StageFailed)) as caught:
        call()
    return str(caught.value)


def _backward(pipe: ElasticPipeline) -> None:
    """A loss of the user's own, of this rank's weights."""
    sum(p.square().sum() for layer in pipe.layers.values() for p in layer.parameters()).backward()  # type: ignore[union-attr]


def _clip(pipe: ElasticPipeline) -> None:
    nn.utils.clip_grad_norm_(pipe.module.parameters(), 1e-3)


def _new_gradients(pipe: ElasticPipeline) -> None:
    for p in pipe.module.parameters():
        p.grad = None if p.grad is None else p.grad / 2


def _unscale(pipe: ElasticPipeline) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(pipe.optimizer)


CHANGES: dict[str, Callable[[ElasticPipeline], Any]] = {
    "clip": _clip,
    "new": _new_gradients,
    "unscale": _unscale,
    "own loss": _backward,
    "own loss after zero_grad": lambda pipe: (pipe.optimizer.zero_grad(), _backward(pipe)),
    "the numbers alone": lambda pipe: [p.grad.data.mul_(0.5) for p in pipe.module.parameters() if p.grad is not None],
    "clip_grad_value_": lambda pipe: nn.utils.clip_grad_value_(pipe.module.parameters(), 1e-5),
}


def _changes(rank: int, size: int) -> dict[str, str]:
    said, pipe = {}, _pipe()
    _backward(pipe)
    said["before"] = _said(lambda: pipe.step(*_batch()))
    for name, change in CHANGES.items():
        pipe.drop_gradients()
        pipe.step(*_batch())
        change(pipe)
        said[name] = _said(lambda: pipe.step(*_batch()))
    for name in ("clip", "own loss", "zeros"):
        pipe.drop_gradients()
        pipe.step(*_batch(), update=False)
        CHANGES.get(name, lambda pipe: pipe.optimizer.zero_grad(set_to_none=False))(pipe)
        said[f"midway: {name}"] = _said(lambda: pipe.step(*_batch()))
    pipe.drop_gradients()
    pipe.step(*_batch())
    return said


def test_gradients_that_are_changed_beside_a_step_are_refused() -> None:
    results = run_gloo(_changes, RANKS)
    assert results[0] == results[1]
    for name, words in results[0].items():
        assert "max_norm=" in words, name
        assert "pipeline_balance.add_loss" in words, name
        when = {"midway": "in mid-update", "before": "no step has made"}.get(name.split(":")[0])
        assert (when or "after the step that has used them") in words, name


def _steppers(rank: int, size: int) -> dict[str, str]:
    said = {}
    pipe = _pipe()
    other = torch.optim.SGD(pipe.module.parameters(), lr=0.1)
    pipe.optimizer.step()  # without a step there is nothing that it could use twice
    pipe.step(*_batch())
    weights = {n: p.detach().clone() for n, p in pipe.module.named_parameters() if not p.is_meta}
    said["again"] = _said(pipe.optimizer.step)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    if rank in pipe.stage_map.used_ranks:
        said["scaler"] = _said(lambda: scaler.step(pipe.optimizer))
    said["other"] = _said(other.step)
    assert all(torch.equal(p, weights[n]) for n, p in pipe.module.named_parameters() if n in weights)
    pipe.drop_gradients()
    pipe.step(*_batch(), update=False)
    said["midway"] = _said(pipe.optimizer.step)
    pipe.step(*_batch())
    pipe.drop_gradients()
    beside = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    beside.step()
    other.step()  # a pipeline whose gradients are gone is nobody's business
    return said


def test_an_optimizer_that_steps_beside_a_step_is_refused() -> None:
    results = run_gloo(_steppers, RANKS)
    assert results[0] == results[1]
    assert "has done so already" in results[0]["again"]
    assert "does so with update=True" in results[0]["midway"]
    assert results[0]["other"].startswith("SGD.step()")
    assert "pipe.scaler()" in results[0]["scaler"]


def _allowed(rank: int, size: int) -> list[list[float]]:
    """Loops that zero, read, clip inside, move in mid-update and schedule, and the plain one."""
    found = []
    for zero in (None, True, False):
        pipe = _pipe()
        scheduler = torch.optim.lr_scheduler.StepLR(pipe.optimizer, 10)
        losses = []
        for step in range(4):
            if zero is not None:
                pipe.optimizer.zero_grad(set_to_none=zero)
            losses.append(pipe.step(*_batch(step), update=False))
            if step == 2 and zero:
                pipe.rebuild(StageMap((0, 1, 4), (1, 0)))
            losses.append(pipe.step(*_batch(step + 9)))
            if step == 1 and zero:
                pipe.rebuild(StageMap((0, 3, 4), (0, 1)))
            scheduler.step()
            sum(float(p.grad.norm()) for p in pipe.module.parameters() if p.grad is not None)
        found.append(losses)
    return found


def test_what_loops_do_rightly_is_not_refused() -> None:
    results = run_gloo(_allowed, RANKS)
    for losses in results[0][1:]:
        assert losses == pytest.approx(results[0][0], rel=1e-6)


# --- losses that nobody adds ---


class Mixed(nn.Module):
    """A layer with a loss, which it returns, keeps, adds, or says nothing of."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.gate, self.how = nn.Linear(DIM, DIM), nn.Linear(DIM, 3), how

    def forward(self, x: Tensor, before: Tensor | None = None) -> Any:
        loss = self.gate(x).softmax(-1).square().sum()
        y = x + torch.tanh(self.linear(x)) * self.gate(x).amax(-1, keepdim=True)
        if self.how == "adds":
            return add_loss(y, loss)
        if self.how == "keeps":
            self.l_aux = loss
        if self.how == "keeps for looks":
            self.l_aux = loss.detach()
        if self.how == "keeps and adds":
            self.l_aux = loss
            return add_loss(y, self.l_aux)
        if self.how == "returns" or (self.how == "returns late" and before is None):
            return y, loss
        if self.how == "carries":
            return y, loss if before is None else before + loss
        return y


def _first(out: Any, y: Tensor) -> Tensor:
    return mse_loss(out[0] if isinstance(out, tuple) else out, y)


def _with_loss(out: Any, y: Tensor) -> Tensor:
    loss: Tensor = mse_loss(out[0], y) + 0.1 * out[1]
    return loss


LOST: dict[str, tuple[list[str], Any, dict[str, Any]]] = {
    "returned by a layer, taken by none": (["returns", "drops", "drops", "drops"], _first, {}),
    "returned at the end of a stage": (["drops", "returns", "drops", "drops"], _first, {}),
    "returned by the last": (["drops"] * 3 + ["returns"], _first, {}),
    "in two halves": (["drops", "drops", "returns", "drops"], _first, {"split_backward": True}),
    "kept": (["drops", "drops", "keeps", "drops"], _first, {}),
}
RIGHT: dict[str, tuple[list[str], Any, dict[str, Any]]] = {
    "added": (["adds"] * 4, _first, {}),
    "kept and added": (["keeps and adds"] * 4, _first, {}),
    "looked at": (["keeps for looks"] * 4, _first, {}),
    "carried": (["carries"] * 4, _with_loss, {}),
    "carried in two halves": (["carries"] * 4, _with_loss, {"split_backward": True}),
    "none": (["drops"] * 4, _first, {}),
}


def _lost(rank: int, size: int, name: str) -> str:
    torch.manual_seed(0)
    hows, loss_fn, options = {**LOST, **RIGHT}[name]
    pipe = _of([Mixed(how) for how in hows], loss_fn, **options)
    if name in RIGHT:
        for step in range(2):
            pipe.step(*_batch(step))
        return ""
    return _said(lambda: pipe.step(*_batch()))


@pytest.mark.parametrize("name", LOST)
def test_a_loss_that_nobody_adds_is_named(name: str) -> None:
    results = run_gloo(_lost, RANKS, name)
    unit = next(i for i, how in enumerate(LOST[name][0]) if how in ("returns", "keeps"))
    for words in results:
        assert f"layer {unit} (Mixed) {'keeps' if name == 'kept' else 'returns'} a loss" in words
        assert "pipeline_balance.add_loss(x, loss)" in words


def _right(rank: int, size: int) -> list[str]:
    return [_lost(rank, size, name) for name in RIGHT]


def test_losses_that_are_added_are_not_refused() -> None:
    assert run_gloo(_right, RANKS) == [[""] * len(RIGHT)] * RANKS


class Wrapped(nn.Module):
    """A layer of a transformers model, wrapped by hand; it may add a router's loss."""

    def __init__(self, layer: nn.Module, rotary: nn.Module, how: str) -> None:
        super().__init__()
        self.layer, self.rotary, self.how = layer, rotary, how

    def forward(self, x: Tensor) -> Any:
        at = self.rotary(x, torch.arange(x.shape[1])[None])
        y: Tensor = self.layer(x, position_embeddings=at)
        if self.how == "adds":
            return add_loss(y, 0.01 * self.layer.mlp.gate(y)[0].softmax(-1).square().sum())  # type: ignore[union-attr, operator]
        return y


def _mixtral(rank: int, size: int) -> dict[str, str]:
    from tests.helpers.transformers_models import small

    said = {}
    for how, asked in (("drops", True), ("adds", True), ("drops", False)):
        model: Any = small("mixtral", output_router_logits=asked)
        rotary = model.model.rotary_emb
        layers = [Wrapped(layer, rotary, how) for layer in model.model.layers]
        pipe = _of([model.model.embed_tokens, *layers, model.lm_head], lambda out, y: mse_loss(out, out.detach() * 0.5))
        ids = torch.arange(16).view(4, 4)
        try:
            said[f"{how} {asked}"] = f"{pipe.step(ids, ids):.3f}"
        except StageFailed as error:
            said[f"{how} {asked}"] = str(error)
    return said


def test_a_router_loss_that_a_config_asks_for_is_added_or_refused() -> None:
    pytest.importorskip("transformers")
    (said,) = run_gloo(_mixtral, 1)
    assert "(Wrapped) has a router whose loss its config asks for" in said["drops True"]
    assert "ElasticPipeline.from_transformers(model)" in said["drops True"]
    assert float(said["adds True"]) > 0
    assert float(said["drops False"]) > 0
