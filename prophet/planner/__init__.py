"""Stub until the planner room lands."""

from typing import Any

from prophet.planner.base import Planner


def get_planner(name: str, **options: Any) -> Planner:
    raise ValueError(name)
