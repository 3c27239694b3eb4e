"""The benchmark of plans and the paper's rows: what the rows say, not how long anything takes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks.switch import paper, plan
from benchmarks.switch.__main__ import main
from benchmarks.switch.cases import cases, least_port_bytes
from pipeline_balance.elastic.predict import switch
from prophet.machine.models import model_named


def test_every_case_fills_its_ranks() -> None:
    cases = list(plan.cases())
    assert {(model, ranks) for model, ranks, _, _ in cases} == {(m, r) for m in plan.SWITCHES for r in plan.RANKS}
    for model, ranks, before, after in cases:
        assert model_named(model).name.lower() == model
        assert plan.filled(before, ranks, "").ranks == plan.filled(after, ranks, "").ranks == ranks


@pytest.mark.parametrize(("model", "before", "after"), [(m, *s) for m, pair in plan.SWITCHES.items() for s in pair])
@pytest.mark.parametrize("ranks", [64, 256])
def test_a_plan_is_measured_with_its_bound(model: str, before: str, after: str, ranks: int) -> None:
    row = plan.measured(model, ranks, before, after)
    assert row["ranks"] == ranks
    assert 0 < row["bound_s"] * 0.999 <= row["port_s"] <= 1.05 * row["bound_s"]
    assert row["direct_bound_s"] is None or row["bound_s"] <= row["direct_bound_s"] * 1.001
    assert row["plan_s"] >= row["layouts_s"] + row["order_s"] + row["routes_s"] > 0
    if (model, before, after, ranks) == ("llama2-7b", "tp2,pp4", "tp2,pp2", 64):
        assert row["port_over_direct_bound"] < 0.5  # ranks forward, which that bound does not allow


@pytest.mark.parametrize("hosts", [4, 8])
def test_no_port_of_a_measured_case_is_far_above_its_bound(hosts: int) -> None:
    for case in cases(hosts):
        way = case.plan(hosts).route
        least = least_port_bytes(case.plan(hosts).route)
        assert max(*way.sent_bytes(), *way.received_bytes()) <= 1.05 * least, case.name


@pytest.mark.parametrize("row", paper.ROWS, ids=lambda r: f"{r.table}-{r.model}-{r.before}")
def test_the_papers_rows_are_not_slower_at_the_stated_bandwidths(row: paper.PaperRow) -> None:
    found = paper.predicted(row)
    assert 0 < found["predicted_s"] < row.paper_s
    assert found["bound_s"] <= found["predicted_s"] * (1 + 1e-9)
    assert found["wire_bytes"] <= found["given_bytes"]


# the port bounds that an independent sketch, which knows no forwarding, found with ranks in the order as given
@pytest.mark.parametrize(
    ("number", "seconds"), [(0, 0.472), (1, 0.539), (2, 0.534), (3, 0.467), (4, 0.617), (5, 0.706), (10, 0.101)]
)
def test_seconds_in_the_order_as_given_are_those_of_the_sketch(
    number: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switch, "route", partial(switch.route, forward=False))
    assert paper.predicted(paper.ROWS[number])["as_given_s"] == pytest.approx(seconds, rel=0.01)


def test_the_command_writes_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paper, "ROWS", paper.ROWS[-1:])
    assert main(["--paper", "--plan", "--most-ranks", "64", "--no-bounds", "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["paper"]) == 1
    assert len(found["plan"]) == 2 * len(plan.SWITCHES)
    assert "predicted_s" in capsys.readouterr().out
