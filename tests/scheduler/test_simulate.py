"""The step simulator against closed forms, and against its own rules on random steps."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prophet.errors import SpecError
from prophet.planner.model.cost import exchange_seconds, transfer_seconds
from prophet.scheduler.actions import Action
from prophet.scheduler.pieces import Form
from prophet.scheduler.schedules import NAMES, Schedule, block_wise, blocking, schedule_named
from prophet.scheduler.simulate import (
    Dispatched,
    SimulatedStep,
    StepDurations,
    check_schedule,
    exchange_by_rank,
    exchanges_by_chunk,
    left_by_rank,
    predicted_durations,
    simulate,
    transfer_by_chunk,
)
from prophet.spec import (
    FORM_NAMES,
    FloatArray,
    FormName,
    LayerShape,
    Link,
    Placement,
    PlanContext,
    Route,
    Split,
    Topology,
    Windows,
    routes_of,
)
from tests.helpers.planner_cases import Case, cases
from tests.helpers.schedules import compute_s, uniform_durations

QUICK = settings(max_examples=60, deadline=None)


@st.composite
def durations(draw: st.DrawFn) -> StepDurations:
    blocks, chunks, ranks = draw(st.integers(1, 4)), 2, draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = rng.choice([0.0, 0.3, 1.0, 5.0], size=11)

    def draw_s(i: int, *shape: int) -> FloatArray:
        seconds: FloatArray = rng.exponential(size=shape) * scale[i]
        return seconds

    fec_s, share = draw_s(1, blocks, ranks), draw(st.sampled_from([None, 0.0, 0.4, 1.0]))
    return StepDurations(
        a2a_s=draw_s(0, blocks, 4, ranks),
        fec_s=fec_s,
        copies_s=None if share is None else share * fec_s * rng.integers(0, 2, (blocks, 1)),
        fnec_s=draw_s(2, blocks, ranks),
        bnec_s=draw_s(3, blocks, ranks),
        bec_s=draw_s(4, blocks, ranks),
        trans_s=draw_s(5, blocks, chunks, ranks),
        agg_s=draw_s(6, blocks, chunks, ranks),
        plan_s=draw_s(7, blocks),
        start_s=draw_s(8, ranks),
        end_s=draw_s(9, ranks),
        update_s=np.zeros(ranks),
        counts_s=float(scale[10]) * 0.01,
        counts_behind_s=draw(st.sampled_from([0.0, 0.2])),
        overlap_cost=draw(st.sampled_from([0.0, 0.3])),
        link_overlap_cost=draw(st.sampled_from([1.0, 0.4])),
        compute_noise=draw(st.sampled_from([0.0, 0.1])),
        exchange_noise_s=draw(st.sampled_from([0.0, 0.1])),
    )


def parts(step: SimulatedStep) -> FloatArray:
    names = ("compute", "slowed", "a2a", "shared", "exposed_trans", "exposed_agg", "exposed_plan", "idle")
    total: FloatArray = np.sum([getattr(step, f"{n}_s") for n in names], axis=0)
    return total


# --- closed forms ---


@pytest.mark.parametrize("shared_link", [False, True])
def test_blocking_is_the_sum_of_everything(shared_link: bool) -> None:
    d = uniform_durations(
        3, 4, a2a_s=2, fec_s=3, fnec_s=5, bnec_s=7, bec_s=6, trans_s=(1, 2), agg_s=(0.5, 1), start_s=4, end_s=8
    )
    step = simulate(blocking(3), d, shared_link=shared_link)
    assert step.makespan_s == pytest.approx(3 * (4 * 2 + 3 + 5 + 7 + 6 + 3 + 1.5) + 4 + 8)
    assert step.exposed_s == pytest.approx({"plan": 0.0, "trans": 9.0, "agg": 4.5})


@pytest.mark.parametrize(("fec", "fnec"), [(4.0, 4.0), (1.0, 4.0), (4.0, 1.0), (0.5, 0.5), (0.0, 0.0)])
@pytest.mark.parametrize("chunks", [(2.0, 2.0), (3.0, 0.0), (0.0, 3.0)])
@pytest.mark.parametrize("a2a", [0.0, 0.25, 10.0])
def test_what_stays_exposed_on_a_shared_link(fec: float, fnec: float, chunks: tuple[float, float], a2a: float) -> None:
    """Eq. 8 chunk by chunk: only compute is cover, whether the all-to-alls are short or long.

    Block 0's Trans has only the start to hide under (and there is none here), so it is paid in full.
    """
    d = uniform_durations(3, 2, a2a_s=a2a, fec_s=fec, fnec_s=fnec, trans_s=chunks)
    step = simulate(block_wise(3), d)
    after_fec = max(0.0, chunks[0] - fec)
    slowed = min(a2a, after_fec)  # the rest of chunk 0 runs under the combine all-to-all and slows it down
    per_block = slowed + max(0.0, after_fec - slowed + chunks[1] - fnec)
    assert step.makespan_s == pytest.approx(3 * (4 * a2a + fec + fnec) + sum(chunks) + 2 * per_block)


@pytest.mark.parametrize("copies", [(1.0, 1.0), (1.0, 0.0)])
def test_replicas_that_run_apart_hide_their_own_transfers(copies: tuple[float, float]) -> None:
    d = uniform_durations(1, 2, fec_s=3, bec_s=6, trans_s=(2, 0), agg_s=(3.5, 0))
    assert simulate(block_wise(1), d).makespan_s == pytest.approx(3 + 6 + 2 + 3.5)
    # two seconds at home hide Trans; of the backward pass the first two are the replicas', the others hide Agg
    apart = simulate(block_wise(1), dataclasses.replace(d, copies_s=np.array([copies])), record=True)
    assert apart.makespan_s == pytest.approx(3 + 6)
    assert [(s.start_s, s.end_s) for s in apart.spans if s.name.startswith("Agg")] == [(5.0, 8.5)] * 2
    hidden = simulate(blocking(1), dataclasses.replace(d, copies_s=np.array([copies])))
    assert hidden.makespan_s == pytest.approx(3 + 6 + 3.5), "a blocking schedule sends gradients in the end"


def test_what_the_experts_at_home_do_not_hide_is_exposed() -> None:
    d = uniform_durations(2, 2, fec_s=3, bec_s=6, trans_s=(4, 1), agg_s=(2, 0.5), end_s=0.5, copies_s=np.ones((2, 2)))
    step = simulate(block_wise(2), d)
    # Trans(0) has 5 s under 2 at home. Trans(1)'s first chunk starts with FEC(0), behind it, and ends at 9; the rest
    # is launched before FEC(1), at 6: it ends at 10, under the experts at home of block 1, which run from 6 to 8
    assert step.exposed_trans_s == pytest.approx([3.0 + 2.0] * 2)
    # Agg(1) runs from 17 to 19.5, Agg(0)'s first chunk from there to 21.5 and its second one under END
    assert step.exposed_agg_s == pytest.approx([0.0, 0.0])
    assert step.makespan_s == pytest.approx(23.5)


def test_all_to_alls_cover_transfers_on_a_link_of_their_own() -> None:
    d = uniform_durations(2, 2, a2a_s=10, fec_s=1, trans_s=(4, 4))
    own = simulate(block_wise(2), d, shared_link=False)
    shared = simulate(block_wise(2), d)
    # block 0: 8 seconds of Trans start with the step and the dispatch of 10 covers them; block 1: hidden as well
    assert own.makespan_s == pytest.approx(2 * 41)
    assert shared.makespan_s == pytest.approx(2 * 41 + 8 + (4 - 1) + 4)
    assert shared.shared_s.tolist() == pytest.approx([15, 15])


def test_what_was_held_back_of_trans_follows_the_counts() -> None:
    """Chunk 2 has no window: it starts after the counts, beside the dispatch, unless nothing of Trans went before."""
    d = uniform_durations(2, 2, a2a_s=4, fec_s=3, fnec_s=3, counts_s=1, trans_s=(3.0, 3.0, 5.0), agg_s=(0.0, 0.0, 0.0))
    ahead = simulate(block_wise(2), d, shared_link=False, record=True)
    late = {
        s.name: s.start_s for s in ahead.spans if s.rank == 0 and s.name in ("Trans(1,2)", "dispatch(1)", "counts(1)")
    }
    assert late["Trans(1,2)"] == late["dispatch(1)"] == late["counts(1)"] + 1
    after = simulate(blocking(2), d, shared_link=False, record=True)
    (start_s,) = {s.start_s for s in after.spans if s.name == "Trans(1,0)"}
    (dispatched_s,) = {s.end_s for s in after.spans if s.name == "dispatch(1)"}
    assert start_s == dispatched_s


def test_agg_hides_under_the_backward_pass_of_the_block_before() -> None:
    d = uniform_durations(2, 2, bnec_s=3, bec_s=5, agg_s=(2, 4))
    step = simulate(block_wise(2), d)
    # Agg(1): 2 under BNEC(0) of 3, 4 under BEC(0) of 5; Agg(0) is sent at the very end, in full
    assert step.exposed_s["agg"] == pytest.approx(6)
    assert step.makespan_s == pytest.approx(2 * 8 + 6)


def test_a_transfer_takes_its_cost_from_the_compute_beside_it() -> None:
    d = uniform_durations(1, 2, start_s=10.0, fec_s=3.0, trans_s=(4.0, 0.0), overlap_cost=0.25)
    step = simulate([Action.parse("TRANS(0,0)@START")], d)
    np.testing.assert_allclose(step.slowed_s, 0.25 * 4.0)  # all of it beside the compute
    assert step.makespan_s == pytest.approx(step.compute_s[0] + 1.0)
    short = simulate([Action.parse("TRANS(0,0)@START")], dataclasses.replace(d, start_s=np.full(2, 1.5)))
    np.testing.assert_allclose(
        short.slowed_s, 0.5
    )  # 1.5 s of work take 2 s, the other 2 s of the transfer are waited for
    np.testing.assert_allclose(short.exposed_trans_s, 2.0)
    assert simulate(blocking(1), d).slowed_s.max() == 0.0
    # a rank that is done before the last one has launched the chunk loses nothing to it
    d = uniform_durations(2, 2, fec_s=3.0, trans_s=(4.0, 0.0), overlap_cost=0.25)
    late, trans_s = d.a2a_s.copy(), d.trans_s.copy()
    late[0, 0, 1] = 5.0  # rank 1 begins its FEC(0) when rank 0 has ended it
    trans_s[0] = 0.0
    step = simulate([Action.parse("TRANS(1,0)@FEC(0)")], dataclasses.replace(d, a2a_s=late, trans_s=trans_s))
    np.testing.assert_allclose(step.slowed_s, [0.0, 0.25 * 4.0])


def test_the_slowest_rank_makes_the_others_wait() -> None:
    d = uniform_durations(2, 3, a2a_s=1, fec_s=2)
    slow = d.fec_s.copy()
    slow[0, 1] = 9
    step = simulate(block_wise(2), dataclasses.replace(d, fec_s=slow))
    assert step.makespan_s == pytest.approx(2 * 4 + 9 + 2)
    assert step.idle_s.tolist() == pytest.approx([7, 0, 7])


def test_a_chunk_starts_when_the_last_rank_has_launched_it() -> None:
    d = uniform_durations(1, 2, trans_s=(1, 0))
    late = dataclasses.replace(d, trans_s=np.array([[[1.0, 0.0], [0.0, 0.0]]]))
    step = simulate((Action.parse("TRANS(0,0)@START"),), late, record=True)
    assert step.exposed_trans_s.tolist() == [1.0, 0.0]
    assert [(s.name, s.rank) for s in step.spans] == [("Trans(0,0)", 0)]


def test_the_plan_is_exposed_only_beyond_the_end_of_the_step() -> None:
    d = uniform_durations(2, 2, a2a_s=1, fec_s=1, plan_s=3)
    # planning of block 0 begins at 0 and of block 1 when the thread is free, at 3; the step itself takes 10
    assert simulate(blocking(2), d).exposed_s["plan"] == 0
    late = dataclasses.replace(d, plan_s=np.array([3.0, 9.0]))
    assert simulate(blocking(2), late).exposed_s["plan"] == pytest.approx(2)


# --- what a measured machine adds ---


def drawn(d: StepDurations, times: int, seed: int) -> float:
    """The mean step without transfers where every operation of every rank is drawn: the oracle of the noise.

    All operations but one begin together, so a step is the sum of what comes last after each of them.
    """
    rng, total = np.random.default_rng(seed), 0.0
    now = np.zeros((times, d.ranks))

    def run(kind: str, seconds: FloatArray, *, together: bool) -> None:
        nonlocal now, total
        if together:
            total += now.max(axis=1).mean()
            now = np.zeros_like(now)
        # counts last until their last rank has them
        noise_s = d.compute_noise * seconds if kind == "c" else d.exchange_noise_s * (kind == "x")
        now = now + seconds + noise_s * rng.normal(size=now.shape)

    run("c", d.start_s, together=False)
    for i in range(d.blocks):
        run("n", np.full(d.ranks, d.counts_s), together=True)
        for kind, seconds in (("x", d.a2a_s[i, 0]), ("c", d.fec_s[i]), ("x", d.a2a_s[i, 1]), ("c", d.fnec_s[i])):
            run(kind, seconds, together=kind == "x")
    for i in reversed(range(d.blocks)):
        for kind, seconds in (("c", d.bnec_s[i]), ("x", d.a2a_s[i, 2]), ("c", d.bec_s[i]), ("x", d.a2a_s[i, 3])):
            run(kind, seconds, together=kind == "x")
    run("c", d.end_s, together=False)
    return total + float(now.max(axis=1).mean())


@pytest.mark.parametrize("even", [True, False])
def test_ranks_that_vary_meet_later(even: bool) -> None:
    d = uniform_durations(2, 4, a2a_s=1.0, fec_s=2.0, fnec_s=0.5, bnec_s=0.7, bec_s=4.0, start_s=0.3, counts_s=0.1)
    if not even:
        skew = np.array([1.0, 1.1, 1.6, 1.0])
        d = dataclasses.replace(d, fec_s=d.fec_s * skew, bec_s=d.bec_s * skew)
    noisy = dataclasses.replace(d, compute_noise=0.06, exchange_noise_s=0.1)
    alone, found = (simulate(block_wise(2), x) for x in (d, noisy))
    assert found.makespan_s == pytest.approx(drawn(noisy, 20_000, 1), rel=3e-3)
    added = found.makespan_s / alone.makespan_s - 1
    assert added > 0.05 if even else added < 0.05, "where one rank is last anyway, noise costs less"
    np.testing.assert_allclose(parts(found), found.makespan_s, rtol=1e-12)
    np.testing.assert_array_equal(found.compute_s, alone.compute_s)


def test_an_all_to_all_and_a_transfer_lengthen_each_other_by_the_measured_share() -> None:
    d = uniform_durations(1, 2, a2a_s=4.0, trans_s=(10.0, 0.0), counts_s=0.0)
    start = [Action.parse("TRANS(0,0)@START")]
    for share, dispatched in ((1.0, 8.0), (0.4, 5.6), (0.0, 4.0)):
        step = simulate(start, dataclasses.replace(d, link_overlap_cost=share), record=True)
        ends = {s.name: s.end_s for s in step.spans if s.rank == 0}
        assert ends["dispatch(0)"] == pytest.approx(dispatched)
        assert ends["Trans(0,0)"] == pytest.approx(10 + 4 * share)
        np.testing.assert_allclose(parts(step), step.makespan_s)
    assert (
        simulate(start, d, shared_link=False).makespan_s
        == simulate(start, dataclasses.replace(d, link_overlap_cost=0.0)).makespan_s
    )


@pytest.mark.parametrize("link_overlap_cost", [0.0, 1.0])
def test_counts_wait_behind_what_is_under_way(link_overlap_cost: float) -> None:
    """Once: they are too few bytes to take a part of the link as well."""
    d = uniform_durations(
        1, 2, trans_s=(3.0, 0.0), counts_s=0.5, counts_behind_s=2.0, link_overlap_cost=link_overlap_cost
    )
    behind = simulate([Action.parse("TRANS(0,0)@START")], d, record=True)
    (counts,) = {(s.start_s, s.end_s) for s in behind.spans if s.name == "counts(0)" and s.end_s > 2.0}
    assert counts == (2.0, 2.5)
    assert behind.shared_s.tolist() == [2.0, 2.0]
    assert behind.makespan_s == pytest.approx(3.0)  # the transfer has gone on meanwhile
    assert simulate(blocking(1), d).shared_s.tolist() == [0.0, 0.0]
    short = dataclasses.replace(d, trans_s=np.full((1, 1, 2), 0.7), agg_s=np.zeros((1, 1, 2)))
    assert simulate([Action.parse("TRANS(0,0)@START")], short).shared_s.tolist() == pytest.approx([0.7, 0.7])


@pytest.mark.parametrize(
    ("transfer", "ends"),
    [
        ((0, 1), {"dispatch(0)": 4.0, "Trans(0,0)": 10.0}),  # the other way
        ((1, 0), {"dispatch(0)": 8.0, "Trans(0,0)": 14.0}),  # the same way, with half of the link each
    ],
)
def test_a_transfer_takes_nothing_from_what_goes_the_other_way(
    transfer: tuple[int, int], ends: dict[str, float]
) -> None:
    """Rank 1 sends 4 bytes of rows to rank 0, while 10 bytes of an expert are under way at 1 byte/s."""
    topology = Topology.uniform(2, intra=Link(bytes_per_s=1.0))
    rows, expert = np.zeros((2, 2, 2))
    rows[1, 0], expert[transfer] = 4.0, 10.0
    d = dataclasses.replace(
        uniform_durations(1, 2, a2a_s=4.0, trans_s=(10.0, 0.0)),
        dispatched=(Dispatched(rows, topology),),
        trans_pairs={(0, 0): expert},
    )
    step = simulate([Action.parse("TRANS(0,0)@START")], d, record=True)
    assert {s.name: s.end_s for s in step.spans if s.name in ends} == pytest.approx(ends)
    np.testing.assert_allclose(parts(step), step.makespan_s)


def test_what_is_left_of_a_transfer_shares_the_link() -> None:
    """Rank 0 has sent 6 of 10 bytes when its rows follow: the last 4 of both take 8 s together."""
    topology = Topology.uniform(3, intra=Link(bytes_per_s=1.0))
    rows, expert = np.zeros((2, 3, 3))
    rows[0, 2], expert[0, 1] = 4.0, 10.0
    d = dataclasses.replace(
        uniform_durations(1, 3, a2a_s=4.0, trans_s=(10.0, 0.0), start_s=6.0),
        trans_s=np.array([[[10.0, 10.0, 0.0], [0.0] * 3]]),
        dispatched=(Dispatched(rows, topology),),
        trans_pairs={(0, 0): expert},
    )
    step = simulate([Action.parse("TRANS(0,0)@START")], d, record=True)
    assert {s.name: s.end_s for s in step.spans if s.rank == 0 and s.name in ("dispatch(0)", "Trans(0,0)")} == {
        "dispatch(0)": pytest.approx(14.0),
        "Trans(0,0)": pytest.approx(14.0),
    }


def test_one_way_is_faster_than_both() -> None:
    """An even exchange takes what the link says, both ways together; each alone 1 / 1.25 of it."""
    plain = Topology.uniform(4, intra=Link(bytes_per_s=1000.0))
    found = dataclasses.replace(plain, duplex_cost=0.25, exchange_noise_s=0.1)
    even = np.where(np.eye(4, dtype=bool), 0.0, 100.0)
    np.testing.assert_allclose(exchange_by_rank(even, found), exchange_by_rank(even, plain))
    one = np.zeros((4, 4))
    one[0, 1] = 1000.0
    assert exchange_by_rank(one, found).tolist() == pytest.approx([0.8, 0.8, 0.0, 0.0])
    one[1, 0] = 400.0  # a quarter of which the port loses to the other way
    assert exchange_by_rank(one, found)[:2].tolist() == pytest.approx([1.1 / 1.25] * 2)


def test_a_backward_pass_has_its_own_seconds_and_a_call_its_overhead() -> None:
    shape = LayerShape.feed_forward(dim=8, hidden=16)
    topology = dataclasses.replace(
        Topology.uniform(2, flops_per_s=1e6, expert_overhead_s=0.01), call_overhead_s=0.5, backward_ratio=2.5
    )
    context = PlanContext(topology=topology, shape=shape, home=(0, 1))
    load = np.array([[70, 0], [30, 0]], dtype=np.int64)
    homes = Placement.homes_only(2, 2)
    d = predicted_durations([homes], [Split.to_homes(load, homes)], [context])
    third = 100 * shape.forward_flops_per_token / 1e6 + 0.01 + 0.5
    assert d.fec_s[0].tolist() == pytest.approx([3 * third / 3.5, 0.0])  # nothing to do, nothing to call
    assert d.bec_s[0].tolist() == pytest.approx([2.5 * 3 * third / 3.5, 0.0])
    usual = dataclasses.replace(context, topology=dataclasses.replace(topology, backward_ratio=2.0))
    d = predicted_durations([homes], [Split.to_homes(load, homes)], [usual])
    assert d.fec_s[0, 0] == pytest.approx(third, rel=1e-15)
    assert d.bec_s[0, 0] == 2 * d.fec_s[0, 0]


# --- pairs of ranks that start when both are there ---


def served(sizes: FloatArray, arrived: FloatArray) -> float:
    """When a sender of 1 byte/s is through that serves all peers who are there alike, by playing its moments."""
    now, left = 0.0, sizes.copy()
    while left.any():
        here = (left > 0) & (arrived <= now)
        coming = arrived[(left > 0) & (arrived > now)]
        until = coming.min() if coming.size else np.inf
        if not here.any():
            now = until
            continue
        many = int(here.sum())
        spent = min(left[here].min() * many, until - now)
        left[here] -= spent / many
        left[left < 1e-12] = 0.0
        now += spent
    return now


@QUICK
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=6), st.booleans())
def test_one_busy_link_is_done_when_its_moments_say_so(peers: list[tuple[int, int]], receives: bool) -> None:
    """One rank alone sends, or alone receives: an oracle that plays every arrival and every end."""
    sizes, arrived = np.array(peers, dtype=np.float64).T
    sizes[0] = 0.0
    pairs = np.zeros((len(peers), len(peers)))
    pairs[0] = sizes
    pairs = pairs.T if receives else pairs
    left = left_by_rank(pairs, Topology.uniform(len(peers), intra=Link(bytes_per_s=1.0)), arrived)
    done = max(arrived[0], (arrived + left[:, 0]).max(where=left[:, 0] > 0, initial=0.0))
    assert done == pytest.approx(max(served(sizes, np.maximum(arrived, arrived[0])), arrived[0]))


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[FloatArray, Topology, FloatArray]:
    per_node, nodes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ranks = max(1, per_node * nodes - draw(st.integers(0, per_node - 1)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    topology = Topology.uniform(
        ranks,
        ranks_per_node=per_node,
        intra=Link(bytes_per_s=10.0, latency_s=draw(st.sampled_from([0.0, 0.5]))),
        inter=Link(bytes_per_s=4.0),
        port_bytes_per_s=draw(st.sampled_from([None, 5.0])),
    )
    pairs = rng.integers(0, 40, size=(ranks, ranks)) * rng.choice([0, 1], size=(ranks, ranks), p=(0.3, 0.7))
    duplex = draw(st.sampled_from([0.0, 0.2]))
    arrived = rng.integers(0, 6, size=ranks).astype(np.float64)
    return pairs.astype(np.float64), dataclasses.replace(topology, duplex_cost=duplex), arrived


@QUICK
@given(exchanges())
def test_what_is_left_agrees_with_its_naive_twin(exchange: tuple[FloatArray, Topology, FloatArray]) -> None:
    pairs, topology, arrived = exchange
    left, alone = left_by_rank(pairs, topology, arrived), exchange_by_rank(pairs, topology)
    for k, at in enumerate(arrived):
        later = np.zeros_like(pairs)
        for r, d in itertools.product(range(topology.ranks), repeat=2):
            if arrived[r] >= at or arrived[d] >= at:
                later[r, d] = pairs[r, d]
        np.testing.assert_array_equal(left[k], exchange_by_rank(later, topology))
    assert (left <= alone).all()
    np.testing.assert_array_equal(left[arrived.argmin()], alone)  # when the first rank comes, all of it
    together = left_by_rank(pairs, topology, np.full(topology.ranks, 3.0))
    np.testing.assert_array_equal(together, np.broadcast_to(alone, together.shape))


def test_very_many_ranks_take_no_less_than_one_by_one() -> None:
    ranks = 80
    rng = np.random.default_rng(3)
    pairs, arrived = rng.random((ranks, ranks)), rng.random(ranks)
    topology = Topology.uniform(ranks, intra=Link(bytes_per_s=10.0))
    found = left_by_rank(pairs, topology, arrived)
    for k in range(ranks):
        begin = np.maximum(arrived[:, None], arrived[None, :]) >= arrived[k]
        exact = exchange_by_rank(np.where(begin, pairs, 0.0), topology)
        assert (found[k] >= exact).all()
        np.testing.assert_allclose(found[k], exact, atol=0.05 * found.max())


@st.composite
def steps_of_pairs(draw: st.DrawFn) -> StepDurations:
    d = draw(durations())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    topology = Topology.uniform(d.ranks, intra=Link(bytes_per_s=draw(st.sampled_from([0.5, 5.0]))))
    moved = [rng.exponential(size=(d.ranks, d.ranks)) for _ in range(d.blocks)]
    ways = [[exchange_by_rank(x, topology) for x in (pairs, pairs.T)] * 2 for pairs in moved]
    return dataclasses.replace(
        d, a2a_s=np.array(ways), dispatched=tuple(Dispatched(pairs, topology) for pairs in moved)
    )


@QUICK
@given(steps_of_pairs(), st.booleans())
def test_steps_of_pairs_have_a_name_for_every_second(d: StepDurations, shared: bool) -> None:
    step = simulate(block_wise(d.blocks), d, shared_link=shared, record=True)
    np.testing.assert_allclose(parts(step), step.makespan_s, rtol=1e-12, atol=1e-12)
    assert all(getattr(step, f.name).min() >= -1e-12 for f in dataclasses.fields(step) if f.name.endswith("s_s"))
    tokens = np.zeros(d.ranks)
    for span in step.spans:
        tokens[span.rank] += span.seconds * (span.stream == "tokens")
    np.testing.assert_allclose(tokens, step.a2a_s + step.shared_s, rtol=1e-9, atol=1e-9)


@QUICK
@given(steps_of_pairs())
def test_pairs_never_make_a_step_longer(d: StepDurations) -> None:
    """Without transfers, whose cost to others depends on when they run, and without noise."""
    nothing = np.zeros_like(d.trans_s)
    d = dataclasses.replace(d, trans_s=nothing, agg_s=nothing, compute_noise=0.0, exchange_noise_s=0.0)
    waits = dataclasses.replace(d, dispatched=())
    assert simulate(blocking(d.blocks), d).makespan_s <= simulate(blocking(d.blocks), waits).makespan_s * (1 + 1e-12)


def test_a_rank_that_comes_late_with_little_delays_little() -> None:
    """Ranks 0 and 1 exchange 10 bytes in both directions while rank 2, which has 1 byte, still computes."""
    pairs = np.array([[0.0, 10.0, 0.0], [10.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    topology = Topology.uniform(3, intra=Link(bytes_per_s=1.0))
    there, back = exchange_by_rank(pairs, topology), exchange_by_rank(pairs.T, topology)
    d = uniform_durations(1, 3)
    late = np.array([[0.0, 0.0, 20.0]])
    d = dataclasses.replace(d, a2a_s=np.array([[there, back, there, back]]), fec_s=late)
    waits = simulate(blocking(1), d)
    step = simulate(blocking(1), dataclasses.replace(d, dispatched=(Dispatched(pairs, topology),)))
    assert there.tolist() == [11.0, 10.0, 1.0]
    # rank 2 computes from 1 to 21. Rank 0 sends its 11 bytes back from 11 on, the last of them from 21 to 22
    assert step.makespan_s == pytest.approx(22 + 2 * 11)
    assert waits.makespan_s == pytest.approx(21 + 3 * 11)


# --- rules on random steps ---


@QUICK
@given(durations(), st.booleans(), st.sampled_from([block_wise, blocking]))
def test_every_second_of_every_rank_has_a_name(d: StepDurations, shared: bool, make: object) -> None:
    step = simulate(make(d.blocks), d, shared_link=shared)  # type: ignore[operator]
    np.testing.assert_allclose(parts(step), step.makespan_s, rtol=1e-12, atol=1e-12)
    assert all(getattr(step, f.name).min() >= 0 for f in dataclasses.fields(step) if f.name.endswith("s_s"))


@QUICK
@given(durations(), st.booleans())
def test_makespan_is_at_least_every_stream(d: StepDurations, shared: bool) -> None:
    step = simulate(block_wise(d.blocks), d, shared_link=shared)
    floor = 1 - 1e-12
    assert step.makespan_s >= floor * (compute_s(d) + d.a2a_s.sum(axis=(0, 1))).max()
    assert step.makespan_s >= floor * (d.trans_s + d.agg_s).sum(axis=(0, 1)).max()
    critical = sum(d.fec_s[i].max() + d.bec_s[i].max() for i in range(d.blocks))
    assert step.makespan_s >= floor * critical  # all-to-alls on both sides of the experts


@QUICK
@given(durations())
def test_exposed_is_at_most_what_is_sent(d: StepDurations) -> None:
    """On one rank, which waits for no other's launch; with several that wait counts as well."""
    own = [
        f.name for f in dataclasses.fields(d) if f.name not in ("plan_s", "dispatched") and np.ndim(getattr(d, f.name))
    ]
    d = dataclasses.replace(d, **{name: getattr(d, name)[..., :1] for name in own})
    for make in (block_wise, blocking):
        step = simulate(make(d.blocks), d)
        assert (step.exposed_trans_s <= d.trans_s.sum(axis=(0, 1)) + 1e-9).all()
        assert (step.exposed_agg_s <= d.agg_s.sum(axis=(0, 1)) + 1e-9).all()
        assert (step.exposed_plan_s <= d.plan_s.sum() + 1e-9).all()


