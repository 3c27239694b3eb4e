"""Planners by name. A planner's module is imported with its first use, so that `import prophet` stays light."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from prophet.errors import SpecError, no_such
from prophet.planner.base import Planner

# Module and class of every planner, as text, so that a list of names imports none of them
_WHERE = {
    "prophet": ("search.prophet", "ProphetPlanner"),
    "static": ("policies.static", "StaticPlanner"),
    "top2": ("policies.top_k", "TopKPlanner"),
    "top3": ("policies.top_k", "TopKPlanner"),
    "top-k": ("policies.top_k", "TopKPlanner"),
    "pro-prophet": ("policies.pro_prophet", "ProProphetPlanner"),
    "fastermoe": ("policies.fastermoe", "FasterMoEPlanner"),
    "eplb": ("policies.eplb", "EplbPlanner"),
    "llep": ("policies.llep", "LlepPlanner"),
    "laer": ("policies.laer", "LaerPlanner"),
    "ultraep": ("policies.ultraep", "UltraEpPlanner"),
    "moonep": ("policies.ultraep", "UltraEpPlanner"),
    "fine-ep": ("policies.fine_ep", "FineEpPlanner"),
}
PLANNER_NAMES: tuple[str, ...] = tuple(_WHERE)


def get_planner(name: str, **options: Any) -> Planner:
    """Return the planner called `name`, built with `options`.

    Raises:
        SpecError: For an unknown name or option.
    """
    if name not in PLANNER_NAMES:
        raise SpecError(no_such("planner", name, PLANNER_NAMES))
    try:
        return _build(name, options)
    except TypeError as error:
        raise SpecError(f"planner {name!r} does not take these options: {sorted(options)} ({error})") from error


def planner_with(name: str, *, effort: float) -> Planner:
    """Return the planner called `name`, with `effort`, a share of a step, if it searches. Raises as `get_planner`."""
    return get_planner(name, effort=effort) if name == "prophet" else get_planner(name)


def _build(name: str, options: dict[str, Any]) -> Planner:
    # One class serves several names: the options make the difference, and the planner must know its name
    if name in ("top2", "top3"):
        options = {"k": int(name[3:]), "name": name, **options}
    elif name == "moonep":
        options = {"exact_match": True, "name": name, **options}
    module, cls = _WHERE[name]
    planner: Planner = getattr(import_module(f"prophet.planner.{module}"), cls)(**options)
    return planner
