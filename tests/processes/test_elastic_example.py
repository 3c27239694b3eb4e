"""The example of a job that switches layouts: it learns, and its losses are those of a run that stays in one."""

from __future__ import annotations

import re

import pytest

from tests.helpers.launch import EXAMPLES, torchrun

STEP = re.compile(r"step (\d+) in [\w,]+: loss ([\d.]+)")


@pytest.mark.slow
def test_five_layouts_train_as_one() -> None:
    how = (("--steps", "6"), ("--steps", "6", "--fixed"))
    said = [torchrun(EXAMPLES / "elastic_training.py", *options, ranks=4) for options in how]
    moving, fixed = ({step: float(loss) for step, loss in STEP.findall(text)} for text in said)
    assert len(moving) == 5
    assert moving == pytest.approx(fixed, abs=2e-5)  # float32, sums in another order
    assert moving["30"] < moving["6"] - 0.3
    assert said[0].count("held up for") == 4
