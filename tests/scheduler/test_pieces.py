"""The piece plan against a simulation that knows nothing of it: every element of every replica, once, and in order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prophet.scheduler.pieces import GRAIN, HALVES, Chunk, Form, agg_chunks, check_cut, cut_by_weights, trans_chunks
from prophet.spec import Placement, Route, Topology, by_node, relayed


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    ranks = draw(st.integers(1, 8))
    per_rank = draw(st.integers(1, 3))
    home = [e // per_rank for e in range(ranks * per_rank)]
    pairs = [(e, r) for e in range(len(home)) for r in range(ranks)]
    kept = draw(st.lists(st.sampled_from(pairs), max_size=24))
    return Placement.with_replicas(home, ranks, kept)


@st.composite
def routed(draw: st.DrawFn) -> tuple[Placement, dict[int, Route] | None]:
    """A placement, and the routes of some of its experts: in groups by node, of any size, or over relays."""
    p = draw(placements())
    topology = Topology.uniform(p.ranks, ranks_per_node=draw(st.integers(1, p.ranks)))
    routes = {}
    for e, found in p.receivers().items():
        ways = [None, Route(by_node(found, topology)), relayed(int(p.home[e]), found, topology)]
        if (route := draw(st.sampled_from(ways))) is not None:
            routes[e] = route
    return p, draw(st.sampled_from([None, routes, routes]))


cuts = st.lists(st.integers(0, GRAIN), max_size=4).map(lambda inner: (0, *sorted(inner), GRAIN))
QUICK = settings(max_examples=150, deadline=None)


def play(chunks_of: list[tuple[Chunk, ...]], memory: list[dict[int, np.ndarray]], *, add: bool) -> list[list[tuple]]:
    """Carry out all ranks' exchanges on flat vectors by rank and expert. Returns what every rank received, in order.

    Buffers are packed and unpacked as the two ends list them, so that a disagreement mixes elements up.
    """
    ranks = len(memory)
    received: list[list[tuple]] = [[] for _ in range(ranks)]
    assert len({len(c) for c in chunks_of}) == 1
    for at in range(len(chunks_of[0])):
        rounds = [c[at] for c in chunks_of]
        assert len({tuple(x.phase for x in r) for r in rounds}) == 1, "all ranks take part in the same all-to-alls"
        for exchanges in zip(*rounds, strict=True):
            wire: dict[tuple[int, int], list[float]] = {}
            for rank, x in enumerate(exchanges):
                buffer = [v for p in x.sends for v in memory[rank][p.expert][p.start : p.stop]]
                offset = 0
                for peer, n in enumerate(x.counts(ranks)[0]):
                    wire[rank, peer] = buffer[offset : offset + n]
                    offset += n
                assert all(p.source == rank for p in x.sends)
                if add:
                    for p in x.sends:
                        memory[rank][p.expert][p.start : p.stop] = 0
            for rank, x in enumerate(exchanges):
                counts = x.counts(ranks)[1]
                assert [len(wire[s, rank]) for s in range(ranks)] == counts
                buffer = [v for s in range(ranks) for v in wire[s, rank]]
                offset = 0
                for p in x.recvs:
                    assert p.target == rank
                    values = buffer[offset : offset + p.size]
                    offset += p.size
                    if add:
                        memory[rank][p.expert][p.start : p.stop] += values
                    else:
                        memory[rank][p.expert][p.start : p.stop] = values
                    received[rank].append((x.phase, p.expert, p.start, p.stop, p.source))
    return received


@QUICK
@given(routed(), st.integers(1, 40), cuts, st.booleans())
def test_trans_brings_every_replica_its_expert(
    given_: tuple[Placement, dict[int, Route] | None], numel: int, cut: tuple[int, ...], two: bool
) -> None:
    p, routes = given_
    rng = np.random.default_rng(0)
    truth = rng.integers(1, 1 << 30, (p.experts, numel)).astype(np.float64)
    memory = [{e: np.full(numel, np.nan) for e in range(p.experts)} for _ in range(p.ranks)]
    for e in range(p.experts):
        memory[p.home[e]][e] = truth[e].copy()
    chunks = [trans_chunks(p, r, numel, cut, two_phase=two, routes=routes) for r in range(p.ranks)]
    assert all(len(c) == len(cut) - 1 for c in chunks)
    play(chunks, memory, add=False)
    for r in range(p.ranks):
        for e in range(p.experts):
            # a part that another rank passes on is right as well
            others = np.isnan(memory[r][e]) & (not p.holds[e, r])
            np.testing.assert_array_equal(memory[r][e][~others], truth[e][~others])
            if not (two and routes and e in routes and routes[e].relays):
                assert others.all() == (not p.holds[e, r])


@QUICK
@given(routed(), st.integers(1, 40), cuts, st.booleans())
def test_agg_brings_every_gradient_home_once(
    given_: tuple[Placement, dict[int, Route] | None], numel: int, cut: tuple[int, ...], two: bool
) -> None:
    p, routes = given_
    rng = np.random.default_rng(1)
    memory = [{e: np.zeros(numel) for e in range(p.experts)} for _ in range(p.ranks)]
    for e in range(p.experts):
        for r in np.flatnonzero(p.holds[e]):
            memory[r][e] = rng.integers(1, 1000, numel).astype(np.float64)
    totals = [sum(memory[r][e] for r in np.flatnonzero(p.holds[e])) for e in range(p.experts)]
    chunks = [agg_chunks(p, r, numel, cut, two_phase=two, routes=routes) for r in range(p.ranks)]
    received = play(chunks, memory, add=True)
    for e in range(p.experts):
        for r in range(p.ranks):
            wanted = totals[e] if r == p.home[e] else np.zeros(numel)
            np.testing.assert_array_equal(memory[r][e], wanted)
    for seen in received:  # what is added up comes by source rank
        by_elements: dict[tuple, list[int]] = {}
        for phase, e, start, stop, source in seen:
            by_elements.setdefault((phase, e, start, stop), []).append(source)
        assert all(sources == sorted(set(sources)) for sources in by_elements.values())


@QUICK
@given(placements(), cuts)
def test_no_rank_sends_more_than_the_model_says(p: Placement, cut: tuple[int, ...]) -> None:
    """Two-phase: one copy out of every home whatever n is, and the n-th part of it to each other receiver."""
    numel = 840  # a multiple of every number of receivers
    copies = p.replica_mask().sum(axis=1)
    for r in range(p.ranks):
        sent: dict[str, int] = {}
        for chunk in trans_chunks(p, r, numel, cut, two_phase=True):
            for x in chunk:
                sent[x.phase] = sent.get(x.phase, 0) + sum(piece.size for piece in x.sends)
        homes = [e for e in range(p.experts) if p.home[e] == r and copies[e]]
        held = [e for e in range(p.experts) if p.holds[e, r] and p.home[e] != r]
        assert sent.get("scatter", 0) == numel * len(homes)
        assert sent.get("gather", 0) == sum(numel // copies[e] * (copies[e] - 1) for e in held)


def test_a_table() -> None:
    """One expert of seven elements at home on rank 0, replicas on ranks 1 and 2, as rank 1 sees it."""
    p = Placement.with_replicas([0], 3, [(0, 1), (0, 2)])

    def shown(chunks: tuple[Chunk, ...]) -> list[str]:
        return [
            f"{at} {x.phase} {p.source}->{p.target} [{p.start},{p.stop})"
            for at, chunk in enumerate(chunks)
            for x in chunk
            for p in (*x.sends, *x.recvs)
        ]

    assert shown(trans_chunks(p, 1, 7, two_phase=True)) == [
        "0 scatter 0->1 [0,3)",
        "1 gather 1->2 [0,3)",
        "1 gather 2->1 [3,7)",
    ]
    assert shown(agg_chunks(p, 1, 7, two_phase=True)) == [
        "0 reduce 1->1 [0,3)",
        "0 reduce 1->2 [3,7)",
        "0 reduce 1->1 [0,3)",
        "0 reduce 2->1 [0,3)",
        "1 home 1->0 [0,3)",
    ]
    assert shown(trans_chunks(p, 1, 7)) == ["0 direct 0->1 [0,3)", "1 direct 0->1 [3,7)"]


def test_a_table_of_what_crosses_once() -> None:
    """One expert of six elements at home on rank 0; of its replicas rank 1 shares the home's node, 2 and 3 another."""
    p = Placement.with_replicas([0], 4, [(0, 1), (0, 2), (0, 3)])

    def shown(chunks: tuple[Chunk, ...]) -> list[str]:
        return [f"{x.phase} {p.source}->{p.target} [{p.start},{p.stop})" for c in chunks for x in c for p in x.recvs]

    routes = {0: Route(((1,), (2, 3)))}
    assert [shown(trans_chunks(p, r, 6, two_phase=True, routes=routes)) for r in range(4)] == [
        [],
        ["scatter 0->1 [0,6)"],
        ["scatter 0->2 [0,3)", "gather 3->2 [3,6)"],
        ["scatter 0->3 [3,6)", "gather 2->3 [0,3)"],
    ]
    assert shown(agg_chunks(p, 0, 6, two_phase=True, routes=routes)) == [
        "home 1->0 [0,6)",
        "home 2->0 [0,3)",
        "home 3->0 [3,6)",
    ]
    assert shown(agg_chunks(p, 2, 6, two_phase=True, routes=routes)) == ["reduce 2->2 [0,3)", "reduce 3->2 [0,3)"]


