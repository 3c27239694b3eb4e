"""A rank's share of a split as row counts, and the order that turns received rows into groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prophet.kernels.split_apply import order_of_runs
from prophet.layer.dispatch import Route
from prophet.spec import Placement, Split


def built(tokens: np.ndarray, replicas: list[tuple[int, int]], rank: int) -> tuple[Route, list[tuple[int, int]]]:
    """The route of `rank` under the split `tokens` [R, E, R]; and source and expert of each row it receives."""
    ranks, experts, _ = tokens.shape
    m = experts // ranks
    home = np.repeat(np.arange(ranks), m)
    placement = Placement.with_replicas(home, ranks, replicas)
    route = Route.build(Split(tokens), placement, rank, rank * m, m)
    rows = [(r, e) for r in range(ranks) for e in range(experts) for _ in range(int(tokens[r, e, rank]))]
    return route, rows


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.integers(1, 2), st.integers(0, 1000), st.booleans())
def test_received_rows_are_grouped_by_expert_homes_first(ranks: int, m: int, seed: int, replicated: bool) -> None:
    rng = np.random.default_rng(seed)
    experts, rank = ranks * m, ranks - 1
    replicas = [(e, rank) for e in range(experts - m) if replicated and rng.random() < 0.5]
    tokens = np.zeros((ranks, experts, ranks), dtype=np.int64)
    held = [*range(rank * m, rank * m + m), *(e for e, _ in replicas)]
    tokens[:, held, rank] = rng.integers(0, 3, (ranks, len(held)))
    route, rows = built(tokens, replicas, rank)
    taken = rows if route.runs is None else [rows[i] for i in order_of_runs(route.runs, len(rows)).order.tolist()]
    assert [e for _, e in taken] == [e for e, n in zip(held, route.sizes, strict=True) for _ in range(n)]
    assert taken == sorted(taken, key=lambda row: (held.index(row[1]), row[0]))
    # rows that arrive in groups are not moved again, and others are
    assert (route.runs is None) == (taken == rows)


@pytest.mark.parametrize("experts", [1, 4])
def test_a_single_rank_moves_no_row_twice(experts: int) -> None:
    tokens = np.arange(experts, dtype=np.int64).reshape(1, experts, 1)
    route, _ = built(tokens, [], 0)
    assert route.runs is None
    assert route.sizes == list(range(experts))
