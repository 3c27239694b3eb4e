"""`benchmarks.auto`: what auto measures beside a calibration that says the same."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.auto import __main__ as command
from benchmarks.auto import measure as measured
from benchmarks.auto.__main__ import main, show
from benchmarks.cluster.testbed import HostFailed, TestbedUnavailable
from prophet.machine import auto
from prophet.ranks.process_group import collective_for
from prophet.spec import Link, Topology
from tests.helpers.launch import on_processes

NOW = Topology.uniform(2, flops_per_s=1e9, intra=Link(bytes_per_s=1e8), name="now")


def rows_with(faster: float) -> list[Any]:
    """One turn in which the thorough calibration finds compute and links `faster` times as fast."""
    calls = []

    def measure(*_: object) -> Topology:
        calls.append(1)
        return NOW

    auto._measure = measure  # type: ignore[assignment]
    thorough = Topology.uniform(2, flops_per_s=faster * 1e9, intra=Link(bytes_per_s=faster * 1e8))
    measured.calibrate = lambda *_, **__: SimpleNamespace(topology=thorough)  # type: ignore[assignment,attr-defined]
    group = collective_for(None)
    rows = measured.measure(group, device="cpu", shape=(8, 16), tokens=64, ranks_per_node=1, repeats=2)
    group.close()
    # each turn measures anew, and looks up once what it has measured
    assert len(calls) == 2
    return rows


@pytest.mark.parametrize("faster", [1.0, 2.0])
def test_a_turn_measures_once_and_compares(faster: float, capsys: pytest.CaptureFixture[str]) -> None:
    for rows in on_processes(2, rows_with, faster):
        assert [r["remembered"] for r in rows] == [True, True]
        for row in rows:
            # all of a step is compute and links, without fixed times
            least, most = row["predicted_least"], row["predicted_most"]
            assert (row["predicted"], least, most) == pytest.approx((faster,) * 3)
            assert row["planned"] == pytest.approx(1.0)
    show(rows)
    assert "first s" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--ranks", "1"], ["--repeats", "0"], ["--profile", "none"]])
def test_arguments_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)


@pytest.mark.parametrize("error", [TestbedUnavailable("not as root"), HostFailed("host 1 has ended")])
def test_hosts_that_fail_are_a_clear_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are asked for one turn, within a limit that is several times as long."""
    asked: list[tuple[int, float]] = []

    class Hosts(contextlib.nullcontext[Any]):
        def __enter__(self) -> Hosts:
            return self

        def run(self, _: str, options: dict[str, Any], *, timeout_s: float) -> None:
            asked.append((options["repeats"], timeout_s))
            raise error

    monkeypatch.setattr(command, "Testbed", lambda *_, **__: Hosts())
    assert main(["--profile", "four-hosts"]) == 2
    assert capsys.readouterr().err == f"error: {error}\n"
    assert asked == [(1, 1800.0)]
