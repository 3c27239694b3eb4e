"""Before the first test the planner's kernels are compiled, or loaded from the cache: once, under no time limit."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _compiled_planner() -> None:
    from prophet.planner import warm

    warm()
