"""The example of docs/parallel.md: four processes, a checkpoint, and the same losses on two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.launch import EXAMPLES, as_launched

EXAMPLE = EXAMPLES / "expert_and_data_parallel.py"


def options(folder: Path, *, ep_size: int, steps: int) -> list[str]:
    return ["--folder", str(folder), "--ep-size", str(ep_size), "--steps", str(steps)]


def losses(said: str) -> dict[int, float]:
    """By step."""
    return {int(s): float(x) for s, x in re.findall(r"step (\d+): loss ([\d.]+)", said)}


def test_a_run_goes_on_at_another_size(tmp_path: Path) -> None:
    all_steps = as_launched(EXAMPLE, *options(tmp_path / "whole", ep_size=2, steps=8), ranks=4)
    whole = losses(all_steps[0])
    assert list(whole) == list(range(1, 9))
    assert whole[8] < whole[1]
    first = as_launched(EXAMPLE, *options(tmp_path / "parts", ep_size=4, steps=4), ranks=4)
    then = as_launched(EXAMPLE, *options(tmp_path / "parts", ep_size=1, steps=8), ranks=2)
    assert not any(all_steps[1:] + first[1:] + then[1:])
    parts = losses(first[0]) | losses(then[0])
    assert list(parts) == list(whole)
    assert parts == pytest.approx(whole, rel=1e-4)
