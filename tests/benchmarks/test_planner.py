"""The planner's benchmark: cases that follow from their number, optima that are solved once, break-even."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planner import optimum
from benchmarks.planner.__main__ import main
from benchmarks.planner.break_even import break_even_rows, scaled
from benchmarks.planner.cases import Walk, cases_of
from benchmarks.planner.optimum import PROVEN, SmallCase, gap_rows, optima, placed, small_case
from benchmarks.planner.splits import EFFORTS
from prophet.machine.presets import get_preset
from prophet.planner import get_planner
from prophet.planner.base import Planner
from prophet.planner.model.cost import step_cost
from prophet.planner.oracle.optimum import solve_exactly
from prophet.spec import IntArray, Placement, PlanContext
from prophet.traces.npz import RoutingTrace, TraceWriter

QUICK = 1  # a case of 4 ranks and 4 experts, solved in a fraction of a second


def seconds_of(case: SmallCase, planner: str, **options: float) -> float:
    chosen = get_planner(planner, **options)
    placement = chosen.place(case.load, case.context)
    return step_cost(chosen.split(case.load, placement, case.context), placement, case.context).total_s


def test_a_case_follows_from_its_number() -> None:
    first, again, other = small_case(7, None), small_case(7, None), small_case(8, None)
    assert np.array_equal(first.load, again.load)
    assert first.context == again.context
    assert not np.array_equal(first.load, other.load)
    assert first.load.shape == (first.context.ranks, first.context.experts)


def test_optima_are_solved_once_and_only_proven_ones_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "optima.jsonl"
    rows = [
        {"case": n, "preset": "x", "seconds": 1.0, "bound": 1.0 if n % 2 else 0.5, "solver_s": 0.0} for n in range(12)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(optimum, "solve_exactly", None)  # what is known is not solved again
    found = list(optima(None, 4, limit_s=1.0, path=file, processes=1))
    assert [case.number for case, _ in found] == [1, 3, 5, 7]
    assert len(file.read_text().splitlines()) == 12
    found = list(optima(None, 2, limit_s=1.0, path=file, processes=1, first=4))
    assert [case.number for case, _ in found] == [5, 7]


def test_gaps_are_measured_from_the_solved_optimum(tmp_path: Path) -> None:
    file = tmp_path / "optima.jsonl"
    slow = [n for n in range(4) if n != QUICK]
    file.write_text("".join(json.dumps({"case": n, "seconds": 1.0, "bound": 0.0}) + "\n" for n in slow))
    solved = list(optima(None, 1, limit_s=20.0, path=file, processes=1))
    assert [case.number for case, _ in solved] == [QUICK]
    assert json.loads(file.read_text().splitlines()[-1])["case"] == QUICK
    for case, row in solved:
        assert row["bound"] * (1 - 1e-9) <= row["seconds"] <= row["bound"] * (1 + PROVEN)
        assert seconds_of(case, "static") >= row["seconds"] * (1 - 1e-3)
    static, searched = gap_rows(solved, {"static": {}, "prophet, effort 1": {"effort": 1.0, "calls": 10}})
    gaps = [seconds_of(case, "static") / row["seconds"] - 1 for case, row in solved]
    assert static["gap_median"] == pytest.approx(np.median(gaps))
    assert static["gap_max"] == pytest.approx(max(gaps))
    assert -1e-3 <= searched["gap_median"] <= static["gap_median"]


@pytest.mark.parametrize("number", [147, 168, 275, 372])
def test_a_few_hundred_calls_come_close_where_slots_are_few_and_exchanges_slow(number: int) -> None:
    """Each call sees counts drawn around the case's."""
    pytest.importorskip("scipy")
    case = small_case(number, None)
    best_s = solve_exactly(case.load, case.context, time_limit_s=20.0).seconds
    planner = get_planner("prophet")
    seconds = []
    for calls in (1, 400):
        placement, _ = placed(case, planner, calls)
        split = planner.split(case.load, placement, case.context)
        seconds.append(step_cost(split, placement, case.context).total_s)
    assert seconds[1] <= 1.05 * best_s
    # later calls planned for other counts of the same popularity
    assert seconds[1] <= 1.005 * seconds[0]


class Led(Planner):
    """A planner that notes what it is asked, and answers with a new placement."""

    name = ""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[tuple[IntArray, Placement | None, Placement]] = []

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        placement = context.homes_only()
        self.asked.append((load, context.previous, placement))
        return placement

    split = None  # type: ignore[assignment]


