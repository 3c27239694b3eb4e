"""moe-prophet: keeps expert-parallel Mixture-of-Experts training balanced.

>>> import prophet                                              # doctest: +SKIP
>>> layer = prophet.MoE(dim=512, hidden=2048, num_experts=16)   # instead of your own MoE layer
>>> engine = prophet.attach(model, optimizer)                   # and train as before
"""

from prophet.convert import Adapter, ConversionReport, convert, revert
from prophet.engine.attach import attach
from prophet.engine.config import EngineConfig
from prophet.engine.engine import Engine
from prophet.engine.replan import ReplanConfig
from prophet.engine.report import StepReport
from prophet.errors import ConfigMismatch, ConversionError, MonitorError, PlanMismatch, ReplicaMemoryError, RoutingError
from prophet.experts.gate import GateConfig
from prophet.layer.moe import LossBook, MoE, collect_losses
from prophet.monitor import Monitor, monitor
from prophet.spec import Windows

__version__ = "0.1.0.dev0"

__all__ = [
    "Adapter",
    "ConfigMismatch",
    "ConversionError",
    "ConversionReport",
    "Engine",
    "EngineConfig",
    "GateConfig",
    "LossBook",
    "MoE",
    "Monitor",
    "MonitorError",
    "PlanMismatch",
    "ReplanConfig",
    "ReplicaMemoryError",
    "RoutingError",
    "StepReport",
    "Windows",
    "attach",
    "collect_losses",
    "convert",
    "monitor",
    "revert",
]
