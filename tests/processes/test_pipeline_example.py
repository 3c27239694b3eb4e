"""The example that readers copy from runs as its first lines say, and draws its picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launch import EXAMPLES, torchrun


def test_the_example_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    said = torchrun(EXAMPLES / "dynamic_pipeline.py", "--steps", "12", "--out", str(tmp_path), ranks=2)
    assert "step 11: loss" in said
    assert "balancing took" in said
    assert (tmp_path / "stages.png").read_bytes().startswith(b"\x89PNG")
