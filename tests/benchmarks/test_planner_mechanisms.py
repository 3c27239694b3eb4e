"""The studies of our planner: walks through a trace, cores without a mechanism, first plans, OLMoE's trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.planner import mechanisms
from benchmarks.planner.cores import Edit, build, edited, in_place, load
from benchmarks.planner.first import BURSTS, SEARCHES, TODAY, first_rows, first_summary
from benchmarks.planner.mechanisms import MECHANISMS, losses
from benchmarks.planner.olmoe_trace import STAGES, TOP_K, main, read_counts
from benchmarks.planner.predictions import summary
from benchmarks.planner.walks import alike, calls_of, contexts, walk
from prophet.errors import TraceError
from prophet.planner import core
from prophet.planner.model.cost import step_cost
from prophet.planner.search.prophet import ProphetPlanner
from prophet.spec import IntArray, Placement, PlanContext
from prophet.traces.npz import RoutingTrace, TraceWriter, read_trace

COUNTS = Path(__file__).parents[3] / "shared" / "traces" / "olmoe-counts.json"
IB = "h100-ib:Qwen3-30B-A3B"


def trace_of(layers: int = 3, iterations: int = 6, ranks: int = 8, experts: int = 16) -> RoutingTrace:
    """Two microbatches per iteration; every layer prefers other experts."""
    rng = np.random.default_rng(1)
    popular = rng.dirichlet(np.full(experts, 0.3), layers)
    steps = 2 * iterations
    counts = np.stack([[rng.multinomial(4096, popular[i], ranks) for i in range(layers)] for _ in range(steps)])
    return RoutingTrace(counts=counts, iteration=np.repeat(np.arange(iterations), 2).astype(np.int32))


# --- walks ---


def test_calls_plan_from_the_iteration_before_and_jump_from_layer_to_layer() -> None:
    trace = trace_of()
    calls = calls_of(trace, [0, 2], 3)
    assert [c.jumped for c in calls] == [True, False, False] * 2
    for call, layer, before in zip(calls, [0, 0, 0, 2, 2, 2], [0, 1, 2, 2, 3, 4], strict=True):
        mean = trace.counts[2 * before : 2 * before + 2, layer].sum(axis=0)
        assert np.abs(2 * call.planned - mean).max() <= 1
        came = trace.counts[2 * before + 2 : 2 * before + 4, layer]
        assert any(np.array_equal(call.present, load) for load in came)


def test_presets_that_differ_in_name_only_are_walked_once() -> None:
    found = contexts(trace_of(), ["hpwnv:MoE-GPT-S", "hpwnv:MoE-GPT-DS", "hpwnv:MoE-GPT-M"], 4)
    assert [names for names, _ in alike(found)] == [["hpwnv:MoE-GPT-S", "hpwnv:MoE-GPT-DS"], ["hpwnv:MoE-GPT-M"]]


class Noted:
    """Plans with ours, and notes which placement was in force."""

    def __init__(self) -> None:
        self.previous: list[Placement | None] = []

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        self.previous.append(context.previous)
        return ProphetPlanner().place(load, context)

    split = staticmethod(ProphetPlanner().split)


def test_a_walk_goes_on_from_the_placement_in_force() -> None:
    trace = trace_of()
    context, planner = contexts(trace, [IB], 2)[IB], Noted()
    calls = calls_of(trace, [0, 1], 2)
    walked, placements = walk(planner, context, calls)  # type: ignore[arg-type]
    assert planner.previous[0] is None
    assert all(before is after for before, after in zip(planner.previous[1:], placements, strict=False))
    assert walked.jumped.tolist() == [True, False, True, False]
    split = ProphetPlanner().split(calls[1].present, placements[1], context)
    assert walked.step_s[1] == pytest.approx(step_cost(split, placements[1], context).total_s)
    assert (walked.plan_us > 0).all()
    assert (walked.split_us > 0).all()


# --- cores without a mechanism ---


@pytest.mark.parametrize("edits", [m.edits for m in MECHANISMS if m.edits] + [SEARCHES])
def test_every_edit_fits_the_present_sources(edits: tuple[Edit, ...]) -> None:
    assert edited(edits) != edited(())


def test_an_edit_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"plan\.cpp: expected this text once, found it 0 times: 'nothing like it'"):
        edited([Edit("plan.cpp", "nothing like it", "")])
    with pytest.raises(ValueError, match=r"nowhere\.cpp: expected this text once, found it 0 times"):
        edited([Edit("nowhere.cpp", "x", "")])


def test_another_core_stands_in_for_ours_for_a_while() -> None:
    class Other:
        def plan(self, *given: Any) -> None:
            given[-1][:] = True

    trace = trace_of()
    context = contexts(trace, [IB], 8)[IB]
    with in_place(Other()):  # type: ignore[arg-type]
        assert ProphetPlanner().place(trace.load(0, 0), context).holds.all()
    assert not ProphetPlanner().place(trace.load(0, 0), context).holds.all()
    assert not isinstance(core.native, Other)


@pytest.mark.slow
def test_first_plans_and_a_mechanism_are_compared_with_compiled_cores(tmp_path: Path) -> None:
    trace = trace_of()
    with TraceWriter(tmp_path / "trace.npz", layers=3, ranks=8, experts=16) as writer:
        for step, iteration in zip(trace.counts, trace.iteration, strict=True):
            writer.append(step, iteration=int(iteration))
    cores = tmp_path / "cores"
    unedited = load(build(edited(()), cores))
    context = contexts(trace, [IB], 4)[IB]
    own = ProphetPlanner().place(trace.load(0, 0), context)
    with in_place(unedited):
        assert np.array_equal(ProphetPlanner().place(trace.load(0, 0), context).holds, own.holds)
    objects = len(list(cores.glob("*.o")))
    paths = [tmp_path / "trace.npz"]
    firsts = list(first_rows(paths, [IB], slots=4, folder=cores, layers=2, iterations=2, failed=20))
    assert [r["call"] for r in firsts] == ["first", "after layers are swapped"] * len(BURSTS)
    today = [r for r in firsts if r["burst"] == TODAY]
    assert all(r["step_worst"] >= 1.0 - 1e-9 for r in today)  # the search starts from this plan, and only shortens
    assert len(list(cores.glob("*.o"))) == objects + len(BURSTS)  # one edited file each, and the search's; not today's
    name = "tries and growth"  # with both, a placement only ever changes to one of a shorter predicted step
    rows = list(mechanisms.study_rows(paths, [IB], slots=4, folder=cores, iterations=2, processes=1, only=name))
    assert [(r["without"], r["preset"]) for r in rows] == [(name, IB)]
    assert rows[0]["step"] > 1.01


# --- tables ---


def test_a_mechanism_stays_where_a_machine_class_or_a_preset_needs_it() -> None:
    usual = {"trace": "t", "step_after_jump": 1.0, "plan_us": 2.0, "plan_us_with": 1.0} | {
        "split_us": 1.0,
        "split_us_with": 1.0,
    }
    steps = {"class": [1.011, 1.011, 1.0], "preset": [1.06, 0.95, 1.0], "nothing": [1.009, 1.009, 1.009]}
    rows = [
        {"without": name, "preset": preset, "step": step, **usual}
        for name, of_one in steps.items()
        for preset, step in zip(["a:x", "a:y", "b:x"], of_one, strict=True)
    ]
    found = {r["without"]: r for r in losses(rows)}
    assert {name: r["stays"] for name, r in found.items()} == {"class": True, "preset": True, "nothing": False}
    assert found["class"]["machines"] == "a"
    assert found["preset"]["preset"] == "a:x"
    assert found["preset"]["preset_loss"] == pytest.approx(0.06)
    assert found["class"]["plan_time"] == 2.0


def test_draws_of_a_mechanism_are_averaged_and_walk_through_other_layers(tmp_path: Path) -> None:
    usual = {"without": "m", "trace": "t", "preset": "a:x", "step_after_jump": 1.0, "plan_us": 1.0}
    usual |= dict.fromkeys(("plan_us_with", "split_us", "split_us_with"), 1.0)
    (found,) = losses([{"step": step, **usual} for step in (1.08, 1 / 1.08)])
    assert found["preset_loss"] == pytest.approx(0.0)
    assert found["preset_error"] == pytest.approx(np.log(1.08))
    assert not found["stays"]
    trace = trace_of()
    with TraceWriter(tmp_path / "trace.npz", layers=3, ranks=8, experts=16) as writer:
        for step, iteration in zip(trace.counts, trace.iteration, strict=True):
            writer.append(step, iteration=int(iteration))
    first, other = (mechanisms.parts_of([tmp_path / "trace.npz"], [IB], 2, 2, draw)[0].calls for draw in (0, 1))
    assert not np.array_equal(first[0].planned, other[0].planned)


def test_first_calls_are_summed_up_over_presets() -> None:
    rows = [
        {"trace": "t", "call": "first", "burst": "8", "preset": p, "steps": steps, "time": time}
        for p, steps, time in (("a", [1.0, 1.2], 3.0), ("b", [1.0], 7.0))
    ]
    (line,) = first_summary(rows)
    assert (line["cases"], line["step_median"], line["step_worst"]) == (3, 1.0, 1.2)
    assert line["beyond_1.1"] == pytest.approx(1 / 3)
    assert (line["time_worst"], line["on"]) == (7.0, "b")


def test_predictions_are_summed_up_by_machine_class() -> None:
    def row(preset: str, policy: str, step_s: float, late_s: float) -> dict[str, Any]:
        return {
            "trace": "t",
            "preset": preset,
            "policy": policy,
            "step_s_geomean": step_s,
            "step_s_geomean_late": late_s,
            "slowest_against_static": 0.9,
        }

    rows = [
        *(row("a:x", *of_one) for of_one in (("prophet", 1.0, 0.5), ("pro-prophet", 2.0, 2.0), ("llep", 0.8, 1.0))),
        *(row("b:x", *of_one) for of_one in (("prophet", 1.0, 1.0), ("pro-prophet", 8.0, 4.0))),
        row("a:x", "forced-balance", 0.1, 0.1),
    ]
    of_all, of_a, of_b = summary(rows)
    assert (of_all["machines"], of_a["machines"], of_b["machines"]) == ("all", "a", "b")
    assert of_all["pro-prophet"] == pytest.approx(4.0)
    assert of_all["pro-prophet_late"] == pytest.approx(4.0)
    assert of_a["pro-prophet_late"] == pytest.approx(4.0)
    assert (of_all["over_best"], of_all["on"], of_all["policy"]) == (pytest.approx(1.25), "a:x", "llep")
    assert of_b["over_best"] == pytest.approx(0.125)


# --- the trace drawn from OLMoE's totals ---


def counts_file(path: Path, experts: int = 8) -> Path:
    """Totals in which every domain prefers an expert of its own."""
    table = {}
    for i, name in enumerate(sorted({name for stage in STAGES for name in stage})):
        counts = np.full((2, experts), 10)
        counts[:, i] = 40
        table[f"olmoe/expert_counts/{name}"] = {"layers": [0, 7], "counts": counts.tolist()}
    path.write_text(json.dumps(table))
    return path


def test_a_drawn_trace_follows_from_its_seed_and_its_stages(tmp_path: Path) -> None:
    counts = counts_file(tmp_path / "counts.json")
    size = ["--iterations", "9", "--microbatches", "2", "--ranks", "4", "--sequences", "8", "--tokens", "64"]
    found = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert main([str(counts), str(tmp_path / f"{name}.npz"), "--seed", seed, *size]) == 0
        found.append(read_trace(tmp_path / f"{name}.npz"))
    assert found[0] == found[1]
    assert found[0] != found[2]
    trace = found[0]
    assert trace.counts.shape == (18, 2, 4, 8)
    assert (trace.counts.sum(axis=3) == 8 * 64 * TOP_K).all()
    assert trace.meta["top_k"] == TOP_K
    domains, _, _ = read_counts(counts)
    shares = trace.counts.sum(axis=(1, 2)).reshape(3, 6, 8).sum(axis=1)  # [stages, E]
    web, instructions = domains.index("c4"), domains.index("tulu")
    assert shares[0, web] > 1.5 * shares[0, instructions]
    assert shares[2, instructions] > 1.2 * shares[2, web]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", "expected counts"),
        ("{}", "expected the same layers and experts for every domain"),
        ('{"olmoe/expert_counts/c4": {"layers": [0], "counts": [[-1, 2]]}}', "expected counts of at least 0"),
        ('{"olmoe/expert_counts/c4": {"layers": [0, 7], "counts": [[1, 2]]}}', "expected the same layers"),
        ('{"olmoe/expert_counts/c4": {"layers": [0], "counts": [[1, 2]]}}', "expected the domains"),
    ],
)
def test_other_files_are_refused(text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "counts.json"
    file.write_text(text)
    with pytest.raises(SystemExit):
        main([str(file), str(tmp_path / "out.npz")])
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out.npz").exists()


def test_a_file_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.planner.olmoe_trace.MAX_FILE_BYTES", 10)
    with pytest.raises(TraceError, match="at most 10 bytes"):
        read_counts(counts_file(tmp_path / "counts.json"))


@pytest.mark.skipif(not COUNTS.exists(), reason="OLMoE's counts are not beside this checkout")
def test_the_real_totals_have_three_layers_of_64_experts() -> None:
    domains, layers, shares = read_counts(COUNTS)
    assert layers == [0, 7, 15]
    assert shares.shape == (len(domains), 3, 64)
    assert shares.max() < 1 / TOP_K  # a token chooses an expert once
