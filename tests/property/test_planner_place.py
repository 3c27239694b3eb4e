"""What every placement must keep, for random topologies, loads and limits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prophet.planner import get_planner, search
from prophet.planner.cost import step_cost
from prophet.planner.greedy import Machine, ProphetPlanner
from prophet.spec import Placement, PlanContext
from tests.property.planner_cases import Case, cases

MANY = settings(max_examples=120, deadline=None)
PLACING = ["prophet", "static", "top2", "top3", "pro-prophet"]


def predicted_s(case: Case, placement: Placement, context: PlanContext) -> float:
    split = ProphetPlanner().split(case.load, placement, context)
    return step_cost(split, placement, context).total_s


@MANY
@given(cases(), st.sampled_from(PLACING))
def test_placement_respects_every_limit_and_repeats(case: Case, name: str) -> None:
    placement = get_planner(name).place(case.load, case.context)
    assert placement.home.tolist() == list(case.context.home)
    assert (placement.copies_per_rank() <= case.context.slot_limits()).all()
    assert placement == get_planner(name).place(case.load.copy(), case.context)


@MANY
@given(cases())
def test_prophet_is_never_worse_than_no_replicas(case: Case) -> None:
    context = dataclasses.replace(case.context, previous=case.placement)
    for given_context in (case.context, context):
        placement = ProphetPlanner().place(case.load, given_context)
        assert (placement.copies_per_rank() <= case.context.slot_limits()).all()
        chosen = predicted_s(case, placement, case.context)
        none = predicted_s(case, case.context.homes_only(), case.context)
        assert chosen <= none * (1 + 1e-9)


@MANY
@given(cases())
def test_a_further_slot_never_makes_the_prediction_worse(case: Case) -> None:
    planner = ProphetPlanner(gain_margin=0.0)
    more = dataclasses.replace(case.context, slots_per_rank=case.context.slots_per_rank + 1)
    few_s = predicted_s(case, planner.place(case.load, case.context), case.context)
    more_s = predicted_s(case, planner.place(case.load, more), more)
    assert more_s <= few_s * (1 + 1e-9)


@MANY
@given(cases())
def test_compiled_cost_agrees_with_its_definition(case: Case) -> None:
    machine = Machine.of(case.context)
    total = case.load.sum(axis=0)
    problem = search.Problem(
        case.load,
        total,
        np.asarray(case.context.home),
        machine.node,
        machine.speed,
        machine.seconds_per_token,
        machine.figures,
        *search.home_traffic(case.load, total, machine.home, machine.node),
    )
    replicas = np.array(case.placement.replicas(), dtype=np.int64).reshape(-1, 2)[::-1]
    fast = search.placement_cost(problem, replicas[:, 0].copy(), replicas[:, 1].copy(), len(replicas))
    slow = step_cost(ProphetPlanner().split(case.load, case.placement, case.context), case.placement, case.context)
    expected = [slow.total_s, slow.a2a_s, slow.expert_s, slow.exposed_trans_s, slow.exposed_agg_s]
    assert fast.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-15)


@MANY
@given(cases())
def test_the_placement_in_force_is_kept_while_it_is_as_good(case: Case) -> None:
    planner = ProphetPlanner()
    first = planner.place(case.load, case.context)
    again = planner.place(case.load, dataclasses.replace(case.context, previous=first))
    assert again == first