def test_a_table_of_what_relays_send() -> None:
    """Two nodes of two ranks. One expert of six elements at home on rank 0, with replicas on ranks 1 and 3."""
    p, routes = Placement.with_replicas([0], 4, [(0, 1), (0, 3)]), {0: Route(((1,), (3,)), (0, 1), ((0, 1), (2, 3)))}
    assert routes == {0: relayed(0, (1, 3), Topology.uniform(4, ranks_per_node=2))}

    def shown(chunks: tuple[Chunk, ...]) -> list[list[str]]:
        return [
            [f"{x.phase} {p.source}->{p.target} [{p.start},{p.stop})" for x in chunk for p in x.recvs]
            for chunk in chunks
        ]

    assert [shown(trans_chunks(p, r, 6, two_phase=True, routes=routes)) for r in range(4)] == [
        [[], []],
        [["spread 0->1 [3,6)"], ["gather 0->1 [0,3)"]],
        [["scatter 0->2 [0,3)"], []],
        [["scatter 1->3 [3,6)"], ["gather 2->3 [0,3)"]],
    ]
    assert [shown(agg_chunks(p, r, 6, two_phase=True, routes=routes)) for r in range(4)] == [
        [["reduce 1->0 [0,3)", "home 0->0 [0,3)", "home 2->0 [0,3)"], ["hand-over 1->0 [3,6)"]],
        [["reduce 1->1 [3,6)", "home 1->1 [3,6)", "home 3->1 [3,6)"], []],
        [["reduce 3->2 [0,3)"], []],
        [["reduce 3->3 [3,6)"], []],
    ]
    phases = [
        [(x.phase, x.sends_on) for x in c] for c in agg_chunks(p, 0, 6, (0, GRAIN), two_phase=True, routes=routes)
    ]
    assert phases == [[("reduce", False), ("home", True), ("hand-over", True)]]


