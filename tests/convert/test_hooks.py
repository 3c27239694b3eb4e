"""Hooks that a model has before its conversion see its own passes alone, and go on changing what they change."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prophet
from prophet.errors import ConversionError
from prophet.experts.hooks import without_hooks
from prophet.ranks.collective import Collective
from tests.helpers.hand_written import DIM, EXPERTS, TokenByToken, feed_forward
from tests.helpers.moe_models import alone, batches, compare, hugging_face, together
from tests.helpers.support import on_threads, seeded


class Tracker:
    """Counts calls, and rows, as a function, a method and an object."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.rows = 0

    def __deepcopy__(self, memo: object) -> Tracker:
        raise TypeError("a tracker holds files")

    def method(self, module: nn.Module, *_: Any) -> None:
        self.calls["method"] += 1

    def __call__(self, module: nn.Module, *_: Any) -> None:
        self.calls["object"] += 1

    def watch(self, module: nn.Module) -> None:
        def counted(_: nn.Module, args: tuple[Tensor, ...], __: Any) -> None:
            self.calls["function"] += 1
            self.rows += args[0].numel() // args[0].shape[-1]

        module.register_forward_hook(counted)
        module.register_forward_hook(self)
        module.register_forward_pre_hook(self.method)
        module.register_full_backward_pre_hook(self.method)
        module.register_full_backward_hook(self.method)


def net() -> nn.Sequential:
    with seeded(2):
        return nn.Sequential(nn.Linear(DIM, DIM), TokenByToken(), nn.Linear(DIM, 3)).double()


def data() -> Tensor:
    return torch.randn(1, 12, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


PLACES: dict[str, Callable[[Any], nn.Module]] = {
    "the model": lambda model: model,
    "the block": lambda model: model[1],
    "the router": lambda model: model[1].gate,
    "the list": lambda model: model[1].experts,
    "an expert": lambda model: model[1].experts[2],
    "a layer of an expert": lambda model: model[1].experts[2][0],
}


@pytest.mark.parametrize("place", PLACES)
def test_no_trial_calls_a_hook(place: str) -> None:
    model, tracker = net(), Tracker()
    module = PLACES[place](model)
    tracker.watch(module)
    before = {name: dict(hooks) for name, hooks in vars(module).items() if name.endswith("_hooks")}
    prophet.convert(model)
    assert not tracker.calls
    prophet.revert(model)
    assert not tracker.calls
    after = PLACES[place](model)
    if place != "the list":  # that is made anew
        assert before == {name: dict(hooks) for name, hooks in vars(after).items() if name.endswith("_hooks")}


def test_rows_are_counted_as_the_model_as_written_counts_them() -> None:
    rows = []
    for converted in (False, True):
        model, trackers = net(), [Tracker() for _ in range(EXPERTS)]
        block: Any = model[1]
        for expert, tracker in zip(block.experts, trackers, strict=True):
            tracker.watch(expert)
        if converted:
            prophet.convert(model)
        for _ in range(2):
            model(data()).sum().backward()
        rows.append([tracker.rows for tracker in trackers])
    assert rows[0] == rows[1]
    assert sum(rows[0]) == 2 * 12 * 2


def test_a_transformers_model_is_tried_without_its_hooks() -> None:
    model: Any = hugging_face("mixtral")
    tracker = Tracker()
    block = model.model.layers[0].mlp
    for module in (model, block, block.gate):
        tracker.watch(module)
    prophet.convert(model)
    assert not tracker.calls
    model(batches(1)[0])
    assert tracker.calls["object"] == 3


def twice(_: nn.Module, __: Any, y: Tensor) -> Tensor:
    return 2 * y


class Rescaled(nn.Module):
    """An expert that sets a hook of its own on a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = feed_forward(), nn.Parameter(torch.ones(DIM))
        self.inner.register_forward_hook(self.rescale)

    def rescale(self, _: nn.Module, __: Any, y: Tensor) -> Tensor:
        return y * self.scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def doubled() -> nn.Module:
    expert = feed_forward()
    expert.register_forward_hook(twice)
    return expert


@pytest.mark.parametrize("expert", [doubled, Rescaled])
def test_a_hook_that_changes_an_answer_stays_in_force(expert: Callable[[], nn.Module]) -> None:
    model = net()
    with seeded(3):
        model[1].experts = nn.ModuleList(expert() for _ in range(EXPERTS))
        model.double()
    steps = [[data() + rank + step for rank in range(2)] for step in range(3)]
    copies = [copy.deepcopy(model) for _ in range(2)]

    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        y = model(x)
        return y.square().mean(), y

    def body(group: Collective) -> Any:
        return together(copies[group.rank], steps, group, loss)

    compare(alone(model, steps, loss), on_threads(2, body), 1e-9)


def test_a_hook_that_reads_a_part_of_one_expert_from_elsewhere_is_refused() -> None:
    """In a replica it would go on reading the home's parameter."""
    model: Any = net()
    for expert in model[1].experts:
        expert.scale = nn.Parameter(torch.ones(DIM, dtype=torch.float64))
        expert.register_forward_hook(lambda m, x, y, own=expert: y * own.scale)
    with pytest.raises(ConversionError, match="its parameter scale is also read from elsewhere"):
        prophet.convert(model)


def test_hooks_are_back_after_an_error_and_their_handles_work() -> None:
    module = nn.Linear(2, 2)
    calls: list[int] = []
    handle = module.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(RuntimeError, match="shapes"), without_hooks(module):
        module(torch.zeros(1, 3))
    assert not calls
    module(torch.zeros(1, 2))
    handle.remove()
    module(torch.zeros(1, 2))
    assert len(calls) == 1


def test_a_layer_with_modules_is_made_without_a_call() -> None:
    tracker = Tracker()

    def expert() -> nn.Module:
        made = feed_forward()
        tracker.watch(made)
        return made

    layer = prophet.MoE(DIM, None, 4, expert=expert)
    assert not tracker.calls
    layer(torch.randn(3, DIM))
    assert tracker.rows == 3 * 2
