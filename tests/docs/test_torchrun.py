"""Every `torchrun` line says --standalone, or names its hosts: two runs on one machine would want the same port."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.house import ROOT

HERE = Path(__file__).relative_to(ROOT).as_posix()
_LINE = re.compile(r"\btorchrun\s+-[^`\n]*")


def without(text: str) -> list[str]:
    """The commands that start ranks on a port that others may have."""
    return [line for line in _LINE.findall(text) if not re.search(r"--standalone\b|--nnodes\b", line)]


def test_every_command_is_standalone_or_names_its_hosts() -> None:
    listed = subprocess.check_output(["git", "ls-files", "*.py", "*.md", "*.sh"], cwd=ROOT, text=True).splitlines()
    texts = {
        name: (ROOT / name).read_text(encoding="utf-8") for name in listed if not name.endswith(Path(__file__).name)
    }
    assert sum(len(_LINE.findall(text)) for text in texts.values()) > 30
    assert {name: found for name, text in texts.items() if (found := without(text))} == {}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("    torchrun --nproc-per-node 2 train.py", 1),
        ("`torchrun --standalone --nproc-per-node 2 train.py`", 0),
        ("$ torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint host:29500 train.py", 0),
        ("start it with `torchrun`", 0),
        ("`torchrun -m x` is one, and --standalone another", 1),
    ],
)
def test_a_command_without_it_is_found(line: str, found: int) -> None:
    assert len(without(line)) == found
