"""examples/accelerate_loop.py as a user runs it, by both launchers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.launch import EXAMPLES, ROOT, torchrun

STEP = re.compile(r"epoch (\d): loss ([\d.]+), norm ([\d.]+), (\d+) copies")


def launched(*arguments: str, ranks: int) -> str:
    """What `accelerate launch` makes a script print."""
    start = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(ranks)]
    start += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "integrations")])}
    done = subprocess.run(
        [*start, str(EXAMPLES / "accelerate_loop.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, **paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.slow
def test_a_run_is_saved_and_goes_on_with_twice_the_ranks(tmp_path: Path) -> None:
    said = [launched("--out", str(tmp_path), ranks=2)]
    from transformers import MixtralForCausalLM

    plain = MixtralForCausalLM.from_pretrained(tmp_path / "model")
    rows = (torch.arange(8).view(-1, 1) + 3 * torch.arange(16)) % 64
    with torch.no_grad():
        assert float(plain(input_ids=rows, labels=rows).loss) < 4.2
    said.append(torchrun(EXAMPLES / "accelerate_loop.py", "--out", str(tmp_path), "--resume", "--epochs", "2", ranks=4))
    first, second = [[(int(e), float(loss), int(n)) for e, loss, _, n in STEP.findall(text)] for text in said]
    assert [epoch for epoch, *_ in (*first, *second)] == [0] * 6 + [1] * 6
    assert sum(copies for *_, copies in first) > 0
    assert second[0][1] < first[0][1]
    assert second[-1][1] < first[-1][1]
