"""Replicas that a change of routing has made useless are withdrawn before the rest of them is paid for."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prophet.machine.presets import PRESET_NAMES, get_preset
from prophet.planner import get_planner
from prophet.planner.model.cost import compute_seconds, step_cost
from prophet.planner.model.withdraw import pays, settled_cost, split_seconds, unhidden_seconds
from prophet.spec import IntArray, PlanContext, Split, TransferSeconds, Windows


def hot(ranks: int, experts: int, expert: int) -> IntArray:
    """Every rank sends most of its tokens to one expert."""
    load = np.full((ranks, experts), 64, dtype=np.int64)
    load[:, expert] = 4096
    return load


def slow_links(preset: str = "ethernet-25g:Mixtral-8x7B") -> PlanContext:
    """A machine where hidden transfers cost nothing."""
    context = get_preset(preset).context(8, 8, routed_per_rank=4096, slots_per_rank=2)
    return dataclasses.replace(context, topology=dataclasses.replace(context.topology, overlap_cost=0.0))


def direct(seconds: float) -> TransferSeconds:
    return TransferSeconds(seconds, math.inf, math.inf)


def test_what_a_split_takes_is_what_the_model_says_of_it() -> None:
    context, load = slow_links(), hot(8, 8, 3)
    homes = context.homes_only()
    split = Split.to_homes(load, homes)
    assert split_seconds(split, context) == pytest.approx(step_cost(split, homes, context).total_s)


def test_nothing_left_to_pay_always_pays() -> None:
    context, load = slow_links(), hot(8, 8, 3)
    assert pays(load, Split.to_homes(load, context.homes_only()), context, direct(0.0), direct(0.0))


def test_replicas_pay_up_to_what_they_save() -> None:
    """Transfers of a schedule that hides nothing, so that all of them is left to pay."""
    context, load = slow_links(), hot(8, 8, 3)
    planner = get_planner("prophet")
    placement = planner.place(load, context)
    assert not placement.is_static
    split = planner.split(load, placement, context)
    saved_s = split_seconds(Split.to_homes(load, context.homes_only()), context) - split_seconds(split, context)
    assert saved_s > 0
    assert pays(load, split, context, direct(0.5 * saved_s), direct(0.499 * saved_s), ahead=False)
    assert not pays(load, split, context, direct(0.5 * saved_s), direct(0.501 * saved_s), ahead=False)
    assert pays(load, split, context, direct(1.5 * saved_s), direct(1.499 * saved_s), ahead=False, microbatches=3)


@pytest.mark.parametrize("experts", [True, False])
@pytest.mark.parametrize("overlap_cost", [0.0, 0.25])
def test_what_is_left_to_pay_is_what_no_window_hides(experts: bool, overlap_cost: float) -> None:
    """Of Trans the hidden part is paid, and what hiding it costs; of Agg nothing is yet."""
    context, load = slow_links(), hot(8, 8, 3)
    topology = dataclasses.replace(context.topology, overlap_cost=overlap_cost)
    context = dataclasses.replace(context, topology=topology, windows=Windows(fnec_s=2.0, bnec_s=3.0, experts=experts))
    split = Split.to_homes(load, context.homes_only())
    forward_s = compute_seconds(split.tokens.sum(axis=0), context) if experts else 0.0
    assert unhidden_seconds(split, context, direct(1.9), direct(0.0)) == 0.0
    assert unhidden_seconds(split, context, direct(2.5 + forward_s), direct(0.0)) == pytest.approx(0.5)
    assert unhidden_seconds(split, context, direct(0.0), direct(2.0)) == pytest.approx(overlap_cost * 2.0)
    window_s = 3.0 + 2.0 * forward_s
    left_s = unhidden_seconds(split, context, direct(0.0), direct(0.75 + window_s))
    assert left_s == pytest.approx(0.75 + overlap_cost * window_s)
    assert unhidden_seconds(split, context, direct(1.0), direct(2.0), ahead=False) == 3.0


def test_of_a_two_phase_transfer_each_phase_is_left_beyond_its_own_window() -> None:
    """The windows together are long enough; the second phase of Trans and the first of Agg are longer than theirs."""
    context, load = slow_links(), hot(8, 8, 3)
    context = dataclasses.replace(context, windows=Windows(fnec_s=2.0, bnec_s=3.0))
    split = Split.to_homes(load, context.homes_only())
    forward_s = compute_seconds(split.tokens.sum(axis=0), context)
    none = TransferSeconds(0.0, 0.0, 0.0)
    trans = TransferSeconds(9.0 + forward_s, 0.5 * forward_s, 2.25)
    agg = TransferSeconds(9.0 + 2.0 * forward_s, 3.5, forward_s)
    assert unhidden_seconds(split, context, trans, none) == pytest.approx(0.25)
    assert unhidden_seconds(split, context, none, agg) == pytest.approx(0.5)
    assert not pays(load, split, context, trans, none)
    assert unhidden_seconds(split, context, trans, none, ahead=False) == 0.5 * forward_s + 2.25


@pytest.mark.parametrize("overlap_cost", [0.0, 0.2])
@pytest.mark.parametrize("experts", [True, False])
def test_layers_that_need_no_closer_look_are_decided_alike(experts: bool, overlap_cost: float) -> None:
    """An even load, from which nothing is saved: replicas pay while nothing is left to pay for them."""
    context = slow_links()
    topology = dataclasses.replace(context.topology, overlap_cost=overlap_cost)
    context = dataclasses.replace(
        context, topology=topology, windows=Windows(fnec_s=1e-3, bnec_s=2e-3, experts=experts)
    )
    load = np.full((8, 8), 512, dtype=np.int64)
    load[0] += 8
    split = Split.to_homes(load, context.homes_only())
    forward_s = compute_seconds(split.tokens.sum(axis=0), context)
    there_s, back_s = sum(context.windows.over_trans(forward_s)), sum(context.windows.over_agg(forward_s))
    answers = set()
    for share in (0.0, 0.5, 0.99, 1.01, 1.1, 2.0):
        for trans, agg in ((share * there_s, 0.0), (0.0, share * back_s)):
            left_s = unhidden_seconds(split, context, direct(trans), direct(agg))
            assert pays(load, split, context, direct(trans), direct(agg)) == (left_s <= 0.0)
            answers.add(left_s <= 0.0)
    assert answers == {True, False}


@given(
    preset=st.sampled_from(PRESET_NAMES),
    seed=st.integers(0, 999),
    overlap_cost=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=40, deadline=None)
def test_a_settled_step_is_never_slower_than_one_without_replicas(preset: str, seed: int, overlap_cost: float) -> None:
    """Planned for one load, used with quite another one; but for what hiding the sent part has cost."""
    rng = np.random.default_rng(seed)
    context = get_preset(preset).context(8, 16, routed_per_rank=4096, slots_per_rank=2)
    context = dataclasses.replace(context, topology=dataclasses.replace(context.topology, overlap_cost=overlap_cost))
    planned, present = (
        np.stack([rng.multinomial(4096, share) for _ in range(8)]).astype(np.int64)
        for share in rng.dirichlet(np.full(16, 0.3), 2)
    )
    planner = get_planner("prophet")
    placement = planner.place(planned, context)
    split = planner.split(present, placement, context)
    found, cost = settled_cost(present, split, placement, context)
    homes = context.homes_only()
    alone = step_cost(Split.to_homes(present, homes), homes, context)
    with_all = step_cost(split, placement, context)
    assert cost.total_s <= with_all.total_s * (1 + 1e-12)
    if found is split:
        assert cost == with_all
    else:
        assert cost.exposed_agg_s == 0.0
        assert cost.total_s == pytest.approx(alone.total_s + overlap_cost * cost.trans_s)
    if overlap_cost == 0.0:
        assert cost.total_s <= alone.total_s * (1 + 1e-12)


def test_a_step_of_several_microbatches_is_worth_more() -> None:
    """A load whose replicas do not pay for themselves in one microbatch, but in many."""
    context = slow_links()
    planned, present = hot(8, 8, 3), hot(8, 8, 3)
    present[:, 3] = 512
    planner = get_planner("prophet")
    placement = planner.place(planned, context)
    split = planner.split(present, placement, context)
    once, _ = settled_cost(present, split, placement, context)
    often, cost = settled_cost(present, split, placement, context, microbatches=1000)
    assert once is not split
    assert often is split
    assert cost == step_cost(split, placement, context)
