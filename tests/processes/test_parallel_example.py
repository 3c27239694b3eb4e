"""The example of docs/parallel.md: four processes, a checkpoint, and the same losses on two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.launch import EXAMPLES, torchrun


def run(folder: Path, *, ranks: int, ep_size: int, steps: int) -> dict[int, float]:
    """The example's losses, by step."""
    options = ["--folder", str(folder), "--ep-size", str(ep_size), "--steps", str(steps)]
    said = torchrun(EXAMPLES / "expert_and_data_parallel.py", *options, ranks=ranks)
    return {int(s): float(x) for s, x in re.findall(r"step (\d+): loss ([\d.]+)", said)}


@pytest.mark.timeout(600)
def test_a_run_goes_on_at_another_size(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", ranks=4, ep_size=2, steps=8)
    assert list(whole) == list(range(1, 9))
    assert whole[8] < whole[1]
    parts = run(tmp_path / "parts", ranks=4, ep_size=4, steps=4)
    parts |= run(tmp_path / "parts", ranks=2, ep_size=1, steps=8)
    assert parts == pytest.approx(whole, rel=1e-4)
