"""Planners on loads small enough to reason about, and the registry."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from prophet.errors import SpecError
from prophet.machine.presets import get_preset
from prophet.planner import PLANNER_NAMES, Planner, get_planner
from prophet.planner.model.cost import step_cost
from prophet.planner.policies.pro_prophet import local_loads
from prophet.planner.search.prophet import ProphetPlanner
from prophet.spec import IntArray, LayerShape, Link, Placement, PlanContext, Split, Topology, Windows

# One expert of 4 is hot; a replica is cheap and hidden, so compute decides.
HOT = np.tile(np.array([600, 100, 50, 50], dtype=np.int64), (4, 1))
ROOMY = PlanContext(
    topology=Topology.uniform(4, flops_per_s=1e9, intra=Link(bytes_per_s=1e9)),
    shape=LayerShape.feed_forward(dim=16, hidden=64),
    home=(0, 1, 2, 3),
    windows=Windows(fnec_s=1.0, bnec_s=1.0),
)


def test_every_name_gives_a_planner_that_places_and_splits() -> None:
    for name in PLANNER_NAMES:
        planner = get_planner(name)
        assert isinstance(planner, Planner)
        assert planner.name == name
        planner.split(HOT, planner.place(HOT, ROOMY), ROOMY).check(HOT, planner.place(HOT, ROOMY))


def test_unknown_names_and_options_are_refused() -> None:
    with pytest.raises(SpecError, match=r"no planner 'best'.*prophet"):
        get_planner("best")
    with pytest.raises(SpecError, match="does not take these options: \\['speed'\\]"):
        get_planner("static", speed=1)
    for name, options in (
        ("prophet", {"effort": -1.0}),
        ("prophet", {"split_effort": -1.0}),
        ("top-k", {"k": -1}),
        ("pro-prophet", {"alpha": -1.0}),
        ("pro-prophet", {"equation": 7}),
    ):
        with pytest.raises(SpecError):
            get_planner(name, **options)


def test_prophet_balances_a_hot_expert_exactly() -> None:
    planner = ProphetPlanner()
    placement = planner.place(HOT, ROOMY)
    split = planner.split(HOT, placement, ROOMY)
    assert split.max_mean() == 1.0
    assert split.rank_load().tolist() == [800, 800, 800, 800]


def test_prophet_uses_no_replica_where_links_are_slow_or_loads_even() -> None:
    slow = PlanContext(
        topology=Topology.uniform(4, flops_per_s=1e12, intra=Link(bytes_per_s=1e5)),
        shape=LayerShape.feed_forward(dim=16, hidden=8192),
        home=(0, 1, 2, 3),
    )
    assert ProphetPlanner().place(np.maximum(HOT // 50, 1), slow).is_static
    even = np.full((4, 4), 100, dtype=np.int64)
    plain = PlanContext(topology=ROOMY.topology, shape=LayerShape.feed_forward(dim=64, hidden=256), home=(0, 1, 2, 3))
    assert ProphetPlanner().place(even, plain).is_static


def test_prophet_gives_a_slow_rank_less() -> None:
    topology = Topology(
        ranks=2,
        ranks_per_node=2,
        intra=Link(bytes_per_s=1e9),
        inter=Link(bytes_per_s=1e9),
        flops_per_s=(1e9, 5e8),
        free_bytes=(1 << 40, 1 << 40),
    )
    plan = PlanContext(
        topology=topology,
        shape=LayerShape.feed_forward(dim=16, hidden=64),
        home=(0, 1),
        windows=Windows(fnec_s=1, bnec_s=1),
    )
    load = np.array([[100, 500], [100, 500]], dtype=np.int64)
    split = ProphetPlanner().split(load, ProphetPlanner().place(load, plan), plan)
    assert split.rank_load().tolist() == [800, 400]


def test_prophet_handles_the_edges() -> None:
    planner = ProphetPlanner()
    nothing = np.zeros((4, 4), dtype=np.int64)
    assert planner.place(nothing, ROOMY).is_static
    assert planner.split(nothing, planner.place(HOT, ROOMY), ROOMY).rank_load().sum() == 0
    alone = PlanContext(topology=Topology.uniform(1), shape=ROOMY.shape, home=(0, 0))
    load = np.array([[3, 4]], dtype=np.int64)
    assert planner.split(load, planner.place(load, alone), alone).rank_load().tolist() == [7]
    no_slots = PlanContext(topology=ROOMY.topology, shape=ROOMY.shape, home=ROOMY.home, slots_per_rank=0)
    assert planner.place(HOT, no_slots).is_static
    one = np.zeros((4, 4), dtype=np.int64)
    one[2] = [0, 900, 0, 0]  # all tokens from one rank for one expert
    assert planner.split(one, planner.place(one, ROOMY), ROOMY).rank_load().sum() == 900


def test_wrong_sizes_and_types_are_refused() -> None:
    planner = ProphetPlanner()
    with pytest.raises(SpecError, match="4 ranks, 4 experts"):
        planner.place(HOT[:2], ROOMY)
    with pytest.raises(SpecError, match="integers"):
        planner.place(HOT.astype(float), ROOMY)
    with pytest.raises(SpecError, match="negative"):
        planner.place(-HOT, ROOMY)
    with pytest.raises(SpecError, match="negative"):
        planner.split(-HOT, ROOMY.homes_only(), ROOMY)
    with pytest.raises(SpecError, match="placement is for"):
        planner.split(HOT, Placement.homes_only(2, 2), ROOMY)


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(SpecError, match="budget_bytes must not be negative"):
        dataclasses.replace(ROOMY, budget_bytes=(1 << 20, -1, 0, 0))


def test_a_placement_is_kept_while_routing_is_steady() -> None:
    """Products matter here, and counts differ from step to step by chance alone."""
    context = PlanContext(
        topology=Topology.uniform(8, intra=Link(bytes_per_s=1e12)),
        shape=LayerShape.feed_forward(dim=1024, hidden=4096),
        home=tuple(e // 2 for e in range(16)),
        slots_per_rank=2,
    )
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.full(16, 0.5))
    planner = ProphetPlanner()
    first = planner.place(rng.multinomial(100_000, share, 8).astype(np.int64), context)
    assert not first.is_static
    now = first
    for _ in range(50):
        load = rng.multinomial(100_000, share, 8).astype(np.int64)
        now = planner.place(load, dataclasses.replace(context, previous=now))
    assert now == first


def test_a_placement_gives_way_when_routing_becomes_even() -> None:
    context = PlanContext(
        topology=Topology.uniform(
            32, ranks_per_node=8, flops_per_s=3e14, intra=Link(bytes_per_s=1e11), inter=Link(bytes_per_s=5e9)
        ),
        shape=LayerShape.feed_forward(dim=2048, hidden=768),
        home=tuple(e // 4 for e in range(128)),
        slots_per_rank=2,
    )
    planner = ProphetPlanner()
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.full(128, 0.2))
    placement = planner.place(rng.multinomial(32768, share, 32).astype(np.int64), context)
    assert not placement.is_static
    even = np.full((32, 128), 16, dtype=np.int64)
    context = dataclasses.replace(context, previous=placement)
    after = planner.place(even, context)
    with_s, without_s = (
        step_cost(planner.split(even, p, context), p, context).total_s for p in (after, context.homes_only())
    )
    assert with_s <= without_s


def swapped_layers(seed: int) -> tuple[PlanContext, IntArray, IntArray]:
    """Loads of two layers whose exchanges fill the step."""
    context = get_preset("h100-ib:Qwen3-30B-A3B").context(16, 32, routed_per_rank=8192, slots_per_rank=4)
    rng = np.random.default_rng(seed)
    one, other = (
        np.stack([rng.multinomial(8192, share) for _ in range(16)]).astype(np.int64)
        for share in rng.dirichlet(np.full(32, 0.3), 2)
    )
    return context, one, other


def test_routing_that_jumps_brings_a_new_plan_at_once() -> None:
    """Nearly always: where levelling beats what is in force. Else tries are left to follow."""
    planner = ProphetPlanner(effort=0.0)  # without tries
    new = 0
    for seed in range(10):
        context, one, other = swapped_layers(seed)
        before, fresh = planner.place(one, context), planner.place(other, context)
        assert before != fresh
        assert planner.place(one, dataclasses.replace(context, previous=before)) == before
        new += planner.place(other, dataclasses.replace(context, previous=before)) == fresh
    assert new >= 8


def test_later_calls_shorten_the_step_and_cost_their_budget() -> None:
    context, load, _ = swapped_layers(0)
    # where hidden transfers have a price the first plan leaves too little for a hundredth
    context = dataclasses.replace(context, topology=dataclasses.replace(context.topology, overlap_cost=0.0))
    rng = np.random.default_rng(0)
    share = load / load.sum(axis=1, keepdims=True)
    planner = ProphetPlanner()

    def seconds(placement: Placement) -> float:
        return step_cost(planner.split(load, placement, context), placement, context).total_s

    first = now = planner.place(load, context)
    for _ in range(200):
        drawn = np.stack([rng.multinomial(8192, p) for p in share]).astype(np.int64)
        now = planner.place(drawn, dataclasses.replace(context, previous=now))
    assert seconds(now) < 0.99 * seconds(first)


def test_a_split_of_little_effort_gains_most_of_what_can_be_gained() -> None:
    """Two nodes on slow links, where the split with the lowest bottleneck takes much longer than the best one."""
    context = get_preset("h100-ib:Qwen3-30B-A3B").context(16, 32, routed_per_rank=8192, slots_per_rank=2)
    context = dataclasses.replace(context, topology=dataclasses.replace(context.topology, ranks_per_node=8))
    none, little, much = (ProphetPlanner(split_effort=e) for e in (0.0, 0.003, 1.0))
    for seed in (1, 3, 7):
        rng = np.random.default_rng(seed)
        load = rng.multinomial(8192, rng.dirichlet(np.full(32, 0.4)), size=16).astype(np.int64)
        heaviest = np.argsort(-load.sum(axis=0), kind="stable")[:8].tolist()
        replicas = [(e, r) for r in range(16) for e in rng.choice(heaviest, 2, replace=False) if context.home[e] != r]
        placement = Placement.with_replicas(context.home, 16, replicas)
        least_s, little_s, most_s = (
            step_cost(p.split(load, placement, context), placement, context).total_s for p in (much, little, none)
        )
        assert most_s > 1.25 * least_s, "the cases are such that it matters"
        assert most_s - little_s > 0.7 * (most_s - least_s)


def test_top_k_replicates_the_heaviest_everywhere() -> None:
    placement = get_planner("top2").place(HOT, ROOMY)
    assert placement.holds.sum(axis=1).tolist() == [4, 4, 1, 1]
    split = get_planner("top2").split(HOT, placement, ROOMY)
    assert split.rank_load().tolist() == [700, 700, 900, 900]
    assert get_planner("top-k", k=0).place(HOT, ROOMY).is_static


def test_pro_prophet_follows_algorithm_1() -> None:
    # Rank 0 is heaviest, so expert 0 goes to all but the n ranks with the fewest tokens for it.
    load = HOT.copy()
    load[3, 0] = 10
    one = get_planner("pro-prophet", n=1, alpha=0.0).place(load, ROOMY)
    assert one.holds[0].tolist() == [True, True, True, False]
    # A tolerance that calls everything balanced leaves the loop before its first round.
    assert get_planner("pro-prophet", alpha=1e6).place(load, ROOMY).is_static
    # Where transfers are exposed and long, the recorded best prefix is the empty one.
    slow = PlanContext(
        topology=Topology.uniform(4, flops_per_s=1e12, intra=Link(bytes_per_s=1e3)),
        shape=LayerShape.feed_forward(dim=16, hidden=8192),
        home=(0, 1, 2, 3),
    )
    assert get_planner("pro-prophet").place(load, slow).is_static
    # Windows hide them in Eq. 8, and do not in Eq. 6.
    hidden = dataclasses.replace(slow, windows=Windows(fnec_s=1e6, bnec_s=1e6))
    assert not get_planner("pro-prophet").place(load, hidden).is_static
    assert get_planner("pro-prophet", equation=6).place(load, hidden).is_static


def test_pro_prophet_counts_what_ranks_compute_and_receive() -> None:
    """H and R of the paper by hand: expert 0 is held by ranks 0 and 1, so rank 1 keeps its row and rank 2 sends one."""
    load = np.array([[3, 1, 0], [1, 1, 2], [4, 0, 1]], dtype=np.int64)
    holds = np.array([[True, True, False], [False, True, False], [False, False, True]])
    computed, received = local_loads(load, holds, np.array([0, 1, 2]))
    assert computed.tolist() == [3 + 4, 1 + 1 + 1, 1 + 2]
    assert received.tolist() == [4, 1, 2]


@pytest.mark.parametrize(("alpha", "places"), [(0.9 * 60 / 100, True), (1.1 * 60 / 100, False)])
def test_pro_prophet_is_balanced_by_a_share_of_the_mean_load_of_an_expert(alpha: float, places: bool) -> None:
    """Eq. 7: loads of 230 and 170 differ by 60, and I / E is 100; I / D would be 200."""
    context = dataclasses.replace(ROOMY, home=(0, 0, 1, 1, 2, 2, 3, 3))
    by_expert = np.array([130, 100, 100, 100, 100, 100, 70, 100])
    load = np.stack([by_expert // 4 + (np.arange(8) % 4 == r) * (by_expert % 4) for r in range(4)]).astype(np.int64)
    assert load.sum(axis=0).tolist() == by_expert.tolist()
    assert not get_planner("pro-prophet", alpha=0.0).place(load, context).is_static
    assert get_planner("pro-prophet", alpha=alpha).place(load, context).is_static != places


# Four exchanges of 16 x 4 bytes, and three products of 2 x 2 x 16 x 64 operations, for a row
PER_ROW_S = 4 * 64 / 1e6 + 3 * 4096 / 1e8
# 2 x alpha x dim^2 parameters of four bytes go to and fro
SHADOW_S = 2 * 2 * 16 * 64 * 4 / 1e6
FASTERMOE = PlanContext(
    topology=Topology.uniform(4, flops_per_s=1e8, intra=Link(bytes_per_s=1e6)),
    shape=LayerShape.feed_forward(dim=16, hidden=64, bias=False),
    home=(0, 1, 2, 3),
)


@pytest.mark.parametrize(
    ("saved_s", "shadowed"),
    [
        # by the first, the second and the third shadow, in shadows' seconds
        ((0.9, 0.0, 0.0), 0),
        ((1.1, 0.0, 0.0), 1),
        ((1.1, 0.9, 0.0), 1),  # the second costs as much again
        ((1.1, 1.1, 0.9), 2),
        ((1.1, 1.1, 1.1), 3),
        ((0.9, 9.0, 9.0), 0),  # it ends with the first that does not pay
    ],
)
def test_fastermoe_shadows_while_each_further_one_pays(saved_s: tuple[float, ...], shadowed: int) -> None:
    scale = 1000  # a larger expert, so that rounding to whole rows hardly counts
    shape = LayerShape.feed_forward(dim=16, hidden=64, bias=False, param_bytes=4 * scale)
    rows = [round(s * scale * SHADOW_S / PER_ROW_S) for s in saved_s]
    total = np.array([10 + sum(rows[i:]) for i in range(4)], dtype=np.int64)
    load = np.zeros((4, 4), dtype=np.int64)
    load[0] = total
    placement = get_planner("fastermoe").place(load, dataclasses.replace(FASTERMOE, shape=shape))
    assert placement.holds.sum(axis=1).tolist() == [4] * shadowed + [1] * (4 - shadowed)


def test_all_kinds_of_arrays_are_planned_alike() -> None:
    frozen = HOT.copy()
    frozen.setflags(write=False)
    planner = ProphetPlanner()
    expected = planner.place(HOT, ROOMY)
    for load in (frozen, HOT.astype(np.int32), np.asfortranarray(HOT), np.repeat(HOT, 2, axis=0)[::2]):
        assert planner.place(load, ROOMY) == expected
        assert planner.split(load, expected, ROOMY) == planner.split(HOT, expected, ROOMY)


def test_no_experts_hide_the_transfers_of_the_first_block() -> None:
    """A replica saves 1.4 ms of products; its Trans and Agg take 1 ms each, under the products of the block before."""
    load = np.tile(np.array([130, 90, 90, 90], dtype=np.int64), (4, 1))
    context = PlanContext(
        topology=Topology.uniform(4, flops_per_s=1e9, intra=Link(bytes_per_s=1e9)),
        shape=LayerShape.feed_forward(dim=16, hidden=64, param_bytes=470, grad_bytes=470),
        home=(0, 1, 2, 3),
    )
    planner = ProphetPlanner()
    assert not planner.place(load, context).is_static
    first = dataclasses.replace(context, windows=Windows(experts=False))
    assert planner.place(load, first).is_static
    covered = dataclasses.replace(context, windows=Windows(fnec_s=2e-3, bnec_s=4e-3, experts=False))
    assert not planner.place(load, covered).is_static


# Products are nothing and exchanges all of a step; every rank routes to ten experts of its own, mostly far away.
RANKS, EXPERTS = 8, 32
FAR_LOAD = np.array(
    [[100 + 10 * n if (n := (e - 4 * r - 6) % EXPERTS) < 10 else 0 for e in range(EXPERTS)] for r in range(RANKS)]
)
FAR = PlanContext(
    topology=Topology.uniform(RANKS, flops_per_s=1e10, intra=Link(bytes_per_s=1e7)),
    shape=LayerShape.feed_forward(dim=16, hidden=64),
    home=tuple(e // (EXPERTS // RANKS) for e in range(EXPERTS)),
    windows=Windows(fnec_s=1.0, bnec_s=1.0),
    slots_per_rank=16,
)


def step_s(context: PlanContext, load: IntArray) -> float:
    planner = ProphetPlanner()
    placement = planner.place(load, context)
    return step_cost(planner.split(load, placement, context), placement, context).total_s


def test_the_fast_plan_keeps_tokens_local_where_copies_are_hidden() -> None:
    placement = ProphetPlanner().place(FAR_LOAD, FAR)
    own = np.take_along_axis(placement.holds.T, np.argsort(-FAR_LOAD, axis=1)[:, :4], axis=1)
    assert own.all()  # every rank holds the experts that it routes most tokens to
    assert (
        step_s(FAR, FAR_LOAD)
        < 0.5 * step_cost(Split.to_homes(FAR_LOAD, FAR.homes_only()), FAR.homes_only(), FAR).total_s
    )
    # not where windows are too short to hide them, and experts are larger than their tokens
    larger = LayerShape.feed_forward(dim=16, hidden=640)
    shown = dataclasses.replace(FAR, shape=larger, windows=Windows(fnec_s=1e-6, bnec_s=1e-6, experts=False))
    assert ProphetPlanner().place(FAR_LOAD, shown).copies_per_rank().max() < 5


def test_further_slots_for_local_copies_make_the_prediction_hardly_worse() -> None:
    """A first plan is a heuristic: other slots lead it another way."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        load = rng.multinomial(2000, rng.dirichlet(np.full(EXPERTS, 0.3)), size=RANKS).astype(np.int64)
        seconds = [step_s(dataclasses.replace(FAR, slots_per_rank=s), load) for s in range(1, 17)]
        assert all(b <= a * 1.05 for a, b in itertools.pairwise(seconds))
        assert seconds[-1] < 0.8 * seconds[0]
