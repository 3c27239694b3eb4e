"""Planners: functions from a load to a placement and its split. `named` finds them by name."""

from prophet.planner.base import Planner
from prophet.planner.named import PLANNER_NAMES, get_planner, planner_with

__all__ = ["PLANNER_NAMES", "Planner", "get_planner", "planner_with"]
