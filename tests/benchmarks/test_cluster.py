"""The parts of the cluster benchmark that need no cluster, and one short run that does."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from benchmarks.cluster import __main__ as cli
from benchmarks.cluster import links, replay
from benchmarks.cluster.calibrate import (
    PROBE_BYTES,
    Observed,
    calibration_of,
    fit_experts,
    fit_link,
    probe_links,
    probe_pairs,
    slowness_of,
)
from benchmarks.cluster.policies import DEFAULT_POLICIES, PolicyError, planner_of, policy
from benchmarks.cluster.profiles import uniform
from benchmarks.cluster.replay import biases, form_of, layers_of, simulated
from benchmarks.cluster.rows import against, summarise, table
from benchmarks.cluster.workload import Workload, build
from prophet import EngineConfig, attach
from prophet.demo.model import ModelConfig, MoEGPT
from prophet.engine.config import Experiment
from prophet.errors import SpecError
from prophet.layer.moe import moe_layers
from prophet.machine.measure import Probe
from prophet.ranks.operation import Operation
from prophet.ranks.threads import ThreadCollective
from prophet.scheduler.actions import Window
from prophet.scheduler.pieces import Form
from prophet.scheduler.recording import ObservedCollective
from prophet.scheduler.schedules import block_wise
from prophet.scheduler.timeline import Recorder, Span
from prophet.spec import FloatArray, LayerShape, Placement, PlanContext, Route
from tests.helpers.cluster_testbed import needs_testbed
from tests.helpers.support import RandomPlanner, on_threads, seeded
from tests.helpers.timelines import read_timeline

SMALL = ModelConfig(dim=8, heads=2, blocks=2, hidden=16, experts=8, top_k=2, length=16)


# --- policies and workload ---


def test_policies() -> None:
    assert all(policy(name).name == name for name in DEFAULT_POLICIES)
    with pytest.raises(PolicyError, match="there are static"):
        policy("nonsense")


def test_a_policy_may_name_a_function_that_returns_a_planner() -> None:
    assert planner_of(policy("tests.helpers.support:RandomPlanner")).name == RandomPlanner().name
    assert planner_of(policy("prophet")).name == "prophet"
    for unknown in ("tests.helpers.nowhere:planner", "tests.helpers.support:nothing"):
        with pytest.raises(SpecError, match="expected a module and its function"):
            planner_of(policy(unknown))


# --- recording ---


def test_a_recorded_step_is_complete_and_in_order() -> None:
    """Compute, all-to-alls and waits of the calling thread add up to the step, and every window is there."""

    def body(collective: ThreadCollective) -> list[Span]:
        with seeded(0):
            model = MoEGPT(SMALL, group=collective)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config, experiment = EngineConfig(planner=RandomPlanner(density=1.0)), Experiment(transfers="direct")
        engine = attach(model, optimizer, config=config, experiment=experiment)
        with engine.recording() as recording:
            for _ in range(3):
                rows = torch.randint(0, 256, (2, 17))
                optimizer.zero_grad()
                loss = model.loss(rows)
                recording.enter(Window("BNEC", SMALL.blocks - 1))
                loss.backward()
                optimizer.step()
        engine.close()
        return recording.spans()

    for spans in cast(list[list[Span]], on_threads(2, body)):
        compute = [s for s in spans if s.stream == "compute"]
        names = [s.name for s in compute]
        expected = ["start", *(f"{w}({i})" for i in (0, 1) for w in ("route", "FEC", "FNEC"))]
        expected += [f"{w}({i})" for i in (1, 0) for w in ("BNEC", "BEC")] + ["end", "update"]
        assert list(dict.fromkeys(names)) == expected
        waiting = sum(s.seconds for s in spans if s.stream in ("tokens", "waits"))
        total = sum(s.seconds for s in compute) + waiting
        assert total == pytest.approx(compute[-1].end_s - compute[0].start_s, rel=1e-6)
        kinds = {s.name.split(" of layer")[0] for s in spans if s.stream == "weights"}
        assert kinds == {"Trans chunk 0", "Trans chunk 1", "Agg chunk 0", "Agg chunk 1"}


def test_an_observed_collective_passes_everything_on() -> None:
    def body(collective: ThreadCollective) -> list[float]:
        observed = ObservedCollective(collective, Recorder(collective.rank))
        x = torch.arange(4.0) + 10 * collective.rank
        out = observed.all_to_all(x, [2, 2], [2, 2], op=Operation("dispatch", 0)).wait()
        gathered = observed.all_gather(x[:1], op=Operation("exchange of counts", 0))
        back = torch.empty(1)
        peer = 1 - collective.rank
        observed.exchange([(peer, x[:1])], [(peer, back)], op=Operation("x")).wait()
        assert len(observed.recorder.spans()) == 4  # the exchange of weights and the wait for it
        return [*out.tolist(), *gathered.flatten().tolist(), *back.tolist()]

    assert on_threads(2, body) == [[0, 1, 10, 11, 0, 10, 10], [2, 3, 12, 13, 0, 10, 0]]


# --- calibration ---


def test_a_link_is_fitted_by_a_line() -> None:
    link = fit_link([(n, 0.004 + n / 25e6) for n in (1e5, 1e6, 1e6)])
    assert link.bytes_per_s == pytest.approx(25e6)
    assert link.latency_s == pytest.approx(0.004)
    assert fit_link([(1e5, 0.001), (1e6, 0.04)]).latency_s == 0.0  # no negative latency


def test_probes_of_links_keep_to_their_level_and_fill_the_busiest_rank() -> None:
    node = np.arange(4) // 2
    between = node[:, None] != node
    pairs = probe_pairs(between, 600, np.array([3.0, 1.0, 3.0, 1.0]))
    assert pairs.tolist() == [[0, 0, 300, 100], [0, 0, 300, 100], [300, 100, 0, 0], [300, 100, 0, 0]]
    assert probe_pairs(between, 600, np.ones(4)).sum(axis=0).tolist() == [600] * 4


@pytest.mark.parametrize(("ranks", "per_node", "alone"), [(3, 3, 3.0), (4, 2, 3.0), (4, 2, 0.5), (2, 1, 3.0)])
def test_links_of_one_and_of_several_nodes_are_probed(
    ranks: int, per_node: int, alone: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`alone` has seconds of a rank that crosses alone: 0.5 where it has the port that both of its node share."""

    def samples(self: Probe, runs: Sequence[Callable[[], float | None]]) -> list[FloatArray]:
        """The exchanges run, their seconds are given: in turn those of a link at 1 GB/s and of one at 500 MB/s."""
        for run in runs:
            run()
        level = self.__dict__["level"] = self.__dict__.get("level", 0) + 1
        seconds = np.full((3, ranks), (1.0, 2.0, alone)[level - 1] * 1e-9)
        if level == 2 and alone < 1.0:
            # a port that is shared has carried everything when the last one is done
            seconds[:, ::2] *= 0.5
        return [seconds * n_bytes for n_bytes in PROBE_BYTES]

    def body(c: ThreadCollective) -> tuple[float, float, float]:
        exchanges = {k: [x.tolist() for x in v] for k, v in probe_links(c, per_node, repeats=1).items()}
        found = calibration_of(replace(observed(ranks), ranks_per_node=per_node, exchanges=exchanges), SHAPE)
        t = found.topology
        return t.intra.bytes_per_s, t.inter.bytes_per_s, t.port_bytes_per_s or 0.0

    monkeypatch.setattr(Probe, "samples", samples)
    found = on_threads(ranks, body)
    assert len(set(found)) == 1  # the same figures everywhere
    nobody = 1e12  # the rate where a rank is alone on its node
    if alone < 1.0:
        expected = 1e9, 2e9, 1e9
    else:
        expected = {(3, 3): (1e9, 1e9, 0.0), (4, 2): (1e9, 5e8, 0.0), (2, 1): (nobody, 1e9, 0.0)}[ranks, per_node]
    assert found[0] == pytest.approx(expected)


