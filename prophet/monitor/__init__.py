"""Live view of a run: every step's balance goes to a file, to TensorBoard and to Weights & Biases while it trains.

>>> engine = prophet.attach(model, optimizer)                   # doctest: +SKIP
>>> prophet.monitor(engine, "runs/x")                           # then: prophet watch runs/x
"""

from prophet.errors import MonitorError
from prophet.monitor.writer import Monitor, monitor

__all__ = ["Monitor", "MonitorError", "monitor"]
