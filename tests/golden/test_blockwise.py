"""Algorithm 2 as a table: which transfer starts in which window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prophet.scheduler.actions import Action, Window
from prophet.scheduler.blockwise import block_wise, blocking, by_window

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
AGG(2,0)@END       AGG(2,1)@END
AGG(1,0)@END       AGG(1,1)@END
AGG(0,0)@END       AGG(0,1)@END
"""


@pytest.mark.parametrize(
    ("schedule", "table"), [(block_wise(1), ONE), (block_wise(3), THREE), (blocking(3), THREE_BLOCKING)]
)
def test_golden(schedule: tuple[Action, ...], table: str) -> None:
    assert [str(a) for a in schedule] == table.split()


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
    st.sampled_from(["START", "END"]).map(Window),
    st.builds(Window, st.sampled_from(["FEC", "FNEC", "BNEC", "BEC"]), st.integers(0, 10**6)),
)


@given(st.builds(Action, st.sampled_from(["TRANS", "AGG"]), st.integers(0, 999), st.integers(0, 9), windows))
def test_an_action_reads_back_what_it_prints(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "TRANS(1)@START", "TRANS(1,0)@FEC", "AGG(1,0)@END(2)", "SEND(1,0)@END", "TRANS(1,0)"]
)
def test_what_is_not_an_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not an action|takes"):
        Action.parse(text)


def test_no_blocks_no_schedule() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        block_wise(0)
    with pytest.raises(ValueError, match="at least one block"):
        blocking(0)
