"""The benchmark of moves, without hosts: bytes are what is missing, rows are right."""

from __future__ import annotations

import pytest
import torch

from benchmarks.pipeline.moves import (
    ENTRIES,
    LAYERS,
    MOVES,
    RANKS,
    busiest_bytes,
    hash_of,
    missing_bytes,
    row_of,
    space_of,
    way_of,
)
from prophet.ranks.threads import ThreadCollective, ThreadWorld
from prophet.state.transition import transition


@pytest.mark.parametrize("name", MOVES)
def test_what_is_sent_is_what_is_missing(name: str) -> None:
    space = space_of(12 * 64)
    way = way_of(space, name)

    def body(collective: ThreadCollective) -> int:
        state = {
            p: torch.full(p.box.shape, float(hash_of(p.name)), dtype=torch.float32)
            for p in way.before.pieces[collective.rank]
        }
        moved = transition(way, state, collective, budget_bytes=500)
        assert all(bool((t == float(hash_of(p.name))).all()) for p, t in moved.state.items())
        return moved.sent_bytes

    sent = ThreadWorld(RANKS).run(body)
    assert sum(sent) == missing_bytes(space, name) == way.wire_bytes > 0
    assert 0 < busiest_bytes(way) <= sum(sent)


def test_every_tensor_is_told_from_the_others() -> None:
    names = [f"{i}/{e}" for i in range(LAYERS) for e in ENTRIES]
    assert len({hash_of(n) for n in names}) == len(names)


def test_a_row_compares_with_the_busiest_link() -> None:
    row = row_of("one rank to four", 1200, 100, 7200, 0.1, 72_000.0)
    # six of eight layers leave rank 0, whose link is the busiest
    assert row["missing_bytes"] == row["wire_bytes"] == 7200
    assert row["least_s"] == pytest.approx(0.1)
    assert row["of_bandwidth"] == pytest.approx(1.0)
    both_ways = row_of("all layers to the next rank", 1200, 100, 9600, 0.1, 72_000.0)
    assert both_ways["least_s"] == pytest.approx(2400 / 72_000)
