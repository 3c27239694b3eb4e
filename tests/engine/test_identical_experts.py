"""Experts that every rank has initialised alike are noticed in the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import prophet
from prophet.errors import ConfigMismatch
from tests.helpers.support import on_threads, seeded

DIM, EXPERTS = 4, 4


def init(m: nn.Module) -> None:
    """As GPTs do it."""
    if isinstance(m, nn.Linear):
        nn.init.normal_(m.weight, std=0.02)


def built(group: Any, how: str) -> nn.Module:
    """A model whose layers are initialised once more, by `init`, as `how` says."""
    make = (lambda: nn.Linear(DIM, DIM).apply(init)) if how == "inside" else (lambda: nn.Linear(DIM, DIM))
    with seeded(1):
        model = nn.Sequential(nn.Linear(DIM, DIM), prophet.MoE(DIM, num_experts=EXPERTS, expert=make, group=group))
    with seeded(2):
        if how == "afterwards":
            model.apply(init)
        elif how == "copies":
            with torch.no_grad():
                for p in model[1].experts.parameters():  # type: ignore[union-attr]
                    p.fill_(0.1)
    return model


def first_step(model: nn.Module) -> None:
    engine = prophet.attach(model)
    try:
        model(torch.ones(3, DIM)).sum().backward()
    finally:
        engine.close()


def test_init_after_building_is_refused_with_the_line_to_write() -> None:
    def body(group: Any) -> None:
        text = r"expert 0 of rank 0 and expert 2 of rank 1 have weights .* bit for bit.*expert=lambda: Expert\(\)"
        with pytest.raises(ConfigMismatch, match=text):
            first_step(built(group, "afterwards"))

    on_threads(2, body)


def test_a_checkpoint_may_be_loaded_after_attaching() -> None:
    def body(group: Any) -> None:
        model, other = built(group, "afterwards"), built(group, "inside")
        engine = prophet.attach(model)
        model.load_state_dict(other.state_dict())
        model(torch.ones(3, DIM)).sum().backward()
        engine.close()

    on_threads(2, body)


def test_init_of_each_expert_is_what_it_says() -> None:
    on_threads(2, lambda group: first_step(built(group, "inside")))


def test_copies_of_one_expert_are_a_warning() -> None:
    with pytest.warns(UserWarning, match="all its experts are, so they may have been copied on purpose"):
        on_threads(2, lambda group: first_step(built(group, "copies")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_pins_no_parameter_to_its_memory(dtype: torch.dtype) -> None:
    """Memory that numpy has seen can never be given back by a switch, or by FSDP."""

    def body(group: Any) -> list[str]:
        model = built(group, "inside").to(dtype)
        engine = prophet.attach(model)
        model(torch.ones(3, DIM, dtype=dtype)).sum().backward()
        engine.close()
        return [name for name, p in model.named_parameters() if not p.untyped_storage().resizable()]

    assert on_threads(2, body) == [[], []]
