"""Carries the engine's memory of every layer over to other groups of ranks.

A group of R ranks remembers loads by rank and expert, and the placement that comes next. Where there are as many groups
of as many ranks afterwards, each takes over one group's memory, placements included. Else every rank is assumed to
route an equal share of all tokens that went to an expert, and the next placement is planned from that at once.

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
"""One group's memory of one layer: "ranks", "step", "plan" and "history", as `Engine.state_dict` has them."""


def memories(engine: Engine) -> list[Memory]:
    """Return the engine's memory by layer; call it between two steps."""
    state = engine.state_dict()
    pairs = zip(state["plans"], state["histories"], strict=True)
    return [{"ranks": state["ranks"], "step": state["step"], "plan": p, "history": h} for p, h in pairs]


def carry(engine: Engine, known: Sequence[Sequence[Memory]], group: int, groups: int) -> None:
    """Have an engine that was just attached go on from the memory of earlier groups; nothing is sent.

    The arguments must be the same on all ranks of a group.

    Args:
        engine: The engine.
        known: For each of its layers the memories of all earlier groups, in their order; empty for a layer that nobody
            has balanced.
        group: The group that this rank is in now.
        groups: How many groups there are now.
    """
    plans, histories, step = [], [], 0
    for layer, before in zip(engine.balanced, known, strict=True):
        # Steps count up in traces, so a model goes on after the layer that is furthest
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
    """Plan a placement for the load that is expected of the next step; None without a history."""
    if not history.observed:
        return None
    config = engine.experiment.replan
    expected = history.predict(config.predict)
    # No previous placement: those of other groups name ranks that are not there any more
    context = replace(layer.context, previous=None)
    return plan_state(next_plan(None, expected, expected, engine.planner, context, config))


def _shared(histories: Sequence[Mapping[str, torch.Tensor]], ranks: int, group: int, groups: int) -> dict[str, Any]:
    """Turn the histories of all earlier groups into that of one of the present groups.

    Args:
        histories: Arrays of every earlier group's history, by name.
        ranks: R, ranks of a present group.
        group: The present group whose history it is.
        groups: G, how many present groups there are.
    """
    every = [{name: tensor.numpy() for name, tensor in history.items()} for history in histories]
    # Of the first group: these are ratios and a count of steps, which do not depend on the number of ranks
    found = {name: every[0][name] for name in ("errors", "observed")}
    # Both are [..., R, E]
    for name in ("ring", "ema"):
        total = sum(history[name].sum(axis=-2, dtype=np.int64) for history in every)
        place = group * ranks + np.arange(ranks)[:, None]
        # Whole tokens: the first `more` ranks of all groups get one token more, so that sums are kept
        least, more = np.divmod(total[..., None, :], ranks * groups)
        found[name] = (least + (place < more)).astype(every[0][name].dtype)
    return found
