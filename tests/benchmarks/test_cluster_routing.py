"""Routing that the cluster benchmark's gates are given: exact counts, valid choices, and the real rest."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from benchmarks.cluster import __main__ as cli
from benchmarks.cluster.peers import build_peer, dropped_fraction
from benchmarks.cluster.policies import policy
from benchmarks.cluster.profiles import uniform
from benchmarks.cluster.routing import drawn, even_row, given, max_mean_at_home, read_replay
from benchmarks.cluster.workload import Workload, build
from benchmarks.layer.implementations import INSTALL
from prophet import EngineConfig, attach
from prophet.demo.model import MoEGPT
from prophet.errors import TraceError
from prophet.layer.moe import moe_layers
from prophet.ranks.threads import ThreadCollective
from prophet.spec import FloatArray, IntArray
from prophet.traces import TraceWriter
from tests.helpers.cluster_testbed import needs_testbed
from tests.helpers.launch import on_processes
from tests.helpers.support import RandomPlanner, on_threads, seeded
from tests.helpers.training import average

SIZES = Workload(dim=8, heads=2, blocks=2, hidden=16, experts=8, top_k=2, length=16, sequences_per_host=2)
RANKS, TOKENS = 2, SIZES.tokens_per_host()


def skewed(steps: int, layers: int, ranks: int, experts: int, *, tokens: int = TOKENS, seed: int = 0) -> IntArray:
    """Counts of top-2 routing, [T, L, R, E]: every token's first choice is among the first experts."""
    rng = np.random.default_rng(seed)
    counts = np.zeros((steps, layers, ranks, experts), dtype=np.int64)
    for cell in np.ndindex(steps, layers, ranks):
        first = rng.integers(experts // 4, size=tokens)
        second = rng.integers(experts // 4, experts, size=tokens)
        counts[cell] = np.bincount(np.concatenate([first, second]), minlength=experts)
    return counts


def written(file: Path, counts: IntArray) -> Path:
    _, layers, ranks, experts = counts.shape
    with TraceWriter(file, layers=layers, ranks=ranks, experts=experts) as writer:
        for step in counts:
            writer.append(step)
    return file


# --- draws ---


@hypothesis_given(
    tokens=st.integers(1, 40), top_k=st.integers(1, 4), spare=st.integers(0, 5), seed=st.integers(0, 1 << 20)
)
def test_draws_have_the_row_and_different_experts(tokens: int, top_k: int, spare: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    experts = top_k + spare
    # any choices of different experts, some experts far more popular
    weight = rng.random(experts) ** 4
    tokens_choose = np.array([rng.choice(experts, top_k, replace=False, p=_positive(weight)) for _ in range(tokens)])
    row = np.bincount(tokens_choose.ravel(), minlength=experts)
    ids = drawn(row, top_k, rng)
    assert ids.shape == (tokens, top_k)
    np.testing.assert_array_equal(np.bincount(ids.ravel(), minlength=experts), row)
    assert all(len(set(chosen)) == top_k for chosen in ids.tolist())


def _positive(weight: FloatArray) -> FloatArray:
    shares: FloatArray = (weight + 1e-3) / np.sum(weight + 1e-3)
    return shares


@pytest.mark.parametrize(("choices", "experts", "ranks"), [(24, 8, 3), (14, 4, 2), (5, 8, 8), (24, 16, 4)])
def test_even_rows_are_even_on_every_rank_and_in_all(choices: int, experts: int, ranks: int) -> None:
    rows = np.array([even_row(choices, experts, r) for r in range(ranks)])
    assert (rows.sum(axis=1) == choices).all()
    assert np.ptp(rows, axis=1).max() <= 1
    assert np.ptp(rows.sum(axis=0)) <= 1


# --- our gate ---


def trained(
    collective: ThreadCollective, row_of: Callable[[int, int], IntArray], *, planner: RandomPlanner | None
) -> tuple[list[float], list[list[list[int]]], bool]:
    """(losses, choices of all ranks by step and layer, whether the gates' weights have gradients)."""
    with seeded(0):
        model = MoEGPT(SIZES.model_config(), group=collective)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = None if planner is None else attach(model, optimizer, config=EngineConfig(planner=planner))
    layers, generator = moe_layers(model), torch.Generator().manual_seed(collective.rank)
    losses, loads, learned = [], [], True
    with given([x.gate for x in layers], row_of, top_k=SIZES.top_k, seed=(0, collective.rank)):
        for _ in range(3):
            rows = torch.randint(0, 256, (SIZES.sequences_per_host, SIZES.length + 1), generator=generator)
            optimizer.zero_grad()
            loss = model.loss(rows)
            loss.backward()
            loss = loss.detach()
            average(model, collective, loss)
            learned &= all(bool(cast(Any, x.gate).weight.grad.abs().sum() > 0) for x in layers)
            optimizer.step()
            losses.append(loss.item())
            loads.append([cast(Any, x.stats).load.tolist() for x in layers])
    if engine is not None:
        engine.close()
    return losses, loads, learned


@pytest.mark.parametrize("planner", [None, RandomPlanner(density=1.0)])
def test_gates_choose_what_the_trace_says_and_learn(planner: RandomPlanner | None) -> None:
    counts = skewed(3, SIZES.blocks, RANKS, SIZES.experts)

    def body(c: ThreadCollective) -> Any:
        return trained(c, lambda step, layer: counts[step, layer, c.rank], planner=planner)

    for losses, loads, learned in on_threads(RANKS, body):
        np.testing.assert_array_equal(loads, counts)
        assert learned
        assert np.isfinite(losses).all()


def test_all_policies_choose_alike() -> None:
    """Balancing changes the order of sums and nothing else, as where the router decides."""
    counts = skewed(3, SIZES.blocks, RANKS, SIZES.experts)

    def body(c: ThreadCollective) -> list[list[float]]:
        row_of = lambda step, layer: counts[step, layer, c.rank]  # noqa: E731
        return [trained(c, row_of, planner=planner)[0] for planner in (None, RandomPlanner(density=1.0))]

    for plain, balanced in cast(list[list[list[float]]], on_threads(RANKS, body)):
        assert balanced == pytest.approx(plain, rel=1e-5)


def test_weights_are_the_chosen_experts_shares() -> None:
    layer = moe_layers(build(dataclasses.replace(SIZES, blocks=1)))[0]
    gate, x = cast(Any, layer.gate), torch.randn(TOKENS, SIZES.dim)
    row = even_row(TOKENS * SIZES.top_k, SIZES.experts, 0)
    with given([gate], lambda step, of: row, top_k=SIZES.top_k, seed=(0,)):
        first, second = gate(x), gate(x)
    logits = x @ gate.weight.t()
    assert torch.allclose(first.weights, logits.gather(1, first.ids).softmax(dim=1), atol=1e-6)
    assert first.counts().tolist() == second.counts().tolist() == row.tolist()
    assert not torch.equal(first.ids, second.ids)  # every step draws anew
    # outside, the gate decides again
    assert torch.equal(gate(x).ids, logits.topk(SIZES.top_k).indices)


def test_even_routing_is_even_and_is_undone() -> None:
    def body(c: ThreadCollective) -> list[float]:
        with seeded(0):
            model = MoEGPT(SIZES.model_config(), group=c)
        layers = moe_layers(model)
        rows = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(c.rank))
        row = even_row(TOKENS * SIZES.top_k, SIZES.experts, c.rank)
        found = []
        for even in (False, True, False):
            if even:
                with given([x.gate for x in layers], lambda step, layer: row, top_k=2, seed=(0, c.rank)):
                    model.loss(rows).backward()
            else:
                model.loss(rows).backward()
            found.append(max(x.stats.max_mean for x in layers if x.stats is not None))
        return found

    for found in cast(list[list[float]], on_threads(RANKS, body)):
        assert found[1] == 1.0
        assert found[0] == found[2] > 1.0


# --- traces ---


def test_a_trace_of_the_runs_sizes_is_replayed_as_it_is(tmp_path: Path) -> None:
    counts = skewed(20, 2, RANKS, SIZES.experts)
    replay = read_replay(written(tmp_path / "t.npz", counts), SIZES, ranks=RANKS, repetitions=2, window=5)
    assert replay.first_steps == (5, 10)
    np.testing.assert_array_equal(replay.trace.counts, counts[5:15])
    assert replay.max_mean_median == np.median(max_mean_at_home(counts[5:15])) > 1.2
    assert "t.npz: layers 0, 1 of 2, from steps 5, 10 of 20" in str(replay)
    assert json.loads(json.dumps(replay.as_dict()))["recorded"] == [20, 2, 8]


def test_ranks_experts_and_tokens_are_folded(tmp_path: Path) -> None:
    """Four ranks to two, 16 experts to 8, five layers to the second and the fourth, 10 tokens of a rank to 32."""
    counts = np.random.default_rng(0).integers(1, 4, (6, 5, 4, 16))
    replay = read_replay(written(tmp_path / "t.npz", counts), SIZES, ranks=2, repetitions=1, window=6)
    assert replay.layers == (1, 3)
    found = replay.trace.counts
    assert found.shape == (6, 2, 2, 8)
    assert (found.sum(axis=3) == TOKENS * 2).all()
    merged = counts[:, (1, 3)].reshape(6, 2, 2, 2, 8, 2).sum(axis=(3, 5))
    exact = merged * (TOKENS * 2 / merged.sum(axis=3, keepdims=True))
    assert np.abs(found - exact).max() < 1  # what does not divide, and nothing else


def test_totals_are_shared_evenly_among_the_ranks(tmp_path: Path) -> None:
    totals = skewed(6, 2, 1, SIZES.experts, tokens=RANKS * TOKENS)[:, :, 0]
    (tmp_path / "t.json").write_text(json.dumps(totals.tolist()), encoding="utf-8")
    found = read_replay(tmp_path / "t.json", SIZES, ranks=RANKS, repetitions=1, window=6).trace.counts
    assert np.abs(found - totals[:, :, None] / RANKS).max() <= 2


def twice(counts: IntArray) -> None:
    counts[..., 0] = 3 * counts.sum(axis=3)


def silent(counts: IntArray) -> None:
    counts[:, :, 1] = 0


@pytest.mark.parametrize(
    ("spoil", "sizes", "message"),
    [
        (None, {"experts": 16}, "expected a multiple of the run's 16 experts, got 8"),
        (None, {"blocks": 3}, "a layer for each of 3 blocks and 6 steps, got 2 layers and 6 steps"),
        (twice, {}, r"in 24 rows a token would choose an expert twice, as in step 0, layer 0, where expert 0"),
        (twice, {"experts": 4}, "--experts 8 merges none"),
        (silent, {}, "rank 1 routes nothing in step 0, layer 0"),
    ],
)
def test_what_cannot_be_replayed_is_one_error(
    spoil: Callable[[IntArray], None] | None, sizes: dict[str, int], message: str, tmp_path: Path
) -> None:
    counts = skewed(6, 2, RANKS, 8)
    if spoil is not None:
        spoil(counts)
    workload = dataclasses.replace(SIZES, **sizes)
    with pytest.raises(TraceError, match=message):
        read_replay(written(tmp_path / "t.npz", counts), workload, ranks=RANKS, repetitions=1, window=6)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--routing", "nowhere.npz"], "there is no such file"),
        (["--routing", "short.npz", "--experts", "8", "--blocks", "2"], "and 10 steps, got 2 layers and 6 steps"),
    ],
)
def test_a_bad_trace_is_one_line_before_anything_runs(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "short.npz", skewed(6, 2, 4, 8))
    assert cli.main(["--policies", "static", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


# --- the peers ---


def peers_choice(system: str, capacity: float | None) -> dict[str, Any]:
    """What our model and a peer's make of the same rows."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes = dataclasses.replace(SIZES, blocks=1)
    counts = skewed(1, 1, ranks, sizes.experts)
    rows = torch.randint(0, 50, (2, 17), generator=torch.Generator().manual_seed(rank))
    ours: Any = build(sizes)
    peer: Any = build_peer(system, sizes, ours.state_dict(), rank=rank, ranks=ranks, capacity=capacity)
    layer = peer.blocks[0].moe
    found = []
    for model, gate in ((ours, ours.blocks[0].moe.gate), (peer, layer.gate)):
        with given([gate], lambda step, of: counts[step, of, rank], top_k=2, seed=(0, rank)):
            loss = model.loss(rows)
            loss.backward()
        found.append(float(loss))
    kept = None
    if system == "deepspeed":
        # -1 stands for a choice that is dropped
        with given([layer.gate], lambda step, of: counts[step, of, rank], top_k=2, seed=(0, rank)):
            kept = int((layer.gate(torch.randn(TOKENS, sizes.dim), None, True, False)[3] >= 0).sum())
    return {
        "losses": found,
        "counted": layer.counts().tolist(),
        "row": counts[0, 0, rank].tolist(),
        "dropped": dropped_fraction(counts[0, 0, rank], layer.capacity(TOKENS, sizes.experts)),
        "kept": kept,
    }


@pytest.mark.parametrize("capacity", [None, 1.25])
@pytest.mark.parametrize("system", list(INSTALL))
def test_peers_choose_the_same_and_say_what_they_drop(
    system: str, capacity: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(system) is None:
        pytest.skip(f"needs {system}: {INSTALL[system]}")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for found in on_processes(2, peers_choice, system, capacity, timeout_s=120):
        assert found["counted"] == found["row"]
        ours, theirs = found["losses"]
        if capacity is None:
            assert theirs == pytest.approx(ours, rel=1e-5)
            assert found["dropped"] == 0
        else:
            assert theirs != pytest.approx(ours, rel=1e-5)
            # of 8 for an expert in the mean, 10 fit
            over = np.maximum(np.array(found["row"]) - 10, 0).sum()
            assert found["dropped"] == over / (2 * TOKENS) > 0.05
        if found["kept"] is not None:
            assert found["kept"] == round(2 * TOKENS * (1 - found["dropped"]))


@pytest.mark.parametrize("system", list(INSTALL))
def test_every_row_of_a_peer_says_its_mode(system: str) -> None:
    assert [policy(f"{system}{mode}").mode for mode in ("", "-capacity", "-even")] == [
        "dropless, padded to the hottest expert",
        "capacity factor 1.25",
        "dropless, padded to the hottest expert, even routing",
    ]
    assert policy("static").mode is None


# --- the whole ---


@pytest.mark.slow
@needs_testbed
def test_a_short_replay_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "load_profile", lambda _: uniform("two", hosts=2, share=0.6))
    counts = skewed(12, 2, 2, 4, tokens=256)
    argv = ["--policies", "static,prophet,forced-balance", "--repetitions", "1", "--steps", "2", "--skip", "1"]
    argv += ["--warm-up-steps", "2", "--dim", "16", "--hidden", "64", "--experts", "4", "--blocks", "2"]
    argv += ["--length", "32", "--routing", str(written(tmp_path / "t.npz", counts))]
    assert cli.main([*argv, "--json", str(tmp_path / "out.json")]) == 0
    assert "routing of t.npz: layers 0, 1 of 2, from steps 3 of 12" in capsys.readouterr().out
    document = json.loads((tmp_path / "out.json").read_text())
    rows = {r["policy"]: r for r in document["rows"]}
    assert {name: row["routing"] for name, row in rows.items()} == {
        "static": "t.npz",
        "prophet": "t.npz",
        "forced-balance": "even",
    }
    counted = max_mean_at_home(counts[4:6]).mean(axis=1)
    assert rows["static"]["max_mean_median"] == pytest.approx(np.median(counted))
    assert rows["prophet"]["max_mean_static_median"] == pytest.approx(np.median(counted))
    assert rows["forced-balance"]["max_mean_median"] == 1.0
    assert rows["static"]["fraction_of_even_routing"] < 1.0
    assert rows["prophet"]["loss_final"] == pytest.approx(rows["static"]["loss_final"], rel=1e-5)
