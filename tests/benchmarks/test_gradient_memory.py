"""The benchmark of memory beside gradients: a row for every case and number of ranks, each within its bound."""

from __future__ import annotations

import pytest

from benchmarks.gradient_memory import __main__ as command


def test_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--ranks", "2", "3", "--mebibytes", "4"]) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[1] for line in lines] == ["2", "3", "2", "3", "1"]
    times = [float(line[-1].removesuffix(" |")) for line in lines]
    assert all(0 < t <= 1 for t in times)
    assert times[-1] < 0.3


def test_sizes_that_are_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--mebibytes", "1"])
    assert "expected ranks of at least 1 and mebibytes of at least 2" in capsys.readouterr().err
