"""A clip by every rank's own norm is an error of the next step; ordinary loops under DDP raise no false alarm."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import prophet
from prophet.errors import GradientMismatch
from prophet.ranks.process_group import collective_for
from tests.helpers.launch import on_processes

DIM, STEPS = 8, 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}


class LoRA(nn.Module):
    """A frozen linear layer and its two factors, of which the second begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.a, self.b = nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.b(self.a(x))
        return y


class Loop:
    """A training loop under DistributedDataParallel."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], *, several: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(DIM, DIM), LoRA(), prophet.MoE(DIM, 16, 4), nn.Linear(DIM, DIM))
        params = list(self.model.parameters())
        apart = list(self.model[3].parameters()) if several else []
        self.optimizers = [make([p for p in params if not any(p is q for q in apart)])]
        self.optimizers += [make(apart)] if several else []
        self.engine = prophet.attach(self.model, self.optimizers[0])
        self.wrapped = DistributedDataParallel(self.model, find_unused_parameters=True)  # one loop freezes some
        self.rank = self.engine.collective.rank

    def backward(self, step: int, microbatch: int = 0) -> None:
        seed = 100 * step + 10 * microbatch + self.rank
        x = torch.randn(6 + self.rank, DIM, generator=torch.Generator().manual_seed(seed))
        self.wrapped(x).square().sum().backward()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def close(self) -> None:
        self.engine.close()


@contextmanager
def _not_averaged(loop: Loop) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(loop.wrapped.no_sync())
        stack.enter_context(loop.engine.no_sync())
        yield


def plain(loop: Loop) -> None:
    for step in range(STEPS):
        loop.backward(step)
        loop.engine.clip_grad_norm_(loop.model.parameters(), 0.1)
        loop.update()


def accumulating(loop: Loop) -> None:
    for step in range(STEPS):
        with _not_averaged(loop):
            loop.backward(step, 0)
        loop.backward(step, 1)
        loop.update()


def freezing(loop: Loop) -> None:
    for step in range(STEPS):
        loop.model[0].requires_grad_(step < 2)
        loop.backward(step)
        loop.update()


def local_sgd(loop: Loop) -> None:
    for step in range(STEPS):
        with loop.wrapped.no_sync():
            loop.backward(step)
        loop.update()


def alarms(make: str, body: Callable[[Loop], None], several: bool) -> list[str]:
    """What the watch warns of in a loop."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop = Loop(OPTIMIZERS[make], several=several)
        body(loop)
        loop.close()
    return [str(w.message) for w in caught if "the other ranks'" in str(w.message)]


def right_loops() -> list[str]:
    bad = []
    for make in OPTIMIZERS:
        for body, several in ((plain, False), (accumulating, False), (freezing, False), (plain, True)):
            bad += [f"{make}, {body.__name__}, {several}: {text}" for text in alarms(make, body, several)]
    found = alarms("SGD", local_sgd, False)
    if len(found) != 1 or "averaged" not in found[0]:
        bad.append(f"local SGD: {found}")
    return bad


def test_no_false_alarms() -> None:
    """Accumulation, frozen and LoRA parameters, several optimizers; in local SGD one warning, and training goes on."""
    assert on_processes(2, right_loops, timeout_s=120) == [[], []]


def wrong_clips() -> list[str]:
    found = []
    for make in OPTIMIZERS.values():
        loop = Loop(make)
        for step in range(STEPS):
            try:
                loop.backward(step)
            except GradientMismatch as error:
                found.append(f"{step}: {error}")
                break
            if step == 1:
                nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
            loop.update()
        loop.close()
    return found


def test_torchs_own_clip_is_an_error_of_the_next_step() -> None:
    for found in on_processes(2, wrong_clips, timeout_s=120):
        assert len(found) == len(OPTIMIZERS)
        for text in found:
            assert text.startswith("2: step 1: rank(s) [")
            assert "engine.clip_grad_norm_" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_alone_has_nobody_to_differ_from(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), prophet.MoE(DIM, 16, 4)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = prophet.attach(model, optimizer)
    assert collective_for(None).size == 1
    for _ in range(2):
        model(torch.ones(3, DIM, dtype=dtype)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    engine.close()
