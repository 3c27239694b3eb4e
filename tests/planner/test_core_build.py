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
from prophet.planner.core.sources import FOLDER, NOT_BUILT, digest, sources

ROOT = Path(__file__).parents[2]
LIMIT_S = 280
BUILD = ("setup.py", "-q", "build_ext")
NO_COMPILER = {"CC": "no-compiler-here", "CXX": "no-compiler-here"}

needs_nanobind = pytest.mark.skipif(importlib.util.find_spec("nanobind") is None, reason="needs nanobind")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def run(*command: str | Path, cwd: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name != "PROPHET_WITHOUT_CORE"}
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


def core_folder(checkout: Path) -> Path:
    return checkout / "prophet" / "planner" / "core"


def test_a_core_that_was_not_built_says_why_and_names_the_command(checkout: Path) -> None:
    (core_folder(checkout) / NOT_BUILT).write_text("`c++` failed\n")
    used = "from prophet.planner import core; print(core.version(), core.lacking()); core.native.split"
    done = run("-c", used, cwd=checkout)
    said = done.stdout.strip().removeprefix("none ")
    assert said.startswith("the planner's compiled core was not built (PROPHET_WITHOUT_CORE=1, and `c++` failed)")
    assert said.endswith("run `pip install -v -e .` in the checkout")
    assert done.stderr.splitlines()[-1] == f"prophet.errors.CoreError: {said}"


@pytest.mark.parametrize("installed", [False, True], ids=["checkout", "installed"])
@pytest.mark.parametrize(
    ("library", "note", "reason"),
    [
        (False, "", "is not there: nothing was built for this Python"),
        (False, "no g++\n", "was not built (PROPHET_WITHOUT_CORE=1, and no g++): install a C++17 compiler"),
        (True, "an earlier reason", "cannot be loaded (its own words)"),
    ],
    ids=["never built", "without", "not loaded"],
)
def test_the_reason_and_the_command_are_those_of_the_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: bool, installed: bool, note: str, reason: str
) -> None:
    if library:
        (tmp_path / built(ROOT)[0].name).touch()
    if note:
        (tmp_path / NOT_BUILT).write_text(note)
    monkeypatch.setattr(core, "FOLDER", tmp_path)
    monkeypatch.setattr(core, "sources", lambda: [] if installed else sources())
    said = core._reason(ImportError("its own words"))
    command = "pip install --force-reinstall --no-deps ." if installed else "pip install -v -e ."
    assert said.startswith(f"the planner's compiled core {reason}")
    assert f"run `{command}` in the checkout" in said


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
    for file in (*core_folder(checkout).glob("*.cpp"), *core_folder(checkout).glob("*.h")):
        file.unlink()
    done = run("-c", "from prophet.planner import core; print(core.version())", cwd=checkout)
    assert done.stdout.strip() == core.version()


@needs_nanobind
def test_a_core_that_cannot_be_built_is_an_error_with_one_line(checkout: Path) -> None:
    done = run(*BUILD, "--inplace", cwd=checkout, **NO_COMPILER)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "error: the planner's compiled core cannot be built (there is no `no-compiler-here`): install"
    )
    assert "apt install g++" in last
    assert "PROPHET_WITHOUT_CORE=1" in last
    assert "Traceback" not in done.stderr
    assert not built(checkout)
    assert not (core_folder(checkout) / NOT_BUILT).exists()


@needs_nanobind
def test_without_a_core_the_reason_lies_beside_its_place_until_one_is_built(checkout: Path) -> None:
    compiler = checkout / "compiler"  # makes what it is asked for, empty
    compiler.write_text('#!/bin/sh\nfor word; do [ "$last" = -o ] && : >"$word"; last=$word; done\n')
    compiler.chmod(0o755)
    for where, place in ((("--inplace",), checkout), (("--build-lib", "lib"), checkout / "lib")):
        note = core_folder(place) / NOT_BUILT
        core_folder(place).mkdir(parents=True, exist_ok=True)
        (core_folder(place) / built(ROOT)[0].name).write_bytes(b"of an earlier build")
        command = (*BUILD, *where, "--force")
        assert run(*command, cwd=checkout, PROPHET_WITHOUT_CORE="1", **NO_COMPILER).returncode == 0
        assert note.read_text() == "there is no `no-compiler-here`\n"
        assert not built(place)
        done = run(*command, cwd=checkout, CC=str(compiler), CXX=str(compiler), PROPHET_WITHOUT_CORE="1")
        assert done.returncode == 0, done.stderr
        assert built(place)
        assert not note.exists()


@needs_compiler
def test_fast_arithmetic_is_refused(tmp_path: Path) -> None:
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Ofast", "-ffp-contract=off", str(FOLDER / "cost.cpp")]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode != 0
    assert "must not be compiled with -ffast-math" in refused.stderr
    assert subprocess.run([*command, "-fno-fast-math"], timeout=60, check=False).returncode == 0
