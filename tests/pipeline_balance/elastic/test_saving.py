"""What a checkpoint says of how far a job was."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline_balance.elastic import saving
from prophet.errors import SpecError

FIRST = {"position": 0, "seed": -3, "balancing": {}}


def test_a_job_may_be_saved_before_its_first_step() -> None:
    saving._check(FIRST, "folder")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position", -1),
        ("position", True),
        ("position", None),
        ("seed", 0.5),
        ("seed", 1 << 63),
        ("seed", -(1 << 63) - 1),
        ("balancing", []),
    ],
)
def test_what_job_save_does_not_write_is_named(name: str, value: Any) -> None:
    with pytest.raises(SpecError, match=rf"folder: run\.{name}: expected"):
        saving._check({**FIRST, name: value}, "folder")