SHAPE = LayerShape.feed_forward(dim=8, hidden=16)


def observed(ranks: int, *, noise: float = 0.0) -> Observed:
    """Two steps of `static`, in which rank 0 has more to do, and two hundred even ones of two blocks."""
    rng, steps, even = np.random.default_rng(0), 202, 200
    rank_load = np.full((steps, 2, ranks), 400)
    rank_load[:2, :, 0] *= 2

    def vary(seconds: FloatArray) -> FloatArray:
        return np.asarray(seconds * (1.0 + noise * rng.normal(size=seconds.shape)))

    forward = 3.0 / 3.4 * (1e-5 * rank_load + 2 * 2e-4)
    # where gradients are averaged, all ranks but the last one wait
    windows = {"start": np.full((steps, ranks), 0.01), "update": 0.2 + 0.05 * np.arange(ranks) * np.ones((steps, 1))}
    for i in (0, 1):
        windows |= {f"FEC({i})": vary(forward[:, i]), f"BEC({i})": vary(2.4 * forward[:, i])}
        windows |= {f"FNEC({i})": vary(np.full((steps, ranks), 0.03 + 0.01 * i))}
        windows |= {f"BNEC({i})": vary(np.full((steps, ranks), 0.04))}
    # of an exchange every moment varies alike, however long it takes
    even_s = [(0.002 + n / 1e8 + 0.01 * noise * rng.normal(size=(40, ranks))).tolist() for n in PROBE_BYTES]
    return Observed(
        ranks_per_node=ranks,
        exchanges={"intra": even_s},
        counts_s=[[[0.003] * ranks] * 2 + [[0.02] * ranks] * 2, [[0.018] * ranks] * 4 + [[0.2] * ranks]],
        overlap_cost=0.1,
        duplex_cost=0.2,
        link_overlap_cost=0.4,
        windows={name: x.tolist() for name, x in windows.items()},
        rank_load=rank_load.tolist(),
        even=even,
        experts=2,
    )


