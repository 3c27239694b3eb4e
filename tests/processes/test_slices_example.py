"""The example of long pages on two real processes: it learns, and slices change no loss."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("transformers", reason="the model is transformers'")

from tests.helpers.launch import EXAMPLES, torchrun

STEP = re.compile(r"step (\d+): loss ([\d.]+)")


@pytest.mark.slow
def test_slices_change_no_loss() -> None:
    said = [
        {step: float(loss) for step, loss in STEP.findall(torchrun(EXAMPLES / "long_context.py", *how, ranks=2))}
        for how in (("--tokens", "64"), ("--tokens", "64", "--slices", "1"))
    ]
    assert len(said[0]) == 4
    assert said[0] == pytest.approx(said[1], abs=2e-3)
    assert said[0]["20"] < said[0]["5"]
