"""Planners by name. Modules are imported when one is asked for, so that `import prophet` stays light."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prophet.errors import SpecError
from prophet.planner.base import Planner

PLANNER_NAMES: tuple[str, ...] = (
    "prophet",
    "static",
    "top2",
    "top3",
    "top-k",
    "pro-prophet",
    "fastermoe",
    "eplb",
    "llep",
    "laer",
    "ultraep",
    "moonep",
    "fine-ep",
)

# Names of the past, and what to write instead.
_GONE = {
    "prophet-search": "planner='prophet', which searches from step to step; its option `effort` says how much",
    "prophet-gradual": "planner='prophet', which goes on from the placement in force itself",
}

__all__ = ["PLANNER_NAMES", "Planner", "get_planner", "planner_with"]


def get_planner(name: str, **options: Any) -> Planner:
    """Return the planner called `name`, built with `options`; raise `SpecError` for an unknown name or
    option.
    """
    if name in _GONE:
        raise SpecError(f"there is no planner {name!r} any more: write {_GONE[name]}")
    if name not in PLANNER_NAMES:
        raise SpecError(f"there is no planner {name!r}; the planners are {', '.join(PLANNER_NAMES)}")
    try:
        return _build(name, options)
    except TypeError as error:
        raise SpecError(f"planner {name!r} does not take these options: {sorted(options)} ({error})") from error


def planner_with(name: str, *, effort: float) -> Planner:
    """The planner called `name`; if it searches, it may search for `effort` of a step. Raises as `get_planner`."""
    return get_planner(name, effort=effort) if name == "prophet" else get_planner(name)


def _build(name: str, options: dict[str, Any]) -> Planner:
    if name == "prophet":
        from prophet.planner.greedy import ProphetPlanner

        return ProphetPlanner(**options)
    from prophet.planner import baselines

    if name == "static":
        return baselines.StaticPlanner(**options)
    if name in ("top2", "top3"):
        return baselines.TopKPlanner(k=int(name[3:]), name=name, **options)
    if name == "top-k":
        return baselines.TopKPlanner(**options)
    if name == "pro-prophet":
        return baselines.ProProphetPlanner(**options)
    from prophet.planner import published

    if name == "moonep":
        return published.UltraEpPlanner(exact_match=True, name=name, **options)
    by_name: dict[str, Callable[..., Planner]] = {
        "fastermoe": published.FasterMoEPlanner,
        "eplb": published.EplbPlanner,
        "llep": published.LlepPlanner,
        "laer": published.LaerPlanner,
        "ultraep": published.UltraEpPlanner,
        "fine-ep": published.FineEpPlanner,
    }
    return by_name[name](**options)
