"""examples/save_transformers.py as a user runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.launch import EXAMPLES, as_launched


@pytest.mark.parametrize("options", [[], ["--fsdp"]])
def test_what_was_saved_is_what_was_trained(options: list[str], tmp_path: Path) -> None:
    said = "".join(as_launched(EXAMPLES / "save_transformers.py", "--out", str(tmp_path), *options, ranks=2))
    gap, largest = map(float, re.findall(r"differ by (\S+) of (\S+)", said)[0])
    assert gap < 1e-5 * largest
    loss, again = map(float, re.findall(r"loss (\S+), resumed (\S+)", said)[0])
    assert again == pytest.approx(loss, rel=1e-5)
