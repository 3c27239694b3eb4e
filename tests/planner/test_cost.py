"""The performance models, against figures computed by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prophet.errors import SpecError
from prophet.planner.core.sources import sources
from prophet.planner.model.cost import exchange_seconds, mean_bandwidth, paper_cost, step_cost, transfer_seconds
from prophet.spec import Cover, LayerShape, Link, Placement, PlanContext, Split, Topology, TransferSeconds, Windows

SHAPE = LayerShape.feed_forward(
    dim=10, hidden=20, bias=False
)  # 400 parameters, 1600 bytes; 800 flops and 40 bytes per token
FOUR = Topology.uniform(
    4,
    ranks_per_node=2,
    flops_per_s=8e5,  # 1000 tokens per second
    intra=Link(bytes_per_s=4000.0, latency_s=0.001),
    inter=Link(bytes_per_s=400.0, latency_s=0.01),
    expert_overhead_s=0.002,
)


def context(topology: Topology = FOUR, windows: Windows | None = None) -> PlanContext:
    return PlanContext(topology=topology, shape=SHAPE, home=(0, 1, 2, 3), windows=windows or Windows())


def test_paper_model_adds_up_equations_1_to_6() -> None:
    flat = Topology.uniform(4, flops_per_s=8e5, intra=Link(bytes_per_s=4000.0))
    cost = paper_cost(
        np.array([50, 100, 20, 30]),
        np.array([10, 60, 20, 0]),
        replicated=3,
        excluded=1,
        context=context(flat),
        overlapped=False,
    )
    assert cost.a2a_s == pytest.approx(4 * 60 * 40 / 4000)
    assert cost.expert_s == pytest.approx(3 * 100 / 1000)
    assert cost.exposed_trans_s == pytest.approx(3 * (4 - 1) * 1600 / (4 * 4000))
    assert cost.exposed_agg_s == cost.exposed_trans_s
    assert cost.total_s == pytest.approx(2.4 + 0.3 + 0.9 + 0.9)


def test_paper_model_hides_transfers_as_equation_8() -> None:
    flat = Topology.uniform(4, flops_per_s=8e5, intra=Link(bytes_per_s=4000.0))
    cost = paper_cost(
        np.array([100, 0, 0, 0]),
        np.zeros(4, dtype=np.int64),
        replicated=3,
        excluded=1,
        context=context(flat, Windows(fnec_s=0.3, bnec_s=1.0)),
    )
    assert cost.trans_s == pytest.approx(0.9)
    assert cost.exposed_trans_s == pytest.approx(0.9 - 0.1 - 0.3)
    assert cost.exposed_agg_s == 0.0


def test_mean_bandwidth_is_that_of_an_even_exchange() -> None:
    assert mean_bandwidth(FOUR) == pytest.approx(3 / (1 / 4000 + 2 / 400))
    assert mean_bandwidth(Topology.uniform(1, intra=Link(bytes_per_s=7.0))) == 7.0


def test_exchange_takes_the_busiest_rank_of_the_slowest_level() -> None:
    pairs = np.zeros((4, 4))
    assert exchange_seconds(pairs, FOUR) == 0.0
    pairs[0, 0] = 1e9  # what stays is free
    pairs[0, 1] = 400.0
    assert exchange_seconds(pairs, FOUR) == pytest.approx(0.001 + 0.1)
    pairs[0, 2] = pairs[0, 3] = 40.0  # rank 0 sends 80 bytes out of its node
    assert exchange_seconds(pairs, FOUR) == pytest.approx(0.01 + 0.2)
    pairs[1, 3] = 400.0  # rank 3 receives 440
    assert exchange_seconds(pairs, FOUR) == pytest.approx(0.01 + 1.1)


def test_the_ranks_of_a_node_share_its_port() -> None:
    """Sending and receiving; a rank that crosses alone has the whole port, up to the rate of its own link."""
    ported = dataclasses.replace(FOUR, port_bytes_per_s=500.0)
    pairs = np.zeros((4, 4))
    assert exchange_seconds(pairs, ported) == 0.0
    pairs[0, 1] = 400.0  # within the node, where the port counts for nothing
    assert exchange_seconds(pairs, ported) == exchange_seconds(pairs, FOUR)
    pairs[0, 2] = 200.0  # alone: over its own link of 400 bytes per second
    assert exchange_seconds(pairs, ported) == pytest.approx(0.01 + 0.5)
    pairs[1, 3] = 100.0  # 300 bytes through both ports, but 200 over the first link
    assert exchange_seconds(pairs, ported) == pytest.approx(0.01 + 300 / 500)
    pairs[2, 0] = pairs[3, 1] = 300.0  # the other way at the same time
    assert exchange_seconds(pairs, ported) == pytest.approx(0.01 + 600 / 500)
    slow = dataclasses.replace(FOUR, port_bytes_per_s=100.0)
    assert exchange_seconds(pairs, slow) == pytest.approx(0.01 + 600 / 100)


def test_a_port_counts_once_however_large_its_node() -> None:
    """Three nodes, of three ranks and of two."""
    eight = Topology.uniform(8, ranks_per_node=3, inter=Link(bytes_per_s=100.0), port_bytes_per_s=100.0)
    pairs = np.zeros((8, 8))
    pairs[6, 0] = pairs[7, 3] = 50.0
    assert exchange_seconds(pairs, eight) == pytest.approx(1.0)
    pairs[0, 3] = pairs[1, 4] = pairs[2, 5] = 40.0  # the port of the middle node receives 170
    assert exchange_seconds(pairs, eight) == pytest.approx(1.7)


def test_what_a_port_leaves_every_rank_where_all_cross() -> None:
    assert FOUR.port_share == 0.0
    assert FOUR.even_inter is FOUR.inter
    rails = dataclasses.replace(FOUR, port_bytes_per_s=800.0)
    assert (rails.port_share, rails.even_inter) == (0.0, FOUR.inter), "both ranks of a node have all of their links"
    shared = dataclasses.replace(FOUR, port_bytes_per_s=300.0)
    assert shared.port_share == pytest.approx(4 / 3)
    assert shared.even_inter == Link(bytes_per_s=150.0, latency_s=0.01)
    assert mean_bandwidth(shared) == pytest.approx(3 / (1 / 4000 + 2 / 150))


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan")])
def test_a_port_without_a_rate_is_refused(wrong: float) -> None:
    with pytest.raises(SpecError, match=r"Topology\.port_bytes_per_s"):
        dataclasses.replace(FOUR, port_bytes_per_s=wrong)


@given(st.integers(1, 4), st.integers(0, 2), st.sampled_from([0.5, 1.0, 2.0]), st.integers(0, 2**32 - 1))
def test_one_rank_per_node_has_its_port_for_itself(nodes: int, short: int, rate: float, seed: int) -> None:
    """A port is then a second link in series; and one as fast as all of a node's links is none, however large it is."""
    rng = np.random.default_rng(seed)
    pairs = rng.pareto(1.0, (nodes, nodes)) * rng.integers(0, 2, (nodes, nodes))
    alone = Topology.uniform(
        nodes, ranks_per_node=1, inter=Link(bytes_per_s=10.0, latency_s=0.5), port_bytes_per_s=10.0 * rate
    )
    slower = dataclasses.replace(alone, inter=Link(bytes_per_s=10.0 * min(1.0, rate), latency_s=0.5))
    plain = dataclasses.replace(slower, port_bytes_per_s=None)
    assert exchange_seconds(pairs, alone) == pytest.approx(exchange_seconds(pairs, plain))
    ranks = nodes * 3 - short  # the last node may be smaller
    many = rng.pareto(1.0, (ranks, ranks))
    rails = Topology.uniform(ranks, ranks_per_node=3, inter=alone.inter, port_bytes_per_s=30.0)
    without = dataclasses.replace(rails, port_bytes_per_s=None)
    assert exchange_seconds(many, rails) == pytest.approx(exchange_seconds(many, without))


