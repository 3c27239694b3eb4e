"""What people change on experts after the conversion: it is as if they had done it before, or it is refused.

Every change is made to a model that is never converted, and to a converted one on one rank and on two with replicas in
force. All of them train in float64 on the same tokens, with momentum and weight decay.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import prophet
from prophet.convert import original_state_dict
from prophet.convert.trials.discover import discover
from prophet.engine.config import Experiment
from prophet.errors import ConfigMismatch, ConversionError, PlanMismatch
from prophet.ranks.collective import Collective
from tests.helpers.hand_written import Swiglu
from tests.helpers.support import RandomPlanner, dense_parameters, on_threads, seeded

DIM, HIDDEN, EXPERTS, STEPS = 8, 12, 4, 3
REFUSED = (ConversionError, ConfigMismatch, PlanMismatch, ValueError)
TOLERANCE = 1e-12
Change = Callable[[Any], object]


@pytest.fixture(autouse=True)
def _tried_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """All models here are of one shape: what is found by trying is found once."""
    convert, find = (importlib.import_module(f"prophet.convert{part}") for part in ("", ".find"))
    monkeypatch.setattr(convert, "check_by_trying", lambda model, found: None)
    monkeypatch.setattr(find, "discover", lambda *given: found_once())


@functools.cache
def found_once() -> Any:
    return discover(net("gelu"), ())


class Block(nn.Module):
    """A loop that skips experts without tokens. kind: "gelu" or "swiglu"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleList(Swiglu() if kind == "swiglu" else feed_forward() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(dim=-1).topk(2)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            row, choice = (ids == e).nonzero(as_tuple=True)
            if len(row):
                y = y.index_add(0, row, expert(x[row]) * weights[row, choice, None])
        return x + y


def feed_forward() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM))


def net(kind: str) -> Any:
    with seeded(5):
        return nn.Sequential(nn.Linear(DIM, DIM), Block(kind), nn.Linear(DIM, DIM)).double()


def tokens(step: int) -> Tensor:
    """[2, 24, D]: those of two ranks."""
    return torch.randn(2, 24, DIM, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)


