"""A small step, operation by operation, under each schedule: a change of the simulator shows as a changed table."""

from __future__ import annotations

import pytest

from prophet.scheduler.schedules import Schedule, block_wise, blocking
from prophet.scheduler.simulate import simulate
from tests.helpers.schedules import uniform_durations

STEP = uniform_durations(
    2,
    2,
    a2a_s=1,
    fec_s=2,
    fnec_s=3,
    bnec_s=3,
    bec_s=4,
    trans_s=(2, 2),
    agg_s=(3, 1),
    start_s=4,
    end_s=1,
    plan_s=2,
    update_s=1,
)

BLOCKING = """
compute  start              0..4
tokens   dispatch(0)        4..5
plan     plan(0)            4..6
weights  Trans(0,0)         5..7
weights  Trans(0,1)         7..9
compute  FEC(0)             9..11
tokens   combine(0)        11..12
compute  FNEC(0)           12..15
tokens   dispatch(1)       15..16
plan     plan(1)           15..17
weights  Trans(1,0)        16..18
weights  Trans(1,1)        18..20
compute  FEC(1)            20..22
tokens   combine(1)        22..23
compute  FNEC(1)           23..26
compute  BNEC(1)           26..29
tokens   combine back(1)   29..30
compute  BEC(1)            30..34
tokens   dispatch back(1)  34..35
compute  BNEC(0)           35..38
tokens   combine back(0)   38..39
compute  BEC(0)            39..43
tokens   dispatch back(0)  43..44
compute  end               44..45
weights  Agg(1,0)          45..48
weights  Agg(1,1)          48..49
weights  Agg(0,0)          49..52
weights  Agg(0,1)          52..53
compute  update            53..54
"""

BLOCK_WISE = """
weights  Trans(0,0)         0..2
compute  start              0..4
weights  Trans(0,1)         2..4
tokens   dispatch(0)        4..5
plan     plan(0)            4..6
compute  FEC(0)             5..7
weights  Trans(1,0)         5..7
tokens   combine(0)         7..8
compute  FNEC(0)            8..11
weights  Trans(1,1)         8..10
tokens   dispatch(1)       11..12
plan     plan(1)           11..13
compute  FEC(1)            12..14
tokens   combine(1)        14..15
compute  FNEC(1)           15..18
compute  BNEC(1)           18..21
tokens   combine back(1)   21..22
compute  BEC(1)            22..26
tokens   dispatch back(1)  26..27
compute  BNEC(0)           27..30
weights  Agg(1,0)          27..30
tokens   combine back(0)   30..31
compute  BEC(0)            31..35
weights  Agg(1,1)          31..32
tokens   dispatch back(0)  35..36
compute  end               36..37
weights  Agg(0,0)          36..39
weights  Agg(0,1)          39..40
compute  update            40..41
"""


@pytest.mark.parametrize(("schedule", "table"), [(blocking(2), BLOCKING), (block_wise(2), BLOCK_WISE)])
def test_table(schedule: Schedule, table: str) -> None:
    step = simulate(schedule, STEP, record=True)
    found = [(s.stream, *s.name.split(), f"{s.start_s:g}..{s.end_s:g}") for s in step.spans if s.rank == 1]
    assert sorted(found) == sorted(tuple(line.split()) for line in table.strip().splitlines())
