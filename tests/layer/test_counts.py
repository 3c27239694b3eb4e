"""The one message of a forward pass: packed and unpacked by name, and what ranks are found to disagree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from prophet.errors import PlanMismatch, RoutingError
from prophet.experts.gate import Routing
from prophet.layer.counts import UNKNOWN, Counts, Row, exchange_counts
from prophet.ranks.collective import Collective
from prophet.scheduler.windows import Stopwatch
from tests.helpers.recorder import RecordingCollective
from tests.helpers.support import FixedPlanner, everywhere, on_threads
from tests.helpers.training import Case, Run

RANKS, EXPERTS = 3, 4
ROW = Row(step=5, placement=-7, split=8, window_us=[10, 20], placements=[1, 2, 3], upcoming=[UNKNOWN])


def routing_of(ids: list[list[int]], kept: list[list[bool]] | None = None, *, finite: bool = True) -> Routing:
    given = Routing.given(
        torch.tensor(ids, dtype=torch.int64).reshape(-1, 2),
        torch.ones(len(ids), 2),
        EXPERTS,
        None if kept is None else torch.tensor(kept, dtype=torch.bool).reshape(-1, 2),
    )
    return replace(given, finite=torch.tensor(finite))


def told(row_of: Callable[[int], Row] = lambda _: ROW, broken: tuple[int, ...] = (), *, extra: bool = False) -> Counts:
    """What rank 0 hears when rank r says `row_of(r)` and routes r tokens, all to experts 0 and 3."""

    def body(group: Collective) -> Counts:
        routing = routing_of([[0, 3]] * group.rank, [[True, False]] * group.rank, finite=group.rank not in broken)
        return exchange_counts(
            row_of(group.rank),
            routing,
            group.rank,
            extra=routing.choice_counts() if extra else None,
            first_choices=False,
            collective=group,
            layer=2,
            stopwatch=Stopwatch(),
        )

    return on_threads(RANKS, body)[0]


def test_every_field_arrives_under_its_name() -> None:
    counts = told(lambda rank: replace(ROW, step=5 + rank, stale=rank == 1, upcoming=[rank]), extra=True)
    assert counts.step.tolist() == [5, 6, 7]
    assert counts.placement.tolist() == [-7] * RANKS
    assert counts.split.tolist() == [8] * RANKS
    assert counts.stale.tolist() == [0, 1, 0]
    assert counts.window_us.tolist() == [[10, 20]] * RANKS
    assert counts.placements.tolist() == [[1, 2, 3]] * RANKS
    assert counts.upcoming.tolist() == [[0], [1], [2]]
    assert counts.tokens.tolist() == counts.dropped.tolist() == [0, 1, 2]
    assert counts.load.tolist() == [[r, 0, 0, 0] for r in range(RANKS)]
    assert counts.undropped().tolist() == counts.judged().tolist() == [[r, 0, 0, r] for r in range(RANKS)]


def test_a_row_that_says_nothing_takes_no_place() -> None:
    counts = told(lambda _: Row())
    assert counts.window_us.shape == counts.placements.shape == counts.upcoming.shape == (RANKS, 0)
    assert counts.extra is None
    assert counts.undropped() is counts.judged() is counts.load
    counts.check(0, "MoE layer")


@pytest.mark.parametrize(("field", "what"), [("step", "step"), ("placement", "placement"), ("split", "previous split")])
def test_a_rank_that_differs_is_named(field: str, what: str) -> None:
    counts = told(lambda rank: replace(ROW, **{field: 5 + 2 * (rank == 1)}))  # type: ignore[arg-type]
    with pytest.raises(PlanMismatch, match=rf"MoE layer 9, step \d: the {what} of rank\(s\) \[1\] differs"):
        counts.check(0, "MoE layer 9")


def test_placements_in_force_are_compared_layer_by_layer() -> None:
    counts = told(lambda rank: replace(ROW, placements=[1, 9 if rank == 2 else 2, 3]))
    with pytest.raises(PlanMismatch, match=r"MoE layer 1, step 5: the placement of rank\(s\) \[2\] differs"):
        counts.check(0, "MoE layer 0")


def test_scores_that_cannot_be_routed_come_before_all_else() -> None:
    counts = told(lambda rank: replace(ROW, step=rank), broken=(1, 2))
    with pytest.raises(RoutingError, match=r"MoE layer 2, step 0: .* NaN or infinite on rank\(s\) \[1, 2\]"):
        counts.check(0, "MoE layer 2")


@pytest.mark.parametrize(
    ("upcoming", "confirmed"), [([4, 4, 4], True), ([4, 5, 4], False), ([4, 4, UNKNOWN], False), ([UNKNOWN] * 3, False)]
)
def test_the_first_layers_next_placement_is_confirmed_by_all_or_not_at_all(
    upcoming: list[int], confirmed: bool
) -> None:
    case = Case(ranks=4, shapes=((5,),) * 4, slots=8)
    run = Run(case, RecordingCollective(1, 4), FixedPlanner(everywhere(8, 4)))
    run.engine.confirm(np.array(upcoming))
    assert run.engine._confirmed is confirmed
    run.close()
    alone = Run(replace(case, blocks=1), RecordingCollective(1, 4), FixedPlanner(everywhere(8, 4)))
    alone.engine.confirm(np.array([4, 4, 4]))
    assert not alone.engine._confirmed, "one layer's next placement is not known when its counts are exchanged"
    alone.close()


def test_the_comparison_of_placements_rides_on_the_counts() -> None:
    """Known in time, the first layer's next placement needs no message; not known, it gets one."""
    case = Case(ranks=4, shapes=((5,),) * 4, slots=8)
    fake = RecordingCollective(1, 4)
    run = Run(case, fake, FixedPlanner(everywhere(8, 4)))

    def comparisons() -> int:
        return sum(c.op.name == "comparison of placements" for c in fake.calls)

    run.whole_step(0)
    assert comparisons() == 1
    run.engine.ensure_step()
    first = run.engine.balanced[0].plans
    real = first.upcoming

    def once_planned(in_force: int) -> int:
        first.latest()
        return real(in_force)

    for s, known in ((1, True), (2, False), (3, True)):
        before = comparisons()
        first.upcoming = once_planned if known else lambda in_force: UNKNOWN  # type: ignore[method-assign]
        run.zero_grad()
        run.backward(s)
        run.step()
        run.engine.ensure_step()
        assert comparisons() - before == (0 if known else 1)
    run.engine.finish_step()
    run.engine.close()
