"""The planner's workloads: each follows from its seed and step alone, and is uneven in one way only."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planner.__main__ import main
from benchmarks.planner.uneven import behind, by_workload, cases_of
from benchmarks.planner.workloads import BURST, PERIOD, WORKLOADS, Sizes, choices, counts_at, popularity, trace_of
from prophet.errors import SpecError
from prophet.spec import IntArray

SIZES = Sizes(ranks=8, experts=32, tokens=200, top_k=2)


def hot(load: IntArray) -> set[int]:
    """Experts with more than twice the mean of all."""
    load_E = load.sum(axis=0)
    return set(np.flatnonzero(load_E > 2 * load_E.mean()).tolist())


def hot_at(workload: str, step: int) -> set[int]:
    return hot(counts_at(workload, 0, step, SIZES))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_counts_follow_from_workload_seed_and_step_alone(workload: str) -> None:
    trace = trace_of(workload, 1, 5, SIZES, layers=2)
    assert trace.counts.shape == (5, 2, 8, 32)
    for step in (4, 0, 2):
        for layer in (1, 0):
            assert np.array_equal(trace.counts[step, layer], counts_at(workload, 1, step, SIZES, layer=layer))
    flat = trace.counts.reshape(10, -1)
    assert len(np.unique(flat, axis=0)) == 10  # steps and layers differ
    assert not np.array_equal(trace.counts, trace_of(workload, 2, 5, SIZES, layers=2).counts)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_every_token_chooses_distinct_experts(workload: str, top_k: int) -> None:
    sizes = Sizes(ranks=4, experts=32, tokens=50, top_k=top_k)
    for step in range(PERIOD):
        counts = counts_at(workload, 0, step, sizes)
        tokens_R = counts.sum(axis=1) // top_k
        assert counts.sum() == 4 * 50 * top_k
        assert np.array_equal(counts.sum(axis=1), tokens_R * top_k)
        assert (counts <= tokens_R[:, None]).all()
        assert (tokens_R == 50).all() or workload == "W4"


def test_choices_are_distinct_and_drawn_by_weight() -> None:
    weight_E = np.array([0.0, 6.0, 3.0, 1.0, 0.0])
    chosen_NK = choices(weight_E, 20_000, 3, np.random.default_rng(0))
    assert (np.sort(chosen_NK, axis=1) == [1, 2, 3]).all()
    first = np.bincount(chosen_NK[:, 0], minlength=5) / 20_000
    assert first == pytest.approx(weight_E / 10, abs=0.015)
    second = np.bincount(chosen_NK[chosen_NK[:, 0] == 1, 1], minlength=5)
    assert second / second.sum() == pytest.approx([0, 0, 0.75, 0.25, 0], abs=0.02)


def test_each_workload_is_uneven_in_its_own_way() -> None:
    even = counts_at("W0", 0, 0, SIZES)
    assert np.ptp(even) <= 1
    assert np.ptp(even.sum(axis=0)) == 0
    home_of = np.arange(32) // 4
    of_a_rank = hot_at("W2", 0)
    assert len(of_a_rank) == 4 == 4 * len({home_of[e] for e in of_a_rank})
    together, apart = sorted(hot_at("W1", 0)), sorted(hot_at("W3", 0))
    assert len(together) == len(apart) == len({home_of[e] for e in apart}) == 4
    assert len({home_of[e] for e in together}) == 2
    sources_R = counts_at("W4", 0, 0, SIZES).sum(axis=1)
    assert sources_R.max() > 6 * sources_R.min()
    assert not hot_at("W4", 0)
    load_RE = counts_at("W5", 0, 0, SIZES).sum(axis=0).reshape(8, 4)
    assert ((load_RE == 0).sum(axis=1) == 4).sum() == 2
    assert ((load_RE == 0).sum(axis=1) == 2).sum() == 6


def test_spread_experts_are_as_hot_as_those_side_by_side() -> None:
    for seed in range(3):
        one, other = (popularity(workload, seed, 0, SIZES) for workload in ("W1", "W3"))
        assert np.array_equal(np.sort(one), np.sort(other))
        assert not np.array_equal(one, other)


def test_what_is_hot_stays_moves_or_returns() -> None:
    for workload in ("W1", "W2", "W3"):
        assert hot_at(workload, 0) == hot_at(workload, 3)
    moving = [hot_at("W6", step) for step in range(PERIOD)]
    assert all(moving)
    assert not any(now & following for now, following in itertools.pairwise(moving))
    bursts = [hot_at("W7", step) for step in range(2 * PERIOD)]
    assert [len(burst) for burst in bursts] == [4 * (step % PERIOD == BURST) for step in range(2 * PERIOD)]
    assert bursts[:PERIOD] == bursts[PERIOD:]


@pytest.mark.parametrize(
    "given",
    [
        {"top_k": 0},
        {"top_k": 13},  # six ranks with two experts each are not idle in W5
        {"tokens": 0},
        {"ranks": 1},
        {"ranks": 7},
    ],
)
def test_sizes_that_do_not_fit_are_refused(given: dict[str, int]) -> None:
    Sizes(**{"ranks": 8, "experts": 32, "tokens": 1, "top_k": 12})
    with pytest.raises(SpecError):
        Sizes(**{"ranks": 8, "experts": 32, "tokens": 1, "top_k": 2, **given})


def test_rows_and_tables_of_workloads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    asked = ["--policy", "static", "--policy", "top2", "--policy", "prophet", "--preset", "h100-ib"]
    assert main(["--workload", "W0,W6", "--ranks", "8", "--seeds", "1", *asked, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert len(rows) == 3 * 3
    assert {(r["workload"], r["plans"]) for r in rows} == {
        ("W0", "this step"),
        ("W6", "this step"),
        ("W6", "the step before"),
    }
    even, known, stale = by_workload(rows)
    assert even["worst_over_static"] <= 1.01
    assert known["over_static"] < 0.9 * stale["over_static"]  # what a plan knows is worth something
    # replicas that turn out not to pay are withdrawn, and what they have cost until then is paid
    assert 1.0 < stale["slowest_step_over_static"] <= 1.02
    assert "over_best" in capsys.readouterr().out


def test_a_step_is_planned_from_its_own_counts_or_from_those_before() -> None:
    trace = trace_of("W6", 0, 5, SIZES)
    for late in (0, 1):
        cases = cases_of(trace, 2, late)
        for t, case in zip((3, 4), cases, strict=True):
            assert np.array_equal(case.present, trace.counts[t, 0])
            assert np.array_equal(case.planned, trace.counts[t - late, 0])
            assert np.array_equal(case.earlier, trace.counts[: t - late, 0])


def test_what_a_published_policy_does_better_is_listed() -> None:
    def row(policy: str, seconds: float, seed: int) -> dict[str, object]:
        known = {"workload": "W1", "plans": "this step", "ranks": 8, "seed": seed, "preset": "x"}
        return {**known, "policy": policy, "step_s_geomean": seconds, "slowest_against_static": 1.0}

    rows = [row("static", 4.0, 0), row("laer", 2.0, 0), row("forced-balance", 0.5, 0), row("prophet", 1.0, 0)]
    rows += [row("static", 1.0, 1), row("laer", 2.0, 1), row("prophet", 1.21, 1)]
    (line,) = by_workload(rows)
    assert (line["worst"], line["on"], line["policy"]) == (1.21, "x, seed 1", "static")
    assert line["over_best"] == pytest.approx((0.5 * 1.21) ** 0.5)
    assert line["over_static"] == pytest.approx((0.25 * 1.21) ** 0.5)
    assert [(found["seed"], found["policy"], found["over_best"]) for found in behind(rows)] == [(1, "static", 1.21)]
