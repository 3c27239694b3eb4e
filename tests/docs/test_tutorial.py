"""The tutorial: its commands print what the page shows, its claims hold, and its picture is drawn from its files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.helpers.house import ROOT
from tests.helpers.page_blocks import blocks_of, play, run, wrong_outputs

PAGE = "docs/tutorial.md"


@pytest.mark.timeout(900)  # 60 s on two idle cores
def test_the_tutorial(tmp_path: Path) -> None:
    played = play(blocks_of(PAGE, (ROOT / PAGE).read_text(encoding="utf-8")), tmp_path)
    wrong = wrong_outputs(played)
    assert not wrong, "\n\n".join(wrong)

    (trained,) = [p.printed for p in played if "tutorial.py train" in p.command]
    (again,) = [p.printed for p in played if "tutorial.py reload" in p.command]
    assert again.strip() == trained.splitlines()[-1]  # the same loss, from plain transformers
    busiest = re.findall(r"busiest rank (\S+) of the mean, (\S+) without", trained)
    assert len(busiest) == 4
    balanced, without = ([float(pair[i]) for pair in busiest] for i in (0, 1))
    assert max(balanced) < 1.1
    assert sum(without) / 4 > sum(balanced) / 4 + 0.1

    picture = tmp_path / "tutorial.png"
    run([sys.executable, str(ROOT / "docs/tools/tutorial_picture.py"), str(tmp_path), str(picture)], tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
