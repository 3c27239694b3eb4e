"""moe-prophet: keeps expert-parallel Mixture-of-Experts training balanced.

>>> import prophet                                              # doctest: +SKIP
>>> layer = prophet.MoE(dim=512, hidden=2048, num_experts=16)   # instead of your own MoE layer
>>> engine = prophet.attach(model, optimizer)                   # and train as before

Names are imported when they are first asked for, so that `import prophet` alone needs neither torch nor numpy.
"""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prophet.convert import Adapter, convert, revert
    from prophet.convert.record import record
    from prophet.engine.attach import attach
    from prophet.engine.config import EngineConfig
    from prophet.engine.engine import Engine
    from prophet.engine.step_report import StepReport
    from prophet.experts.gate import GateConfig
    from prophet.layer.moe import MoE, collect_losses
    from prophet.machine.topology import read_topology
    from prophet.monitor import monitor
    from prophet.spec import Topology, Windows

# A library adds no output by itself: without a handler, Python would print warnings to stderr
logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "0.1.0.dev0"

__all__ = [
    "Adapter",
    "Engine",
    "EngineConfig",
    "GateConfig",
    "MoE",
    "StepReport",
    "Topology",
    "Windows",
    "attach",
    "collect_losses",
    "convert",
    "monitor",
    "read_topology",
    "record",
    "revert",
]

_MODULE_OF = {
    "Adapter": "prophet.convert",
    "Engine": "prophet.engine.engine",
    "EngineConfig": "prophet.engine.config",
    "GateConfig": "prophet.experts.gate",
    "MoE": "prophet.layer.moe",
    "StepReport": "prophet.engine.step_report",
    "Topology": "prophet.spec",
    "Windows": "prophet.spec",
    "attach": "prophet.engine.attach",
    "collect_losses": "prophet.layer.moe",
    "convert": "prophet.convert",
    "monitor": "prophet.monitor",
    "read_topology": "prophet.machine.topology",
    "record": "prophet.convert.record",
    "revert": "prophet.convert",
}


class _Package(ModuleType):
    """This package. Its `convert` and `monitor` are functions, and folders too.

    After importing a folder Python binds it to its name here: `import prophet.convert.base` would put a module where
    the function belongs.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> object:
        if name in _MODULE_OF:
            found = getattr(importlib.import_module(_MODULE_OF[name]), name)
            # From now on it is an ordinary attribute, and this method is not called for it again
            setattr(self, name, found)
            return found
        folder = f"{self.__name__}.{name}"
        try:
            if not name.startswith("_"):
                return importlib.import_module(folder)
        except ModuleNotFoundError as error:
            # The module is there, and something that it imports is missing: that error is the one to show
            if error.name != folder:
                raise
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


# `__getattr__` of a module would do for the names, but only a class can refuse what Python binds
sys.modules[__name__].__class__ = _Package
