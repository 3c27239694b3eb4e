"""Which tokens of a slice ranks have that share it: all of them once, with equal work, and who sees which."""

from __future__ import annotations

import pytest
import torch

from pipeline_balance.slices.attention import _Place
from pipeline_balance.slices.sharing.context import Context, check_lengths, ranges_of, taken
from pipeline_balance.slices.store import ChunkStore, Unit
from prophet.errors import SpecError
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld

START, STOP = 48, 96


def _tokens(rank: int, ranks: int) -> torch.Tensor:
    return torch.cat([torch.arange(a, b) for a, b in ranges_of(START, STOP, rank, ranks)])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_every_token_is_on_one_rank_and_every_pair_is_seen_once(ranks: int) -> None:
    every = [_tokens(rank, ranks) for rank in range(ranks)]
    assert torch.cat(every).sort().values.tolist() == list(range(START, STOP))
    world = ThreadWorld(ranks)
    work = []
    for rank, here in enumerate(every):
        context = Context(world.collective(rank))
        assert sorted([rank, *context.others]) == list(range(ranks))
        asking = torch.cat([every[r] for r in (rank, *context.others)])
        seen = torch.zeros(len(asking), len(here), dtype=torch.bool)
        # its own tokens are in ascending order: a triangle
        seen[: len(here)] = torch.ones(len(here), len(here), dtype=torch.bool).tril()
        for rows, columns in context.rectangles(len(here)):
            assert not seen[rows, columns].any()
            seen[rows, columns] = True
        assert torch.equal(seen, asking[:, None] >= here)
        work.append(int(seen.sum()))
    assert len(set(work)) == 1


def test_slices_of_any_length_that_can_be_shared_pass() -> None:
    check_lengths((0, 16, 24, 32), 2)
    with pytest.raises(SpecError, match="into 8 parts of equal length, and slices have 16, 20 tokens here"):
        check_lengths((0, 16, 36), 4)


def test_one_range_is_a_view() -> None:
    tensor = torch.arange(12).view(2, 6)
    assert taken(tensor, 1, ((1, 3),)).data_ptr() == tensor[:, 1:].data_ptr()
    assert taken(tensor, 1, ((0, 1), (4, 6))).tolist() == [[0, 4, 5], [6, 10, 11]]


def test_what_is_gathered_and_given_back_is_each_rank_s() -> None:
    def run(collective: Collective) -> tuple[list[list[float]], list[list[float]]]:
        context = Context(collective)
        mine = [torch.full((1, 1, 2), float(context.rank), dtype=torch.float64), torch.full((1, 1, 2, 3), context.rank)]
        every = context.gather(mine, 0)
        # what is found for a rank says for whom and by whom
        found = context.give([every[0] * 10 + context.rank, every[1]], 0)
        return [t.flatten()[:: t[0, 0, 0].numel()].tolist() for t in every], [t[0].flatten().tolist() for t in found]

    for rank, (every, found) in enumerate(ThreadWorld(3).run(run)):
        others = [(rank + 1) % 3, (rank + 2) % 3]
        assert every == [[number for one in (rank, *others) for number in (one, one)]] * 2
        assert found == [[10 * rank + other] * 2 for other in others]


def test_what_is_planned_for_one_group_is_not_read_by_another() -> None:
    store, unit = ChunkStore(), Unit(0, 0, 2)
    query = torch.zeros(1, 2, 8, 4)
    store.append(0, unit, query, query, pending=False)
    place = _Place(store, 0, unit, 1.0, False, None, None)
    world, found = ThreadWorld(2), []
    for context in (None, Context(world.collective(0)), Context(world.collective(1))):
        store.context = context
        every = query if context is None else torch.cat([query, query], dim=2)
        found.append([(block.rows, block.columns) for block in place.blocks(every)])
    alone, first, second = found
    assert alone == [(slice(None), slice(None))]
    assert first == [(slice(0, 8), slice(0, 8)), (slice(8, 16), slice(0, 4))]
    assert second == [(slice(0, 8), slice(0, 8)), (slice(12, 16), slice(0, 8))]