def test_a_planner_that_goes_on_is_led_through_all_iterations() -> None:
    counts = np.random.default_rng(0).integers(0, 100, (8, 1, 4, 8)).astype(np.int32)
    trace = RoutingTrace(counts=counts, iteration=np.repeat(np.arange(4), 2))
    means = [counts[a : a + 2, 0].astype(np.int64).sum(axis=0) // 2 for a in (0, 2, 4)]
    cases = cases_of(trace, exact=False, count=3)  # of the iterations 1, 2 and 3
    context = get_preset("h100-ib:Qwen3-30B-A3B").context(4, 8, routed_per_rank=400, slots_per_rank=2)
    for goes_on, chosen in ((False, cases), (True, cases), (True, cases[2:])):
        planner = Led("prophet" if goes_on else "led")
        walk = Walk(planner, context)
        placements = [walk.place(case) for case in chosen]
        loads, previous, given = zip(*planner.asked, strict=True)
        expected = means if goes_on else [case.planned for case in chosen]
        assert all(np.array_equal(x, y) for x, y in zip(loads, expected, strict=True))
        assert list(previous) == ([None, *given[:-1]] if goes_on else [None] * 3)
        assert placements[-1] is given[-1]
        assert len(walk.plan_us) == 3
    assert [c.planned.tolist() for c in cases] == [m.tolist() for m in means]


def load_of(ranks: int, experts: int) -> IntArray:
    rng = np.random.default_rng(3)
    popular = rng.dirichlet(np.full(experts, 0.3))
    return np.stack([rng.multinomial(4096, popular) for _ in range(ranks)]).astype(np.int64)


def test_scaling_keeps_tokens_and_levels_the_skew() -> None:
    load = load_of(8, 16)
    assert scaled(load, 1000, 1.0).sum() == pytest.approx(8000, rel=0.01)
    assert np.ptp(scaled(load, 1600, 0.0)) == 0
    busy = [scaled(load, 4096, s).sum(axis=0).max() for s in (0.0, 0.5, 1.0)]
    assert busy[0] < busy[1] < busy[2]


def test_replicas_pay_with_many_tokens_and_not_where_routing_is_even() -> None:
    rows = list(break_even_rows([load_of(8, 16)], ["h100-nvlink:Mixtral-8x7B"], ["prophet"], 4))
    gain = {(r["tokens_per_rank"], r["gb_per_s"], r["skew"]): r["gain"] for r in rows}
    assert gain[65536, 450.0, 1.0] > 1.3
    assert gain[64, 0.1, 1.0] == 1.0
    assert 1.0 <= gain[16384, 25.0, 0.0] < 1.03  # copies save a little of the exchanges even so
    assert all(r["gain_least"] >= 1.0 - 1e-9 for r in rows)


def test_what_a_splits_effort_buys(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    popular = rng.dirichlet(np.full(32, 0.3), 16)  # each rank prefers other experts
    file, out = tmp_path / "trace.npz", tmp_path / "rows.json"
    with TraceWriter(file, layers=1, ranks=16, experts=32) as writer:
        for _ in range(6):
            writer.append([[rng.multinomial(8192, p) for p in popular]])
    preset = "h100-ib:Qwen3-30B-A3B"
    assert main(["--splits", "--trace", str(file), "--preset", preset, "--slots", "3", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert [(r["policy"], r["split_effort"]) for r in rows] == list(itertools.product(["prophet"], EFFORTS))
    assert all(r["cases"] == 5 and r["split_us_mean"] > 0 for r in rows)
    assert all(r["with_split_above_least"] > r["above_least"] for r in rows)
    assert rows[0]["above_least"] > 0.03  # the lowest bottleneck alone
    assert rows[-1]["above_least"] == 0.0
    assert rows[0]["step_s_geomean"] == pytest.approx(rows[-1]["step_s_geomean"] * (1 + rows[0]["above_least"]))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "give --trace FILE, --workload NAME, --scale, --optimum N, --break-even or --former FOLDER"),
        (["--optimum", "0"], "expected a positive integer, got 0"),
        (["--optimum", "3", "--processes", "-1"], "expected a positive integer, got -1"),
        (["--optimum", "3", "--limit", "0"], "expected a positive number of seconds"),
        (["--optimum", "3", "--first-case", "-1"], "expected a case's number, at least 0, got -1"),
        (["--scale", "--plot", "x.png"], "--plot goes with --break-even"),
        (["--splits", "--cold", "--trace", "x.npz"], "--cold goes with --scale"),
        (["--splits"], "--splits goes with --trace FILE"),
        (["--scale", "--splits"], "argument --splits: not allowed with argument --scale"),
        (["--trace", "x.npz", "--splits", "--policy", "laer"], "expected --policy to be one of prophet, "),
        (["--trace", "nowhere.npz"], "nowhere.npz"),
        (["--break-even", "--preset", "nothing"], "nothing"),
        (["--break-even", "--policy", "nobody"], "there is no planner 'nobody'"),
        (["--workload", "W0,W9"], "expected all, or some of W0, W1, "),
        (["--workload", "W0", "--trace", "x.npz"], "--workload draws its routing: leave --trace out"),
        (["--workload", "W0", "--scale"], "not allowed with argument"),
        (["--workload", "W0", "--ranks", "4", "--top-k", "9"], "expected tokens, and top_k from 1 to 6"),
        (["--scale", "--ranks", "4"], "--ranks goes with --workload"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err