@QUICK
@given(durations())
def test_block_wise_is_never_slower_than_blocking_on_links_of_its_own(d: StepDurations) -> None:
    """Where hiding is free: else a transfer can be taken from the rank that all others wait for."""
    d = dataclasses.replace(d, overlap_cost=0.0)
    fast = simulate(block_wise(d.blocks), d, shared_link=False)
    slow = simulate(blocking(d.blocks), d, shared_link=False)
    assert fast.makespan_s <= slow.makespan_s * (1 + 1e-12)


@QUICK
@given(durations())
def test_block_wise_is_never_slower_on_a_shared_link_when_ranks_send_alike(d: StepDurations) -> None:
    """Without planning: a transfer that slows the first exchange of counts makes the planner start that much later."""
    same = {n: np.repeat(getattr(d, n)[..., :1], d.ranks, axis=-1) for n in ("trans_s", "agg_s", "a2a_s")}
    d = dataclasses.replace(d, **same, plan_s=np.zeros(d.blocks), overlap_cost=0.0)  # type: ignore[arg-type]
    fast, slow = simulate(block_wise(d.blocks), d), simulate(blocking(d.blocks), d)
    assert fast.makespan_s <= slow.makespan_s * (1 + 1e-12)


@QUICK
@given(durations())
def test_recorded_spans_agree_with_the_sums(d: StepDurations) -> None:
    step = simulate(block_wise(d.blocks), d, record=True)
    for stream, expected in (
        ("compute", compute_s(d) + step.slowed_s),
        ("tokens", step.a2a_s + step.shared_s),
    ):
        found = np.zeros(d.ranks)
        for span in step.spans:
            found[span.rank] += span.seconds * (span.stream == stream)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    for rank in range(d.ranks):  # one thing at a time on each stream
        for stream in ("compute", "tokens", "weights", "plan"):
            own = sorted(s for s in step.spans if (s.rank, s.stream) == (rank, stream))
            assert all(b.start_s >= a.end_s - 1e-9 for a, b in itertools.pairwise(own))


