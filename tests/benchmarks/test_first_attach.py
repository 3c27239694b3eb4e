"""The first attach over `static`: processes are fresh, and differences are taken pair by pair."""

from __future__ import annotations

import pytest

from benchmarks.planner import first_attach


def test_a_fresh_process_finds_an_empty_home_and_places_replicas() -> None:
    row = first_attach.fresh("--planner", "prophet", "--alone", "8x16")
    assert row["copies"] > 0
    assert row["memory_mb"] > 0


def test_what_is_left_in_a_home_folder_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    here = "import os, pathlib; pathlib.Path(os.environ['HOME'], 'cache').touch(); print('{}')"
    monkeypatch.setattr(first_attach.sys, "executable", "sh")
    monkeypatch.setattr(first_attach, "_COMMAND", ("-c", f'exec python3 -c "{here}"'))
    with pytest.raises(RuntimeError, match="left files in a home folder: cache"):
        first_attach.fresh("--planner", "prophet")


def test_differences_are_those_of_pairs_and_the_order_rotates(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def pretended(*arguments: str, processes: int) -> first_attach.Row:
        asked.append(arguments[1])
        return {"attach_s": {"static": 1.0, "prophet": 1.5}[arguments[1]] + len(asked)}

    monkeypatch.setattr(first_attach, "fresh", pretended)
    (row,) = first_attach.compare("attach", 3)
    assert asked == ["static", "prophet", "prophet", "static", "static", "prophet"]
    assert (row["static"], row["prophet"]) == (5.0, 4.5)
    assert (row["low"], row["more"], row["high"]) == (-0.5, 1.5, 1.5)
