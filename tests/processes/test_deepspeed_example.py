"""The example script on real processes: DeepSpeed's own losses, and those of a run that was not interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.launch import EXAMPLES, torchrun

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install '.[deepspeed]'")


def run(out: Path, *options: str, ranks: int = 4) -> list[float]:
    """Losses of the example, by step."""
    starter = out.parent / f"{out.name}.py"
    starter.write_text(
        "import runpy\n"
        # DeepSpeed would compile an operation for processes of one machine, and wait for whoever compiles it already
        "import deepspeed; deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False\n"
        f"runpy.run_path({str(EXAMPLES / 'deepspeed_config.py')!r}, run_name='__main__')\n"
    )
    torchrun(starter, "--out", str(out), *options, ranks=ranks, DS_ACCELERATOR="cpu")
    starter.unlink()
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