# --- errors ---


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (("TRANS(3,0)@START",), "outside a step of 2 blocks"),
        (("TRANS(0,2)@START",), "outside a step of 2 blocks and 2 chunks"),
        (("TRANS(0,0)@FEC(2)",), "names a window outside"),
        (("TRANS(0,0)@START", "TRANS(0,0)@FEC(0)"), "launched twice"),
        (("AGG(1,0)@BEC(1)",), "before the backward pass of its own experts"),
        (("AGG(0,0)@FNEC(0)",), "before the backward pass of its own experts"),
    ],
)
def test_schedules_that_do_not_fit(actions: tuple[str, ...], message: str) -> None:
    schedule: Schedule = tuple(Action.parse(a) for a in actions)
    with pytest.raises(ValueError, match=message):
        simulate(schedule, uniform_durations(2, 2))


def test_built_in_schedules_fit() -> None:
    for blocks in (1, 2, 5):
        check_schedule(block_wise(blocks), blocks, 2)
        check_schedule(blocking(blocks), blocks, 2)


def test_bad_durations_name_the_field() -> None:
    d = uniform_durations(2, 2)
    with pytest.raises(SpecError, match=r"fec_s must have shape \[2, 2\]"):
        dataclasses.replace(d, fec_s=np.zeros((2, 3)))
    with pytest.raises(SpecError, match="agg_s must have shape"):
        dataclasses.replace(d, agg_s=np.zeros((2, 3, 2)))
    with pytest.raises(SpecError, match="bec_s must hold finite seconds"):
        dataclasses.replace(d, bec_s=np.full((2, 2), -1.0))
    with pytest.raises(SpecError, match="overlap_cost must be at least 0 and below 1"):
        dataclasses.replace(d, overlap_cost=1.0)
    with pytest.raises(SpecError, match="a2a_s must have shape"):
        dataclasses.replace(d, a2a_s=np.zeros((2, 2)))