def alone(kind: str, change: Change) -> dict[str, Tensor]:
    """The state of the model as written after some steps; the loss is the mean of both ranks'."""
    model = net(kind)
    model = change(model) or model
    optimizer = adamw(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(model(x).square().mean() for x in tokens(step)).div(2).backward()  # type: ignore[union-attr]
        optimizer.step()
    return dict(model.state_dict())


def converted(model: Any, change: Change, group: Collective) -> dict[str, Tensor]:
    """The same of the model on a rank of `group`, in the original layout."""
    prophet.convert(model, group=group)
    model = change(model) or model
    optimizer = adamw(model)
    config = prophet.EngineConfig(planner=RandomPlanner(0, 1.0), slots_per_rank=2)
    engine = prophet.attach(model, optimizer, config=config, experiment=Experiment(check_every=1))
    copies = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        mine = tokens(step) if group.size == 1 else tokens(step)[group.rank : group.rank + 1]
        (sum(model(x).square().mean() for x in mine) / len(mine)).backward()
        group.all_reduce_mean_([p.grad for p in dense_parameters(model).values() if p.grad is not None])
        optimizer.step()
        assert engine.last_step is not None
        copies += int(engine.last_step.copies.sum())
    engine.close()
    assert copies or group.size == 1
    return original_state_dict(model)


# --- the changes ---


def every(act: Callable[[Any], object]) -> Change:
    """Do it to all experts of the list."""

    def change(model: Any) -> None:
        for expert in model[1].experts:
            act(expert)

    return change


def one(act: Callable[[Any], object]) -> Change:
    """Do it to the second expert alone, which lives on the first of two ranks."""
    return on(lambda model: act(model[1].experts[1]))


def on(act: Callable[[Any], object]) -> Change:
    def change(model: Any) -> None:
        act(model)

    return change


def first(expert: Any) -> Any:
    return expert.w1 if isinstance(expert, Swiglu) else expert[0]


def by_name(part: str) -> Change:
    def change(model: Any) -> None:
        for name, p in model.named_parameters():
            if part in name:
                p.requires_grad_(False)

    return change


def drawn(draw: Callable[..., object]) -> Change:
    """All weights of experts anew, from a generator that every rank has for itself."""

    def change(model: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        for expert in model[1].experts:
            for p in expert.parameters():
                draw(p if p.dim() > 1 else p.unsqueeze(0), generator=generator)

    return change


@torch.no_grad()
def halved(p: Tensor) -> None:
    p.mul_(0.5)


@torch.no_grad()
def copied(p: Tensor, source: Tensor) -> None:
    p.copy_(source)


@torch.no_grad()
def normed(p: Tensor, other: Tensor) -> None:
    p.div_(other.norm())


def of_tenths(expert: Any) -> dict[str, Tensor]:
    return {name: torch.full(t.shape, 0.1, dtype=torch.float64) for name, t in expert.state_dict().items()}


def activation(expert: Any) -> None:
    if isinstance(expert, Swiglu):
        expert.forward = lambda x: expert.w2(expert.w1(x).relu() * expert.w3(x))
    else:
        expert[1] = nn.ReLU()


def pruned_for_good(expert: Any) -> None:
    prune.l1_unstructured(first(expert), "weight", 0.5)
    prune.remove(first(expert), "weight")


def orthogonal(expert: Any) -> None:
    with seeded(1):
        parametrizations.orthogonal(first(expert))


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def loaded(model: Any) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def assigned(model: Any) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)


def set_data(expert: Any) -> None:
    for p in expert.parameters():
        p.data = p.data * 0.5 if not p.is_meta else p.data


def replaced(model: Any) -> None:
    model[1].experts[2] = feed_forward().double()


EVERYWHERE: dict[str, Change] = {
    "nothing": lambda model: None,
    "freeze a parameter": one(lambda e: first(e).weight.requires_grad_(False)),
    "freeze an expert": one(lambda e: e.requires_grad_(False)),
    "freeze all experts": every(lambda e: e.requires_grad_(False)),
    "freeze the list": on(lambda model: model[1].experts.requires_grad_(False)),
    "freeze by name": by_name("experts.2."),
    "freeze a matrix of all": every(lambda e: first(e).requires_grad_(False)),
    "nn.init.constant_": one(lambda e: nn.init.constant_(first(e).weight, 0.1)),
    "nn.init.normal_": drawn(nn.init.normal_),
    "nn.init.kaiming_uniform_": drawn(nn.init.kaiming_uniform_),
    "nn.init.orthogonal_": drawn(nn.init.orthogonal_),
    "in place": every(lambda e: [halved(p) for p in e.parameters()]),
    "in place, a slice": one(lambda e: halved(first(e).weight[2:4])),
    ".data.copy_": one(lambda e: first(e).weight.data.copy_(torch.full((HIDDEN, DIM), 0.1))),
    ".data =": every(set_data),
    "apply": on(lambda model: model.apply(lambda m: isinstance(m, nn.Linear) and halved(m.weight))),
    "activation of all": every(activation),
    "hooks on all": every(lambda e: e.register_forward_hook(lambda m, given, answer: answer * 2)),
    "prune, then remove, all": every(pruned_for_good),
    "load_state_dict": loaded,
    "load_state_dict(assign=True)": assigned,
    "load_state_dict of an expert": one(
        lambda e: e.load_state_dict({n: t * 0 + 0.1 for n, t in e.state_dict().items()})
    ),
    "to and back": on(lambda model: model.float().double()),
    "a copy goes on": copy.deepcopy,
    "eval of one": one(lambda e: e.eval()),
    "get_parameter": by_name("experts.1."),
}
# one process has all experts; on two it is refused
ALONE: dict[str, Change] = {
    "activation of one": one(activation),
    "a hook on one": one(lambda e: e.register_forward_hook(lambda m, given, answer: answer * 2)),
    "a full backward hook": one(
        lambda e: first(e).register_full_backward_hook(
            lambda m, d_x, d_y: tuple(g if g is None else 2 * g for g in d_x)
        )
    ),
    "a hook on a parameter": one(lambda e: first(e).weight.register_hook(lambda g: g * 0.5)),
    "a hook after accumulation": one(
        lambda e: first(e).weight.register_post_accumulate_grad_hook(lambda p: halved(p.grad))
    ),
    "another parameter": one(lambda e: setattr(first(e), "weight", nn.Parameter(first(e).weight.detach() * 2))),
    "another layer": one(lambda e: setattr(first(e), "bias", nn.Parameter(torch.ones(HIDDEN).double()))),
    "a copy of another expert": on(lambda m: copied(first(m[1].experts[1]).weight, first(m[1].experts[3]).weight)),
    "prune": one(lambda e: prune.l1_unstructured(first(e), "weight", 0.5)),
    "prune globally": lambda model: prune.global_unstructured(
        [(first(e), "weight") for e in model[1].experts], prune.L1Unstructured, amount=0.5
    ),
    "weight_norm": one(lambda e: parametrizations.weight_norm(first(e))),
    "orthogonal": one(orthogonal),
    "a parametrization": every(lambda e: parametrize.register_parametrization(first(e), "weight", Double())),
    "a buffer": one(lambda e: e.register_buffer("seen", torch.zeros(3).double())),
    "the norm of an expert": on(lambda m: normed(m[0].weight, first(m[1].experts[3]).weight)),
}
# torch 2.13 looks at what it has drawn, which is refused; 2.11 does not
EITHER: dict[str, Change] = {"nn.init.trunc_normal_": drawn(nn.init.trunc_normal_)}
NEVER: dict[str, Change] = {
    "another expert": replaced,
    "one more": lambda model: model[1].experts.append(feed_forward()),
    "one less": lambda model: model[1].experts.pop(3),
    "another list": lambda model: setattr(model[1], "experts", nn.ModuleList(feed_forward() for _ in range(EXPERTS))),
}


def same(kind: str, change: Change, ranks: int) -> None:
    """Raise unless the change is as if it had been made before."""
    want = alone(kind, change)
    models = [net(kind) for _ in range(ranks)]
    for got in on_threads(ranks, lambda group: converted(models[group.rank], change, group)):
        assert got.keys() == want.keys()
        for name, value in want.items():
            torch.testing.assert_close(
                got[name], value, rtol=0, atol=TOLERANCE, msg=lambda text, n=name: f"{n}: {text}"
            )


KINDS = ("gelu", "swiglu")
CASES = [
    pytest.param(kind, name, marks=() if (at + i) % 2 else pytest.mark.slow, id=f"{name}-{kind}")
    for at, name in enumerate((*EVERYWHERE, *ALONE, *EITHER))
    for i, kind in enumerate(KINDS)
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_on_one_rank_a_change_is_as_if_it_was_made_before(kind: str, name: str) -> None:
    same(kind, (EVERYWHERE | ALONE | EITHER)[name], 1)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_on_two_ranks_it_is_so_too_or_it_is_refused(kind: str, name: str) -> None:
    if name in EVERYWHERE:
        same(kind, EVERYWHERE[name], 2)
        return
    if name in EITHER:
        with contextlib.suppress(ConversionError):
            same(kind, EITHER[name], 2)
        return
    with pytest.raises(REFUSED) as caught:
        same(kind, ALONE[name], 2)
    assert "expert" in str(caught.value)


def test_a_global_hook_is_called_with_every_expert() -> None:
    """On the kernels nobody would call it."""
    model, plain = net("swiglu"), net("swiglu")
    prophet.convert(model)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, given, answer: 2 * answer if isinstance(module, Swiglu) else None
    )
    try:
        assert torch.equal(model(tokens(0)[0]), plain(tokens(0)[0]))
    finally:
        handle.remove()
    assert model[1].experts.experts._on_kernels is False
    model(tokens(0)[0])
    assert model[1].experts.experts._on_kernels is True


@pytest.mark.parametrize("name", NEVER)
def test_the_list_itself_keeps_its_modules(name: str) -> None:
    model = net("gelu")
    prophet.convert(model)

    def changed_and_run() -> None:
        NEVER[name](model)
        model(tokens(0)[0])

    with pytest.raises(ConversionError, match=r"prophet.revert\(model\)"):
        changed_and_run()
