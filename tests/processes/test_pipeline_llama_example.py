"""The example's two loops, in one process and over stages: few lines apart, the same losses, the same model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the model is transformers'")

from transformers import LlamaForCausalLM

from tests.helpers.changed_lines import lines_changed
from tests.helpers.house import ROOT
from tests.helpers.launch import torchrun

ONE, STAGES = ROOT / "examples" / "pipeline_llama_one.py", ROOT / "examples" / "pipeline_llama.py"
MOST_LINES = 8


def test_few_lines_change() -> None:
    changed = lines_changed(ONE, STAGES)
    assert len(changed) <= MOST_LINES, changed


def test_a_change_is_counted(tmp_path: Path) -> None:
    for name, text in {"a.py": '"""A."""\nx = 1\ny = 2\n', "b.py": '"""B."""\n\nx = 1\ny = 3\nz = 4\n'}.items():
        (tmp_path / name).write_text(text)
    assert lines_changed(tmp_path / "a.py", tmp_path / "b.py") == ["y = 3", "z = 4"]


@pytest.mark.slow
def test_both_train_the_same_model(tmp_path: Path) -> None:
    one = [sys.executable, ONE, "--out", tmp_path / "one"]
    done = subprocess.run(one, capture_output=True, text=True, timeout=240, check=True, cwd=ROOT)
    said = torchrun(STAGES, "--out", str(tmp_path / "stages"), ranks=2)
    losses = re.findall(r"step \d+: loss [\d.]+", done.stdout)
    assert len(losses) == 6
    assert sorted(re.findall(r"step \d+: loss [\d.]+", said)) == sorted(losses * 2)
    models = [LlamaForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "stages")]
    weights, other = (model.state_dict() for model in models)
    for name, tensor in weights.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-4)