def test_two_phase_transfer_is_taken_where_it_is_cheaper() -> None:
    one_node = Topology.uniform(4, intra=Link(bytes_per_s=1600.0, latency_s=0.25))
    everywhere = Placement.with_replicas((0, 1, 2, 3), 4, [(0, 1), (0, 2), (0, 3)])
    trans = transfer_seconds(everywhere, one_node, 1600)
    assert trans[:3] == pytest.approx((0.25 + 3, 0.25 + 1, 0.25 + 2 / 3))
    mirrored = transfer_seconds(everywhere, one_node, 1600, sum_bytes=1600)
    assert mirrored == TransferSeconds(trans.direct, trans.second, trans.first), "and nothing to cross once"
    # sums of half precisions go home in float32
    agg = transfer_seconds(everywhere, one_node, 1600, sum_bytes=3200)
    assert agg[:3] == pytest.approx((trans.direct, trans.second, 0.25 + 2))
    assert trans.form(Cover(), 0.0) == "two-phase"
    single = transfer_seconds(Placement.with_replicas((0, 1, 2, 3), 4, [(0, 1)]), one_node, 1600)
    assert single[:3] == pytest.approx((1.25, 1.25, 0.0))
    assert single.form(Cover(), 0.0) == "direct"
    assert transfer_seconds(Placement.homes_only(4, 4), one_node, 1600) == TransferSeconds(0.0, 0.0, 0.0)


