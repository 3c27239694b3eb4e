"""The compiled core as a built thing: there or not, from these sources or from others, with any flags."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prophet.planner import core
from prophet.planner.core.sources import FOLDER, digest, sources

ROOT = Path(__file__).parents[2]
LIMIT_S = 280

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("nanobind") is None or shutil.which("g++") is None, reason="needs nanobind and g++"
)


def run(*command: str | Path, cwd: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name != "PROPHET_REQUIRE_CORE"}
    environment = {**own, "PYTHONPATH": str(cwd)} | settings
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the sources without a built core."""
    leave = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "prophet", tmp_path / "prophet", ignore=leave)
    shutil.copy(ROOT / "setup.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def built(folder: Path) -> list[Path]:
    return list((folder / "prophet" / "planner" / "core").glob("_core.*.so"))


def test_the_core_that_is_tested_was_built_from_these_sources() -> None:
    assert core.lacking() == ""
    assert core.version() == digest(sources())
    assert sources(), FOLDER


def test_a_core_that_was_not_built_names_the_command(checkout: Path) -> None:
    used = "from prophet.planner import core; print(core.version(), core.lacking()); core.native.split"
    done = run("-c", used, cwd=checkout)
    assert done.stdout.startswith("none the planner's compiled core is not there")
    assert "`pip install -v -e .`" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("prophet.errors.CoreError: the planner's compiled core is not there")


def test_a_core_of_other_sources_is_an_error_with_the_command(checkout: Path) -> None:
    (present,) = built(ROOT)
    shutil.copy(present, checkout / present.relative_to(ROOT))
    assert run("-c", "import prophet.planner.core", cwd=checkout).returncode == 0
    with (checkout / "prophet" / "planner" / "core" / "cost.cpp").open("a") as file:
        file.write("// changed\n")
    done = run("-c", "import prophet.planner.core", cwd=checkout)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("prophet.errors.CoreError: ")
    assert "built from other sources" in last
    assert "`pip install -v -e .`" in last


def test_an_installed_core_without_its_sources_is_used(checkout: Path) -> None:
    (present,) = built(ROOT)
    shutil.copy(present, checkout / present.relative_to(ROOT))
    for file in (checkout / "prophet" / "planner" / "core").glob("*.cpp"):
        file.unlink()
    for file in (checkout / "prophet" / "planner" / "core").glob("*.h"):
        file.unlink()
    done = run("-c", "from prophet.planner import core; print(core.version())", cwd=checkout)
    assert done.stdout.strip() == core.version()


@needs_compiler
def test_a_core_that_cannot_be_built_is_an_error_only_where_it_is_required(checkout: Path) -> None:
    command = ("setup.py", "-q", "build_ext", "--inplace")
    without = {"CC": "no-compiler-here", "CXX": "no-compiler-here"}
    assert run(*command, cwd=checkout, **without).returncode == 0
    required = run(*command, cwd=checkout, **without, PROPHET_REQUIRE_CORE="1")
    assert required.returncode != 0
    assert "no-compiler-here" in required.stderr
    assert not built(checkout)


@needs_compiler
def test_fast_arithmetic_is_refused(tmp_path: Path) -> None:
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Ofast", "-ffp-contract=off", str(FOLDER / "cost.cpp")]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode != 0
    assert "must not be compiled with -ffast-math" in refused.stderr
    assert subprocess.run([*command, "-fno-fast-math"], timeout=60, check=False).returncode == 0