# --- durations from the model ---


def context() -> PlanContext:
    topology = Topology.uniform(4, ranks_per_node=2, intra=Link(bytes_per_s=1000.0), inter=Link(bytes_per_s=100.0))
    topology = dataclasses.replace(topology, flops_per_s=(1e4, 1e4, 1e4, 5e3))
    return PlanContext(
        topology=topology,
        shape=LayerShape.feed_forward(dim=2, hidden=2, bias=False),
        home=(0, 1, 2, 3),
        windows=Windows(fnec_s=1.0),
    )


def test_exchange_by_rank_follows_the_busiest_link() -> None:
    topology = context().topology
    pairs = np.zeros((4, 4))
    pairs[0, 1] = 500.0  # inside node 0
    pairs[2, 2] = 1e9  # stays at home
    assert exchange_by_rank(pairs, topology).tolist() == [0.5, 0.5, 0.0, 0.0]
    pairs[0, 3] = 100.0  # between nodes
    assert exchange_by_rank(pairs, topology).tolist() == [1.0, 0.5, 0.0, 1.0]


def test_whoever_uses_a_port_is_done_when_it_is() -> None:
    topology = dataclasses.replace(context().topology, port_bytes_per_s=100.0)
    pairs = np.zeros((4, 4))
    pairs[1, 0] = 100.0  # inside node 0: no port
    assert exchange_by_rank(pairs, topology).tolist() == [0.1, 0.1, 0.0, 0.0]
    pairs[0, 2] = 100.0
    assert exchange_by_rank(pairs, topology).tolist() == [1.0, 0.1, 1.0, 0.0]
    pairs[1, 3] = 50.0  # 150 bytes through both ports
    assert exchange_by_rank(pairs, topology).tolist() == [1.5] * 4
    pairs[1, 3] = 0.0
    pairs[3, 1] = 20.0  # the other way is free
    assert exchange_by_rank(pairs, topology).tolist() == [1.0, 0.2, 1.0, 0.2]
    four = Topology.uniform(4, ranks_per_node=1, inter=topology.inter, port_bytes_per_s=100.0)
    pairs = np.random.default_rng(0).pareto(1.0, (4, 4))
    alone = dataclasses.replace(four, port_bytes_per_s=None)
    assert exchange_by_rank(pairs, four) == pytest.approx(exchange_by_rank(pairs, alone))


