"""The core built with other flags: the same bits without optimisation, and clean under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prophet.planner.core import version

ROOT = Path(__file__).parents[2]
LIMIT_S = 900

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * LIMIT_S),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


def run(*command: str, cwd: Path, **settings: str) -> str:
    """What a program says that sees `cwd` alone."""
    environment = {**os.environ, "PYTHONPATH": str(cwd)} | settings
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def library(name: str) -> str:
    found = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"the compiler has no {name}")
    return str(Path(found).resolve())


def results(folder: Path, flags: str, **settings: str) -> str:
    """What the core says that is built in `folder` with these flags."""
    leave = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "prophet", folder / "prophet", ignore=leave)
    for name in ("setup.py", "pyproject.toml", "tests/helpers/core_digest.py"):
        shutil.copy(ROOT / name, folder)
    command = ("setup.py", "-q", "build_ext", "--inplace")
    run(*command, cwd=folder, PROPHET_CORE_FLAGS=flags)
    asked = "from prophet.planner import core; print(core.version())"
    assert run("-c", asked, cwd=folder, **settings) == version()
    return run("core_digest.py", cwd=folder, **settings)


@pytest.fixture(scope="module")
def wanted() -> str:
    return run("-m", "tests.helpers.core_digest", cwd=ROOT)


def test_without_optimisation_the_bits_are_the_same(tmp_path: Path, wanted: str) -> None:
    assert results(tmp_path, "-O0") == wanted


def test_sanitizers_and_checked_indices_find_nothing(tmp_path: Path, wanted: str) -> None:
    flags = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -DPROPHET_CHECKED"
    settings = {
        # Python itself is not instrumented: the sanitizer has to be there first, with what its interceptors ask for.
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    assert results(tmp_path, flags, **settings) == wanted