def test_copies_for_one_node_cross_once_in_two_phases() -> None:
    """Through a shared port a direct transfer crosses with every copy; two phases send parts, then exchange them."""
    ported = dataclasses.replace(FOUR, port_bytes_per_s=400.0)
    away = Placement.with_replicas((0, 1, 2, 3), 4, [(0, 2), (0, 3)])
    found = transfer_seconds(away, ported, 1600)
    assert found[:3] == pytest.approx((0.01 + 2 * 1600 / 400, 0.01 + 1600 / 400, 0.001 + 800 / 4000))


def test_a_form_that_takes_less_but_shows_more_is_not_taken() -> None:
    """Each phase is hidden by its own window; a direct transfer by both."""
    transfer = TransferSeconds(direct=10.0, first=3.0, second=4.0)
    for cover, overlap_cost, felt_s, form in (
        (Cover(0.0, 0.0), 0.0, 7.0, "two-phase"),
        (Cover(3.0, 4.0), 0.0, 0.0, "two-phase"),
        (Cover(1.0, 8.0), 0.0, 1.0, "direct"),
        (Cover(8.0, 1.0), 0.0, 1.0, "direct"),
        (Cover(1.0, 7.0), 0.0, 2.0, "two-phase"),  # alike, but fewer seconds
        (Cover(1.0, 8.0), 0.5, 2.0 + 0.5 * 5.0, "two-phase"),  # a direct one would cost 1 + 4.5
        (Cover(20.0, 0.0), 0.0, 0.0, "direct"),
    ):
        assert transfer.form(cover, overlap_cost) == form
        assert transfer.exposed_seconds(cover, overlap_cost) == felt_s


def test_crossing_once_is_one_more_form() -> None:
    """It takes 5.5 seconds where the two-phase form takes 7, and yet may show more: its phases are less alike."""
    transfer = TransferSeconds(direct=10.0, first=3.0, second=4.0, once_first=5.0, once_second=0.5)
    for cover, felt_s, form in (
        (Cover(0.0, 0.0), 5.5, "node-once"),
        (Cover(1.0, 1.0), 4.0, "node-once"),
        (Cover(3.0, 4.0), 0.0, "two-phase"),
        (Cover(2.0, 4.0), 1.0, "two-phase"),
        (Cover(5.0, 0.5), 0.0, "node-once"),
        (Cover(5.0, 4.0), 0.0, "node-once"),  # alike, but fewer seconds
    ):
        assert transfer.form(cover, 0.0) == form
        assert transfer.exposed_seconds(cover, 0.0) == felt_s
    assert transfer.seconds("node-once") == 5.5
    assert transfer.hidden(Cover(2.0, 4.0), "node-once") == 2.5


def test_spreading_is_one_more_form() -> None:
    transfer = TransferSeconds(10.0, 3.0, 4.0, once_first=5.0, once_second=0.5, spread_first=2.0, spread_second=2.0)
    for cover, felt_s, form in (
        (Cover(0.0, 0.0), 4.0, "spread"),
        (Cover(5.0, 0.5), 0.0, "node-once"),
        (Cover(2.0, 2.0), 0.0, "spread"),
        (Cover(20.0, 0.0), 0.0, "direct"),
    ):
        assert transfer.form(cover, 0.0) == form
        assert transfer.exposed_seconds(cover, 0.0) == felt_s
    assert transfer.phases("spread") == (2.0, 2.0)
    assert transfer.hidden(Cover(1.0, 4.0), "spread") == 3.0


