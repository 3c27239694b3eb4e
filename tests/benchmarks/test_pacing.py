"""Emulated hosts that are evenly slower than the machine, on a clock that the test moves."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import pacing
from benchmarks.pacing import MOST_LATE_S, Pace, PacedOperators


@dataclass
class Clock:
    wall_s: float = 100.0
    work_s: float = 1.0
    slept_s: float = 0.0

    def perf_counter(self) -> float:
        return self.wall_s

    def thread_time(self) -> float:
        return self.work_s

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.wall_s += seconds

    def work(self, seconds: float, *, waiting: float = 0.0) -> None:
        self.work_s += seconds
        self.wall_s += seconds + waiting


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pacing, "time", clock)
    return clock


def operator(paced: PacedOperators, clock: Clock, seconds: float, *, waiting: float = 0.0) -> float:
    """Run an operator of so many processor seconds; returns how long it took."""
    began = clock.wall_s
    paced.__torch_dispatch__(lambda: clock.work(seconds, waiting=waiting), ())
    return clock.wall_s - began


def test_an_operator_lasts_longer_and_python_does_not(clock: Clock) -> None:
    paced = PacedOperators(Pace(4.0))
    assert operator(paced, clock, 0.01) == pytest.approx(0.04)
    clock.work(0.5)
    assert operator(paced, clock, 0.002) == pytest.approx(0.008)
    assert clock.slept_s == pytest.approx(0.036)


def test_short_operators_are_paid_for_together(clock: Clock) -> None:
    paced, began = PacedOperators(Pace(3.0)), clock.wall_s
    for _ in range(100):
        operator(paced, clock, 2e-5)
    assert clock.wall_s - began == pytest.approx(100 * 3 * 2e-5, abs=pacing.SHORTEST_SLEEP_S)


def test_a_host_without_a_core_catches_up(clock: Clock) -> None:
    """It waited for its core within one operator, for longer than the operator should have taken."""
    paced = PacedOperators(Pace(4.0))
    assert operator(paced, clock, 0.01, waiting=0.045) == pytest.approx(0.055)
    assert operator(paced, clock, 0.01) == pytest.approx(0.04 - 0.015)
    assert operator(paced, clock, 0.01, waiting=5.0) == pytest.approx(5.01)
    assert operator(paced, clock, 0.01) == pytest.approx(0.04 - MOST_LATE_S)


def test_waiting_for_others_gives_no_credit(clock: Clock) -> None:
    paced = PacedOperators(Pace(4.0))
    operator(paced, clock, 0.01, waiting=0.045)
    clock.sleep(0.1)  # a message
    assert operator(paced, clock, 0.01) == pytest.approx(0.04)


def test_waiting_for_the_core_before_an_action_is_made_up_for(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core that an action moves to is another host's at first."""

    def move(_: int, cores: tuple[int, ...]) -> None:
        clock.work(0.0, waiting=0.01 if cores == (0,) else 0.0)

    monkeypatch.setattr(pacing, "_cores", lambda: (0, 1))
    monkeypatch.setattr(os, "sched_setaffinity", move, raising=False)
    monkeypatch.setattr(pacing.Apart, "look", lambda *_: None)
    pace, began = Pace(4.0, apart=pacing.Apart(), roams=True), clock.wall_s
    pace.work(lambda: clock.work(0.01))
    assert clock.wall_s - began == pytest.approx(0.04)


def test_work_within_work_is_paid_for_once(clock: Clock) -> None:
    """As the loss of a stage within its action: what the inner call is late by is no second credit."""
    pace, began = Pace(4.0), clock.wall_s

    def action() -> None:
        clock.work(0.01)
        pace.work(lambda: clock.work(0.02, waiting=0.07))

    pace.work(action)
    assert clock.wall_s - began == pytest.approx(0.12)


def test_what_computes_nothing_keeps_the_machines_speed(clock: Clock) -> None:
    """Memory that is filled and a sum are an accelerator's work; views, empty memory and a posted message are not."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with _Counted(clock, seconds=0.01), PacedOperators(Pace(4.0)):
            x = torch.zeros(4, 4)
            assert clock.slept_s == pytest.approx(0.03)
            out = torch.empty_like(x.view(-1)[4:]).detach()
            dist.all_reduce(out.new_empty(3))
            assert clock.slept_s == pytest.approx(0.03)
            x.sum()
            assert clock.slept_s == pytest.approx(0.06)
    finally:
        dist.destroy_process_group()


class _Counted(TorchDispatchMode):
    """Every operator takes this long."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.clock.work(self.seconds)
        return func(*args, **(kwargs or {}))


def test_results_and_gradients_are_those_of_the_machine() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    (x @ x).sum().backward()
    expected, x.grad = x.grad, None
    with PacedOperators(Pace(2.0)):
        (x @ x).sum().backward()
    assert expected is not None
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_a_tensor_of_a_new_size_needs_no_new_pages() -> None:
    """8 MB are 2000 pages, which would count as the work of whoever writes them first."""
    program = (
        "import resource, torch\n"
        "from prophet.machine.memory import keep_memory\n"
        "def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "agreed, before = keep_memory(), faults()\n"
        "for n in (2_000_000, 2_100_000, 2_200_000): torch.ones(n)\n"
        "print(agreed, faults() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    agreed, faults = done.stdout.split()
    if agreed != "True":
        pytest.skip("this C library takes no advice about memory")
    assert int(faults) < 500


def test_a_slowdown_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"slowdown must be at least 1, got 0\.5"):
        PacedOperators(Pace(0.5))
