"""The engine's memory between two steps, as numbers and tensors that a checkpoint can hold, and back.

A run that resumes with it on as many ranks starts with the very placements that the saved run had planned, and so adds
its sums in the same order: it goes on bit by bit. The loads that plans are made from count tokens by rank, so on
another number of ranks none of it applies.

Shape legend: R ranks, E experts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import torch

from prophet.engine.history import History
from prophet.engine.replan import KeptPlan, Reason
from prophet.errors import SpecError, TopologyError
from prophet.machine.topology import topology_from, topology_table
from prophet.spec import Placement, Topology

# The fields of a plan that are saved as they are, and their types
_NUMBERS: dict[str, Any] = {
    "gain": (int, float),
    "age": int,
    "fresh": bool,
    "usual": (int, float, type(None)),
    "reason": str,
}


def engine_state(
    step: int, plans: Sequence[KeptPlan | None], histories: Sequence[History], topology: Topology | None
) -> dict[str, Any]:
    """Return the memory as numbers and tensors by name.

    Args:
        step: The number of the next step.
        plans: What is planned for it, by layer, or None.
        histories: By layer.
        topology: The machine that is planned for; None where nobody knows it.
    """
    return {
        "step": step,
        "ranks": histories[0].ranks,
        "plans": [None if plan is None else plan_state(plan) for plan in plans],
        "histories": [{k: torch.from_numpy(v) for k, v in h.arrays().items()} for h in histories],
        **({} if topology is None else {"topology": topology_table(topology)}),
    }


def engine_state_from(
    state: Mapping[str, Any], homes: Sequence[Placement], like: Sequence[History]
) -> tuple[int, list[KeptPlan | None], list[History], Topology | None]:
    """Read what `engine_state` returned.

    Args:
        state: The state, of unknown origin: everything in it is checked.
        homes: Placements without replicas, by layer.
        like: Histories of the same kind, by layer; they are not changed.

    Returns:
        The step, the plans, the histories and the machine; None for that where none was saved.

    Raises:
        SpecError: For the state of another number of ranks or of other layers, and for a value that is no state.
    """
    # A checkpoint may come from anywhere, so each field is checked before the next one relies on it
    if set(state) - {"topology"} != {"step", "ranks", "plans", "histories"}:
        raise SpecError(f"expected the state of an engine, got {', '.join(sorted(map(str, state))) or 'nothing'}")
    if not isinstance(state["step"], int) or state["step"] < 0:
        raise SpecError(f"step: expected an integer from 0 on, got {state['step']!r}")
    if state["ranks"] != homes[0].ranks:
        raise SpecError(f"the state is of {state['ranks']!r} ranks; expected {homes[0].ranks}")
    if len({len(state["plans"]), len(state["histories"]), len(homes)}) > 1:
        raise SpecError(f"the state is of {len(state['plans'])} MoE layers, expected {len(homes)}")
    plans: list[KeptPlan | None] = []
    histories = []
    for i, (plan, saved) in enumerate(zip(state["plans"], state["histories"], strict=True)):
        plans.append(None if plan is None else plan_from(plan, homes[i], f"plan of MoE layer {i}"))
        where, mine = f"history of MoE layer {i}", like[i].arrays()
        if not isinstance(saved, Mapping):
            raise SpecError(f"{where}: expected tensors by name, got {type(saved).__name__}")
        # A copy, restored: nothing of the engine changes where a later layer's state is refused
        histories.append(copy.deepcopy(like[i]))
        histories[i].restore({k: array(saved.get(k), f"{where}, {k}", v.shape, v.dtype) for k, v in mine.items()})
    topology = _topology(state["topology"], homes[0].ranks) if "topology" in state else None
    return int(state["step"]), plans, histories, topology


def _topology(table: Any, ranks: int) -> Topology:
    """Read the machine of an engine's state.

    Args:
        table: The state, of unknown origin.
        ranks: How many it must have.

    Raises:
        SpecError: For anything that is no topology of so many ranks.
    """
    try:
        topology = topology_from(table) if isinstance(table, Mapping) else None
    except TopologyError as error:
        raise SpecError(f"topology: {error}") from None
    if topology is None or topology.ranks != ranks:
        raise SpecError(f"topology: expected a machine of {ranks} ranks")
    return topology


def plan_state(plan: KeptPlan) -> dict[str, Any]:
    """Return a plan as a dictionary, without the homes."""
    # Copies: numpy and torch would share memory with a placement that is frozen
    found = {name: getattr(plan, name) for name in _NUMBERS}
    return {"holds": torch.from_numpy(plan.placement.holds.copy()), "load": torch.from_numpy(plan.load.copy()), **found}


def plan_from(state: Any, like: Placement, where: str) -> KeptPlan:
    """Read what `plan_state` returned.

    Args:
        state: The state, of unknown origin.
        like: A placement with the same homes.
        where: Its place in the whole state, for errors.

    Raises:
        SpecError: For anything that is no plan of these experts and ranks.
    """
    if not isinstance(state, Mapping) or set(state) != {"holds", "load", *_NUMBERS}:
        raise SpecError(f"{where}: expected a plan, got {type(state).__name__}")
    for name, kind in _NUMBERS.items():
        if not isinstance(state[name], kind):
            raise SpecError(f"{where}.{name}: got {state[name]!r}")
    if state["reason"] not in get_args(Reason):
        raise SpecError(f"{where}.reason: expected one of {', '.join(get_args(Reason))}, got {state['reason']!r}")
    holds = array(state["holds"], f"{where}.holds", like.holds.shape, np.dtype(np.bool_))
    # A placement is [E, R], a load [R, E]
    load = array(state["load"], f"{where}.load", like.holds.shape[::-1], np.dtype(np.int64))
    plan = KeptPlan(placement=Placement(like.home, holds), load=load)
    return replace(plan, **{name: state[name] for name in _NUMBERS})


def array(value: Any, where: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return a tensor as an array.

    Args:
        value: The tensor, of unknown origin.
        where: Its place in the whole state, for errors.
        shape: The shape that it must have.
        dtype: The type that it must have.

    Raises:
        SpecError: For anything else.
    """
    if not isinstance(value, torch.Tensor):
        raise SpecError(f"{where}: expected a tensor, got {type(value).__name__}")
    found: np.ndarray[Any, Any] = value.detach().cpu().numpy()
    if found.shape != shape or found.dtype != dtype:
        raise SpecError(f"{where}: expected {dtype} {list(shape)}, got {found.dtype} {list(found.shape)}")
    return found.copy()
