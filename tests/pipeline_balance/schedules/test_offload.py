"""What goes to the host: by hand, over many schedules, its memory, and what a link hides."""

from __future__ import annotations

import re
from itertools import product

import pytest

from benchmarks.slices.by_hand import Dims, chunk_gradient_bytes, unit_bytes
from pipeline_balance.schedules.actions import Action, Schedule
from pipeline_balance.schedules.closed_forms import offloaded_peak_bytes
from pipeline_balance.schedules.offload import AHEAD, Hidden, Offload, _peak, hidden, late_s, offload
from pipeline_balance.schedules.simulate import Durations, peak_activation_bytes, simulate
from pipeline_balance.schedules.sliced import Order, sliced
from prophet.errors import SpecError
from tests.helpers.house import ROOT

ORDERS: tuple[Order, ...] = ("minimal", "aligned")
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def test_the_first_slices_go_and_are_back_with_the_backward_before_theirs() -> None:
    # one rank: F0 F1 F2 F3 B3 B2 B1 B0
    (row,) = sliced(1, 1, 1, 4).actions
    found = offload(row, 4, 0.5)
    assert {str(action): places for action, places in found.back.items()} == {"0F0": (6, 7), "0F1": (5, 6)}
    assert {place: [str(a) for a in some] for place, some in found.due().items()} == {5: ["0F1"], 6: ["0F0"]}
    assert found.away_bytes([1, 10, 100, 1000]) == [0, -1, -11, -11, -11, -1, 0, 0]
    # slice 3 is read by the next action
    assert [str(a) for a in offload(row, 4, 1.0).back] == ["0F0", "0F1", "0F2"]
    # earlier than with the first backward, there are forwards: slices 1 and 2 would come back as they leave
    assert offload(row, 4, 1.0, ahead=3).back == {row[0]: (4, 7), row[1]: (3, 6)}


def test_a_slice_that_is_too_large_for_the_share_stays() -> None:
    (row,) = sliced(1, 1, 1, 4).actions
    assert [str(a) for a in offload(row, 4, 0.5, sizes=[0.4, 0.3, 0.2, 0.1]).back] == ["0F0"]
    assert [str(a) for a in offload(row, 4, 0.7, sizes=[0.4, 0.3, 0.2, 0.1]).back] == ["0F0", "0F1"]


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_other_shares_are_refused(share: float) -> None:
    with pytest.raises(SpecError, match="a share must be from 0 to 1"):
        offload(sliced(1, 1, 1, 4).actions[0], 4, share)