@given(cases(max_ranks=8), st.integers(0, 2**32 - 1))
def test_the_last_rank_is_done_when_the_model_says(case: Case, seed: int) -> None:
    topology = case.context.topology
    rng = np.random.default_rng(seed)
    pairs = rng.pareto(1.0, (topology.ranks,) * 2) * rng.integers(0, 2, (topology.ranks,) * 2)
    done = exchange_by_rank(pairs, topology)
    assert done.max() == pytest.approx(exchange_seconds(pairs, topology))
    idle = pairs - np.diag(np.diag(pairs))
    assert ((done == 0) == ((idle.sum(axis=0) == 0) & (idle.sum(axis=1) == 0))).all()


def test_replicas_take_their_part_of_a_block() -> None:
    topology = Topology.uniform(2, flops_per_s=1.0)
    shape = LayerShape(
        expert_params=1, expert_bytes=4.0, expert_grad_bytes=4.0, token_bytes=4.0, forward_flops_per_token=1.0
    )
    context = PlanContext(topology=topology, shape=shape, home=(0, 1), slots_per_rank=1)
    placement = Placement.with_replicas((0, 1), 2, [(0, 1)])
    tokens = np.zeros((2, 2, 2), dtype=np.int64)
    tokens[0, 0], tokens[1, 1, 1] = (3, 2), 4
    split = Split(tokens)
    whole = predicted_durations([placement], [split], [context])
    assert whole.copies_s is None
    apart = predicted_durations([placement], [split], [context], apart=[True])
    assert apart.copies_s is not None
    np.testing.assert_allclose(apart.copies_s, whole.fec_s * [[0.0, 2 / 6]])
    assert predicted_durations([placement], [split], [context], apart=[False]).copies_s is None


