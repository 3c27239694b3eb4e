"""Boxes that few hold and many miss: ranks that receive them send them on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prophet.ranks.threads import ThreadWorld
from prophet.state.layout import Piece, layout_from
from prophet.state.route import route
from prophet.state.space import Space, TensorSpec
from prophet.state.streams import Measures, Timetable, sends_of, window_of
from prophet.state.transition import transition


@pytest.mark.parametrize("ranks", [3, 8])
def test_a_new_copy_for_many_is_sent_once_and_passed_on(ranks: int) -> None:
    space = Space((TensorSpec(name="w", shape=(16 * (ranks - 1), 5)),))
    whole = [("w", space["w"].box)]
    way = route(layout_from(space, ranks, {0: whole}), layout_from(space, ranks, dict.fromkeys(range(ranks), whole)))
    values = torch.arange(80.0 * (ranks - 1)).reshape(-1, 5)
    states: list[dict[Piece, Tensor]] = [{Piece(*whole[0]): values}, *({} for _ in range(ranks - 1))]
    options = {"budget_bytes": 1 << 20, "chunk_bytes": 32}
    moved = ThreadWorld(ranks).run(lambda c: transition(way, states[c.rank], c, **options))  # type: ignore[arg-type]
    assert len(way.rows) == (ranks - 1) ** 2  # each passes on one part: neighbours that go the same ways are one
    size = values.numel() * 4
    assert moved[0].sent_bytes == size
    assert all(m.received_bytes == size for m in moved[1:])
    assert max(m.sent_bytes for m in moved) == size
    for m in moved:
        assert torch.equal(next(iter(m.state.values())), values)


@pytest.mark.parametrize("longer", [1, 3])
def test_what_is_passed_on_goes_while_more_comes(longer: int) -> None:
    # two ranks of one node get a tensor; two others move another one, which takes as many rounds, or more
    space = Space((TensorSpec(name="w", shape=(640,)), TensorSpec(name="z", shape=(320 * longer,))))
    whole, other = [("w", space["w"].box)], [("z", space["z"].box)]
    before = layout_from(space, 5, {0: whole, 3: other})
    after = layout_from(space, 5, {**dict.fromkeys(range(3), whole), 4: other})
    way = route(before, after, nodes=[0, 1, 1, 2, 3])
    window = window_of(1 << 20, 64, 2, Measures.of(way, None))
    table = Timetable(way, window, None)
    direct, passed_on = (
        [number for number, _ in table.rounds(source, hop, sends_of(way, source)[peer, hop])]
        for source, peer, hop in ((0, 1, 0), (1, 2, 1))
    )
    assert direct == list(range(0, 20 * longer, longer))
    assert passed_on == [number + window.depth for number in direct]
