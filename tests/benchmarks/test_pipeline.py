"""The parts of `benchmarks.pipeline` that need no hosts: cases, policies, the simulator's rows, pacing."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.pipeline.__main__ import main
from benchmarks.pipeline.alone import Recording, optimizer_rate, record, simulate_policy
from benchmarks.pipeline.cases import Case, cases
from benchmarks.pipeline.pacing import Pace, PacedMeter
from benchmarks.pipeline.partitions import compare
from benchmarks.pipeline.picture import draw, maps_of
from benchmarks.pipeline.policies import POLICIES, PolicyError, check_policies, simulated_step_s, smoothed
from benchmarks.pipeline.rows import COLUMNS, summarise, table
from pipeline_balance.dynamics.gpt import Block, GPTShape
from pipeline_balance.spec import LayerCost, StageMap
from prophet.demo.text import VOCABULARY, load_corpus

FIELDS = {
    *("case", "policy", "layers", "ranks", "step_s_median", "tokens_per_s", "bubble_ratio", "max_mean", "loss_final"),
    *("max_minus_min_over_mean", "rebalances", "moved_bytes", "overhead_fraction", "ranks_used_mean"),
}


def small() -> Case:
    shape = GPTShape(vocabulary=VOCABULARY, dim=16, heads=2, blocks=6, context=16)
    freezing = cases(8)["freezing"].freezing
    return Case(
        name="small",
        shape=shape,
        make_block=lambda _: Block(16, 2),
        every_steps=2,
        microbatches=4,
        tokens=16,
        freezing=freezing,
    )


def cost(seconds: float) -> LayerCost:
    return LayerCost(
        forward_s=seconds / 3, backward_input_s=seconds / 3, backward_weight_s=seconds / 3, parameter_bytes=1000
    )


def changing(steps: int, layers: int) -> Recording:
    """The first half of the layers becomes cheap after a third of the steps."""
    early = [
        cost(6.0 if i >= layers // 2 or step < steps // 3 else 0.5) for step in range(steps) for i in range(layers)
    ]
    return Recording(
        costs=[early[s * layers : (s + 1) * layers] for s in range(steps)],
        losses=[3.0 - s / steps for s in range(steps)],
        optimizer_s_per_byte=1e-5,
        frozen=[0] * steps,
    )


def test_every_case_is_there_and_its_layers_can_be_built() -> None:
    every = cases(20)
    assert set(every) == {"moe", "pruning", "freezing", "sparse-attention", "early-exit", "mixture-of-depths"}
    for case in every.values():
        x = torch.zeros(1, 4, case.shape.dim + case.shape.channels)
        x[..., -1] = 1.0
        layers = case.modules()
        assert layers[1](x).shape == x.shape
        assert len(layers) == case.layers


def test_replicas_share_what_a_step_draws() -> None:
    case, corpus = small(), load_corpus(max_bytes=1 << 19)
    twice = replace(case, microbatches=2 * case.microbatches).batch(corpus, 3)
    for whole, parts in zip(twice, zip(*(case.batch(corpus, 3, r, 2) for r in range(2)), strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts))


def test_a_recording_holds_every_step() -> None:
    found = record(small(), load_corpus(max_bytes=1 << 19), 3)
    assert len(found.costs) == len(found.losses) == len(found.frozen) == 3
    assert all(c.forward_s > 0 and c.backward_s > 0 for c in found.costs[1])
    assert found.losses[-1] < found.losses[0]


def test_rows_of_a_simulated_run(tmp_path: Path) -> None:
    case = replace(small(), shape=replace(small().shape, blocks=10))
    recording = changing(30, 12)
    figures = {
        p: simulate_policy(p, case, recording, ranks=4, warm_up=2, transfer_s=0.0, bytes_per_s=1e9) for p in POLICIES
    }
    rows = summarise(
        case,
        [figures],
        recording.costs[2:],
        ranks=4,
        transfer_s=0.0,
        optimizer_s_per_byte=recording.optimizer_s_per_byte,
        measured=False,
    )
    assert [r["policy"] for r in rows] == list(POLICIES)
    assert all(set(r) >= FIELDS for r in rows)
    by_policy = {r["policy"]: r for r in rows}
    assert by_policy["partition"]["gain_over_uniform"] > 1.1
    assert by_policy["partition"]["rebalances"] >= 1
    assert by_policy["oracle"]["tokens_per_s"] >= 0.999 * max(r["tokens_per_s"] for r in rows)
    assert by_policy["partition"]["of_oracle"] > 0.8
    assert by_policy["optimal-at-start"]["tokens_per_s"] == pytest.approx(by_policy["uniform"]["tokens_per_s"])
    for name, row in by_policy.items():
        assert [[list(m.boundaries), list(m.ranks)] for m in maps_of(row)] == figures[name]["maps"]
    assert draw(rows, tmp_path / "a" / "ranks.png") == 1
    assert (tmp_path / "a" / "ranks.png").stat().st_size > 5_000
    assert draw([by_policy["uniform"]], tmp_path / "none.png") == 0
    assert len(table(rows).splitlines()) == len(POLICIES) + 1
    assert set(COLUMNS) <= set(rows[0])


def test_what_the_runtime_takes_lengthens_a_step() -> None:
    costs = [cost(1.0)] * 8
    for bounds in ((0, 8), (0, 2, 4, 6, 8)):
        step = partial(
            simulated_step_s,
            costs,
            StageMap.contiguous(bounds),
            microbatches=4,
            transfer_s=0.2,
            optimizer_s_per_byte=0.0,
        )
        # one rank alone never waits: a pause after each of its eight actions but the last
        least = 7 * 0.01 if len(bounds) == 2 else 0.0
        assert least <= step(between_s=0.01) - step() + 1e-12
        assert 0 < step(between_s=0.01) - step() < 20 * 0.01


def test_the_optimizer_passes_over_frozen_layers() -> None:
    trained, frozen = replace(cost(1.0), gradient_bytes=100), cost(1.0)
    assert optimizer_rate([[trained, frozen], [trained, trained], [frozen, frozen]], [1.0, 2.0, 0.1]) == 0.01
    step = partial(
        simulated_step_s,
        stage_map=StageMap.contiguous((0, 2)),
        microbatches=1,
        transfer_s=0.0,
        optimizer_s_per_byte=0.01,
    )
    assert step([trained, frozen]) == pytest.approx(step([frozen, frozen]) + 1.0)


def test_smoothing_forgets_one_disturbed_step() -> None:
    assert [c.forward_s for c in smoothed([[cost(3.0)], [cost(90.0)], [cost(3.0)]])] == [1.0]


def test_a_paced_host_takes_its_time() -> None:
    meter = PacedMeter(Pace(4.0))

    def spin() -> None:
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass

    began = time.perf_counter()
    meter.run_action("F", 0, spin)
    assert time.perf_counter() - began >= 0.04


def test_what_is_asked_for_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PolicyError, match="luck"):
        check_policies(["uniform", "luck"])
    assert main(["--cases", "weather"]) == 2
    assert "cases must be of" in capsys.readouterr().err
    assert main(["--steps", "0"]) == 2
    assert main(["--hosts", "4", "--replicas", "3"]) == 2
    assert "must divide" in capsys.readouterr().err
    assert main(["--replicas", "2", "--simulate"]) == 2
    assert "has no replicas" in capsys.readouterr().err
    assert main(["--picture", "x.png"]) == 2
    assert "name it in --policies" in capsys.readouterr().err


def test_where_hosts_cannot_be_made_the_simulator_runs(tmp_path: Path) -> None:
    found = tmp_path / "rows.json"
    policies = "uniform,partition"
    asked = ["--simulate", "--cases", "moe", "--policies", policies, "--steps", "1", "--warm-up", "1"]
    assert main([*asked, "--json", str(found)]) == 0
    document = json.loads(found.read_text())
    assert not document["measured"]
    assert [row["policy"] for row in document["rows"]] == policies.split(",")
    assert all(row["step_s_median"] > 0 for row in document["rows"])


def test_the_partitioner_is_timed() -> None:
    rows = compare()["partition"]
    assert rows[-1]["layers"] == 256
    assert all(r["bottleneck_over_mean"] >= 1.0 for r in rows)
    if "deepspeed_seconds" in rows[0]:
        assert all(r["deepspeed_bottleneck_over_ours"] >= 1 - 1e-9 for r in rows)