def test_a_calibration_has_what_was_put_in() -> None:
    found = calibration_of(observed(4), SHAPE)
    topology = found.topology
    assert topology.flops_per_s == pytest.approx((SHAPE.forward_flops_per_token / 1e-5,) * 4, rel=1e-3)
    assert topology.expert_overhead_s == pytest.approx(2e-4, rel=1e-2)
    assert topology.backward_ratio == pytest.approx(2.4)
    assert (topology.compute_noise, topology.exchange_noise_s) == (pytest.approx(0.0), pytest.approx(0.0))
    assert (topology.overlap_cost, topology.duplex_cost, topology.link_overlap_cost) == (0.1, 0.2, 0.4)
    assert (topology.intra.latency_s, topology.intra.bytes_per_s) == (pytest.approx(0.002), pytest.approx(1e8))
    assert (found.windows.fnec_s, found.windows.bnec_s) == (pytest.approx(0.03), pytest.approx(0.04))
    # the last block's FNEC is longer by 0.01: with the head and the loss
    assert (found.start_s, found.end_s, found.update_s) == (0.01, 0.0, pytest.approx(0.21))
    assert (found.counts_s, found.counts_behind_s) == (0.003, pytest.approx(0.015))
    noisy = calibration_of(observed(4, noise=0.06), SHAPE).topology
    assert noisy.compute_noise == pytest.approx(0.06, rel=0.1)
    assert noisy.exchange_noise_s == pytest.approx(6e-4, rel=0.15)
    assert noisy.intra.bytes_per_s == pytest.approx(1e8, rel=0.03)


