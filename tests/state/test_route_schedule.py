"""What a rank finds of a route ahead is what it would find at the move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld
from prophet.state import route_schedule as module
from prophet.state.layout import Layout, Piece, layout_from, slice_box
from prophet.state.route import Route, route
from prophet.state.route_schedule import RouteSchedule
from prophet.state.space import Space, TensorSpec
from prophet.state.streams import Streams, Timetable
from prophet.state.transition import Mode, transition

RANKS, BUDGET = 3, 1 << 10
MODES: tuple[Mode, ...] = ("safe", "in-place")


def _moves() -> tuple[Route, list[dict[Piece, Tensor]], dict[str, Tensor]]:
    """Tensors in rows on three ranks go whole to one each, and one that two hold goes to the third."""
    space = Space((*(TensorSpec(name=n, shape=(6, 5)) for n in "abc"), TensorSpec(name="both", shape=(40,))))
    cut = {r: [(n, slice_box((6, 5), 0, RANKS, r)) for n in "abc"] for r in range(RANKS)}
    both = ("both", space["both"].box)
    before = layout_from(space, RANKS, {r: row + [both] * (r < 2) for r, row in cut.items()})
    after = layout_from(space, RANKS, {r: [(n, space[n].box)] + [both] * (r == 2) for r, n in enumerate("abc")})
    truth = {
        t.name: torch.randn(t.shape, generator=torch.Generator().manual_seed(k)) for k, t in enumerate(space.tensors)
    }
    states = [{p: truth[p.name][p.box.slices(space[p.name].box)].clone() for p in row} for row in before.pieces]
    return route(before, after), states, truth


def _check(after: Layout, moved: Any, truth: dict[str, Tensor]) -> None:
    for rank, row in enumerate(after.pieces):
        assert set(moved[rank].state) == set(row)
        for piece, tensor in moved[rank].state.items():
            assert torch.equal(tensor, truth[piece.name][piece.box.slices(after.space[piece.name].box)])


@pytest.mark.parametrize("mode", MODES)
def test_a_move_finds_nothing_that_was_found_ahead(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    way, states, truth = _moves()
    plans = [RouteSchedule(way, rank) for rank in range(RANKS)]
    for plan in plans:
        plan.precompute(1 << 20, in_place=mode == "in-place")

    def again(*_: Any, **__: Any) -> Any:
        raise AssertionError("found twice")

    monkeypatch.setattr(Route, "digest", again)
    monkeypatch.setattr(Streams, "of", again)
    monkeypatch.setattr(Timetable, "rounds", again)
    monkeypatch.setattr(module, "in_place", again)

    def body(c: Collective) -> Any:
        return transition(way, states[c.rank], c, budget_bytes=1 << 20, mode=mode, ahead=plans[c.rank])

    _check(way.after, ThreadWorld(RANKS).run(body), truth)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budgets", [(BUDGET, BUDGET, BUDGET), (BUDGET, 1 << 9, BUDGET), (1 << 12, 1 << 12, 400)])
def test_ranks_that_foresaw_other_windows_move_the_same(mode: Mode, budgets: tuple[int, ...]) -> None:
    """Rank 0 foresaw what no rank does now, rank 1 nothing."""
    way, states, truth = _moves()
    plans = [RouteSchedule(way, rank) for rank in range(RANKS)]
    plans[0].precompute(1 << 8, in_place=mode != "in-place")
    plans[2].precompute(budgets[2], in_place=mode == "in-place")

    def body(c: Collective) -> Any:
        options: dict[str, Any] = {"budget_bytes": budgets[c.rank], "mode": mode, "chunk_bytes": 64}
        return transition(way, states[c.rank], c, ahead=plans[c.rank] if c.rank != 1 else None, **options)

    moved = ThreadWorld(RANKS).run(body)
    _check(way.after, moved, truth)
    fresh = _moves()[1]

    def without(c: Collective) -> Any:
        return transition(way, fresh[c.rank], c, budget_bytes=budgets[c.rank], mode=mode, chunk_bytes=64)

    for a, b in zip(moved, ThreadWorld(RANKS).run(without), strict=True):
        assert (a.messages, a.bytes_to, a.peak_bytes) == (b.messages, b.bytes_to, b.peak_bytes)


def test_bytes_by_link_are_those_of_the_transfers() -> None:
    way = _moves()[0]
    found: dict[tuple[int, int], int] = {}
    for t in way.transfers:
        found[t.source, t.destination] = found.get((t.source, t.destination), 0) + way.n_bytes(t)
    assert way.link_bytes == found
    assert sum(found.values()) == way.wire_bytes > 0


def test_a_budget_that_holds_no_element_is_found_out_together() -> None:
    way = _moves()[0]
    plan = RouteSchedule(way, 0)
    plan.precompute(1, in_place=False)
    assert plan.digest == way.digest()
    assert plan._rounds == {}
