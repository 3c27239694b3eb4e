"""A plugin of pytest: an engine's tests on the device of `tests.helpers.pretend_device` instead of the host.

    python -m pytest -p tests.helpers.pretended tests/engine/test_replan.py tests/engine/test_gradients_property.py

Library products stand for Triton's kernels. Tests that start processes, make a backward pass fail, compare tensors of
their own with the model's or expect windows that the host has timed do not fit: they fail or end the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prophet.kernels import choice
from prophet.ranks.threads import ThreadCollective, ThreadWorld
from tests.helpers.pretend_device import NAME, on_pretended_device
from tests.helpers.training import Case


def pytest_configure() -> None:
    """Cases are made for the device, and every rank that is a thread sees it."""
    make, run = Case.__init__, ThreadWorld.run

    def made(self: Case, *args: Any, **fields: Any) -> None:
        make(self, *args, **{"device": NAME, **fields})

    def on_device(self: ThreadWorld, body: Callable[[ThreadCollective], Any]) -> list[Any]:
        def rank(collective: ThreadCollective) -> Any:
            with on_pretended_device():
                return body(collective)

        return run(self, rank)

    Case.__init__ = made  # type: ignore[method-assign]
    ThreadWorld.run = on_device  # type: ignore[method-assign]
    choice.triton_available = lambda: False


@pytest.fixture(autouse=True)
def pretended() -> Iterator[None]:
    with on_pretended_device():
        yield
