"""The examples for loops of one's own on two real processes: what they print is what they promise."""

from __future__ import annotations

import re

import pytest

from tests.helpers.launch import EXAMPLES, as_launched, torchrun

STEP = re.compile(r"step \d+: loss ([\d.]+), rank max/mean ([\d.]+) \(without balancing ([\d.]+)\), (\d+) copies")


@pytest.mark.parametrize(
    ("name", "by_torchrun"),
    [("own_loop.py", False), ("own_blocks.py", False), pytest.param("own_loop.py", True, marks=pytest.mark.slow)],
)
def test_an_example_trains_and_is_balanced(name: str, by_torchrun: bool) -> None:
    said = torchrun(EXAMPLES / name, ranks=2) if by_torchrun else "".join(as_launched(EXAMPLES / name, ranks=2))
    steps = [tuple(map(float, found)) for found in STEP.findall(said)]
    assert len(steps) == 4
    assert steps[-1][0] < steps[0][0]
    assert sum(copies for *_, copies in steps) > 0
    assert sum(balanced for _, balanced, _, _ in steps) < sum(static for _, _, static, _ in steps)
    if name == "own_blocks.py":
        assert "2 MoE blocks converted" in said
        assert re.search(r"run one by one: Expert: .*net\.0", said)
        assert "parameters are back" in said
