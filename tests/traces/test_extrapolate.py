"""`prophet simulate`: bigger machines from small ones, error bars from measurements, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import prophet.traces.extrapolate as ex
from prophet.cli import main
from prophet.errors import SpecError
from prophet.machine.topology import write_topology
from prophet.spec import LayerShape, Link, PlanContext, Topology, Windows

ROOT = Path(__file__).resolve().parents[2]
SMALL = Topology.uniform(
    4, ranks_per_node=2, flops_per_s=1e12, intra=Link(bytes_per_s=1e11), inter=Link(bytes_per_s=1e10)
)
CONTEXT = PlanContext(
    topology=SMALL,
    shape=LayerShape.feed_forward(dim=64, hidden=256),
    home=(0, 0, 1, 1, 2, 2, 3, 3),
    windows=Windows(fnec_s=1e-3),
)
SCENARIO = ex.Scenario(context=CONTEXT, layers=2, routed_per_rank=1000, skew=0.8)
EXACT = ex.ErrorBar(errors=(0.25, -0.2), source="two cases")


def test_a_stretched_topology_repeats_what_was_measured() -> None:
    four = Topology(
        ranks=4,
        ranks_per_node=2,
        intra=SMALL.intra,
        inter=SMALL.inter,
        flops_per_s=(1.0, 2.0, 3.0, 4.0),
        free_bytes=(1, 2, 3, 4),
    )
    ten = ex.stretched(four, 10)
    assert ten.flops_per_s == (1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0, 1.0, 2.0)
    assert (ten.nodes, ten.free_bytes[9]) == (5, 2)
    one_node = ex.stretched(Topology.uniform(4), 8)
    assert one_node.nodes == 2, "a machine of one node grows by nodes"
    assert ex.stretched(four, 4) == four


def test_the_balanced_routing_is_even() -> None:
    load = ex.even_load(SCENARIO, 4, 12)
    assert (load.sum(axis=1) == 1000).all()
    assert np.ptp(load) <= 1
    assert np.ptp(load.sum(axis=0)) <= 4


def test_order_of_policies_and_the_bar_around_a_step() -> None:
    found = {p: ex.extrapolate(SCENARIO, p, 16, 8, EXACT) for p in ("static", "prophet", ex.BALANCED)}
    assert max(found[ex.BALANCED].step_s, found["prophet"].step_s) <= found["static"].step_s
    # Copies keep tokens on their ranks, which even routing without copies cannot: one per cent, no more.
    assert found[ex.BALANCED].step_s <= 1.01 * found["prophet"].step_s
    assert found[ex.BALANCED].max_mean == pytest.approx(1.0, abs=0.01)
    assert found["static"].copies_per_rank == 0 < found["prophet"].copies_per_rank
    step = found["static"]
    assert (step.low_s, step.high_s) == (pytest.approx(step.step_s / 1.25), pytest.approx(step.step_s / 0.8))
    more = ex.extrapolate(SCENARIO, "static", 4096, 8, EXACT)
    assert more.step_s >= step.step_s, "the slowest of more groups"
    with pytest.raises(SpecError, match="multiple of the group"):
        ex.extrapolate(SCENARIO, "static", 12, 8, EXACT)


def test_dense_gradients_are_averaged_by_all_ranks() -> None:
    dense = ex.Scenario(context=CONTEXT, layers=2, routed_per_rank=1000, dense_bytes=10**9)
    plain = ex.Scenario(context=CONTEXT, layers=2, routed_per_rank=1000)
    gap = ex.extrapolate(dense, "static", 64, 4, EXACT).step_s - ex.extrapolate(plain, "static", 64, 4, EXACT).step_s
    assert gap == pytest.approx(2 * 1e9 * 63 / 64 / 1e10)


def test_error_bars_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    rows = [{"simulated_error": 0.1, "hosts": 4}, {"simulated_error": None, "hosts": 4}]
    file.write_text(json.dumps({"rows": [*rows, {"simulated_error": -0.05, "hosts": 8}]}))
    bar = ex.read_error_bar(file)
    assert bar.errors == (0.1, -0.05)
    assert bar.mean == pytest.approx(0.075)
    assert "2 policies on [4, 8] hosts" in bar.source
    for text in ("", "[]", "{}", '{"rows": [{}]}', '{"rows": []}', '{"rows": [{"simulated_error": -2, "hosts": 1}]}'):
        file.write_text(text)
        with pytest.raises(SpecError, match=r"rows\.json.*: expected"):
            ex.read_error_bar(file)
    with pytest.raises(SpecError, match="expected rows of the cluster benchmark"):
        ex.read_error_bar(tmp_path / "none")


def test_the_built_in_error_bar_is_what_was_measured() -> None:
    lines = (ROOT / "benchmarks/results/2026-11-22-cluster-peers.md").read_text().splitlines()
    cells = [[c.strip() for c in line.split("|")] for line in lines if line.startswith("| ")]
    shown = sorted(cell for row in cells for cell in row if cell[:1] in ("+", "-") and cell.endswith(" %"))
    assert sorted(f"{100 * e:+.1f} %" for e in ex.MEASURED.errors) == shown


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "machine.toml"
    write_topology(file, SMALL)
    few = ["--tokens", "256", "--planner", "static"]
    assert main(["simulate", "--ranks", "8,16", "--machine", f"{file}:MoE-GPT-S", "--json", *few]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(r["ranks"], r["planner"]) for r in answer["rows"]] == [
        (n, p) for n in (8, 16) for p in ("static", ex.BALANCED)
    ]
    assert answer["model"] == "MoE-GPT-S"
    assert all(r["low_s"] <= r["step_s"] <= r["high_s"] for r in answer["rows"])
    assert "emulated hosts" in answer["error"]["source"]
    assert main(["simulate", "--ranks", "8", *few]) == 0
    assert "Nothing was measured at these sizes" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--machine", "none.toml"], "none.toml: expected a topology file"),
        (["--machine", "none"], "none"),
        (["--ranks", "96"], "multiple"),
        (["--planner", "none"], "none"),
    ],
)
def test_what_the_command_refuses(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--ranks", "8", *words]) == 2
    assert message in capsys.readouterr().err