def test_the_crossing_follows_an_exchange_within_nodes() -> None:
    """Nodes of two ranks with a card each: spread, scatter and gather of Trans, and the way back."""
    away = Placement.with_replicas((0, 1, 2, 3), 4, [(0, 2), (0, 3)])
    topology = Topology.uniform(4, ranks_per_node=2, intra=Link(bytes_per_s=4000.0), inter=Link(bytes_per_s=400.0))
    found = transfer_seconds(away, topology, 1600)
    assert found.phases("spread") == pytest.approx((800 / 4000 + 800 / 400, 800 / 4000))
    # Sums of half precisions are twice as long
    mirrored = transfer_seconds(away, topology, 1600, sum_bytes=3200)
    assert mirrored.phases("spread") == pytest.approx((800 / 4000 + 1600 / 400, 1600 / 4000))


def test_step_cost_counts_groups_windows_and_slow_ranks() -> None:
    topology = Topology(
        ranks=2,
        ranks_per_node=2,
        intra=Link(bytes_per_s=4000.0),
        inter=Link(bytes_per_s=1.0),
        flops_per_s=(8e5, 4e5),
        free_bytes=(10**9, 10**9),
        expert_overhead_s=0.002,
    )
    plan = PlanContext(topology=topology, shape=SHAPE, home=(0, 1), windows=Windows(fnec_s=0.1, bnec_s=0.05))
    tokens = np.zeros((2, 2, 2), dtype=np.int64)
    tokens[0, 0, 0] = 30
    tokens[0, 0, 1] = 10
    tokens[1, 1, 1] = 20
    placement = Placement.with_replicas((0, 1), 2, [(0, 1)])
    cost = step_cost(Split(tokens), placement, plan)
    forward = max(0.030 + 0.002, 0.060 + 2 * 0.002)
    assert cost.expert_s == pytest.approx(3 * forward)
    assert cost.a2a_s == pytest.approx(4 * 10 * 40 / 4000)
    assert cost.trans_s == pytest.approx(0.4)
    assert cost.exposed_trans_s == pytest.approx(0.4 - forward - 0.1)
    assert cost.exposed_agg_s == pytest.approx(0.4 - 2 * forward - 0.05)
    taxed = dataclasses.replace(plan, topology=dataclasses.replace(topology, overlap_cost=0.2))
    cost = step_cost(Split(tokens), placement, taxed)
    assert cost.exposed_trans_s == pytest.approx(0.4 - 0.8 * (forward + 0.1))
    first = dataclasses.replace(plan, windows=Windows(fnec_s=0.1, bnec_s=0.05, experts=False))
    cost = step_cost(Split(tokens), placement, first)  # no experts come before the first block's
    assert cost.exposed_trans_s == pytest.approx(0.4 - 0.1)
    assert cost.exposed_agg_s == pytest.approx(0.4 - 0.05)
    roomy = dataclasses.replace(taxed, windows=Windows(fnec_s=9.0, bnec_s=9.0))
    cost = step_cost(Split(tokens), placement, roomy)
    assert cost.exposed_trans_s == cost.exposed_agg_s == pytest.approx(0.2 * 0.4)


def test_sizes_that_disagree_are_refused() -> None:
    split = Split(np.zeros((2, 2, 2), dtype=np.int64))
    with pytest.raises(SpecError, match="4 ranks"):
        step_cost(split, Placement.homes_only(2, 2), context())
    with pytest.raises(SpecError, match="per rank"):
        paper_cost(np.zeros(3, np.int64), np.zeros(4, np.int64), replicated=0, excluded=0, context=context())


def test_the_core_counts_seconds_in_one_place() -> None:
    """Whoever changes the cost model changes `cost.cpp`, and nothing else of the core."""
    model = ["token_bytes", "bytes_per_s", "latency_s", "param_bytes", "grad_bytes", "fnec_s", "bnec_s", "overhead_s"]
    model += ["overlap_cost", "windows_have_experts", "A2A_PER_STEP", "FORWARD_AND_BACKWARD"]
    users = {file.name for file in sources() if any(word in file.read_text() for word in model)}
    assert users == {"problem.h", "cost.h", "cost.cpp"}