def test_predicted_durations() -> None:
    load = np.array([[8, 0, 0, 0]] * 4)
    c = context()
    placement = Placement.with_replicas(c.home, 4, [(0, 1)])
    tokens = np.zeros((4, 4, 4), dtype=np.int64)
    tokens[:2, 0, 0] = 8
    tokens[2:, 0, 1] = 8
    split = Split(tokens)
    split.check(load, placement)
    cut = (0, 256, 1024)
    d = predicted_durations([placement], [split], [c], forms=[Form(cut, cut)], plan_s=0.1)
    assert d.fec_s[0].tolist() == pytest.approx([16 * 16 / 1e4, 16 * 16 / 1e4, 0, 0])
    assert d.fnec_s[0].tolist() == [1, 1, 1, 2]
    assert d.bec_s[0].tolist() == pytest.approx((2 * d.fec_s[0]).tolist())
    assert d.trans_s[0, :, 1].tolist() == pytest.approx([0.25 * 32 / 1000, 0.75 * 32 / 1000])
    assert d.trans_s[0, 0, 2:].tolist() == [0, 0]
    np.testing.assert_allclose(d.agg_s, d.trans_s)
    assert {key: pairs.tolist() for key, pairs in d.agg_pairs.items()} == {
        key: pairs.T.tolist() for key, pairs in d.trans_pairs.items()
    }
    assert [float(d.trans_pairs[0, c][0, 1]) for c in (0, 1)] == [8.0, 24.0]
    step = simulate(block_wise(1), d)
    assert step.makespan_s > 0
    with pytest.raises(SpecError, match="as many placements"):
        predicted_durations([placement], [split, split], [c])


