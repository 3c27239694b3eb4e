"""The example of docs/parallel.md: four processes, a checkpoint, and the same losses on two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *, ranks: int, ep_size: int, steps: int) -> dict[int, float]:
    """The example's losses, by step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["examples/expert_and_data_parallel.py", "--folder", str(folder)]
    command += ["--ep-size", str(ep_size), "--steps", str(steps)]
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, check=False, env=settings)
    if done.returncode:
        raise AssertionError(done.stdout[-2000:] + done.stderr[-6000:])
    return {int(s): float(x) for s, x in re.findall(r"step (\d+): loss ([\d.]+)", done.stdout)}


@pytest.mark.timeout(600)
def test_a_run_goes_on_at_another_size(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", ranks=4, ep_size=2, steps=8)
    assert list(whole) == list(range(1, 9))
    assert whole[8] < whole[1]
    parts = run(tmp_path / "parts", ranks=4, ep_size=4, steps=4)
    parts |= run(tmp_path / "parts", ranks=2, ep_size=1, steps=8)
    assert parts == pytest.approx(whole, rel=1e-4)
