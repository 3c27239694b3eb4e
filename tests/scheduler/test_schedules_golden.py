"""Algorithm 2 as a table: which transfer starts in which window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prophet.scheduler.actions import Action, Window
from prophet.scheduler.schedules import (
    NAMES,
    Schedule,
    block_wise,
    blocking,
    by_window,
    depth_within,
    look_ahead,
    operator_grained,
    program,
    schedule_named,
    with_refetch,
)
from prophet.scheduler.simulate import check_schedule

ONE = """
TRANS(0,0)@START  TRANS(0,1)@START
AGG(0,0)@END      AGG(0,1)@END
"""

THREE = """
TRANS(0,0)@START   TRANS(0,1)@START
TRANS(1,0)@FEC(0)  TRANS(1,1)@FNEC(0)
TRANS(2,0)@FEC(1)  TRANS(2,1)@FNEC(1)
AGG(2,0)@BNEC(1)   AGG(2,1)@BEC(1)
AGG(1,0)@BNEC(0)   AGG(1,1)@BEC(0)
AGG(0,0)@END       AGG(0,1)@END
"""

THREE_BLOCKING = """
TRANS(0,0)@FEC(0)  TRANS(0,1)@FEC(0)
TRANS(1,0)@FEC(1)  TRANS(1,1)@FEC(1)
TRANS(2,0)@FEC(2)  TRANS(2,1)@FEC(2)
AGG(2,0)@UPDATE    AGG(2,1)@UPDATE
AGG(1,0)@UPDATE    AGG(1,1)@UPDATE
AGG(0,0)@UPDATE    AGG(0,1)@UPDATE
"""


THREE_OPERATOR = """
TRANS(0,0)@START   TRANS(0,1)@START
TRANS(1,0)@FEC(0)  TRANS(1,1)@FEC(0)
TRANS(2,0)@FEC(1)  TRANS(2,1)@FEC(1)
AGG(2,0)@BNEC(1)   AGG(2,1)@BNEC(1)
AGG(1,0)@BNEC(0)   AGG(1,1)@BNEC(0)
AGG(0,0)@END       AGG(0,1)@END
"""

THREE_AHEAD = """
TRANS(0,0)@START   TRANS(0,1)@START
TRANS(1,0)@FEC(0)  TRANS(2,0)@FEC(0)
TRANS(1,1)@FNEC(0) TRANS(2,1)@FNEC(0)
TRANS(2,2)@FEC(1)
TRANS(2,3)@FNEC(1)
AGG(2,0)@BNEC(1)
AGG(2,1)@BEC(1)
AGG(2,2)@BNEC(0)   AGG(1,0)@BNEC(0)
AGG(2,3)@BEC(0)    AGG(1,1)@BEC(0)
AGG(0,0)@END       AGG(0,1)@END
"""

THREE_REFETCHED = """
TRANS(0,0)@START   TRANS(0,1)@START
TRANS(1,0)@FEC(0)  TRANS(1,1)@FNEC(0)
TRANS(2,0)@FEC(1)  TRANS(2,1)@FNEC(1)
FETCH(1,0)@BEC(2)
FETCH(1,1)@BNEC(1) AGG(2,0)@BNEC(1)
FETCH(0,0)@BEC(1)  AGG(2,1)@BEC(1)
FETCH(0,1)@BNEC(0) AGG(1,0)@BNEC(0)
AGG(1,1)@BEC(0)
AGG(0,0)@END       AGG(0,1)@END
"""

TWO_PROGRAM = """
TRANS(0,0)@START TRANS(0,1)@START START
COUNTS(0) PLAN(0) A2A(0,dispatch) WAIT_TRANS(0) TRANS(1,0)@FEC(0) FEC(0) A2A(0,combine) TRANS(1,1)@FNEC(0) FNEC(0)
COUNTS(1) PLAN(1) A2A(1,dispatch) WAIT_TRANS(1) FEC(1) A2A(1,combine) FNEC(1)
BNEC(1) A2A(1,combine-back) BEC(1) A2A(1,dispatch-back)
AGG(1,0)@BNEC(0) BNEC(0) A2A(0,combine-back) AGG(1,1)@BEC(0) BEC(0) A2A(0,dispatch-back)
AGG(0,0)@END AGG(0,1)@END END WAIT_AGG(1) WAIT_AGG(0) UPDATE WAIT_PLAN
"""

TWO_BLOCKING_REFETCHED = """
START
COUNTS(0) PLAN(0) A2A(0,dispatch) TRANS(0,0)@FEC(0) TRANS(0,1)@FEC(0) WAIT_TRANS(0) FEC(0) A2A(0,combine) FNEC(0)
COUNTS(1) PLAN(1) A2A(1,dispatch) TRANS(1,0)@FEC(1) TRANS(1,1)@FEC(1) WAIT_TRANS(1) FEC(1) A2A(1,combine) FNEC(1)
BNEC(1) A2A(1,combine-back) BEC(1) A2A(1,dispatch-back)
BNEC(0) A2A(0,combine-back) FETCH(0,0)@BEC(0) FETCH(0,1)@BEC(0) WAIT_FETCH(0) BEC(0) A2A(0,dispatch-back)
END AGG(1,0)@UPDATE AGG(1,1)@UPDATE AGG(0,0)@UPDATE AGG(0,1)@UPDATE WAIT_AGG(1) WAIT_AGG(0) UPDATE WAIT_PLAN
"""


@pytest.mark.parametrize(
    ("schedule", "table"),
    [
        (block_wise(1), ONE),
        (block_wise(3), THREE),
        (blocking(3), THREE_BLOCKING),
        (operator_grained(3), THREE_OPERATOR),
        (look_ahead(3, 2), THREE_AHEAD),
        (with_refetch(block_wise(3), 3), THREE_REFETCHED),
        (program(block_wise(2), 2), TWO_PROGRAM),
        (program(with_refetch(blocking(2), 2), 2), TWO_BLOCKING_REFETCHED),
    ],
)
def test_golden(schedule: tuple[Action, ...], table: str) -> None:
    assert [str(a) for a in schedule] == table.split()
    assert tuple(map(Action.parse, table.split())) == schedule


@pytest.mark.parametrize("refetch", [False, True])
@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_a_program_holds_its_schedule_and_reads_back(name: str, blocks: int, refetch: bool) -> None:
    schedule = schedule_named(name, blocks, depth=3, refetch=refetch)
    whole = program(schedule, blocks)
    assert tuple(a for a in whole if a.is_transfer) == schedule
    assert program(whole, blocks) == whole
    assert tuple(Action.parse(str(a)) for a in whole) == whole
    check_schedule(whole, blocks, 6)


def test_what_is_no_program() -> None:
    whole: Schedule = program(block_wise(2), 2)
    with pytest.raises(ValueError, match="come in one order only"):
        program(whole[:-1], 2)
    with pytest.raises(ValueError, match="come in one order only"):
        program(whole, 3)
    with pytest.raises(ValueError, match="outside a step of 1 blocks"):
        program(block_wise(3), 1)
    with pytest.raises(ValueError, match="no schedule 'x'"):
        schedule_named("x", 2)


def test_look_ahead_is_bounded_by_memory() -> None:
    assert look_ahead(4, 1) == block_wise(4)
    assert depth_within([10, 10, 10, 10], None, 3) == 3
    assert depth_within([10, 10, 10, 10], 40, 3) == 3
    assert depth_within([10, 10, 10, 10], 39, 3) == 2
    assert depth_within([10, 10, 10, 10], 5, 3) == 1
    assert depth_within([10, 1, 1, 10], 12, 3) == 2
    with pytest.raises(ValueError, match="depth of at least one"):
        depth_within([1], None, 0)
    with pytest.raises(ValueError, match="depth of at least one"):
        look_ahead(2, 0)


@pytest.mark.parametrize("make", [block_wise, blocking])
@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_every_chunk_of_every_block_is_launched_once_each_way(make: type, blocks: int) -> None:
    actions = make(blocks)
    found = sorted((a.kind, a.block, a.chunk) for a in actions)
    assert found == sorted((k, b, c) for k in ("TRANS", "AGG") for b in range(blocks) for c in (0, 1))


def test_table_by_window_keeps_the_order() -> None:
    table = by_window(block_wise(2))
    assert [str(a) for a in table[Window("START")]] == ["TRANS(0,0)@START", "TRANS(0,1)@START"]
    assert [str(a) for a in table[Window("BEC", 0)]] == ["AGG(1,1)@BEC(0)"]


windows = st.one_of(
    st.sampled_from(["START", "END", "UPDATE"]).map(Window),
    st.builds(Window, st.sampled_from(["FEC", "FNEC", "BNEC", "BEC"]), st.integers(0, 10**6)),
)


numbers = st.integers(0, 999)
actions = st.one_of(
    st.builds(Action, st.sampled_from(["TRANS", "FETCH", "AGG"]), numbers, st.integers(0, 99), windows),
    st.builds(Action, st.just("A2A"), numbers, st.integers(0, 3)),
    st.builds(Action, st.sampled_from(["COUNTS", "PLAN", "FEC", "BNEC", "WAIT_TRANS", "WAIT_FETCH"]), numbers),
    st.sampled_from(["START", "END", "UPDATE", "WAIT_PLAN"]).map(Action),
)


@given(actions)
def test_an_action_reads_back_what_it_prints(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text",
    [
        "",
        "TRANS(1)@START",
        "TRANS(1,0)@FEC",
        "AGG(1,0)@END(2)",
        "SEND(1,0)@END",
        "TRANS(1,0)",
        "FEC",
        "FEC(1,0)",
        "FEC(1)@START",
        "START(0)",
        "A2A(1)",
        "A2A(1,0)",
        "A2A(1,send)",
        "TRANS(1,combine)@START",
    ],
)
def test_what_is_not_an_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not an action|takes"):
        Action.parse(text)


def test_no_blocks_no_schedule() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        block_wise(0)
    with pytest.raises(ValueError, match="at least one block"):
        blocking(0)
