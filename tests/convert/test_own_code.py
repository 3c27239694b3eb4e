"""Blocks that nobody announced: ten that are found, or named, and six that only look like one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prophet
from prophet.convert.discover import discover
from prophet.errors import ConversionError
from prophet.ranks.process_group import collective_for
from tests.helpers.hand_written import DIM, FOUND, NAMED, NOISY, HandWritten
from tests.helpers.launch import on_processes
from tests.helpers.look_alikes import LOOK_ALIKES
from tests.helpers.moe_models import Seen, alone, compare, together
from tests.helpers.support import on_threads

STEPS, LEARNING_RATE = 20, 0.01
TOLERANCE = 1e-10
NAMES = "blocks.*.experts"


def options_of(kind: type[nn.Module]) -> dict[str, Any]:
    """The line that a block needs, if it needs one."""
    return {"experts": NAMES} if kind in NAMED else {}


def tokens(ranks: int, step: int) -> list[Tensor]:
    """One [2, 6, D] batch per rank."""
    generator = torch.Generator().manual_seed(100 + step)
    return list(torch.randn(ranks, 2, 6, DIM, generator=generator, dtype=torch.float64))


def loss_of(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """A loss that everything which the blocks hand out has a share in, and all of that."""
    y, extra = model(x)
    return (y - 1).square().mean() + 0.1 * extra, torch.cat([y.flatten(), extra.view(1)])


def without_dropout(kind: type[nn.Module]) -> HandWritten:
    """The model, its experts' own randomness off."""
    model = HandWritten(kind)
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    return model


# --- what is found ---


@pytest.mark.parametrize("kind", [*FOUND, *NAMED])
def test_experts_are_found_or_named(kind: type[nn.Module]) -> None:
    model = HandWritten(kind)
    found, left = discover(model, ())
    names = [f.name for f in found]
    if kind in FOUND:
        assert names == ["blocks.0.experts", "blocks.1.experts"]
        assert [f.block for f in found] == ["blocks.0", "blocks.1"]
    else:
        assert names == []
        assert "prophet.convert(model, experts='blocks.0.experts')" in {x.name: x.why for x in left}["blocks.0.experts"]
        assert [f.name for f in discover(model, (), [NAMES])[0]] == ["blocks.0.experts", "blocks.1.experts"]
    assert {x.name for x in left} >= {"mixes", "blocks"}


@pytest.mark.parametrize("kind", LOOK_ALIKES)
def test_look_alikes_are_left_alone(kind: type[nn.Module]) -> None:
    model = kind()
    state = {n: t.clone() for n, t in model.state_dict().items()}
    found, left = discover(model, ())
    assert not found
    assert len(left) == 1
    with pytest.raises(ConversionError, match=f"{left[0].name} was left alone: "):
        prophet.convert(model)
    assert type(model) is kind
    assert all(torch.equal(model.state_dict()[n], t) for n, t in state.items())


# --- what they compute ---


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", [k for k in (*FOUND, *NAMED) if k not in NOISY])
def test_training_is_that_of_the_block_as_written(kind: type[nn.Module], ranks: int) -> None:
    model = HandWritten(kind)
    steps = [tokens(ranks, s) for s in range(STEPS)]
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    found = on_threads(
        ranks, lambda group: together(copies[group.rank], steps, group, loss_of, lr=LEARNING_RATE, **options_of(kind))
    )
    compare(alone(model, steps, loss_of, LEARNING_RATE), found, TOLERANCE)
    assert all(seen.extra > 0 for seen in found)  # replicas were in force


def train_noisy(ranks: int) -> dict[str, Seen]:
    """On one rank: all blocks that draw random numbers."""
    group = collective_for(None)
    seen = {}
    for kind in NOISY:
        torch.manual_seed(group.rank)
        steps = [tokens(ranks, s) for s in range(STEPS)]
        seen[kind.__name__] = together(without_dropout(kind), steps, group, loss_of, lr=LEARNING_RATE).mapped(
            Tensor.numpy
        )
    return seen


class RanksInTurn:
    """The loss on one rank after the other, each with random numbers of its own."""

    def __init__(self, ranks: int) -> None:
        self.turn = 0
        self.states = [torch.Generator().manual_seed(rank).get_state() for rank in range(ranks)]

    def __call__(self, model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        rank = self.turn % len(self.states)
        self.turn += 1
        torch.set_rng_state(self.states[rank])
        result = loss_of(model, x)
        self.states[rank] = torch.get_rng_state()
        return result


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_numbers_are_those_of_the_block_as_written(ranks: int) -> None:
    found = on_processes(ranks, train_noisy, ranks, timeout_s=240)
    for kind in NOISY:
        with torch.random.fork_rng(devices=[]):
            steps = [tokens(ranks, s) for s in range(STEPS)]
            want = alone(without_dropout(kind), steps, RanksInTurn(ranks), LEARNING_RATE)
        compare(want, [by_kind[kind.__name__].mapped(torch.from_numpy) for by_kind in found], TOLERANCE)
