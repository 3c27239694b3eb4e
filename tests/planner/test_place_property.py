"""What every placement must keep, for random topologies, loads and limits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prophet.planner import PLANNER_NAMES, core, get_planner
from prophet.planner.model.cost import step_cost
from prophet.planner.model.machine import Machine
from prophet.planner.search.prophet import ProphetPlanner, Tuning
from prophet.spec import LayerShape, Link, Placement, PlanContext, Topology
from tests.helpers.planner_cases import Case, cases

MANY = settings(max_examples=120, deadline=None)
PLACING = list(PLANNER_NAMES)


# An exact split of two slots beats that of one, but one slot can be split to a shorter step.
SLOT_CASE = Case(
    load=np.array([[3, 14, 46, 39], [4, 118, 18, 29], [0, 61, 21, 40], [1, 71, 12, 34]]),
    placement=Placement.with_replicas((0, 3, 1, 2), 4, ()),
    context=PlanContext(
        topology=Topology(
            ranks=4,
            ranks_per_node=4,
            intra=Link(bytes_per_s=1e8, latency_s=0.0),
            inter=Link(bytes_per_s=1e7, latency_s=2e-5),
            flops_per_s=(25e9, 5e8, 25e9, 1e11),
            free_bytes=(5760, 2304, 5760, 4608),
        ),
        shape=LayerShape.feed_forward(dim=8, hidden=8),
        home=(0, 3, 1, 2),
        slots_per_rank=1,
    ),
)


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
@given(cases(), st.sampled_from([0.0, 0.03, 10.0]))
@example(SLOT_CASE, 0.03)
def test_a_further_slot_makes_no_first_plan_worse(case: Case, split_effort: float) -> None:
    planner = ProphetPlanner(tuning=Tuning(gain_margin=0.0, spare=0.0, split_effort=split_effort))
    slots = case.context.slots_per_rank
    less, more = (
        predicted_with(planner, dataclasses.replace(case, context=dataclasses.replace(case.context, slots_per_rank=s)))
        for s in (slots, slots + 1)
    )
    assert more <= less * (1 + 1e-9)


def predicted_with(planner: ProphetPlanner, case: Case) -> float:
    placement = planner.place(case.load, case.context)
    return step_cost(planner.split(case.load, placement, case.context), placement, case.context).total_s


@MANY
@given(cases(), st.sampled_from([0.0, 0.02, 1.0]))
def test_compiled_cost_agrees_with_its_definition(case: Case, effort: float) -> None:
    machine = Machine.of(case.context)
    *_, fast = core.native.split_rows(
        case.load,
        case.placement.holds,
        case.placement.home,
        machine.node,
        machine.speed,
        machine.seconds_per_token,
        machine.figures,
        effort,
    )
    slow = step_cost(
        ProphetPlanner(tuning=Tuning(split_effort=effort)).split(case.load, case.placement, case.context),
        case.placement,
        case.context,
    )
    expected = [slow.total_s, slow.a2a_s, slow.expert_s, slow.exposed_trans_s, slow.exposed_agg_s]
    assert list(fast) == pytest.approx(expected, rel=1e-9, abs=1e-15)


@MANY
@given(cases())
def test_the_placement_in_force_is_kept_while_it_is_as_good(case: Case) -> None:
    planner = ProphetPlanner(effort=0.0, tuning=Tuning(least_search_s=0.0))  # a try may find a better one
    first = planner.place(case.load, case.context)
    again = planner.place(case.load, dataclasses.replace(case.context, previous=first))
    assert again == first


@MANY
@given(cases(), st.sampled_from([0.0, 0.1]))
def test_a_placement_that_no_longer_pays_is_not_kept(case: Case, gain_margin: float) -> None:
    planner = ProphetPlanner(tuning=Tuning(gain_margin=gain_margin))
    context = dataclasses.replace(case.context, previous=case.placement)
    placement = planner.place(case.load, context)
    homes = context.homes_only()
    with_s, without_s = (
        step_cost(planner.split(case.load, p, context), p, context).total_s for p in (placement, homes)
    )
    assert placement == homes or with_s <= without_s * (1 - gain_margin) * (1 + 1e-9)


@MANY
@given(cases(), st.sampled_from([0.02, 10.0]))
def test_effort_never_makes_a_split_slower_than_the_one_with_the_lowest_bottleneck(case: Case, effort: float) -> None:
    timed, exact = (
        step_cost(
            ProphetPlanner(tuning=Tuning(split_effort=e)).split(case.load, case.placement, case.context),
            case.placement,
            case.context,
        )
        for e in (effort, 0.0)
    )
    assert timed.total_s <= exact.total_s * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_spare_replicas_cost_at_most_their_margin(case: Case) -> None:
    bare, spared = (ProphetPlanner(tuning=Tuning(spare=s, gain_margin=0.0)) for s in (0.0, 0.2))
    bare_s = predicted_s(case, bare.place(case.load, case.context), case.context)
    spared_s = predicted_s(case, spared.place(case.load, case.context), case.context)
    assert spared_s <= bare_s * (1 + spared.tuning.spare_margin + 1e-9)


@MANY
@given(cases(), st.sampled_from([0.0, 1.0]))
def test_a_later_call_never_makes_the_prediction_worse(case: Case, least_search_s: float) -> None:
    """But for what noise in the counts may cost: `keep_margin`, where a plan is made anew; and spare replicas."""
    planner = ProphetPlanner(tuning=Tuning(least_search_s=least_search_s, gain_margin=0.0, spare=0.0, keep_margin=0.0))

    def predicted(placement: Placement) -> float:
        return step_cost(planner.split(case.load, placement, case.context), placement, case.context).total_s

    placement = planner.place(case.load, case.context)
    for _ in range(3):
        following = planner.place(case.load, dataclasses.replace(case.context, previous=placement))
        assert (following.copies_per_rank() <= case.context.slot_limits()).all()
        assert predicted(following) <= predicted(placement) * (1 + 1e-9)
        placement = following


@MANY
@given(cases(), st.sampled_from([0.0, 1.0]))
def test_it_goes_on_from_any_placement(case: Case, least_search_s: float) -> None:
    """Also from one that no longer fits the limits; and equal arguments give equal plans."""
    planner = ProphetPlanner(tuning=Tuning(least_search_s=least_search_s))
    context = dataclasses.replace(case.context, previous=case.placement)
    placement = planner.place(case.load, context)
    assert placement.home.tolist() == list(case.context.home)
    assert (placement.copies_per_rank() <= case.context.slot_limits()).all()
    assert placement == planner.place(case.load.copy(), context)
