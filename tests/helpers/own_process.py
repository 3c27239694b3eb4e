"""Tests in a process of their own, where what they need stays for the life of one: Triton's interpreter, a device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 280.0


def run(*arguments: str, told: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `python -m` with these arguments; `told` is added to the environment."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(told or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def passed(*arguments: str, told: Mapping[str, str] | None = None) -> str:
    """Return what pytest prints in a process of its own; fails unless all of its tests passed."""
    done = run("pytest", "-q", "-x", *arguments, told=told)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    return done.stdout
