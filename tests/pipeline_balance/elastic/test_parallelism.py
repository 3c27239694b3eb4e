"""Parallel layouts as values: places, groups, text, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_balance.elastic.layouts.parallelism import AXES, FEWEST_BYTES, Parallelism, Place
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError


@st.composite
def parallelisms(draw: st.DrawFn) -> Parallelism:
    pp, tp, dp = (draw(st.integers(1, 4)) for _ in range(3))
    v = draw(st.integers(1, 2)) if pp > 1 else 1
    ep = draw(st.sampled_from([n for n in range(1, tp * dp + 1) if tp * dp % n == 0]))
    order = draw(st.none() | st.just(FEWEST_BYTES) | st.permutations(range(2, 2 + pp * tp * dp)).map(tuple))
    stages = draw(st.none() | st.lists(st.integers(1, 5), min_size=pp * v, max_size=pp * v).map(tuple))
    zero, slices = draw(st.integers(0, 3)), draw(st.integers(1, 3)) * (pp if v > 1 else 1)
    return Parallelism(pp=pp, tp=tp, dp=dp, ep=ep, zero=zero, v=v, slices=slices, stages=stages, order=order)


@given(parallelisms())
def test_what_is_printed_reads_back(layout: Parallelism) -> None:
    assert Parallelism.parse(str(layout)) == layout


@given(parallelisms().filter(lambda p: p.order != FEWEST_BYTES))
def test_groups_and_places_agree(layout: Parallelism) -> None:
    for axis in AXES:
        groups = layout.groups(axis)
        assert sorted(r for members in groups for r in members) == sorted(layout.rank_of_place)
        for members in groups:
            places = [layout.place(r) for r in members]
            assert all(p is not None for p in places)
            assert [getattr(p, axis) for p in places] == list(range(len(members)))
            others = {"pp": ("dp", "tp"), "dp": ("pp", "tp"), "tp": ("pp", "dp"), "ep": ("pp", "edp")}
            for other in others.get(axis, ("pp", "ep")):
                assert len({getattr(p, other) for p in places}) == 1
            assert layout.group(axis, members[0]) == members


def test_places_of_a_small_layout() -> None:
    layout = Parallelism(pp=2, tp=2, dp=2, ep=4)
    assert layout.place(5) == Place(pp=1, dp=0, tp=1, ep=1, edp=0)
    assert layout.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert layout.place(8) is None
    assert layout.group("dp", 8) == ()


def test_an_order_says_who_stands_where() -> None:
    layout = Parallelism(pp=2, dp=2, order=(7, 2, 0, 3))
    assert layout.groups("pp") == ((7, 0), (2, 3))
    assert layout.place(1) is None
    assert Parallelism(dp=2, order=(0, 1)) == Parallelism(dp=2)


def test_stages_may_be_unequal_and_chunks_go_round() -> None:
    assert Parallelism(pp=3).stage_map(8) == StageMap((0, 3, 6, 8), (0, 1, 2))
    assert Parallelism(pp=2, stages=(1, 4)).stage_map(5) == StageMap((0, 1, 5), (0, 1))
    assert Parallelism(pp=2, v=2).stage_map(4) == StageMap((0, 1, 2, 3, 4), (0, 1, 0, 1))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Parallelism(pp=0), "pp must be a whole number of at least 1, got 0"),
        (lambda: Parallelism(dp=True), "dp must be a whole number"),
        (lambda: Parallelism(zero=4), "zero must be 0, 1, 2 or 3"),
        (lambda: Parallelism(tp=2, dp=3, ep=4), "ep must divide tp \\* dp = 6, got 4"),
        (lambda: Parallelism(v=2), "v = 2 needs several stages"),
        (lambda: Parallelism(slices=0), "slices must be a whole number of at least 1, got 0"),
        (lambda: Parallelism(pp=4, v=2, slices=6), "a multiple of the 4 ranks: take 4 or 8 instead of 6"),
        (lambda: Parallelism(pp=2, stages=(1, 2, 3)), "one number of layers per chunk \\(2\\)"),
        (lambda: Parallelism(pp=2, stages=(0, 2)), "every chunk needs a layer"),
        (lambda: Parallelism(dp=2, order=(1, 1)), "2 different ranks"),
        (lambda: Parallelism(dp=2, order=(-1, 0)), "2 different ranks"),
        (lambda: Parallelism(dp=2, order="best"), "\"fewest-bytes\", got 'best'"),
        (lambda: Parallelism(dp=2, order=FEWEST_BYTES).place(0), "not chosen yet"),
        (lambda: Parallelism(pp=2, stages=(1, 2)).stage_map(4), "stages are of 3 layers, the model has 4"),
        (lambda: Parallelism(pp=4).stage_map(3), "4 chunks need at least as many layers, the model has 3"),
        (lambda: Parallelism(dp=2).groups("cp"), "an axis must be one of"),
        (lambda: Parallelism.parse("tp4,cp2"), "'cp2' is not understood; expected parts of tpN"),
        (lambda: Parallelism.parse("tp4,tp2"), "'tp2' is given twice"),
        (lambda: Parallelism.parse(""), "'' is not understood"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        make()


@pytest.mark.parametrize(
    ("layout", "experts", "named"),
    [
        ("pp2,tp2,dp2,zero1", False, ""),
        ("tp2,dp2,zero3", False, ""),
        ("pp2,dp4,ep4,zero1", True, ""),
        ("pp2,dp2,slices4", False, ""),
        ("pp2,dp2,zero2", False, "zero2 with pp2"),
        ("dp4,ep2,zero3", True, "zero3 with experts"),
        ("dp4,ep2,zero2", True, "zero2 with experts"),
        ("pp2,tp2,dp2,ep4,zero1", True, ""),
        ("tp2,dp2,zero2", True, "zero2 with experts"),
        ("dp2,ep2", False, "ep2 with a model that has no experts"),
        ("tp2,pp2,slices2", False, ""),
        ("pp2,dp2,ep2,slices2", True, ""),
        ("pp2,tp2,ep2,slices2,zero1", True, ""),
        ("dp2,slices2,zero2", False, "slices2 with zero2"),
        ("dp2,slices2,zero3", False, "slices2 with zero3"),
    ],
)
def test_what_cannot_be_trained_is_named(layout: str, experts: bool, named: str) -> None:
    value = Parallelism.parse(layout)
    if not named:
        value.check_trainable(experts=experts)
    else:
        with pytest.raises(SpecError, match=f"{named}.* cannot be trained"):
            value.check_trainable(experts=experts)
