"""moe-prophet: keeps expert-parallel Mixture-of-Experts training balanced.

>>> import prophet                                              # doctest: +SKIP
>>> layer = prophet.MoE(dim=512, hidden=2048, num_experts=16)   # instead of your own MoE layer
>>> engine = prophet.attach(model, optimizer)                   # and train as before
"""

from prophet.config import ConfigMismatch, EngineConfig
from prophet.convert import Adapter, ConversionError, ConversionReport, convert, revert
from prophet.engine import Engine
from prophet.experts import ReplicaMemoryError
from prophet.gate import GateConfig
from prophet.layer import LossBook, MoE, PlanMismatch, RoutingError, collect_losses
from prophet.monitor import Monitor, MonitorError, monitor
from prophet.replan import ReplanConfig
from prophet.spec import Windows
from prophet.start import attach
from prophet.step_report import StepReport

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