def test_phases_meet_next_to_the_middle_of_the_cut() -> None:
    p = Placement.with_replicas([0], 3, [(0, 1), (0, 2)])

    def phases(*cut: int) -> list[list[str]]:
        return [[x.phase for x in chunk] for chunk in trans_chunks(p, 0, 100, cut, two_phase=True)]

    assert phases(0, 100, GRAIN) == [["scatter"], ["gather"]]
    assert phases(0, GRAIN) == [["scatter", "gather"]]
    assert phases(0, 100, 500, 600, GRAIN) == [["scatter"], ["scatter"], ["gather"], ["gather"]]
    assert phases(0, 900, 950, GRAIN) == [["scatter"], ["gather"], ["gather"]]


@pytest.mark.parametrize("cut", [(), (0,), (0, 5), (1, GRAIN), (0, 600, 500, GRAIN)])
def test_what_is_no_cut_is_refused(cut: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a cut rises from 0 to 1024"):
        check_cut(cut)
    with pytest.raises(ValueError, match="a cut rises from 0 to 1024"):
        Form(trans_cut=cut)


def test_cuts_follow_the_windows() -> None:
    assert cut_by_weights([1, 3]) == (0, GRAIN // 4, GRAIN)
    assert cut_by_weights([0, 0]) == HALVES
    assert cut_by_weights([0, 7]) == (0, 0, GRAIN)
    assert cut_by_weights([2, 2, 4]) == (0, GRAIN // 4, GRAIN // 2, GRAIN)
    for bad in ([], [-1, 2]):
        with pytest.raises(ValueError, match="expected the length of one window or more"):
            cut_by_weights(bad)
