"""moe-prophet: keeps expert-parallel Mixture-of-Experts training balanced.

>>> import prophet                                              # doctest: +SKIP
>>> layer = prophet.MoE(dim=512, hidden=2048, num_experts=16)   # instead of your own MoE layer
>>> engine = prophet.attach(model, optimizer)                   # and train as before
"""

from prophet.convert import Adapter, convert, revert
from prophet.engine.attach import attach
from prophet.engine.config import EngineConfig
from prophet.engine.engine import Engine
from prophet.engine.report import StepReport
from prophet.experts.gate import GateConfig
from prophet.layer.moe import MoE, collect_losses
from prophet.machine.topology import read_topology
from prophet.monitor import monitor
from prophet.spec import Topology, Windows

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
    "revert",
]
