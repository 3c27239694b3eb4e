"""What is noted of messages, and what links take by that; values and threads only."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline_balance.pipeline.measure import links
from pipeline_balance.pipeline.measure.links import LinkTimes, Noted, gather_links, link_samples, typical
from pipeline_balance.spec import StageMap
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld

TWO = StageMap.contiguous((0, 1, 2))


class _Clock:
    """Reads what it is set to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(links.time, "perf_counter", lambda: self.now)

    def at(self, now: float) -> float:
        self.now = now
        return now


def _received(clock: _Clock, *, asked: float, wanted: float, there: float) -> Noted:
    """A receiver whose clock stands at 1000 s when all meet."""
    noted = Noted()
    clock.at(1000.0)
    noted.meet(5, enabled=True)
    clock.at(1000.0 + asked)
    noted.asked((True, 1, 0))
    clock.at(1000.0 + there)
    noted.took((True, 1, 0), 1000.0 + wanted)
    return noted


@pytest.mark.parametrize(
    ("asked", "wanted", "there", "expected"),
    [
        (0.0, 0.0, 5.5, (0.5, True)),  # the sender was late: it has sent at 5
        (5.25, 5.25, 5.75, (0.5, True)),  # the receiver was late
        (0.0, 7.0, 7.0, (2.0, False)),  # it was there before anybody waited
        (0.0, 0.0, 4.9, (-0.1, True)),  # the ranks' clocks are a little apart
    ],
)
def test_a_message_is_on_its_way_once_it_was_sent_and_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: float, wanted: float, there: float, expected: tuple[float, bool]
) -> None:
    noted = _received(_Clock(monkeypatch), asked=asked, wanted=wanted, there=there)
    ((taken, exact),) = link_samples(noted, {(5, 0): 5.0}, 1, forward=True)
    assert (taken, exact) == (pytest.approx(expected[0]), expected[1])
    # of another update, another unit, or nothing that was sent
    for sent in ({(4, 0): 5.0}, {(5, 1): 5.0}, {(5, 0): math.nan}):
        assert link_samples(noted, sent, 1, forward=True) == []
    assert link_samples(noted, {(5, 0): 5.0}, 1, forward=False) == []


def test_what_was_there_already_counts_only_where_nothing_else_is_known() -> None:
    assert typical([(0.5, True), (0.7, True), (0.6, True), (0.1, False)]) == 0.6
    assert typical([(2.0, False), (1.0, False)]) == 1.0


def test_the_last_updates_are_kept_and_one_that_is_not_measured_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, noted = _Clock(monkeypatch), Noted()
    for update in range(5):
        noted.meet(update, enabled=update != 4)
        noted.sent((True, 1, 0))
    assert sorted(noted.updates) == [2, 3]
    # another batch of the same update takes the place of the first
    noted.meet(3, enabled=True)
    assert not noted.updates[3].sent
    noted.sent((True, 1, 1))
    copy = noted.copy()
    noted.sent((True, 1, 2))
    noted.reset()
    noted.sent((True, 1, 3))
    assert not noted.updates
    assert list(copy.updates[3].sent) == [(True, 1, 1)]
    clock.at(0.0)


def _link(collective: Collective, noted: list[Noted], stage_map: StageMap, replicas: int = 1) -> LinkTimes:
    each = collective.size // replicas
    rows = [range(r * each, (r + 1) * each) for r in range(replicas)]
    return gather_links(noted[collective.rank], stage_map, 2, collective, rows=rows)


def _noted(forward_s: float, gradient_s: float | None, skew_s: float) -> list[Noted]:
    """Two ranks, the second of which counts from `skew_s` later."""
    below, above = Noted(), Noted()
    for noted in (below, above):
        noted.meet(0, enabled=True)
    first, second = below.updates[0], above.updates[0]
    first.sent[True, 1, 0], second.asked[True, 1, 0] = 1.0, 0.0
    second.waited[True, 1, 0] = 0.0, 1.0 + forward_s - skew_s
    if gradient_s is not None:
        second.sent[False, 1, 0], first.asked[False, 1, 0] = 2.0 - skew_s, 0.0
        first.waited[False, 1, 0] = 0.0, 2.0 + gradient_s
    return [below, above]


@pytest.mark.parametrize(
    ("gradient_s", "skew_s", "expected"),
    [(0.5, 0.25, 0.5), (0.5, 0.75, 0.5), (0.5, 0.0, 0.5), (None, 0.0, 0.5), (None, 0.75, 0.0), (1.5, 0.0, 1.0)],
)
def test_the_mean_over_directions_has_no_part_of_the_clocks(
    gradient_s: float | None, skew_s: float, expected: float
) -> None:
    noted = _noted(0.5, gradient_s, skew_s)
    for found in ThreadWorld(2).run(lambda c: _link(c, noted, TWO)):
        assert found.transfer_s[0, 1] == found.transfer_s[1, 0] == pytest.approx(expected)
        assert np.isnan(np.diag(found.transfer_s)).all()
        assert found.all_reduce_s == (0.0, 0.0)


def test_a_link_that_nothing_has_passed_is_not_known() -> None:
    noted = [Noted(), Noted(), Noted()]
    # the third rank has no stage
    for found in ThreadWorld(3).run(lambda c: _link(c, noted, TWO)):
        assert np.isnan(found.transfer_s).all()


def test_replicas_give_their_slowest_link_and_means_without_the_wait_for_the_last() -> None:
    noted = [*_noted(0.5, 0.5, 0.0), *_noted(0.75, 0.75, 0.0)]
    for rank, one in enumerate(noted):
        # the second replica begins half a second later, and both end at 4
        one.updates[0].reduced[rank % 2] = (3.0 + rank // 2 / 2, 4.0)
    for found in ThreadWorld(4).run(lambda c: _link(c, noted, TWO, replicas=2)):
        assert found.transfer_s[0, 1] == pytest.approx(0.75)
        assert found.all_reduce_s == pytest.approx((0.5, 0.5))
