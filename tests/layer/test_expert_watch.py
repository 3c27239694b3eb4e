"""What layers say of their experts on three ranks, and what is found; `test_experts_mixed` has whole loops."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import prophet
from prophet.errors import ExpertsMixed
from prophet.experts.feed_forward import FeedForwardBank
from prophet.layer import expert_watch
from prophet.layer.expert_watch import ExpertWatch
from tests.helpers.support import on_threads

RANKS, CPU = 3, torch.device("cpu")


def bank(rank: int, *, equal: bool = False, experts: int = 2) -> FeedForwardBank:
    found = FeedForwardBank(4, 6, experts, first_expert=experts * rank, total_experts=experts * RANKS, ep_size=RANKS)
    if equal:
        with torch.no_grad():
            for p in found.parameters():
                p.copy_(torch.linspace(0.1, 1.0, p.numel()).view_as(p))
    return found


class Ranks:
    """Banks of experts and their watches, in steps that something may spoil."""

    def __init__(self, *, plain: bool = True, initialised_here: bool = False, **options: Any) -> None:
        self.plain = plain
        self.banks = [bank(rank, **options) for rank in range(RANKS)]
        self.watches = [ExpertWatch(b, initialised_here=initialised_here) for b in self.banks]

    def hear(self) -> list[str]:
        """A training pass: what is warned of."""
        rows = [watch.report(CPU, plain=self.plain) for watch in self.watches]
        assert len({row.shape for row in rows}) == 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            errors = []
            for watch in self.watches:
                try:
                    watch.compare(np.stack([row.numpy() for row in rows]), "MoE layer 3")
                except ExpertsMixed as error:
                    errors.append(str(error))
        assert len(errors) in (0, RANKS), "all ranks come to the same result"
        if errors:
            raise ExpertsMixed(errors[0])
        return [str(w.message) for w in caught]

    def step(self, gradient: Callable[[int, int, nn.Parameter], torch.Tensor | None] | None = None) -> list[str]:
        """A pass and an optimizer step that uses these gradients of parameter i on rank r; what the next pass finds."""
        found = self.hear()
        for rank, b in enumerate(self.banks):
            for i, p in enumerate(b.parameters()):
                p.grad = torch.randn_like(p) if gradient is None else gradient(rank, i, p)
        for watch in self.watches:
            watch.look()
            watch.look()  # an optimizer inside of another one
        return found + self.hear()


def alike(rank: int, i: int, p: nn.Parameter) -> torch.Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(i))


def test_equal_gradients_of_different_experts_are_an_error() -> None:
    with pytest.raises(
        ExpertsMixed, match=r"MoE layer 3: .*same gradients .* rank\(s\) \[0, 1, 2\].*expert_parameters"
    ):
        Ranks().step(alike)


def test_the_ranks_that_are_averaged_are_named() -> None:
    with pytest.raises(ExpertsMixed, match=r"rank\(s\) \[0, 2\]"):
        Ranks().step(lambda rank, i, p: alike(rank, i, p) * (2.0 if rank == 1 else 1.0))


@pytest.mark.parametrize("value", [0.0, -0.0, float("nan"), float("inf"), None])
def test_gradients_that_say_nothing_are_no_alarm(value: float | None) -> None:
    ranks = Ranks()
    for _ in range(3):
        assert not ranks.step(lambda rank, i, p: None if value is None else torch.full_like(p, value))


def test_experts_that_are_equal_from_the_start_may_have_equal_gradients() -> None:
    ranks = Ranks(equal=True)
    for _ in range(3):
        assert not ranks.step(alike)


def overwrite(ranks: Ranks) -> None:
    for b in ranks.banks[1:]:
        b.load_state_dict(dict(zip(b.state_dict(), ranks.banks[0].state_dict().values(), strict=True)))


@pytest.mark.parametrize("after", [0, 1])
def test_experts_that_have_become_equal_are_an_error(after: int) -> None:
    ranks = Ranks()
    for _ in range(after):
        assert not ranks.step()
    overwrite(ranks)
    with pytest.raises(ExpertsMixed, match=r"rank\(s\) \[0, 1, 2\] have become equal bit for bit"):
        ranks.step()


def test_a_mistake_in_mid_run_is_found_when_experts_are_compared() -> None:
    ranks = Ranks()
    for watch in ranks.watches:
        watch.every = 5
    for _ in range(3):
        assert not ranks.step()
    overwrite(ranks)
    for step in range(3, 6):
        if step < 5:
            assert not ranks.step()
        else:
            with pytest.raises(ExpertsMixed):
                ranks.step()


def test_what_was_loaded_is_right() -> None:
    ranks = Ranks()
    overwrite(ranks)
    for watch in ranks.watches:
        watch.remember()
    assert not ranks.step()


@pytest.mark.parametrize("plain", [True, False])
def test_copies_made_before_the_first_step_are_a_warning(plain: bool) -> None:
    """Of a layer that drew its own; an engine warns of them by itself."""
    ranks = Ranks(plain=plain, initialised_here=True)
    for b in ranks.banks:
        with torch.no_grad():
            for p in b.parameters():
                p.fill_(0.1)
    found = ranks.step()
    assert len(found) == (RANKS if plain else 0)
    assert not plain or "copies on purpose" in found[0]


def test_frozen_experts_are_compared_too() -> None:
    ranks = Ranks()
    for b in ranks.banks:
        b.requires_grad_(False)
    assert not ranks.step(lambda rank, i, p: None)
    overwrite(ranks)
    with pytest.raises(ExpertsMixed, match="become equal"):
        ranks.step(lambda rank, i, p: None)


def test_experts_without_rows_make_room_for_others() -> None:
    class Many(nn.ParameterList):
        device = CPU

        def entries(self) -> Any:
            return iter(())

    ranks = Ranks()
    ranks.banks = [Many(nn.Parameter(torch.randn(3, 3)) for _ in range(9)) for _ in range(RANKS)]  # type: ignore[misc]
    ranks.watches = [ExpertWatch(b, initialised_here=False) for b in ranks.banks]
    first = {id(p) for p in ranks.watches[0]._watched()[1]}
    some = [i for i, p in enumerate(ranks.banks[0]) if id(p) not in first]  # type: ignore[arg-type]
    assert not ranks.step(lambda rank, i, p: alike(rank, i, p) if i in some else None)
    with pytest.raises(ExpertsMixed):
        ranks.step(lambda rank, i, p: alike(rank, i, p) if i in some else None)


def test_ranks_that_speak_of_other_parameters_are_not_compared() -> None:
    ranks = Ranks()
    ranks.banks[2].w_in.requires_grad_(False)
    assert not ranks.step(alike)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda watch: pickle.loads(pickle.dumps(watch))])
def test_a_copy_knows_what_the_experts_were(copied: Callable[[Any], Any]) -> None:
    ranks = Ranks()
    pairs = [copied((b, w)) for b, w in zip(ranks.banks, ranks.watches, strict=True)]
    ranks.banks, ranks.watches = [b for b, _ in pairs], [w for _, w in pairs]
    overwrite(ranks)
    with pytest.raises(ExpertsMixed, match="become equal"):
        ranks.step()


def test_the_hook_holds_no_model_and_knows_only_its_optimizers() -> None:
    def body(group: Any) -> tuple[bool, bool, Any, Any]:
        model = prophet.MoE(4, 6, 4, group=group)
        own, foreign = (torch.optim.SGD(p, 0.1) for p in (model.parameters(), nn.Linear(2, 2).parameters()))
        model(torch.randn(5, 4)).sum().backward()
        own.step()
        foreign.step()
        held = expert_watch._held
        kinds = bool(held[own].layers), bool(held[foreign].layers or held[foreign].shared)
        return *kinds, weakref.ref(model), weakref.ref(own)

    for ours, others, model, optimizer in on_threads(2, body):
        gc.collect()
        assert ours
        assert not others
        assert model() is None
        assert optimizer() is None
