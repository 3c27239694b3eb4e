"""What every placement must keep, for random topologies, loads and limits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prophet.planner import PLANNER_NAMES, core, get_planner
from prophet.planner.model.cost import step_cost
from prophet.planner.model.machine import Machine
from prophet.planner.search.prophet import ProphetPlanner
from prophet.planner.split.exact import NOT_DENSE
from prophet.spec import LayerShape, Link, Placement, PlanContext, Topology, Windows
from tests.helpers.planner_cases import Case, cases

MANY = settings(max_examples=120, deadline=None)
PLACING = list(PLANNER_NAMES)


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


def predicted_with(planner: ProphetPlanner, case: Case) -> float:
    placement = planner.place(case.load, case.context)
    return step_cost(planner.split(case.load, placement, case.context), placement, case.context).total_s


@MANY
@given(cases(), st.sampled_from([0.0, 0.02, 1.0]))
def test_compiled_cost_agrees_with_its_definition(case: Case, effort: float) -> None:
    machine = Machine.of(case.context)
    *_, fast = core.native.split(
        case.load,
        case.placement.holds,
        case.placement.home,
        machine.node,
        machine.speed,
        machine.seconds_per_token,
        machine.figures,
        effort,
        NOT_DENSE,
    )
    slow = step_cost(
        ProphetPlanner(split_effort=effort).split(case.load, case.placement, case.context),
        case.placement,
        case.context,
    )
    expected = [slow.total_s, slow.a2a_s, slow.expert_s, slow.exposed_trans_s, slow.exposed_agg_s]
    assert list(fast) == pytest.approx(expected, rel=1e-9, abs=1e-15)


@MANY
@given(cases())
def test_the_placement_in_force_is_kept_while_it_is_as_good(case: Case) -> None:
    planner = ProphetPlanner(effort=0.0)  # a try may find a better one
    first = planner.place(case.load, case.context)
    again = planner.place(case.load, dataclasses.replace(case.context, previous=first))
    assert again == first


@MANY
@given(cases())
def test_a_placement_that_no_longer_pays_is_not_kept(case: Case) -> None:
    """Replicas have to save 1 % of a step."""
    planner = ProphetPlanner()
    context = dataclasses.replace(case.context, previous=case.placement)
    placement = planner.place(case.load, context)
    homes = context.homes_only()
    with_s, without_s = (
        step_cost(planner.split(case.load, p, context), p, context).total_s for p in (placement, homes)
    )
    assert placement == homes or with_s <= without_s * 0.99 * (1 + 1e-9)


@MANY
@given(cases(), st.sampled_from([0.02, 10.0]))
def test_effort_never_makes_a_split_slower_than_the_one_with_the_lowest_bottleneck(case: Case, effort: float) -> None:
    timed, exact = (
        step_cost(
            ProphetPlanner(split_effort=e).split(case.load, case.placement, case.context),
            case.placement,
            case.context,
        )
        for e in (effort, 0.0)
    )
    assert timed.total_s <= exact.total_s * (1 + 1e-9)


def test_a_first_plan_has_spare_copies_where_transfers_are_hidden() -> None:
    """One copy levels this load; a transfer that shows is 4 % of the step."""
    load = np.tile(np.array([300, 200, 200, 100], dtype=np.int64), (4, 1))

    def copies(windows: Windows) -> int:
        context = PlanContext(
            topology=Topology.uniform(4, flops_per_s=1e9, intra=Link(bytes_per_s=1e9)),
            shape=LayerShape.feed_forward(dim=16, hidden=64, param_bytes=100, grad_bytes=100),
            home=(0, 1, 2, 3),
            windows=windows,
        )
        return int(ProphetPlanner().place(load, context).copies_per_rank().sum())

    assert copies(Windows(experts=False)) == 1 < copies(Windows(fnec_s=1.0, bnec_s=1.0))


@MANY
@given(cases(), st.sampled_from([0.0, 1e6]))
def test_a_later_call_never_makes_the_prediction_worse(case: Case, effort: float) -> None:
    planner = ProphetPlanner(effort=effort)

    def predicted(placement: Placement) -> float:
        return step_cost(planner.split(case.load, placement, case.context), placement, case.context).total_s

    placement = planner.place(case.load, case.context)
    for _ in range(3):
        following = planner.place(case.load, dataclasses.replace(case.context, previous=placement))
        assert (following.copies_per_rank() <= case.context.slot_limits()).all()
        assert predicted(following) <= predicted(placement) * (1 + 1e-9)
        placement = following


@MANY
@given(cases(), st.sampled_from([0.0, 1e6]))
def test_it_goes_on_from_any_placement(case: Case, effort: float) -> None:
    """Also from one that no longer fits the limits; and equal arguments give equal plans."""
    planner = ProphetPlanner(effort=effort)
    context = dataclasses.replace(case.context, previous=case.placement)
    placement = planner.place(case.load, context)
    assert placement.home.tolist() == list(case.context.home)
    assert (placement.copies_per_rank() <= case.context.slot_limits()).all()
    assert placement == planner.place(case.load.copy(), context)
