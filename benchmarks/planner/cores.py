"""The planner's core without one of its mechanisms: built from edited copies of its sources, and put in its place.

The product has no switches for this. An edit names a file of `prophet/planner/core`, the text that stands there exactly
once, and what to write instead; an edit that no longer fits is an error, so that no study goes by old sources.
"""

from __future__ import annotations

import hashlib
import importlib.util
import runpy
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import setuptools

from prophet.planner import core
from prophet.planner.core.sources import sources

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0  # of compiling one file


@dataclass(frozen=True, slots=True)
class Edit:
    """In the core's file of this name, `old` is replaced by `new`."""

    file: str
    old: str
    new: str


def edited(edits: Sequence[Edit]) -> dict[str, str]:
    """The core's sources by file name, after these edits; ValueError where one does not fit them."""
    texts = {path.name: path.read_text() for path in sources()}
    for edit in edits:
        found = texts.get(edit.file, "").count(edit.old)
        if found != 1:
            raise ValueError(f"{edit.file}: expected this text once, found it {found} times: {edit.old!r}")
        texts[edit.file] = texts[edit.file].replace(edit.old, edit.new)
    return texts


def extension() -> Any:
    """The extension module as `setup.py` describes it."""
    given: dict[str, Any] = {}
    with mock.patch.object(setuptools, "setup", given.update), chdir(ROOT):
        runpy.run_path(str(ROOT / "setup.py"))
    return given["ext_modules"][0]


def build(texts: Mapping[str, str], folder: Path) -> Path:
    """Compile these sources as `setup.py` would; objects and modules that are in `folder` already are not made again.

    Returns the module's file.
    """
    described = extension()
    includes = [*described.include_dirs, sysconfig.get_paths()["include"]]
    flags = [
        *("-fPIC", "-DNDEBUG", *described.extra_compile_args),
        *(f"-I{(ROOT / path).resolve()}" for path in includes),
        *(f"-D{name}={value}" for name, value in described.define_macros),
    ]
    headers = "".join(f"{name}\n{text}" for name, text in sorted(texts.items()) if name.endswith(".h"))
    objects = []
    for name, text in sorted(texts.items()):
        if not name.endswith(".cpp"):
            continue
        stem = f"{Path(name).stem}-{_hash(' '.join(flags), headers, text)}"
        target = folder / f"{stem}.o"
        if not target.exists():
            place = folder / stem
            place.mkdir(parents=True, exist_ok=True)
            for other, header in texts.items():
                if other.endswith(".h"):
                    (place / other).write_text(header)
            (place / name).write_text(text)
            _run(["g++", *flags, f"-I{place}", "-c", str(place / name), "-o", f"{target}.part"])
            Path(f"{target}.part").replace(target)
        objects.append(str(target))
    module = folder / f"core-{_hash(*objects)}" / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not module.exists():
        module.parent.mkdir(exist_ok=True)
        _run(["g++", "-shared", *objects, *described.extra_link_args, "-o", f"{module}.part"])
        Path(f"{module}.part").replace(module)
    return module


def _hash(*texts: str) -> str:
    hashed = hashlib.blake2b(digest_size=8)
    for text in texts:
        hashed.update(f"{len(text)}\n{text}".encode())
    return hashed.hexdigest()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr[-2000:]}")


def load(module: Path) -> ModuleType:
    """Import the module that `build` made."""
    spec = importlib.util.spec_from_file_location("prophet.planner.core._core", module)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@contextmanager
def in_place(module: ModuleType) -> Iterator[None]:
    """Inside, whatever of the planner calls its core calls this one."""
    own = core.native
    users = [
        (user, name)
        for key, user in list(sys.modules.items())
        if key.startswith("prophet.")
        for name, value in list(vars(user).items())
        if value is own
    ]
    assert users
    try:
        for user, name in users:
            setattr(user, name, module)
        yield
    finally:
        for user, name in users:
            setattr(user, name, own)
