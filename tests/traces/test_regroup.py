"""A recorded routing on other ranks and with other tokens, against the same by hand."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from prophet.errors import TraceError
from prophet.traces.importers import read_any
from prophet.traces.npz import RoutingTrace, write_trace
from prophet.traces.regroup import regrouped, scaled


def counts(steps: int = 6, layers: int = 2, ranks: int = 8, experts: int = 4) -> np.ndarray:
    return np.random.default_rng(steps).integers(0, 100, (steps, layers, ranks, experts))


def by_hand(given: np.ndarray, ranks: int, common: int) -> list[list[np.ndarray]]:
    """[step][layer] of [ranks, E], rank by rank."""
    merge, together = given.shape[2] // common, ranks // common
    found = []
    for first in range(0, len(given) - together + 1, together):
        layers = []
        for layer in range(given.shape[1]):
            rows = []
            for step in range(first, first + together):
                rows += [sum(given[step, layer, merge * c + i] for i in range(merge)) for c in range(common)]
            layers.append(np.stack(rows))
        found.append(layers)
    return found


@pytest.mark.parametrize(("ranks", "common"), [(8, 8), (4, 4), (1, 1), (16, 8), (24, 8), (6, 2), (12, 4)])
def test_ranks_are_merged_or_come_from_several_steps(ranks: int, common: int) -> None:
    given = counts()
    found, iteration = regrouped(given, np.arange(6), ranks)
    expected = np.array(by_hand(given, ranks, common))
    np.testing.assert_array_equal(found, expected)
    assert iteration.tolist() == list(range(0, 6, ranks // common))[: len(expected)]


def test_forty_steps_of_eight_ranks_are_twenty_of_sixteen(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.npz", RoutingTrace(counts(41), np.arange(41)))
    trace = read_any(tmp_path / "t.npz", job=16)
    assert trace.counts.shape == (20, 2, 16, 4)  # the last step has no second half
    np.testing.assert_array_equal(trace.counts[3, 1], np.concatenate(counts(41)[6:8, 1]))
    grouped = read_any(tmp_path / "t.npz", job=16, ranks=4)
    assert grouped.counts.shape == (20, 8, 4, 4)
    np.testing.assert_array_equal(grouped.counts[3, 2 * 3 + 1], counts(41)[7, 1, 4:])  # last group, second layer
    assert grouped.meta["groups"] == 4


def test_microbatches_come_before_iterations() -> None:
    given = counts(8)
    found, iteration = regrouped(given, np.array([3, 3, 3, 3, 7, 7, 9, 9]), 16)
    assert iteration.tolist() == [3, 3, 7, 9]
    np.testing.assert_array_equal(found[2, 0], np.concatenate(given[4:6, 0]))
    assert regrouped(given, np.repeat(np.arange(4), 2), 32)[1].tolist() == [0, 2]
    for iteration in ([0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 1, 1, 1, 2, 2, 2]):
        with pytest.raises(TraceError, match=r"2 steps each, and iterations have 2 to 3 of them: expected a multiple"):
            regrouped(given, np.array(iteration), 16)
    with pytest.raises(TraceError, match="9 steps each, there are 8: record more steps, or ask for fewer ranks"):
        regrouped(given, np.arange(8), 72)


def test_a_log_without_ranks_is_shared_among_those_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("layer_id,expert_id,count\n0,0,10\n0,1,7\n0,2,0\n0,3,1\n")
    trace = read_any(tmp_path / "t.csv", job=4, ranks=2)
    assert (trace.ranks, trace.layers, trace.meta["groups"]) == (2, 2, 2)
    assert trace.counts.sum(axis=(0, 1, 2)).tolist() == [10, 7, 0, 1]


@pytest.mark.parametrize("routed", [1, 7, 100, 16384, (1 << 31) - 1])
def test_every_rank_routes_exactly_what_is_asked(routed: int) -> None:
    given = counts(3)
    given[1, 0, 2] = 0  # a rank without tokens
    found = scaled(RoutingTrace(given, np.arange(3)), routed)
    total = np.full((3, 2, 8), routed)
    total[1, 0, 2] = 0
    np.testing.assert_array_equal(found.counts.sum(axis=3), total)
    for row, kept in zip(given.reshape(-1, 4).tolist(), found.counts.reshape(-1, 4).tolist(), strict=True):
        exact = [Fraction(n * routed, max(sum(row), 1)) for n in row]
        assert all(abs(k - e) < 1 for k, e in zip(kept, exact, strict=True))
        up = [e - int(e) for e, k in zip(exact, kept, strict=True) if k > e]
        down = [e - int(e) for e, k in zip(exact, kept, strict=True) if k < e]
        assert not up or not down or min(up) >= max(down)  # the largest remainders are rounded up


def test_equal_remainders_go_to_the_lower_expert() -> None:
    found = scaled(RoutingTrace(np.array([[[[1, 1, 1, 1]]]]), np.zeros(1, int)), 6)
    assert found.counts.tolist() == [[[[2, 2, 1, 1]]]]
    again = scaled(found, 6)
    assert again.counts.tolist() == found.counts.tolist()
    with pytest.raises(TraceError, match="tokens: expected 1 to"):
        scaled(found, 1 << 31)
