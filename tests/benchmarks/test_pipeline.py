"""The parts of `benchmarks.pipeline` that need no hosts: cases, policies, the simulator's rows, pacing."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import pacing
from benchmarks.cluster import kernel_objects as kernel
from benchmarks.cluster.profiles import Profile
from benchmarks.pacing import Pace
from benchmarks.pipeline import __main__ as command
from benchmarks.pipeline import moves, repacked, slow_link
from benchmarks.pipeline.__main__ import main
from benchmarks.pipeline.alone import Recording, optimizer_rate, record, simulate_policy
from benchmarks.pipeline.cases import Case, Dynamism, cases
from benchmarks.pipeline.pacing import PacedMeter
from benchmarks.pipeline.partitions import compare
from benchmarks.pipeline.picture import draw, maps_of
from benchmarks.pipeline.policies import (
    DEFAULT_POLICIES,
    POLICIES,
    PolicyError,
    check_policies,
    simulated_step_s,
    smoothed,
)
from benchmarks.pipeline.rows import COLUMNS, summarise, table, verdict, verdict_text
from pipeline_balance.dynamics.depths import MixtureOfDepths
from pipeline_balance.dynamics.early_exit import EarlyExit
from pipeline_balance.dynamics.freezing import FreezingRule
from pipeline_balance.dynamics.gpt import Block, GPTShape
from pipeline_balance.dynamics.pruning import PrunedLinear
from pipeline_balance.dynamics.sparse_attention import HashAttention
from pipeline_balance.spec import LayerCost, StageMap
from prophet.demo.text import VOCABULARY, load_corpus
from prophet.ranks.threads import ThreadWorld

FIELDS = {
    *("case", "policy", "layers", "ranks", "step_s_median", "tokens_per_s", "bubble_ratio", "max_mean", "loss_final"),
    *("max_minus_min_over_mean", "rebalances", "moved_bytes", "overhead_fraction", "ranks_used_mean"),
}


def small() -> Case:
    shape = GPTShape(vocabulary=VOCABULARY, dim=16, heads=2, blocks=6, context=16)
    return Case(
        name="small",
        shape=shape,
        make_block=lambda _: Block(16, 2),
        every_steps=2,
        microbatches=4,
        tokens=16,
        freezing=FreezingRule(share=0.99, loss_rate=0.5, patience=1, most=6, in_turn=True),
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
    every = cases(20, layers=7)
    assert set(every) == {
        *("moe", "moe-sinkhorn", "pruning", "freezing", "sparse-attention", "early-exit", "early-exit-confidence"),
        *("mixture-of-depths", "depths-and-experts"),
    }
    for case in every.values():
        x = torch.zeros(1, 4, case.shape.dim + case.shape.channels)
        x[..., case.shape.dim :] = 1.0
        layers = case.modules()
        assert layers[1](x).shape == x.shape
        assert len(layers) == case.layers == 7


def test_lives_go_from_whole_to_what_the_paper_ran() -> None:
    """Nothing changes before the first counted step; the last quarter is the life's end."""
    steps, warm_up, alone = 12, 2, ThreadWorld(1).collective(0)
    seen: dict[str, list[list[float]]] = {}
    for name, what in (
        ("early-exit", lambda m: m.threshold if isinstance(m, EarlyExit) else None),
        ("early-exit-confidence", lambda m: m.threshold if isinstance(m, EarlyExit) else None),
        ("sparse-attention", lambda m: m.bits if isinstance(m, HashAttention) else None),
        ("mixture-of-depths", lambda m: m.capacity if isinstance(m, MixtureOfDepths) else None),
        ("pruning", lambda m: m.kept if isinstance(m, PrunedLinear) else None),
    ):
        case = cases(steps, layers=7)[name]
        units = case.modules()
        dynamism = Dynamism(case, steps, warm_up)
        seen[name] = []
        for step in range(warm_up + steps):
            dynamism.before(units, dict(enumerate(units)), step, alone, ())
            seen[name].append([v for unit in units for m in unit.modules() if (v := what(m)) is not None])
    assert all(found[0] == found[warm_up] and found[-1] == found[-3] != found[0] for found in seen.values())
    assert set(seen["early-exit"][0]) == set(seen["early-exit-confidence"][0]) == {1.0}
    assert set(seen["sparse-attention"][0]) == {0}
    assert set(seen["sparse-attention"][-1]) == {4}
    assert set(seen["mixture-of-depths"][0]) == {1.0}
    assert set(seen["mixture-of-depths"][-1]) == {0.125}
    # on the way the deepest blocks are ahead
    assert seen["sparse-attention"][6][0] < seen["sparse-attention"][6][-1]
    assert seen["mixture-of-depths"][6][0] > seen["mixture-of-depths"][6][-1]
    assert seen["pruning"][-1][0] > 2 * seen["pruning"][-1][-2], "a threshold leaves the first blocks more"
    assert sum(seen["pruning"][-1]) / len(seen["pruning"][-1]) == pytest.approx(0.05, abs=0.01)


def test_replicas_share_what_a_step_draws() -> None:
    case, corpus = small(), load_corpus(max_bytes=1 << 19)
    twice = replace(case, microbatches=2 * case.microbatches).batch(corpus, 3)
    for whole, parts in zip(twice, zip(*(case.batch(corpus, 3, r, 2) for r in range(2)), strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts))


