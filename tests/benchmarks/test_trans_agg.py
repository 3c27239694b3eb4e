"""The benchmark of Trans and Agg: what arrives is checked, bytes are those of the busiest rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import Row
from benchmarks.trans_agg import __main__ as command
from benchmarks.trans_agg import measure as measuring
from benchmarks.trans_agg.measure import OPERATIONS, placement_of
from prophet.ranks.threads import ThreadCollective
from prophet.scheduler.replica_transfers import Agg, Trans
from tests.helpers.support import on_threads

PARAMS = 2 * 8 * 16 + 16 + 8  # of an expert of 8 x 16


def rows_of(ranks: int = 4, **changes: Any) -> list[Row]:
    options: dict[str, Any] = {"shapes": [(8, 16)], "dtypes": ["float32"], "copies": [1, 3], "repeats": 2, **changes}

    def body(collective: ThreadCollective) -> list[Row]:
        return measuring.measure(collective, device="cpu", **options)

    found = on_threads(ranks, body)
    assert all(rows == found[0] for rows in found)
    return found[0]


def test_placements() -> None:
    assert placement_of(3, 1, "all").replicas() == [(0, 1), (1, 2), (2, 0)]
    assert placement_of(4, 2, "one").replicas() == [(0, 1), (0, 2)]


def test_rows(tmp_path: Path) -> None:
    rows = rows_of()
    by = {(r["operation"], r["form"], r["homes"], r["copies"]): r for r in rows}
    assert len(by) == len(rows) == 2 * 2 * 3  # one copy has no second form
    for operation in OPERATIONS:
        for homes in ("all", "one"):
            assert by[operation, "direct", homes, 3]["busiest_bytes"] == 3 * 4 * PARAMS
            assert by[operation, "direct", homes, 1]["busiest_bytes"] == 4 * PARAMS
        # scatter sends one expert from its home, gather two thirds of it from every receiver
        two_phase = by[operation, "two-phase", "one", 3]["busiest_bytes"]
        assert two_phase == pytest.approx(4 * PARAMS * (1 + 2 / 3), rel=0.02)
    for row in rows:
        assert row["expert_bytes"] == 4 * PARAMS
        assert row["exposed_s"] == pytest.approx(max(0.0, row["under_compute_s"] - row["compute_s"]))
        assert 0 <= row["hidden"] <= 1
        assert 0 < row["seconds"] <= row["median_s"]
    command.plot(rows, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_what_arrives_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Any, *_: Any) -> None:
        """Nothing is put in place."""

    monkeypatch.setattr(Trans, "_place", lost)
    rows = rows_of(2, copies=[1])
    assert [("wrong" in r, r["operation"]) for r in rows if r["operation"] == "trans"] == [(True, "trans")] * 2
    assert all("seconds" in r for r in rows if r["operation"] == "agg")
    monkeypatch.setattr(Agg, "_place", lost)
    assert all("not what was sent" in r["wrong"] and "seconds" not in r for r in rows_of(2, copies=[1]))


def test_the_command_on_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sub" / "t.json"
    assert command.main(["--ranks", "2", "--shapes", "8x16", "--repeats", "1", "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["benchmark"] == "trans_agg"
    assert {(r["operation"], r["homes"]) for r in written["rows"]} == {
        (o, h) for o in ("trans", "agg") for h in ("all", "one")
    }
    assert "direct" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["--ranks", "3", "--copies", "3"])
    assert "from 1 to 2" in capsys.readouterr().err
