"""Lines that a user writes for each loop, counted on the page that lists them and in the examples that tests run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.helpers.changed_lines import lines_of_ours

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "loops.md").read_text()
# by the first word of the sentence before; the table's first number, by the first word of its row
BLOCKS = dict(re.findall(r"^(\w+)[^\n]*:\n\n```python[^\n]*\n(.*?)```", PAGE, re.M | re.S))
SAID = {name.lower(): int(n) for name, n in re.findall(r"^\| \[(.+?)\].*?\| [^|]*?(\d)[^|]* \|", PAGE, re.M)}
AT_MOST_TWO = [
    "accelerate_loop",
    "deepspeed_autoep",
    "deepspeed_config",
    "deepspeed_hugging_face",
    "deepspeed_images",
    "transformers_trainer",
    "trl_sft",
    "tutel_training",
]


@pytest.mark.parametrize("loop", ["DeepSpeed", "accelerate", "Trainer", "Tutel"])
def test_a_loop_with_an_integration_takes_the_lines_that_the_page_says(loop: str) -> None:
    found = lines_of_ours(BLOCKS[loop])
    assert len(found) == SAID[loop.lower()] <= 2, found


def test_a_loop_of_ones_own_takes_four_lines() -> None:
    found = lines_of_ours(BLOCKS["Your"])
    assert len(found) == 4, found  # with clipping and saving
    assert SAID["your own"] == 1
    assert "2 with a [converted model]" in PAGE
    assert SAID["fsdp2"] == 2 + len(lines_of_ours(BLOCKS["FSDP2"]))


@pytest.mark.parametrize("example", AT_MOST_TWO)
def test_an_example_has_two_lines_of_ours_at_most(example: str) -> None:
    found = lines_of_ours((ROOT / "examples" / f"{example}.py").read_text())
    assert 1 <= len(found) <= 2, found


def test_an_example_with_an_own_loop_has_four_lines_of_ours_at_most() -> None:
    for example in ("own_loop", "own_blocks"):
        found = lines_of_ours((ROOT / "examples" / f"{example}.py").read_text())
        assert 2 <= len(found) <= 4, found


def test_lines_are_found_and_looks_are_not() -> None:
    source = """
import prophet
from prophet_accelerate import balance
import torch
for x in range(3):
    a, b = prophet.convert(x)
    torch.step(a)
    print(a)
    last = b.last_step
c = torch.zeros(3)
c.step(balance)
config["prophet"] = {}
"""
    wanted = ["a, b = prophet.convert(x)", "torch.step(a)", "c.step(balance)", 'config["prophet"] = {}']
    assert lines_of_ours(source) == wanted


def test_the_page_on_loops_names_what_exists() -> None:
    assert len(BLOCKS) == 6
    for block in BLOCKS.values():
        known: dict[str, object] = {}
        tree = ast.parse(block)
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(compile(ast.Module([node], []), "loops.md", "exec"), known)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
                assert hasattr(known[node.value.id], node.attr), ast.unparse(node)
