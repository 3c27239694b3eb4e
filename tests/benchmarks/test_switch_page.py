"""The page of switches: its tables are those of the files, misses have their cause, other files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.switch.__main__ import command, main
from benchmarks.switch.page import page
from benchmarks.switch.rows import HIDDEN, ONE_BY_ONE, ONE_OVER_OURS, Row, targets
from benchmarks.switch.universal import UNIVERSAL
from prophet.errors import SpecError
from tests.helpers.prose import MOST_WORDS_IN_A_SENTENCE, sentences_of

ENVIRONMENT = {
    "date": "2026-11-25T10:00:00+00:00",
    "cores": 2,
    "python": "3.11",
    "torch": "2.13",
    "commit": "abc",
    "load_before": 0.25,
    "command": "python -m benchmarks.switch --json OUT",
}
MOVE: Row = {
    "case": "dp doubled",
    "from": "dp2,zero1",
    "to": "dp4,zero1",
    "hosts": 4,
    "model_bytes": 90_000_000,
    "wire_bytes": 64_000_000,
    "given_bytes": 80_000_000,
    "least_port_bytes": 32_000_000,
    "port_bytes": 32_000_000,
    "bound_s": 1.28,
    "direct_bound_s": 1.28,
    "blocked_s": 1.36,
    "blocked_least_s": 1.35,
    "blocked_most_s": 1.38,
    "ratio": 1.0625,
    "plan_s": 0.01,
    "group_s": 0.02,
    "hidden_s": None,
    "host_s": 0.005,
    "messages": 32,
    "peak_bytes": 60_000_000,
    "predicted_s": 1.496,
    "empty_s": 0.01,
}
JOB = {**MOVE, "case": "whole job, in-place", "mode": "in-place", "budget_bytes": 1, "larger_bytes": 60_000_000}
BESIDE = {
    "job": "whole job",
    "preparations": 2,
    **dict.fromkeys(("groups_s", "routes_s", "exposed_s", "called_s"), 0.05),
    "hidden_share": 0.5,
    **dict.fromkeys(("step_before_s", "step_meanwhile_s"), 0.1),
    "slowed_by": 0.0,
    "cpu_s": 0.02,
    "cpu_slows_by": 0.4,
    "table_2_here": 0.1,
}
COVERED = {"save_s": 0.1, "convert_s": 0.2, "load_s": 0.3, "saved_bytes": 1, "converted_bytes": 2, "read_bytes": 3}


def _document(hosts: int = 4) -> dict[str, Any]:
    peer = {"peer": ONE_BY_ONE, "peer_bytes": 32_000_000, "peer_s": 1.4, "possible": 1.06}
    rows = [
        MOVE | peer,
        MOVE | {"peer": UNIVERSAL, "peer_bytes": 9, "peer_s": 0.6} | COVERED,
        MOVE | {"case": "tp doubled", "peer": UNIVERSAL, "peer_bytes": None, "peer_s": None, "reason": "tp: why"},
    ]
    cold = {"imports_s": [4.0, 5.0, 6.0], "process_group_s": 1.0, "layout_groups_s": 0.02, "seconds": 6.02}
    found = {
        "hosts": hosts,
        "links": "200 Mbit/s, emulated",
        "sizes": {"repetitions": 3},
        "bytes_per_s": 25e6,
        "probe": {"bytes_per_s": 23.7e6},
        "cold_start": cold,
        "rows": rows,
        "jobs": [JOB],
        "beside": [BESIDE],
        "table_2_paper": {"addition": 0.955},
        "targets": targets(rows, [JOB], [BESIDE]),
        "wall_s": 500.0,
    }
    return {"environment": ENVIRONMENT, "measured": found}


def _written(folder: Path, *documents: dict[str, Any]) -> list[Path]:
    files = [folder / f"{k}.json" for k in range(len(documents))]
    for file, document in zip(files, documents, strict=True):
        file.write_text(json.dumps(document))
    return files


def test_a_page_has_both_runs_and_names_the_cause_of_what_is_missed(tmp_path: Path) -> None:
    text = page(_written(tmp_path, _document(4), _document(8)))
    assert text.startswith("# Switches of the parallel layout, 2026-11-25\n")
    assert "## Four hosts" in text
    assert "## Eight hosts" in text
    assert "`python -m benchmarks.switch --json OUT`.\n  Load average before: 0.25." in text
    assert f"| {ONE_OVER_OURS} | 0 of 1 | 1 | 1.03 | 1.25 | dp doubled dp2,zero1 -> dp4,zero1 |" in text
    cause = "out of reach: one message per tensor keeps the busiest port busy 94% of its time"
    assert f"| {ONE_OVER_OURS} | dp doubled, dp2,zero1 to dp4,zero1 | 1.03 | 1.25 | {cause} |" in text
    assert f"| {HIDDEN} | whole job | 0.5 | 0.95 | 50 ms of 50 ms are the call of `prepare` |" in text
    assert "| dp doubled, dp2,zero1 to dp4,zero1 | 0.60 | 0.10 | 0.20 | 0.30 |" in text
    assert "| tp: why | tp doubled, dp2,zero1 to dp4,zero1 |" in text
    assert "| 1.50 | 1.40 | 1.03 | 1.06 |" in text  # predicted; one message per tensor, its ratio, what is possible
    assert "Predicted over measured, on average: +10.0% of moves of 32 MB." in text
    for sentence in sentences_of(text):
        assert len(sentence.split()) <= MOST_WORDS_IN_A_SENTENCE, sentence


def test_a_page_has_the_papers_rows_and_plans(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    assert main(["--paper", "--plan", "--most-ranks", "64", "--no-bounds", "--json", str(out)]) == 0
    assert main(["--page", str(tmp_path / "page.md"), str(out)]) == 0
    text = (tmp_path / "page.md").read_text()
    assert "| 1 | llama2-70b | tp4,pp8,dp2 | tp8,pp16 | 128 | 1.96 | MCP 92.88 |" in text
    assert "Slower than DynaTran: 0 rows." in text
    assert "| llama2-7b | tp2,pp2 | tp4,pp2 | 64 |" in text


@pytest.mark.parametrize("words", ["", "{}", "[]", '{"measured": 1}', '{"measured": {}, "environment": {}}'])
def test_another_file_is_refused(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.json"
    file.write_text(words)
    with pytest.raises(SpecError, match=r"other\.json"):
        page([file])
    assert main(["--page", str(tmp_path / "page.md"), str(file)]) == 1
    assert "what --json wrote" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


def test_the_command_is_noted_without_the_files_name() -> None:
    assert command(["--hosts", "8", "--json", "/some/where.json"]) == "python -m benchmarks.switch --hosts 8 --json OUT"
