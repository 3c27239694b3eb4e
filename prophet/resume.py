"""What balancing remembers between two steps, as numbers and tensors that a checkpoint can hold, and back.

A run that resumes with it on as many ranks starts with the very placements that the saved run had planned, and so adds
its sums in the same order: it goes on bit by bit. The loads that plans are made from count tokens by rank, so on
another number of ranks none of it applies.

Shape legend: R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import torch

from prophet.replan import KeptPlan, Reason
from prophet.spec import Placement, SpecError

_NUMBERS: dict[str, Any] = {
    "gain": (int, float),
    "age": int,
    "fresh": bool,
    "usual": (int, float, type(None)),
    "reason": str,
}


def plan_state(plan: KeptPlan) -> dict[str, Any]:
    """A plan as a dictionary; the homes are not in it."""
    found = {name: getattr(plan, name) for name in _NUMBERS}
    return {"holds": torch.from_numpy(plan.placement.holds.copy()), "load": torch.from_numpy(plan.load.copy()), **found}


def plan_from(state: Any, like: Placement, where: str) -> KeptPlan:
    """The inverse, for experts at home as in `like`; raises `SpecError`, with `where`, for anything else."""
    if not isinstance(state, Mapping) or set(state) != {"holds", "load", *_NUMBERS}:
        raise SpecError(f"{where}: expected a plan, got {type(state).__name__}")
    for name, kind in _NUMBERS.items():
        if not isinstance(state[name], kind):
            raise SpecError(f"{where}.{name}: got {state[name]!r}")
    if state["reason"] not in get_args(Reason):
        raise SpecError(f"{where}.reason: expected one of {', '.join(get_args(Reason))}, got {state['reason']!r}")
    holds = array(state["holds"], f"{where}.holds", like.holds.shape, np.dtype(np.bool_))
    load = array(state["load"], f"{where}.load", like.holds.shape[::-1], np.dtype(np.int64))
    plan = KeptPlan(placement=Placement(like.home, holds), load=load)
    return replace(plan, **{name: state[name] for name in _NUMBERS})


def array(value: Any, where: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A tensor as an array of a known shape and kind; raises `SpecError`, with `where`, for anything else."""
    if not isinstance(value, torch.Tensor):
        raise SpecError(f"{where}: expected a tensor, got {type(value).__name__}")
    found: np.ndarray[Any, Any] = value.detach().cpu().numpy()
    if found.shape != shape or found.dtype != dtype:
        raise SpecError(f"{where}: expected {dtype} {list(shape)}, got {found.dtype} {list(found.shape)}")
    return found.copy()