def test_a_recording_holds_every_step() -> None:
    found = record(small(), load_corpus(max_bytes=1 << 19), 8, warm_up=2)
    assert len(found.costs) == len(found.losses) == len(found.frozen) == 10
    assert all(c.forward_s > 0 and c.backward_s > 0 for c in found.costs[1])
    assert found.losses[-1] < found.losses[0]
    assert found.frozen[0] == 0
    assert 0 < found.frozen[-1] <= 6
    # a frozen layer has no gradient to compute
    assert found.costs[-1][1].gradient_bytes == 0 < found.costs[0][1].gradient_bytes


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
    assert by_policy["partition"]["of_static_optimal"] > 1.1
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
    found = verdict(replace(case, gain=1.5), [rows, rows])
    reached, gained = (by_policy[p]["of_static_optimal"] for p in ("partition", "oracle"))
    assert found["partition of_static_optimal"] == [reached] * 3
    assert not found["nothing_to_gain"]
    # 0.9 of what the oracle gains, as that is less than what the case asks for
    assert ("of the static optimum" in str(found["missed"])) == (reached < 1 + 0.9 * (gained - 1))
    assert "2 repetitions" in verdict_text(found)


def row(policy: str, of_static: float, of_oracle: float) -> dict[str, object]:
    return {"policy": policy, "of_static_optimal": of_static, "of_oracle": of_oracle}


@pytest.mark.parametrize(
    ("partition", "diffusion", "oracle", "missed"),
    [
        (1.19, 1.19, 1.2, 0),  # less than 1.2, and more than 0.9 of what the oracle gains
        (1.21, 1.3, 1.5, 2),  # 1.2 is enough, but both are far from the oracle
        (1.11, 1.2, 1.2, 2),  # 0.9 of the oracle's gain would be 1.18
        (0.995, 0.9, 1.02, 0),  # nothing to gain: not slower is all that is asked of it
        (0.98, 1.0, 1.02, 1),
    ],
)
def test_verdicts(partition: float, diffusion: float, oracle: float, missed: int) -> None:
    ratios = {"optimal-at-start": 1.0, "partition": partition, "diffusion": diffusion, "oracle": oracle}
    lives = [[row(p, r + e, (r + e) / oracle) for p, r in ratios.items()] for e in (-0.001, 0.0, 0.002)]
    found = verdict(replace(small(), gain=1.2), lives)
    assert found["partition of_static_optimal"] == pytest.approx([partition, partition - 0.001, partition + 0.002])
    assert found["nothing_to_gain"] == (oracle < 1.03)
    assert len(found["missed"]) == missed, found["missed"]
    assert ("nothing to gain" in verdict_text(found)) == (oracle < 1.03)
    assert "missed" not in verdict(small(), [[row("partition", 1.0, 1.0)]]), "without an oracle nothing is known"


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
    assert main(["--layers", "3"]) == 2
    assert main(["--share-experts"]) == 2
    assert "needs --replicas" in capsys.readouterr().err
    assert main(["--hosts", "4", "--replicas", "3"]) == 2
    assert "must divide" in capsys.readouterr().err
    assert main(["--replicas", "2", "--simulate"]) == 2
    assert "has no replicas" in capsys.readouterr().err
    assert main(["--picture", "x.png"]) == 2
    assert "name it in --policies" in capsys.readouterr().err


def _also(option: str, asked: list[str]) -> int:
    return main([option, *asked])


COMMANDS = (main, slow_link.main, repacked.main, partial(_also, "--swing"), partial(_also, "--simulate"))


@pytest.mark.parametrize("run", COMMANDS)
@pytest.mark.parametrize("slowdown", ["0", "101", "nan"])
def test_a_slowdown_that_no_host_can_have_is_refused(
    run: Callable[[list[str]], int], slowdown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--slowdown", slowdown]) == 2
    assert f"--slowdown must be from 1 to 100, got {slowdown}" in capsys.readouterr().err


@pytest.mark.parametrize("run", COMMANDS[:4])
def test_hosts_that_need_more_than_the_cores_are_refused(
    run: Callable[[list[str]], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They could be emulated, so no simulator steps in unasked."""
    monkeypatch.setattr(kernel, "check_available", lambda: None)
    monkeypatch.setattr(pacing, "_cores", lambda: (0, 1))
    assert run(["--hosts", "6"]) == 2
    found = capsys.readouterr()
    assert "--slowdown must be at least 6 / 1 (hosts over cores to compute on), got 5" in found.err
    assert "simulator" not in found.out


def test_hosts_that_only_move_state_have_no_slowdown(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []

    class Hosts(contextlib.nullcontext[None]):
        def __init__(self, profile: Profile, *, paced: bool) -> None:
            super().__init__()
            shares.append(sum(profile.share))

    monkeypatch.setattr(command, "Testbed", Hosts)
    monkeypatch.setattr(moves, "compare", lambda *_, **__: {})
    assert main(["--moves", "--slowdown", "1"]) == 0
    assert shares == [pytest.approx(0.4)]


@pytest.mark.parametrize("case", cases(1, layers=8))
def test_every_case_runs_by_command(tmp_path: Path, case: str) -> None:
    found = tmp_path / "rows.json"
    asked = ["--simulate", "--cases", case, "--layers", "8", "--steps", "6", "--warm-up", "1", "--repetitions", "2"]
    assert main([*asked, "--json", str(found)]) == 0
    document = json.loads(found.read_text())
    assert not document["measured"]
    assert [row["policy"] for row in document["rows"]] == [*DEFAULT_POLICIES] * 2
    assert [row["repetition"] for row in document["rows"]] == [0] * 4 + [1] * 4
    assert all(row["time_to_end_s"] > 0 for row in document["rows"])
    (judged,) = document["verdicts"]
    assert judged["case"] == case
    assert judged["repetitions"] == 2


def test_the_partitioner_is_timed() -> None:
    rows = compare()["partition"]
    assert rows[-1]["layers"] == 256
    assert all(r["bottleneck_over_mean"] >= 1.0 for r in rows)
    if "deepspeed_seconds" in rows[0]:
        assert all(r["deepspeed_bottleneck_over_ours"] >= 1 - 1e-9 for r in rows)
