"""A split as flows is its dense twin in everything that is asked of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prophet.errors import SpecError
from prophet.planner.search.prophet import ProphetPlanner
from prophet.spec import Flows, Placement, Split
from tests.helpers.planner_cases import Case, cases

MANY = settings(max_examples=120, deadline=None)
LOAD = np.array([[3, 1], [2, 4]])
HOMES = Placement.homes_only(2, 2)


def alike(flows: Split, dense: Split) -> None:
    """Whether both say the same of everything but their digest, whose form they differ in."""
    assert flows == dense
    assert dense == flows
    assert (flows.ranks, flows.experts) == (dense.ranks, dense.experts)
    for name in ("load", "pairs", "by_expert", "rank_load"):
        mine, other = getattr(flows, name)(), getattr(dense, name)()
        assert mine.dtype == other.dtype == np.int64
        assert np.array_equal(mine, other), name
    assert flows.max_mean() == dense.max_mean()
    for rank in range(dense.ranks):
        assert np.array_equal(flows.sent_by(rank), dense.sent_by(rank))
        assert np.array_equal(flows.received_by(rank), dense.received_by(rank))


@MANY
@given(cases(), st.sampled_from([0.0, 0.06, 10.0]))
def test_flows_are_their_dense_twin(case: Case, effort: float) -> None:
    flows = ProphetPlanner(split_effort=effort).split(case.load, case.placement, case.context)
    alike(flows, Split(flows.tokens))
    flows.check(case.load, case.placement)
    # What the core says that ranks compute, and what follows from the rows
    assert np.array_equal(flows.rank_load(), flows.by_expert().sum(axis=0))


@MANY
@given(cases())
def test_everything_at_home_is_its_dense_twin(case: Case) -> None:
    tokens = np.zeros((*case.load.shape, len(case.load)), dtype=np.int64)
    tokens[:, np.arange(tokens.shape[1]), case.placement.home] = case.load
    alike(Split.to_homes(case.load, case.placement), Split(tokens))


@MANY
@given(cases(), st.data())
def test_the_digest_differs_where_the_split_does(case: Case, data: st.DataObject) -> None:
    """One token more, of an expert with rows or without; and one that goes elsewhere."""
    planner = ProphetPlanner()
    split = planner.split(case.load, case.placement, case.context)
    assert split.digest() == planner.split(case.load.copy(), case.placement, case.context).digest()
    more = case.load.copy()
    more[data.draw(st.integers(0, len(more) - 1)), data.draw(st.integers(0, more.shape[1] - 1))] += 1
    assert planner.split(more, case.placement, case.context).digest() != split.digest()
    if len(split.rows) and split.ranks > 1:
        rows = split.rows.copy()
        rows[0, 2] = (rows[0, 2] + 1) % split.ranks
        assert Flows(split.load(), split.home, split.shared, rows).digest() != split.digest()


def test_counts_that_need_more_than_thirty_two_bits_have_a_digest_of_their_own() -> None:
    large = LOAD.astype(np.int64)
    large[0, 0] += 1 << 32
    digests = {Split.to_homes(load, HOMES).digest() for load in (LOAD, large)}
    assert len(digests) == 2


def test_a_split_keeps_its_own_numbers() -> None:
    load = LOAD.copy()
    split = Split.to_homes(load, HOMES)
    load[:] = 0
    assert split.load().tolist() == LOAD.tolist()
    for array in (split.tokens, split.rank_load()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    split.sent_by(0)[:] = 7
    assert split.sent_by(0).tolist() == [[3, 0], [0, 1]]


def test_rows_that_lose_tokens_or_go_astray_are_found_out() -> None:
    shared = np.array([0])
    placement = Placement.with_replicas((0, 1), 2, [(0, 1)])
    right = np.array([[0, 0, 0, 3], [1, 0, 1, 2]])
    Flows(LOAD, placement.home, shared, right).check(LOAD, placement)
    with pytest.raises(SpecError, match="conserve the tokens of rank 1 for expert 0"):
        Flows(LOAD, placement.home, shared, right[:1]).check(LOAD, placement)
    with pytest.raises(SpecError, match="does not hold their expert"):
        Flows(LOAD, placement.home, shared, right).check(LOAD, HOMES)
    with pytest.raises(SpecError, match="split is for 2 ranks x 2 experts, placement for 2 x 4"):
        Flows(LOAD, placement.home, shared, right).check(LOAD, Placement.homes_only(4, 2))
    back = np.array([[0, 0, 0, 4], [0, 0, 1, -1], [1, 0, 1, 2]])
    with pytest.raises(SpecError, match="negative numbers of tokens, got -1"):
        Flows(LOAD, placement.home, shared, back).check(LOAD, placement)
    twice = np.array([[0, 0, 0, 1], [0, 0, 0, 2], [1, 0, 1, 2]])
    with pytest.raises(SpecError, match="each way from a rank over an expert to a rank once"):
        Flows(LOAD, placement.home, shared, twice).check(LOAD, placement)
    with pytest.raises(SpecError, match="rank_load does not add up"):
        Flows(LOAD, placement.home, shared, right, np.array([5, 5])).check(LOAD, placement)


def test_a_planner_may_go_on_writing_to_its_arrays() -> None:
    shared, rows, rank_load = np.array([0]), np.array([[0, 0, 0, 3], [1, 0, 1, 2]]), np.array([3, 7])
    flows = Flows(LOAD, HOMES.home, shared, rows, rank_load)
    rows[:], rank_load[:], shared[:] = 0, 0, 1
    assert flows.rank_load().tolist() == [3, 7]
    assert flows.sent_by(0).tolist() == [[3, 0], [0, 1]]


@pytest.mark.parametrize("load", [LOAD * 1.0, -LOAD, LOAD[:, :1]])
def test_loads_that_cannot_go_home(load: np.ndarray) -> None:
    with pytest.raises(SpecError, match="load"):
        Split.to_homes(load, HOMES)
