"""What users import: fifteen names, errors in one place, and the doors that documentation names."""

from __future__ import annotations

import importlib
import re

import pytest

import prophet
from tests.helpers.house import sources, text_of


def test_the_package_has_few_names_and_all_of_them() -> None:
    assert len(prophet.__all__) <= 15
    assert all(hasattr(prophet, name) for name in prophet.__all__)


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
