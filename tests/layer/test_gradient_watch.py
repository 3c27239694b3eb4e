"""What the watch says of gradients that ranks' optimizers used, without an engine; `test_mistakes` has whole loops."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from prophet.errors import GradientMismatch
from prophet.layer.gradient_watch import DIGEST_NUMBERS, WATCHED, GradientWatch

RANKS = 3
CPU = torch.device("cpu")
Change = Callable[[int, nn.Module], None]


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(6))).to(dtype)


class Ranks:
    """Copies of a model, their optimizers and watches, with equal gradients until something changes them."""

    def __init__(self, model: nn.Module) -> None:
        self.models = [copy.deepcopy(model) for _ in range(RANKS)]
        optimizers = [torch.optim.AdamW(m.parameters()) for m in self.models]
        self.watches = [GradientWatch(m, o) for m, o in zip(self.models, optimizers, strict=True)]

    def step(self, number: int, change: Change = lambda rank, model: None) -> list[str]:
        """One step in which `change` comes between averaging and the optimizer; what was warned of."""
        for rank, (model, watch) in enumerate(zip(self.models, self.watches, strict=True)):
            for i, p in enumerate(model.parameters()):
                drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * number + i))
                p.grad = drawn.to(p.dtype) if p.requires_grad else None
            change(rank, model)
            watch.look(number)
        rows = [watch.take(CPU) for watch in self.watches]
        assert all(row.any() for row in rows)
        assert not any(watch.take(CPU).any() for watch in self.watches), "it is said once"
        assert all(row.shape == (DIGEST_NUMBERS,) and row.dtype == torch.int64 for row in rows)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            errors = []
            for watch in self.watches:
                try:
                    watch.compare(np.stack([row.numpy() for row in rows]))
                except GradientMismatch as error:
                    errors.append(str(error))
        assert len(errors) in (0, RANKS), "all ranks come to the same result"
        if errors:
            raise GradientMismatch(errors[0])
        return [str(w.message) for w in caught]


def scaled(factor: Callable[[int], float]) -> Change:
    def change(rank: int, model: nn.Module) -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(factor(rank))

    return change


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("odd", [{2}, {1, 2}, {0, 1, 2}])
def test_one_factor_by_rank_is_a_wrong_clip(dtype: torch.dtype, odd: set[int]) -> None:
    ranks = Ranks(network(dtype))
    assert not ranks.step(0)
    with pytest.raises(GradientMismatch, match=r"step 1: .*engine\.clip_grad_norm_"):
        ranks.step(1, scaled(lambda rank: 1.0 - 0.11 * (rank + 1) if rank in odd else 1.0))


def test_the_ranks_that_differ_are_named() -> None:
    with pytest.raises(GradientMismatch, match=r"step 0: rank\(s\) \[1\] .* rank 0 times a factor"):
        Ranks(network()).step(0, scaled(lambda rank: 0.5 if rank == 1 else 1.0))


def test_one_factor_on_all_ranks_is_right() -> None:
    assert not Ranks(network()).step(0, scaled(lambda rank: 0.3))


def test_a_difference_as_small_as_a_rounding_is_no_clip() -> None:
    """Some reductions do not give every rank the same bits."""
    found = Ranks(network()).step(0, scaled(lambda rank: 1.0 + 3e-7 * rank))
    assert len(found) == RANKS
    assert "averaged" in found[0]


def noise(rank: int, model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad += 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(rank)).to(p.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_differ_otherwise_are_warned_of_once(dtype: torch.dtype) -> None:
    ranks = Ranks(network(dtype))
    assert len(ranks.step(0, noise)) == RANKS
    assert not ranks.step(1, noise)


def test_one_factor_by_layer_is_no_clip() -> None:
    def change(rank: int, model: nn.Module) -> None:
        for i, p in enumerate(model.parameters()):
            assert p.grad is not None
            p.grad.mul_(1.0 + 0.1 * i * rank)

    assert "averaged" in Ranks(network()).step(0, change)[0]


def test_parameters_that_differ_under_equal_gradients() -> None:
    def change(rank: int, model: nn.Module) -> None:
        if rank == 2:
            next(model.parameters()).data += 1.0

    found = Ranks(network()).step(0, change)
    assert len(found) == RANKS
    assert "0.weight of rank(s) [2] differs" in found[0]
    assert "start alike" in found[0]


def test_zero_gradients_make_room_for_others() -> None:
    """Of 24 gradients the watched ones are zero at first; a wrong clip shows once others are watched."""
    torch.manual_seed(0)
    ranks = Ranks(nn.Sequential(*(nn.Linear(3, 3) for _ in range(12))))

    def first_are_zero(rank: int, model: nn.Module) -> None:
        at_first = set(seen) or {n for n, _ in ranks.watches[0]._watched}
        seen.update(at_first)
        for n, p in model.named_parameters():
            assert p.grad is not None
            p.grad.mul_(0.0 if n in at_first else 1.0 - 0.2 * rank)

    seen: set[str] = set()
    assert not ranks.step(0, first_are_zero)
    assert len(seen) == WATCHED
    with pytest.raises(GradientMismatch, match="step 1"):
        ranks.step(1, first_are_zero)


def test_of_a_pair_one_of_which_is_zero_the_other_is_watched() -> None:
    """As A and B of a LoRA pair are in the first step; 20 pairs in their usual order."""
    ranks = Ranks(nn.ModuleDict({f"{i}{which}": nn.Linear(4, 2, bias=False) for i in range(20) for which in "AB"}))

    def a_is_zero(rank: int, model: nn.Module) -> None:
        for n, p in model.named_parameters():
            assert p.grad is not None
            p.grad.mul_(0.0 if "A" in n else 1.0 - 0.2 * rank)

    with pytest.raises(GradientMismatch, match="step 0"):
        ranks.step(0, a_is_zero)


def test_infinite_gradients_are_no_clip() -> None:
    def change(rank: int, model: nn.Module) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.fill_(float("inf") if rank else float("nan"))

    assert "averaged" in Ranks(network()).step(0, change)[0]


def test_what_is_not_watched() -> None:
    model = network()
    parts = dict(model.named_parameters())
    parts["0.weight"].prophet_expert = True  # type: ignore[attr-defined]
    model._ddp_params_and_buffers_to_ignore = ["1.weight"]  # type: ignore[assignment]
    parts["2.weight"].requires_grad_(False)
    watch = GradientWatch(model, torch.optim.SGD([p for n, p in parts.items() if n != "3.weight"], lr=0.1))
    names = {n for n, _ in (*watch._watched, *watch._waiting)}
    assert names == set(parts) - {"0.weight", "1.weight", "2.weight", "3.weight"}


@pytest.mark.parametrize("count", range(1, 20))
def test_every_parameter_has_its_turn(count: int) -> None:
    model = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(count))
    watch = GradientWatch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert len(watch._watched) == min(count, WATCHED)
    assert sorted(n for n, _ in (*watch._watched, *watch._waiting)) == sorted(n for n, _ in model.named_parameters())


def test_a_model_without_anything_to_watch() -> None:
    model = nn.Linear(2, 2)
    watch = GradientWatch(model, torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    watch.look(0)
    assert not watch.take(CPU).any()
    watch.compare(np.zeros((RANKS, DIGEST_NUMBERS), dtype=np.int64))
