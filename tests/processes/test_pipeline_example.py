"""The programs that readers copy run: the example with its picture, and those of the guide as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.house import ROOT
from tests.helpers.launch import EXAMPLES, as_launched

GUIDE = ROOT / "docs" / "pipeline.md"


def test_the_example_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    said = as_launched(EXAMPLES / "dynamic_pipeline.py", "--steps", "12", "--out", str(tmp_path), ranks=2)[0]
    assert "step 11: loss" in said
    assert "balancing took" in said
    assert (tmp_path / "stages.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("number", [0, 1], ids=["a Llama", "layers of your own"])
def test_a_program_of_the_guide_runs(number: int, tmp_path: Path) -> None:
    """It is run as it is printed, for fewer steps and with its results in another folder."""
    if number == 0:
        pytest.importorskip("transformers", reason="the model is transformers'")
    programs = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S)
    printed = programs[number]  # the others are titled as parts of one
    text = re.sub(r"range\(\d\d+\)", "range(3)", printed).replace('"trained"', repr(str(tmp_path / "trained")))
    assert text != printed
    program = tmp_path / "train.py"
    program.write_text(f"{text}print(loss)\n", encoding="utf-8")
    losses = [float(said.split()[-1]) for said in as_launched(program, ranks=2)]
    assert losses[0] == losses[1] > 0
    assert number or (tmp_path / "trained" / "model.safetensors").exists()
