"""What balancing remembers of every layer, carried over to other groups of ranks.

A group of R ranks remembers loads by rank and expert, and the placement that comes next. Where there are as many groups
of as many ranks afterwards, each goes on with what one group remembered, placements included. Else every rank is taken
to route its share of what all ranks have routed to an expert, and the next placement is planned from that at once.

Shape legend: R ranks of a group, G groups, W steps kept, E experts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from prophet.engine.balanced_layer import BalancedLayer
from prophet.engine.checkpoint.balancing import plan_state
from prophet.engine.engine import Engine
from prophet.engine.history import History
from prophet.engine.replan import next_plan

Memory = Mapping[str, Any]
"""What one group remembers of one layer: its "ranks", "step", "plan" and "history", as `Engine.state_dict` has them."""


def memories(engine: Engine) -> list[Memory]:
    """What the engine remembers, by layer; to be asked between two steps."""
    state = engine.state_dict()
    pairs = zip(state["plans"], state["histories"], strict=True)
    return [{"ranks": state["ranks"], "step": state["step"], "plan": p, "history": h} for p, h in pairs]


def carry(engine: Engine, known: Sequence[Sequence[Memory]], group: int, groups: int) -> None:
    """Have an engine that was just attached go on from what groups have remembered; nothing is sent.

    known: for each of its layers what every group of before remembers, in their order; none of a layer that nobody has
    balanced. group, groups: which of how many groups this rank is in now. The same on all ranks of a group.
    """
    plans, histories, step = [], [], 0
    for layer, before in zip(engine.balanced, known, strict=True):
        step = max([step, *(int(memory["step"]) for memory in before)])
        if len(before) == groups and all(memory["ranks"] == layer.context.ranks for memory in before):
            plan, arrays = before[group]["plan"], before[group]["history"]
        else:
            history = copy.deepcopy(layer.history)
            if before:
                history.restore(_shared([memory["history"] for memory in before], layer.context.ranks, group, groups))
            plan = _planned(engine, layer, history)
            arrays = {name: torch.from_numpy(array) for name, array in history.arrays().items()}
        plans.append(plan)
        histories.append(arrays)
    ranks = engine.collective.size
    engine.load_state_dict({"step": step, "ranks": ranks, "plans": plans, "histories": histories})


def _planned(engine: Engine, layer: BalancedLayer, history: History) -> dict[str, Any] | None:
    """The placement for the load that is expected of the next step."""
    if not history.observed:
        return None
    config = engine.experiment.replan
    expected = history.predict(config.predict)
    context = replace(layer.context, previous=None)
    return plan_state(next_plan(None, expected, expected, engine.planner, context, config))


def _shared(histories: Sequence[Mapping[str, torch.Tensor]], ranks: int, group: int, groups: int) -> dict[str, Any]:
    """Histories of all groups before, as one of a group's `ranks` of which there are `groups` now."""
    every = [{name: tensor.numpy() for name, tensor in history.items()} for history in histories]
    found = {name: every[0][name] for name in ("errors", "observed")}
    for name in ("ring", "ema"):  # [..., R, E]
        total = sum(history[name].sum(axis=-2, dtype=np.int64) for history in every)
        place = group * ranks + np.arange(ranks)[:, None]
        least, more = np.divmod(total[..., None, :], ranks * groups)
        found[name] = (least + (place < more)).astype(every[0][name].dtype)
    return found
