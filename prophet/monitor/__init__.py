"""Live view of a run: every step's balance goes to a file, to TensorBoard and to Weights & Biases while it trains.

>>> engine = prophet.attach(model, optimizer)                   # doctest: +SKIP
>>> prophet.monitor(engine, "runs/x")                           # then: prophet watch runs/x

The writer is imported when it is first asked for: reading a run needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prophet.errors import MonitorError

if TYPE_CHECKING:
    from prophet.monitor.writer import Monitor, monitor

__all__ = ["Monitor", "MonitorError", "monitor"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from prophet.monitor import writer

    return getattr(writer, name)
