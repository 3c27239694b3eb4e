"""The layer benchmark: routing follows the asked skew, a wrong layer is not timed, rows hold what is promised."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prophet
from benchmarks.common import Row
from benchmarks.kernels.workload import SKEWS
from benchmarks.layer import __main__ as command
from benchmarks.layer import implementations
from benchmarks.layer import measure as measuring
from benchmarks.layer.cases import (
    MOST,
    Sizes,
    biased_gate,
    capped,
    common_state,
    inputs,
    typical,
    visited,
    visits_of,
)
from benchmarks.layer.implementations import PARTS, missing
from benchmarks.layer.measure import difference, measure
from benchmarks.layer.output import plot, show
from prophet.ranks.threads import ThreadCollective
from prophet.spec import Topology
from tests.helpers.support import FixedPlanner, everywhere, on_threads

SMALL = Sizes(dim=16, hidden=16, experts=8, top_k=2, tokens=48)


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("top_k", [1, 2])
def test_the_gate_chooses_as_asked(skew: str, top_k: int) -> None:
    sizes = dataclasses.replace(SMALL, top_k=top_k, tokens=8192)
    visits = visits_of(skew, sizes, 2)
    if isinstance(visits, str):
        pytest.skip(visits)
    assert visits.sum() == pytest.approx(top_k)
    assert visits.max() <= MOST + 1e-9
    found = visited(inputs(sizes, 99) @ biased_gate(sizes, visits).t(), top_k)
    np.testing.assert_allclose(found.numpy(), visits, atol=0.03)


def test_nine_of_ten_tokens_visit_one_expert() -> None:
    visits = visits_of("one-expert-90%", SMALL, 2)
    assert not isinstance(visits, str)
    assert visits[0] == 0.9
    np.testing.assert_allclose(visits[1:], 1.1 / 7)


def test_the_typical_row_is_the_median_by_skew_of_ranks() -> None:
    # of ranks (two experts each): 1.0, 1.5 and 2.0; the last is more skewed by expert, but not by rank
    rows = np.array([[10.0, 10, 10, 10], [40.0, 0, 0, 0], [15.0, 15, 5, 5]])
    np.testing.assert_allclose(typical(rows, 4, 2), [0.375, 0.375, 0.125, 0.125])
    np.testing.assert_allclose(typical(rows, 2, 2), [0.75, 0.25])


def test_what_is_cut_goes_to_the_others() -> None:
    found = capped(np.array([1.5, 0.3, 0.2]))
    np.testing.assert_allclose(found, [MOST, 0.63, 0.42])
    np.testing.assert_allclose(capped(np.array([2.0, 0.0, 0.0])), [MOST, (2 - MOST) / 2, (2 - MOST) / 2])


@pytest.mark.parametrize(
    ("changes", "ranks", "word"),
    [
        ({"dim": 15}, 2, "--dim"),
        ({"top_k": 8}, 2, "--top-k"),
        ({}, 3, "--ranks"),
        ({}, 1, "--ranks"),
        ({"tokens": 0}, 2, "at least 1"),
    ],
)
def test_sizes_that_do_not_fit(changes: dict[str, int], ranks: int, word: str) -> None:
    assert word in (dataclasses.replace(SMALL, **changes).problem(ranks) or "")
    assert SMALL.problem(4) is None


def rows_of(names: Sequence[str], gates: dict[str, Any] | None = None) -> list[Row]:
    visits = visits_of("one-expert-90%", SMALL, 2)
    assert not isinstance(visits, str)
    options = {"sizes": SMALL, "gates": gates or {"hot": biased_gate(SMALL, visits).tolist()}, "names": names}
    return on_threads(2, lambda ranks: measure(ranks, **options, repetitions=2))[0]  # type: ignore[arg-type]


def test_rows_have_what_is_promised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measuring, "missing", lambda name: "not installed: x" if name == "tutel" else None)
    rows = rows_of(("prophet", "static", "tutel"))
    assert [(r["ranks"], r["skew"], r["impl"], r["tokens_per_rank"]) for r in rows] == [
        (2, "hot", name, 48) for name in ("prophet", "static", "tutel")
    ]
    ours, static, absent = rows
    assert ours["ratio_to_prophet"] == 1.0
    assert static["ratio_to_prophet"] == pytest.approx(static["fwd_bwd_ms"] / ours["fwd_bwd_ms"])
    for row in (ours, static):
        assert 0 < row["fwd_ms"] < row["fwd_bwd_ms"]
        assert set(row["breakdown_ms"]) == {*PARTS, "rest"}
        assert row["breakdown_ms"]["experts"] > 0
        assert row["repetitions"] == 2
    assert 1.0 <= ours["max_mean"] <= static["max_mean"]
    assert ours["replicas"] >= 0
    assert "replicas" not in static
    assert absent["note"] == "not installed: x"
    assert "fwd_ms" not in absent
    plot(rows, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000
    show(rows)
    text = capsys.readouterr().out
    assert "not installed: x" in text
    assert "experts" in text


def test_a_wrong_layer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = implementations.build

    def broken(name: str, *args: Any) -> implementations.Implementation:
        one = right(name, *args)
        if name == "prophet":
            with torch.no_grad():
                one.layer.experts.w_out.mul_(1.001)  # type: ignore[union-attr, operator]
        return one

    monkeypatch.setattr(measuring, "build", broken)
    ours, static = rows_of(("prophet", "static"))
    assert "output: differs by" in ours["wrong"]
    assert "fwd_ms" not in ours
    assert static["fwd_ms"] > 0
    assert static["ratio_to_prophet"] is None


def test_what_is_timed_has_replicas() -> None:
    """As the benchmark steps it: with a planner that always makes them they are there, and the results are the same."""
    visits = visits_of("one-expert-90%", SMALL, 2)
    assert not isinstance(visits, str)

    def body(ranks: ThreadCollective) -> tuple[str | None, int]:
        state = common_state(SMALL, biased_gate(SMALL, visits))
        truth, one = (implementations.build(n, SMALL, state, ranks, Topology.uniform(2)) for n in ("static", "prophet"))
        one.close()
        config = prophet.EngineConfig(planner=FixedPlanner(everywhere(8, 2)))
        one.engine = prophet.attach(one.layer, config=config)
        problem = measuring.wrong(one, truth, [inputs(SMALL, ranks.rank)], torch.randn(SMALL.tokens, SMALL.dim))
        found = one.replicas()
        one.close()
        return problem, found

    assert on_threads(2, body) == [(None, 8), (None, 8)]


def test_a_skew_that_cannot_be_had_is_a_note() -> None:
    assert rows_of(("static",), {"trace": "no trace: not measured"}) == [
        {"ranks": 2, "skew": "trace", "note": "no trace: not measured"}
    ]


def test_differences() -> None:
    x = torch.tensor([1.0, -2.0])
    assert difference("y", x + 1e-5, x) is None
    assert difference("y", x + 1e-2, x) is not None
    assert difference("y", x * float("nan"), x) is not None
    assert "shape None" in (difference("y", None, x) or "")


def test_a_peer_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".", maxsplit=1)[0])

    def damaged(name: str) -> None:
        raise ModuleNotFoundError("No module named 'numpy.x'", name="numpy.x")

    assert missing("static") is None
    monkeypatch.setattr(importlib, "import_module", absent)
    assert missing("deepspeed") == "not installed: pip install deepspeed"
    assert (missing("tutel") or "").startswith("not installed: NO_CUDA=1 pip install")
    monkeypatch.setattr(importlib, "import_module", damaged)
    assert (missing("tutel") or "").startswith("cannot be imported: ")


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)

    def run(
        sizes: Sizes, ranks: int, skews: Sequence[str], names: Sequence[str], n: int, limit_s: float, on_gpus: bool
    ) -> list[Row]:
        asked.append((ranks, tuple(skews), tuple(names), on_gpus))
        return [{"ranks": ranks, "skew": skews[0], "impl": "tutel", "wrong": "output: differs"}]

    monkeypatch.setattr(command, "run", run)
    out = tmp_path / "new" / "layer.json"
    assert command.main(["--peers", "tutel,static", "--skews", "uniform", "--json", str(out)]) == 1
    assert asked == [
        (2, ("uniform",), ("prophet", "static", "tutel"), False),
        (4, ("uniform",), ("prophet", "static", "tutel"), False),
    ]
    written = json.loads(out.read_text())
    assert written["benchmark"] == "layer"
    assert written["rows"][1]["ranks"] == 4
    assert written["environment"]["sizes"]["top_k"] == 2
    assert "computed something else" in capsys.readouterr().err
    asked.clear()
    command.main(["--device", "cuda", "--ranks", "2", "--peers", "static", "--skews", "uniform"])
    assert asked == [(2, ("uniform",), ("prophet", "static"), True)]
    capsys.readouterr()
    for wrong, word in (
        (["--device", "cuda"], "4 ranks need a GPU each, and torch sees 3 GPUs"),
        (["--peers", "fastmoe"], "no peer 'fastmoe'"),
        (["--ranks", "3"], "divide 32 experts"),
        (["--repetitions", "0"], "--repetitions"),
    ):
        with pytest.raises(SystemExit):
            command.main(wrong)
        assert word in capsys.readouterr().err