def test_recorded_steps_are_played_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The steps that were simulated when they ran come out alike from the file, and an error of 10 % as one."""
    seen = observed(2)
    calibration, placement = calibration_of(seen, SHAPE), Placement.with_replicas((0, 0, 1, 1), 2, [(0, 1)])
    windows = replace(calibration.windows, experts=False)
    context = PlanContext(topology=calibration.topology, shape=SHAPE, home=(0, 0, 1, 1), windows=windows)
    layers = layers_of([context, replace(context, windows=calibration.windows)])
    counts = np.array([[[300, 20, 50, 30], [300, 20, 50, 30]]] * 2)
    done = {"counts": counts.tolist(), "forms": [dataclasses.asdict(Form())] * 2}
    alone, with_copy = ({**done, "replicas": x} for x in ([[], []], [[], [list(r) for r in placement.replicas()]]))
    schedule = block_wise(2)
    runs = []
    for name, step in (("static", alone), ("prophet", with_copy)):
        (now,) = simulated(name, calibration, layers, schedule, [step])
        run = {"policy": name, "schedule": [str(a) for a in schedule], "steps": [step], "step_s": [now["step"] / 1.1]}
        runs.append(run)
    file = tmp_path / "record.json"
    file.write_text(json.dumps({"observed": dataclasses.asdict(seen), "layers": layers, "runs": runs}))
    rows = biases(json.loads(file.read_text()))
    assert [r["policy"] for r in rows] == ["static", "prophet"]
    assert [r["bias"] for r in rows] == pytest.approx([0.1, 0.1])
    assert rows[1]["simulated_s"]["step"] < rows[0]["simulated_s"]["step"]
    assert replay.main([str(file)]) == 0
    assert "common offset +0.100, spread 0.000" in capsys.readouterr().out
    file.write_text("{}")
    assert replay.main([str(file)]) == 2
    assert "record.json" in capsys.readouterr().err


def test_a_recorded_form_keeps_its_routes() -> None:
    """JSON has texts as keys: an expert whose route was not found travelled as if it had one group."""
    trans, agg = {3: Route(((0, 1), (4,)))}, {5: Route(((2, 6),), relays=(1, 3), carriers=((2, 6),))}
    form = Form((0, 512, 1024), two_phase_trans=True, trans_routes=trans, agg_routes=agg)
    taken_apart = dataclasses.asdict(form)
    assert form_of(json.loads(json.dumps(taken_apart))) == form_of(taken_apart) == form


@pytest.mark.parametrize("argv", [["--repeats", "0"], ["--timeout-s", "0"], ["--profile", "five-hosts"]])
def test_bad_arguments_of_the_benchmark_of_links(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = links.main(argv)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert re.search(r"expected repeats of at least 1|there are four-hosts", capsys.readouterr().err)


@needs_testbed
def test_both_ways_of_an_all_to_all_are_timed_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, out = tmp_path / "pair.toml", tmp_path / "links.json"
    profile.write_text("nodes = 1\nhosts_per_node = 2\nlink_mbit_per_s = 400\nshare = 0.2\n", encoding="utf-8")
    assert links.main(["--profile", str(profile), "--repeats", "1", "--json", str(out)]) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [r["way"] for r in rows] == ["gloo's own", "receives first"] * (len(rows) // 2)
    assert len(rows) == 2 * 2 * len(PROBE_BYTES)
    for row in rows:  # no faster than the link is, less what it may catch up on
        assert row["seconds_p10"] > 0.8 * (row["bytes"] / 50e6 - 0.004)
    assert capsys.readouterr().out.count("| one rank popular |") == len(PROBE_BYTES)


def test_rates_and_overhead_are_fitted_together() -> None:
    shape = LayerShape.feed_forward(dim=8, hidden=16)
    rng = np.random.default_rng(0)
    rows = rng.integers(100, 1000, size=(12, 3))
    groups = rng.integers(2, 6, size=(12, 3))
    slowness = np.array([1.0, 1.0, 3.0])
    seconds = np.asarray(3 * (rows * 1e-5 + groups * 2e-4) * slowness, dtype=np.float64)
    rates, overhead = fit_experts(seconds, rows, groups, shape, slowness)
    assert rates == pytest.approx(tuple(shape.forward_flops_per_token / (1e-5 * slowness)), rel=1e-4)
    assert overhead == pytest.approx(2e-4, rel=1e-3)
    # every rank computes the same two experts: what they cost shows in how seconds grow with rows
    rates, overhead = fit_experts(seconds[:, :2], rows[:, :2], groups[:, :2] * 0 + 2, shape, slowness[:2])
    assert overhead > 0
    # times that fall with the rows fit no model: ratios of sums
    seconds = np.asarray(3 * 1e-5 * (1100.0 - rows), dtype=np.float64)
    rates, overhead = fit_experts(seconds, rows, groups, shape, np.ones(3))
    assert overhead == 0.0
    assert min(rates) > 0
    one = fit_experts(np.full((1, 2), 3.0), np.full((1, 2), 100), np.zeros((1, 2), dtype=np.int64), shape, np.ones(2))
    assert one[0] == pytest.approx((100 * shape.forward_flops_per_token,) * 2)
    with pytest.raises(ValueError, match="positive seconds"):
        fit_experts(np.zeros((1, 2)), np.full((1, 2), 100), np.ones((1, 2), dtype=np.int64), shape, np.ones(2))


def test_ranks_that_cannot_be_told_apart_are_taken_as_equal() -> None:
    noise = np.random.default_rng(0).lognormal(0.0, 0.1, size=(9, 5))
    slowness = slowness_of(noise * np.array([1.0, 1.0, 3.0, 1.0, 1.0]))
    assert slowness[[0, 1, 3, 4]].tolist() == [1.0] * 4
    assert slowness[2] == pytest.approx(3.0, rel=0.2)
    assert slowness_of(np.array([[1.0, 1.3]])).tolist() == pytest.approx([1.0, 1.0])  # neither of two is the usual one


# --- rows ---


def run_of(name: str, step_s: list[float], repetition: int, **more: object) -> dict[str, object]:
    run: dict[str, object] = {
        "policy": name,
        "repetition": repetition,
        "peak_memory_bytes": 5,
        "step_s": step_s,
        "losses": [3.0, 2.5],
        "max_mean": [1.5, 1.7],
        "copies_per_rank": [2.0],
    }
    return run | more


def test_rows() -> None:
    seconds = {"a2a": 0.5, "expert": 1.0, "exposed_plan": 0.01, "exposed_trans": 0.02, "exposed_agg": 0.07, "plan": 0.1}
    grown = {"resident_bytes": [1, *[100] * 18, 107]}  # what the first steps take is no growth
    results = [
        {
            "runs": [
                run_of("prophet", [2.0, 2.0], 0, seconds=seconds, simulated_s=[{"step": 2.2, "idle": 0.5}], **grown),
                run_of("forced-balance", [1.0, 1.0], 0, seconds=seconds),
                run_of("deepspeed", [8.0, 8.0], 0, max_mean=[]),
                run_of("deepspeed-capacity", [2.0, 2.0], 0, dropped=[0.125, 0.25]),
            ]
        }
        for _ in range(2)
    ]
    rows = {r["policy"]: r for r in summarise(results, tokens_per_step=100, policies=_names(results), replayed="t.npz")}
    row = rows["prophet"]
    assert row["tokens_per_s"] == 50.0
    assert row["fraction_of_even_routing"] == 0.5
    assert row["max_mean_median"] == pytest.approx(1.6)
    assert row["exposed_s"] == {"plan": 0.01, "trans": 0.02, "agg": 0.07}
    assert row["exposed_fraction"] == pytest.approx(0.05)
    assert row["simulated_error"] == pytest.approx(0.1)
    assert row["simulated_parts_s"] == {"step": 2.2, "idle": 0.5}
    assert row["hosts"] == 2
    assert (row["resident_growth_bytes"], rows["deepspeed"]["resident_growth_bytes"]) == (7, None)
    assert rows["deepspeed"]["a2a_s"] is None
    assert rows["deepspeed"]["max_mean_median"] is None
    text = table(list(rows.values()))
    assert len(text.splitlines()) == 5
    assert rows["deepspeed-capacity"]["dropped_fraction"] == 0.1875
    assert rows["deepspeed"]["dropped_fraction"] is None
    assert text.splitlines()[-2].endswith("-  dropless, padded to the hottest expert")
    assert text.splitlines()[-1].endswith("0.188                    capacity factor 1.25")
    assert {r["policy"]: r["routing"] for r in rows.values()} == {
        "prophet": "t.npz",
        "forced-balance": "even",
        "deepspeed": "t.npz",
        "deepspeed-capacity": "t.npz",
    }
    assert "0.500" in text
    without = summarise(results, tokens_per_step=100, policies=["prophet"])
    assert without[0]["fraction_of_even_routing"] is None
    assert without[0]["routing"] == "the router's own"


def _names(results: list[dict[str, list[dict[str, object]]]]) -> list[str]:
    return [str(r["policy"]) for r in results[0]["runs"]]


# --- the command ---


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--profile", "nowhere"], "no built-in profile"),
        (["--policies", "nonsense"], "no policy 'nonsense'"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--experts", "6", "--policies", "static"], "cannot be divided"),
    ],
)
def test_bad_arguments_are_one_clear_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_peer_that_is_missing_is_left_out_with_a_reason() -> None:
    able, skipped = cli.runnable(["static", "tutel", "static"], sys.executable)
    assert able[0] == "static"
    assert ("tutel" in able) != ("tutel" in skipped)


@pytest.mark.slow
@needs_testbed
def test_a_short_run_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "load_profile", lambda _: uniform("two", hosts=2, share=0.6))
    argv = ["--policies", "static,prophet,forced-balance", "--repetitions", "1", "--steps", "2", "--skip", "1"]
    argv += ["--warm-up-steps", "2", "--dim", "16", "--hidden", "64", "--experts", "4", "--blocks", "2"]
    argv += ["--length", "32", "--json", str(tmp_path / "out.json"), "--trace", str(tmp_path / "trace.json")]
    assert cli.main(argv) == 0
    document = json.loads((tmp_path / "out.json").read_text())
    rows = {r["policy"]: r for r in document["rows"]}
    assert set(rows) == {"static", "prophet", "forced-balance"}
    # balancing changes the order of sums and nothing else
    assert rows["prophet"]["loss_final"] == pytest.approx(rows["static"]["loss_final"], rel=1e-5)
    assert rows["forced-balance"]["fraction_of_even_routing"] == 1.0
    assert rows["forced-balance"]["max_mean_median"] == 1.0
    assert document["calibration"]["topology"]["intra"]["bytes_per_s"] < 1.3 * 25e6
    traced = read_timeline(tmp_path / "trace.json")
    assert {s.rank for s in traced["prophet"]} == {0, 1}


def test_a_workload_builds_its_model_on_one_rank() -> None:
    workload = Workload(dim=8, heads=2, blocks=1, hidden=16, experts=4, length=16, sequences_per_host=2)
    model = build(workload)
    assert workload.tokens_per_host() == 32
    assert len(moe_layers(model)) == 1
    rows = torch.randint(0, 256, (2, 17))
    assert model.loss(rows).isfinite()


def test_policies_are_compared_with_the_fastest_of_some_others() -> None:
    seconds = {"new": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "a": [2.0, 2.0, 2.0, 2.0, 2.0, 2.0], "b": [9.0] * 6}
    rows = [
        {"policy": name, "step_s_median": float(np.median(of_one)), "step_s_by_repetition": of_one}
        for name, of_one in seconds.items()
    ]
    (line,) = against(rows, ["a", "b"])
    assert (line["policy"], line["over"]) == ("new", "a")
    assert line["ratios"] == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert (line["ratio_median"], line["interval"]) == (1.75, [0.5, 3.0])
    few = [{**r, "step_s_by_repetition": seconds[r["policy"]][:4]} for r in rows]
    assert against(few, ["a", "b"])[0]["interval"] is None


def test_traced_hosts_have_one_zero() -> None:
    hosts = [
        {"spans": {"static": [[5.5, 6.0, 1, "compute", "start"]]}},
        {"spans": {"static": [[5.0, 5.25, 0, "a", "b"]]}},
    ]
    groups = cli.traced_steps(hosts)
    assert [(s.rank, s.start_s, s.end_s) for s in groups["static"]] == [(1, 0.5, 1.0), (0, 0.0, 0.25)]
