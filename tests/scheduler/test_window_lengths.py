"""How long windows are: measured, agreed on by all ranks, or predicted; and what is cut by it."""

from __future__ import annotations

import time
from contextlib import suppress

import numpy as np
import pytest
import torch

from prophet.ranks.device import clocks
from prophet.scheduler.actions import Window
from prophet.scheduler.pieces import GRAIN, HALVES
from prophet.scheduler.schedules import block_wise, blocking, cut_of
from prophet.scheduler.windows import (
    _MOST_MARKS,
    KINDS,
    BlockWindows,
    Stopwatch,
    WindowClock,
    predicted_window_us,
)
from prophet.spec import LayerShape, PlanContext, Topology, Windows
from tests.helpers.support import FixedPlanner, everywhere, on_threads
from tests.helpers.training import Case, Run, compare, expected


def agree(ranks: list[BlockWindows]) -> None:
    """Every rank takes in what all have measured."""
    told = np.array([windows.own_us for windows in ranks], dtype=np.int64)
    for windows in ranks:
        windows.agree(told)


def test_all_ranks_agree_on_the_mean_of_the_windows() -> None:
    first, second = ([BlockWindows(block) for _ in range(2)] for block in range(2))
    for rank, fec_s in enumerate((0.002, 0.004)):
        for windows in (first[rank], second[rank]):
            windows.measured({Window("FEC", 0): fec_s, Window("FNEC", 0): 0.001, Window("START"): 9.0})
    for step in range(2):
        agree(first)
        agree(second)
        us = [a.agreed_us() | b.agreed_us() for a, b in zip(first, second, strict=True)]
        assert us[0] == us[1]
        assert us[0][Window("FEC", 0)] == 3000, step
    assert cut_of(block_wise(2), "TRANS", 1, us[0]) == (0, GRAIN * 3 // 4, GRAIN)
    first[0].measured({Window("FEC", 0): 0.012})
    first[1].measured({Window("FEC", 0): 0.010})
    agree(first)
    assert first[0].agreed_us()[Window("FEC", 0)] == (3 * 3000 + 11000) // 4


def test_a_cut_without_measurements_and_with_one_window() -> None:
    assert cut_of(block_wise(3), "TRANS", 1) == HALVES
    assert cut_of(block_wise(3), "TRANS", 0) == (0, GRAIN, GRAIN)
    assert cut_of(block_wise(3), "AGG", 2, {Window("BNEC", 1): 1, Window("BEC", 1): 7}) == (0, GRAIN // 8, GRAIN)
    assert cut_of(blocking(3), "AGG", 2, {Window("BNEC", 1): 1}) == (0, GRAIN, GRAIN)
    assert cut_of(block_wise(3), "FETCH", 1) == (0, GRAIN)


def test_windows_are_compute_without_waiting() -> None:
    clock_s = [0.0]
    watch = Stopwatch()
    clock = WindowClock(watch, now=lambda: clock_s[0])
    clock.enter(Window("FEC", 0))
    clock_s[0] = 5.0
    watch.add("a2a", 2.0)
    watch.add("expert", 3.0)
    clock.enter(Window("FNEC", 0))
    clock_s[0] = 6.0
    clock.close()
    clock_s[0] = 9.0
    assert clock.take() == {Window("FEC", 0): 3.0, Window("FNEC", 0): 1.0}
    assert clock.take() == {}


def test_a_window_of_several_microbatches_is_as_long_as_one_of_them() -> None:
    clock_s = [0.0]
    clock = WindowClock(Stopwatch(), now=lambda: clock_s[0])
    for seconds in (2.0, 4.0):
        clock.enter(Window("FEC", 0))
        clock_s[0] += seconds
        clock.close()
    assert clock.take() == {Window("FEC", 0): 3.0}


def test_windows_from_the_model() -> None:
    topology = Topology.uniform(2, flops_per_s=16e3)
    shape = LayerShape.feed_forward(dim=2, hidden=2)  # 16 operations per token: 1000 tokens/s
    context = PlanContext(topology=topology, shape=shape, home=(0, 1), windows=Windows(fnec_s=0.5, bnec_s=0.25))
    found = predicted_window_us([context], [np.array([10, 20])])
    assert [found[Window(k, 0)] for k in KINDS] == [15000, 500000, 250000, 30000]
    assert (found[Window("START")], found[Window("END")]) == (500000, 250000), "as before and after any other block"


def test_the_ends_of_a_step_belong_to_the_first_block() -> None:
    first, second = ([BlockWindows(block) for _ in range(2)] for block in range(2))
    for rank in range(2):
        for windows in (first[rank], second[rank]):
            windows.measured({Window("START"): 1e-3 * (1 + rank), Window("END"): 3e-3, Window("FEC", 1): 5e-3})
    agree(first)
    agree(second)
    found = first[0].agreed_us()
    assert (found[Window("START")], found[Window("END")]) == (1500, 3000)
    assert second[0].agreed_us()[Window("FEC", 1)] == 5000
    assert Window("START") not in second[0].agreed_us()


def test_a_stopwatch_times_a_context_and_what_begins_and_ends_apart() -> None:
    watch = Stopwatch()
    with watch("split"):
        time.sleep(0.01)
    apart = watch("expert")
    apart.start()
    time.sleep(0.01)
    apart.stop()
    with suppress(KeyError), watch("split"):
        time.sleep(0.01)
        raise KeyError
    seconds = watch.take()
    assert seconds["split"] >= 0.02
    assert seconds["expert"] >= 0.01
    assert watch.seconds == {}


def test_an_engine_cuts_by_what_it_measured_and_stays_exact() -> None:
    case = Case(ranks=2, blocks=3, shapes=((2, 3), (4,)), steps=4)

    def body(group: object) -> tuple[list[object], list[tuple[int, ...]]]:
        run = Run(case, group, FixedPlanner(everywhere(4, 2)), slots_per_rank=8)  # type: ignore[arg-type]
        steps = [run.whole_step(s) for s in range(case.steps)]
        weights = run.engine._agreed_us()
        cuts = [cut_of(block_wise(3), "AGG", b, weights) for b in (1, 2)]
        run.close()
        return steps, cuts  # type: ignore[return-value]

    by_rank = on_threads(2, body)  # type: ignore[arg-type]
    compare(expected(case), [steps for steps, _ in by_rank])  # type: ignore[misc]
    assert by_rank[0][1] == by_rank[1][1]
    assert all(cut not in (HALVES, (0, GRAIN, GRAIN)) for cut in by_rank[0][1])


def test_an_engine_says_which_windows_it_measured() -> None:
    case = Case(ranks=2, blocks=3, shapes=((2, 3), (4,)), steps=4)

    def body(group: object) -> list[Windows | None]:
        run = Run(case, group, FixedPlanner(everywhere(4, 2)), slots_per_rank=8)  # type: ignore[arg-type]
        found = [run.engine.measured_windows]
        for step in range(case.steps):
            run.whole_step(step)
            found.append(run.engine.measured_windows)
        weights = run.engine._agreed_us()
        middle = sum(weights[Window("FNEC", i)] for i in (0, 1)) / 2
        last = found[-1]
        assert last is not None
        assert last.fnec_s == pytest.approx(1e-6 * middle)
        run.close()
        return found

    by_rank = on_threads(2, body)  # type: ignore[arg-type]
    assert by_rank[0] == by_rank[1]
    assert by_rank[0][:2] == [None, None]
    last = by_rank[0][-1]
    assert last is not None
    assert min(last.fnec_s, last.bnec_s) > 0


class _Event:
    """Of a device whose clock the test sets; `told`: the milliseconds, once the device has come there."""

    def __init__(self) -> None:
        self.told: float | None = None

    def query(self) -> bool:
        return self.told is not None

    def synchronize(self) -> None:
        assert self.told is not None, "the host would wait"

    def elapsed_time(self, later: _Event) -> float:
        assert self.told is not None
        assert later.told is not None
        return later.told - self.told


def test_a_devices_marks_are_read_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[_Event] = []
    monkeypatch.setattr(clocks, "timed_event", lambda _: events.append(_Event()) or events[-1])
    watch = Stopwatch()
    watch.on(torch.device("cuda"))
    clock = WindowClock(watch)

    def step() -> tuple[dict[str, float], dict[Window, float]]:
        clock.enter(Window("FEC", 0))
        with watch("expert"):
            pass
        with watch("a2a"):
            pass
        clock.enter(Window("FNEC", 0))
        return watch.take(), clock.take()

    assert step() == ({}, {})
    # the device has not come there: nobody waits, and nothing is lost
    assert (watch.take(), clock.take()) == ({}, {})
    # the window from 1 to 9 with experts from 2 to 4 and a wait from 4 to 7, then one from 9 to 10
    for event, ms in zip(events, (1, 2, 4, 4, 7, 9, 9, 10), strict=True):
        event.told = float(ms)
    taken, windows = step()
    assert taken == pytest.approx({"expert": 2e-3, "a2a": 3e-3})
    assert windows == pytest.approx({Window("FEC", 0): 5e-3, Window("FNEC", 0): 1e-3})
    # plans are made on the host, whatever computes
    watch.add("plan", 0.5)
    for event in events[8:]:
        event.told = 20.0
    assert watch.take() == {"plan": 0.5, "expert": 0.0, "a2a": 0.0}


def test_marks_of_a_long_evaluation_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter(range(1 << 30))

    def timed_event(_: torch.device) -> _Event:
        event = _Event()
        event.told = float(next(made))
        return event

    monkeypatch.setattr(clocks, "timed_event", timed_event)
    watch = Stopwatch()
    watch.on(torch.device("cuda"))
    for _ in range(3 * _MOST_MARKS):
        with watch("expert"):
            pass
    assert len(watch._stretches) <= _MOST_MARKS
    first = watch.take()["expert"]
    assert first + watch.take()["expert"] == pytest.approx(3e-3 * _MOST_MARKS)
