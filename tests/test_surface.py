"""What users import: fifteen names, errors in one place, and the doors that documentation names."""

from __future__ import annotations

import ast
import importlib
import os
import pickle
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import prophet
from tests.helpers.house import ROOT, sources, text_of


def test_the_package_has_few_names_and_all_of_them() -> None:
    assert len(prophet.__all__) <= 15
    assert all(hasattr(prophet, name) for name in prophet.__all__)
    assert set(dir(prophet)) >= {*prophet.__all__, "__version__", "__path__"}


@pytest.mark.parametrize(
    "package", ["prophet", "pipeline_balance", "pipeline_balance.elastic", "pipeline_balance.slices"]
)
def test_the_page_on_stability_has_all_names(package: str) -> None:
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `{re.escape(package)}` \| (.*) \|$", page, re.M)
    assert row is not None
    assert re.findall(r"`(\w+)`", row[1]) == sorted(importlib.import_module(package).__all__)


def test_what_types_say_is_what_is_loaded() -> None:
    """Of every name: the import that type checkers read, and the table of modules."""
    tree = ast.parse(text_of(Path("prophet/__init__.py")))
    told = {
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("prophet.")
        for alias in node.names
    }
    assert told == {(module, name) for name, module in prophet._MODULE_OF.items()}
    assert sorted(prophet.__all__) == sorted(prophet._MODULE_OF)


def in_a_fresh_process(code: str) -> str:
    """What a program prints that begins anew."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


_FOLDERS = ("prophet.convert", "prophet.convert.base", "prophet.monitor", "prophet.monitor.read")


def test_functions_that_are_folders_too_stay_functions() -> None:
    """After importing a folder, Python binds it to its name in the package. Both orders: folder first, name first."""
    checks = "".join(
        f"import {folder}\nassert callable({name}) and {name}.__module__ in ('{name}', '{name}.writer'), {name}\n"
        for folder in _FOLDERS
        for name in [".".join(folder.split(".")[:2])]
    )
    in_a_fresh_process(f"{checks}from prophet import convert\nassert convert is prophet.convert")
    for folder in _FOLDERS:
        name = folder.split(".")[1]
        function = getattr(prophet, name)
        assert isinstance(function, types.FunctionType)
        setattr(prophet, name, importlib.import_module(f"prophet.{name}"))  # as Python does once it has imported it
        assert getattr(prophet, name) is function
        assert pickle.loads(pickle.dumps(function)) is function


def test_names_and_rooms_load_when_they_are_used() -> None:
    said = in_a_fresh_process(
        "import sys, prophet\n"
        "assert not {'torch', 'numpy', 'rich'} & sys.modules.keys()\n"
        "print(prophet.planner.get_planner('static').name, prophet.Topology.__module__)\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert said.split() == ["static", "prophet.spec.cost"]
    found: dict[str, object] = {}
    exec("from prophet import *", found)
    assert found.keys() >= {*prophet.__all__}
    assert found["EngineConfig"] is prophet.engine.config.EngineConfig
    assert not hasattr(prophet, "no_such_room")
    assert not hasattr(prophet, "__wrapped__")
    with pytest.raises(AttributeError, match="module 'prophet' has no attribute 'atach'"):
        prophet.atach  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="atach"):
        from prophet import atach  # type: ignore[attr-defined]  # noqa: F401


_A_USER = """
import prophet
import prophet.convert.base
import prophet.monitor.read
from torch import nn
from prophet import monitor
from prophet.convert import original_state_dict

model = nn.Linear(2, 2)
reveal_type(prophet.convert(model))
reveal_type(prophet.attach(model))
reveal_type(monitor)
reveal_type(prophet.Topology.uniform(2))
reveal_type(original_state_dict)
prophet.convert(model, experts=3)
prophet.atach(model)
"""


@pytest.mark.slow
def test_a_type_checker_sees_every_name(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(_A_USER)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(tmp_path / "user.py")],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": f"{ROOT}"},
    )
    found = [line.partition("user.py:")[2] for line in done.stdout.splitlines() if "user.py:" in line]
    notes = [line for line in found if "Revealed type" in line]
    shown = ("ConversionReport", "Engine", "Monitor", "Topology", "dict[")
    assert len(notes) == len(shown), done.stdout + done.stderr
    assert all(part in note for note, part in zip(notes, shown, strict=True)), notes
    errors = [line for line in found if " error: " in line]
    assert len(errors) == 2, errors
    assert '"experts" to "convert"' in errors[0]
    assert '"atach"' in errors[1]


def test_errors_are_defined_in_one_place() -> None:
    elsewhere = [
        f"{path}: {name}"
        for path in sources("prophet")
        if path.as_posix() != "prophet/errors.py"
        for name in re.findall(r"^class (\w+(?:Error|Mismatch|Failed|Timeout))\b", text_of(path), re.M)
    ]
    assert not elsewhere


@pytest.mark.parametrize("door", ["checkpoint", "comm", "convert", "memory", "parallel", "topology", "traces"])
def test_a_door_opens(door: str) -> None:
    module = importlib.import_module(f"prophet.{door}")
    assert all(hasattr(module, name) for name in module.__all__)
