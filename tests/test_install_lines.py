"""No page and no message installs from an index: none has the package, and whoever registers its name would be run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# pyproject.toml refers to its own extras by that name
_FROM_AN_INDEX = re.compile(
    r"\b(?:install|add|run)\b[^`\n]*[\s\"']moe[-_]prophet\b(?![\w.-]*\.(?:whl|tar))|\bmoe[-_]prophet\["
)
_OURS = {"pyproject.toml", "tests/test_install_lines.py"}


def from_an_index(text: str) -> list[str]:
    """What would install the distribution by its name; a message may be split over lines of a program."""
    joined = re.sub(r'"\s*\n\s*f?"', "", text)
    return [match[0] for match in _FROM_AN_INDEX.finditer(joined)]


def test_nothing_tells_to_install_by_name() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    found = {}
    for name in listed.stdout.split("\0"):
        if (
            name
            and name not in _OURS
            and (ROOT / name).suffix not in (".png", ".svg", ".npz")
            and (ROOT / name).is_file()
        ):
            found[name] = from_an_index((ROOT / name).read_text(encoding="utf-8", errors="ignore"))
    assert "README.md" in found
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "pip install moe-prophet",
        "pip install 'moe-prophet[hf]'",
        "needs tensorboard: moe-prophet[monitor]",
        "uv add moe_prophet",
        'Run `pip install --no-deps "\n            "moe-prophet`',
    ],
)
def test_a_line_that_does_is_found(line: str) -> None:
    assert from_an_index(line)


@pytest.mark.parametrize(
    "line", ["pip install '.[hf]'", "pip install dist/moe_prophet-0.1-py3-none-any.whl", "# moe-prophet"]
)
def test_a_line_that_does_not_is_not(line: str) -> None:
    assert not from_an_index(line)
