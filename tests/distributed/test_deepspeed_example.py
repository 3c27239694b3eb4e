"""The example script on real processes: DeepSpeed's own losses, and those of a run that was not interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install 'moe-prophet[deepspeed]'")

ROOT = Path(__file__).resolve().parents[2]


def run(out: Path, *options: str, ranks: int = 4) -> list[float]:
    """Losses of the example, by step."""
    starter = out.parent / f"{out.name}.py"
    starter.write_text(
        f"import runpy, sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'integrations')!r}]\n"
        # DeepSpeed would compile an operation for processes of one machine, and wait for whoever compiles it already
        "import deepspeed; deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False\n"
        f"runpy.run_path({str(ROOT / 'examples' / 'deepspeed_config.py')!r}, run_name='__main__')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(starter), "--out", str(out), *options]
    settings = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, check=False, env=settings)
    starter.unlink()
    if done.returncode:
        raise AssertionError(done.stdout[-2000:] + done.stderr[-6000:])
    found: list[float] = json.loads((out / "losses.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_losses_are_deepspeeds_and_go_on_after_a_resume(tmp_path: Path) -> None:
    # the balance loss is a mean over each rank's tokens, and the gate's noise is each rank's own: without both, losses
    # do not depend on the number of ranks
    common = ("--aux", "0", "--no-sampling", "--planner", "pro-prophet")
    plain = run(tmp_path / "plain", "--plain", "--save-at", "0", "--steps", "6", *common)
    balanced = run(tmp_path / "out", "--save-at", "2", "--steps", "6", *common)
    assert balanced == pytest.approx(plain, rel=1e-5)
    again = run(tmp_path / "out", "--resume", "--save-at", "0", "--steps", "4", *common)
    assert again == balanced[2:4]  # as many ranks: bit by bit
    two = run(tmp_path / "out", "--resume", "--save-at", "4", "--steps", "4", *common, ranks=2)
    four = run(tmp_path / "out", "--resume", "--save-at", "0", "--steps", "6", *common)
    assert (len(two), len(four)) == (2, 2)
    assert two + four == pytest.approx(balanced[2:], rel=1e-5)