@pytest.mark.parametrize("port_bytes_per_s", [None, 120.0])
def test_chunks_of_all_forms_add_up_to_the_planners_cost(port_bytes_per_s: float | None) -> None:
    c = context()
    c = dataclasses.replace(c, topology=dataclasses.replace(c.topology, port_bytes_per_s=port_bytes_per_s))
    seen: set[FormName] = set()
    for pairs in ([(0, 1), (0, 2), (0, 3), (3, 1)], [(1, 3)], []):
        placement = Placement.with_replicas(c.home, 4, pairs)
        forms: list[tuple[FormName, dict[int, Route]]] = [("direct", {}), ("two-phase", {})]
        forms += [(form, routes) for form, routes in routes_of(placement, c.topology).items() if routes]
        seen.update(form for form, _ in forms)
        costs = transfer_seconds(placement, c.topology, 32), transfer_seconds(placement, c.topology, 32, sum_bytes=64)
        for cut in ((0, 256, 1024), (0, 1024), (0, 100, 512, 900, 1024)):
            for cost, sum_bytes in zip(costs, (None, 64), strict=True):
                for form, routes in forms:
                    moved = exchanges_by_chunk(
                        placement, 32, cut, two_phase=form != "direct", routes=routes, sum_bytes=sum_bytes
                    )
                    chunks = transfer_by_chunk(moved, c.topology)
                    assert chunks.shape == (len(cut) - 1, 4)
                    assert chunks.max(axis=1).sum() == pytest.approx(cost.seconds(form))
    assert seen == set(FORM_NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("refetch", [False, True])
def test_every_schedule_accounts_for_all_of_its_step(name: str, refetch: bool) -> None:
    d = uniform_durations(4, 2, a2a_s=1, fec_s=2, fnec_s=1, bnec_s=1, bec_s=4, trans_s=(1,) * 4, agg_s=(1,) * 4)
    schedule = schedule_named(name, 4, refetch=refetch)
    whole = simulate(schedule, d)
    np.testing.assert_allclose(parts(whole), whole.makespan_s)
    if refetch and name == "blocking":
        assert whole.makespan_s == simulate(schedule_named(name, 4), d).makespan_s + 3 * 4


def test_thousands_of_ranks_are_quick() -> None:
    d = uniform_durations(24, 4096, a2a_s=1, fec_s=2, fnec_s=1, bnec_s=1, bec_s=4, trans_s=(1, 1), agg_s=(1, 1))
    assert simulate(block_wise(24), d).makespan_s > 24 * 12
