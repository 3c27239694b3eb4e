"""Nobody looks for a free port and lets it go again: until the store opens it, any other program may take it.

Ranks of two groups meet at one port then, and wait for each other. `prophet.ranks.launch.open_store` opens a port and
keeps it, a file store needs none, and where nobody has to be found port 0 will do.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.house import ROOT

_LOOKS = re.compile(r"\.bind\(\s*\([^()]*,\s*0\s*\)\s*\)|\bfind_free_port\b|\bget_free_port\b")


def looks_for_a_port(text: str) -> list[str]:
    """What asks the system for a port without listening there."""
    return _LOOKS.findall(text)


def test_ports_are_kept_by_who_asked_for_them() -> None:
    listed = subprocess.check_output(["git", "ls-files", "*.py", "*.md", "*.sh"], cwd=ROOT, text=True).splitlines()
    texts = {
        name: (ROOT / name).read_text(encoding="utf-8") for name in listed if not name.endswith(Path(__file__).name)
    }
    assert len(texts) > 300
    assert {name: found for name, text in texts.items() if (found := looks_for_a_port(text))} == {}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('free.bind(("127.0.0.1", 0))', 1),
        ("taken.bind((\n    host, 0\n))", 1),
        ("port = get_free_port()", 1),
        ('with socket.create_server(("", 0)) as kept:', 0),
        ('listener.bind(("127.0.0.1", port))', 0),
    ],
)
def test_a_port_that_is_let_go_is_found(line: str, found: int) -> None:
    assert len(looks_for_a_port(line)) == found