@pytest.mark.parametrize("order", ORDERS)
def test_what_goes_waits_longest_and_is_back_in_time(order: Order) -> None:
    for p, v, m, a in product((1, 2, 4), (1, 2), (1, 2, 4), (1, 2, 4)):
        n = a * p
        for row, share, ahead in product(sliced(p, v, m, n, order).actions, SHARES, (AHEAD, 3)):
            found = offload(row, n, share, ahead=ahead)
            places = {action: number for number, action in enumerate(row)}
            waits = {f: places[Action(f.stage, "B", f.microbatch)] - places[f] for f in row if f.kind == "F"}
            for forward, (place, backward) in found.back.items():
                assert row[backward] == Action(forward.stage, "B", forward.microbatch)
                backwards = sum(action.kind == "B" for action in row[place:backward])
                assert backwards == ahead or row[place - 1].kind == row[place].kind == "F"
                # something runs while it is away
                assert places[forward] + 1 < place
            for microbatch in range(m):
                mine = {f: w for f, w in waits.items() if f.microbatch // n == microbatch}
                moved = [w for f, w in mine.items() if f in found.back]
                assert len(moved) <= share * n * v
                stay = [w for f, w in mine.items() if f not in found.back]
                assert not moved or not stay or min(moved) >= max(stay) or share == 1.0


@pytest.mark.parametrize("order", ORDERS)
def test_the_peak_is_the_closed_form(order: Order) -> None:
    for p, n, m in product((1, 2, 3, 4), (4, 6, 8, 16), (3, 4, 5)):
        schedule = sliced(p, 1, m, n, order)
        for rank, moved, sizes in product(range(p), range(n), ((5, 7, 3), (0, 1, 0), (3, 1, 40))):
            beyond = (p - 1 - rank) * (1 if order == "minimal" else 2)
            if beyond > n or (moved == n - 1 and beyond < 2):
                continue
            stays, goes, gradients = sizes
            assert _bytes(schedule, rank, moved / n, stays, goes, gradients) == offloaded_peak_bytes(
                rank, p, n, moved, (stays, goes), gradients, order
            ), (p, n, m, rank, moved, sizes)


def _bytes(schedule: Schedule, rank: int, share: float, stays: int, goes: int, gradients: int) -> int:
    kept = []
    for row in schedule.actions:
        besides = offload(row, schedule.slices, share).away_bytes([goes] * schedule.units)
        # sums of a microbatch's gradients are one piece of memory, from its first backward to its last
        under_way = False
        for number, action in enumerate(row):
            under_way = under_way or action.kind == "B"
            besides[number] += under_way * (schedule.slices - 1) * gradients
            under_way = under_way and (action.kind == "F" or action.microbatch % schedule.slices > 0)
        kept.append(besides)
    return peak_activation_bytes(schedule, (stays + goes,) * schedule.stages, (), kept)[rank]


def test_the_table_of_the_page() -> None:
    page = (ROOT / "docs" / "slices.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| dense, (\d+) key heads \| (0\.\d+) \| (0\.\d+) \| (0\.\d+) \|$", page, re.M)
    assert len(rows) == 2
    for kv_heads, *shares in rows:
        dims = Dims(hidden=4096, heads=32, kv_heads=int(kv_heads), head_dim=128, intermediate=14336)
        keys = chunk_gradient_bytes(dims, 1, 1, 1)
        sizes = keys, unit_bytes(dims, 1, 1, 1, "selective") - keys
        found = [offloaded_peak_bytes(0, 4, 16, moved, sizes, keys) for moved in (0, 4, 8, 12)]
        assert [round(n / found[0], 2) for n in found[1:]] == [float(share) for share in shares]


def test_lateness_by_hand() -> None:
    (row,) = sliced(1, 1, 1, 4).actions
    times = simulate(sliced(1, 1, 1, 4), Durations.uniform(1, input_s=1.0, weight_s=0.0))
    found = offload(row, 4, 0.5)
    # F0 leaves until 2, F1 until 3; F1 comes back from 5 to 6, when it is read, F0 from 6 to 7
    assert late_s(found, times.start_s, times.end_s, [1.0] * 4) == 0
    # until 3 and 5; from 5 to 7, and from 7 to 9, two late
    assert late_s(found, times.start_s, times.end_s, [2.0] * 4) == 2
    assert late_s(Offload(row, {}), times.start_s, times.end_s, [9.0] * 4) == 0


def _hidden(link_s: float) -> Hidden:
    schedule = sliced(4, 1, 4, 8)
    units = schedule.units
    return hidden(schedule, 0, [1 / 8] * units, [1.0] * units, [2.0] * units, [link_s] * units)


def test_what_takes_least_memory_of_what_is_hidden() -> None:
    fast, slow, none = _hidden(0.1), _hidden(5.0), _hidden(1000.0)
    # the first rank has forwards enough between a last slice's and its backward
    assert (fast.share, fast.more, fast.plan.ahead) == (1.0, None, AHEAD)
    # a transfer takes longer than a forward and a backward
    assert 0 < slow.share < fast.share
    assert slow.more is not None
    assert slow.late_s > 0
    assert (none.share, none.plan.back) == (0.0, {})
    peaks = [_peak(_hidden(link).plan, [1] * 32) for link in (0.5, 1.0, 2.0, 3.0, 5.0, 8.0)]
    assert peaks == sorted(peaks)
