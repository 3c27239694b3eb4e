"""Deciding when layers move. A door: the code is in `pipeline_balance.control`."""

from pipeline_balance.control.controller import Controller, DecisionMismatch, Overhead
from pipeline_balance.control.decide import ControllerConfig, Decision, MoveCost

__all__ = ["Controller", "ControllerConfig", "Decision", "DecisionMismatch", "MoveCost", "Overhead"]
