"""What ranks tell each other beside the counts, and what is cut and compared by it."""

from __future__ import annotations

import numpy as np
import pytest

from prophet.scheduler.actions import Window
from prophet.scheduler.notes import KINDS, UNKNOWN, Notes, predicted_weights
from prophet.scheduler.pieces import GRAIN, HALVES
from prophet.scheduler.schedules import block_wise, blocking, cut_of
from prophet.scheduler.windows import Stopwatch, WindowClock
from prophet.spec import IntArray, LayerShape, PlanContext, Topology, Windows
from tests.helpers.recorder import RecordingCollective
from tests.helpers.support import FixedPlanner, everywhere, on_threads
from tests.helpers.training import (
    Case,
    Run,
    compare,
    expected,
)


def table(notes: list[Notes], layer: int, digests: list[list[int]], upcoming: list[int]) -> IntArray:
    rows = [n.write(layer, d, u) for n, d, u in zip(notes, digests, upcoming, strict=True)]
    return np.array(rows, dtype=np.int64)


def test_all_ranks_agree_on_the_mean_of_the_windows() -> None:
    notes = [Notes(block_wise(2), 2) for _ in range(2)]
    for n, fec_s in zip(notes, (0.002, 0.004), strict=True):
        n.measured({Window("FEC", 0): fec_s, Window("FNEC", 0): 0.001, Window("START"): 9.0})
    for step in range(2):
        for layer in range(2):
            told = table(notes, layer, [[5, 6]] * 2, [7, 7])
            assert all(n.read(layer, told) is None for n in notes)
        assert notes[0].weights() == notes[1].weights()
        assert notes[0].weights()[Window("FEC", 0)] == 3000, step
    cut = cut_of(block_wise(2), "TRANS", 1, notes[0].weights())
    assert cut == (0, GRAIN * 3 // 4, GRAIN)
    notes[0].measured({Window("FEC", 0): 0.012})
    notes[1].measured({Window("FEC", 0): 0.010})
    notes[0].read(0, table(notes, 0, [[5, 6]] * 2, [7, 7]))
    assert notes[0].weights()[Window("FEC", 0)] == (3 * 3000 + 11000) // 4


def test_placements_in_force_are_compared_layer_by_layer() -> None:
    notes = [Notes(block_wise(3), 3) for _ in range(3)]
    told = table(notes, 0, [[1, 2, 3], [1, 2, 3], [1, 9, 3]], [0] * 3)
    assert notes[0].read(0, told) == (1, [2])


@pytest.mark.parametrize(
    ("upcoming", "confirmed"), [([4, 4, 4], True), ([4, 5, 4], False), ([4, 4, UNKNOWN], False), ([UNKNOWN] * 3, False)]
)
def test_the_first_layers_next_placement_is_confirmed_by_all_or_not_at_all(
    upcoming: list[int], confirmed: bool
) -> None:
    notes = [Notes(block_wise(2), 2) for _ in range(3)]
    told = table(notes, 1, [[1, 2]] * 3, upcoming)
    for n in notes:
        n.read(1, told)
    assert [n.confirmed for n in notes] == [confirmed] * 3
    alone = [Notes(block_wise(1), 1) for _ in range(3)]
    alone[0].read(0, table(alone, 0, [[1]] * 3, [4, 4, 4]))
    assert not alone[0].confirmed, "one layer's next placement is not known when its counts are exchanged"


def test_a_cut_without_measurements_and_with_one_window() -> None:
    assert cut_of(block_wise(3), "TRANS", 1) == HALVES
    assert cut_of(block_wise(3), "TRANS", 0) == (0, GRAIN, GRAIN)
    assert cut_of(block_wise(3), "AGG", 2, {Window("BNEC", 1): 1, Window("BEC", 1): 7}) == (0, GRAIN // 8, GRAIN)
    assert cut_of(blocking(3), "AGG", 2, {Window("BNEC", 1): 1}) == (0, GRAIN, GRAIN)
    assert cut_of(block_wise(3), "FETCH", 1) == (0, GRAIN)


def test_windows_are_compute_without_waiting() -> None:
    time = [0.0]
    watch = Stopwatch()
    clock = WindowClock(watch, now=lambda: time[0])
    clock.enter(Window("FEC", 0))
    time[0] = 5.0
    watch.add("a2a", 2.0)
    watch.add("expert", 3.0)
    clock.enter(Window("FNEC", 0))
    time[0] = 6.0
    clock.close()
    time[0] = 9.0
    assert clock.take() == {Window("FEC", 0): 3.0, Window("FNEC", 0): 1.0}
    assert clock.take() == {}


def test_a_window_of_several_microbatches_is_as_long_as_one_of_them() -> None:
    time = [0.0]
    clock = WindowClock(Stopwatch(), now=lambda: time[0])
    for seconds in (2.0, 4.0):
        clock.enter(Window("FEC", 0))
        time[0] += seconds
        clock.close()
    assert clock.take() == {Window("FEC", 0): 3.0}


def test_windows_from_the_model() -> None:
    topology = Topology.uniform(2, flops_per_s=16e3)
    shape = LayerShape(dim=2, hidden=2)  # 16 operations per token: 1000 tokens/s
    context = PlanContext(topology=topology, shape=shape, home=(0, 1), windows=Windows(fnec_s=0.5, bnec_s=0.25))
    found = predicted_weights([context], np.array([[10, 20]]))
    assert [found[Window(k, 0)] for k in KINDS] == [15000, 500000, 250000, 30000]
    assert (found[Window("START")], found[Window("END")]) == (500000, 250000), "as before and after any other block"


def test_the_ends_of_a_step_travel_with_the_first_layer_notes() -> None:
    notes = [Notes(block_wise(2), 2) for _ in range(2)]
    for rank, note in enumerate(notes):
        note.measured({Window("START"): 1e-3 * (1 + rank), Window("END"): 3e-3, Window("FEC", 1): 5e-3})
    for note in notes:
        for layer in range(2):
            assert note.read(layer, np.array([n.write(layer, [7, 7], UNKNOWN) for n in notes])) is None
        found = note.weights()
        assert (found[Window("START")], found[Window("END")], found[Window("FEC", 1)]) == (1500, 3000, 5000)


def test_an_engine_cuts_by_what_it_measured_and_stays_exact() -> None:
    case = Case(ranks=2, blocks=3, shapes=((2, 3), (4,)), steps=4)

    def body(group: object) -> tuple[list[object], list[tuple[int, ...]]]:
        run = Run(case, group, FixedPlanner(everywhere(4, 2)), slots_per_rank=8)  # type: ignore[arg-type]
        steps = [run.whole_step(s) for s in range(case.steps)]
        weights = run.engine._notes.weights()
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
        weights = run.engine._notes.weights()
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


def test_the_comparison_of_placements_rides_on_the_counts() -> None:
    """Known in time, the first layer's next placement needs no message; not known, it gets one."""
    case = Case(ranks=4, shapes=((5,),) * 4, slots=8)
    fake = RecordingCollective(1, 4)
    run = Run(case, fake, FixedPlanner(everywhere(8, 4)))

    def comparisons() -> int:
        return sum(c.op.name == "comparison of placements" for c in fake.calls)

    run.whole_step(0)
    assert comparisons() == 1
    run.engine.ensure_step()
    real = run.engine._upcoming
    for s, known in ((1, True), (2, False), (3, True)):
        before = comparisons()
        if known:
            run.engine._upcoming = lambda: (run.engine._plans[0].result(10), real())[1]  # type: ignore
        else:
            run.engine._upcoming = lambda: UNKNOWN  # type: ignore[method-assign]
        run.zero_grad()
        run.backward(s)
        run.step()
        run.engine.ensure_step()
        assert comparisons() - before == (0 if known else 1)
    run.engine.finish_step()
    run.engine.close()
