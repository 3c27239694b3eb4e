"""Schedules drawn as tables; a change of a single cell fails."""

from __future__ import annotations

import pytest

from benchmarks.slices.peers import zb_v
from pipeline_balance.schedules.actions import Schedule
from pipeline_balance.schedules.classic import gpipe, interleaved, one_f_one_b
from pipeline_balance.schedules.flexible import flexible
from tests.helpers.pipeline_schedules import zb_h1

TABLES = {
    "gpipe": (
        gpipe(3, 3),
        """
        0F0,0F1,0F2,0B0,0B1,0B2
        1F0,1F1,1F2,1B0,1B1,1B2
        2F0,2F1,2F2,2B0,2B1,2B2
        """,
    ),
    "1f1b": (
        one_f_one_b(3, 4),
        """
        0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3
        1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3
        2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3
        """,
    ),
    "interleaved": (
        interleaved(2, 2, 4),
        """
        0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3
        1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3
        """,
    ),
    "zb-h1": (
        zb_h1(3, 4),
        """
        0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3
        1F0,1F1,1I0,1F2,1I1,1W0,1F3,1I2,1W1,1I3,1W2,1W3
        2F0,2I0,2F1,2I1,2F2,2I2,2W0,2F3,2I3,2W1,2W2,2W3
        """,
    ),
    "zb-v": (
        zb_v(2, 3),
        """
        0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,3F2,3I2,3W2,0I1,0W1,0I2,0W2
        1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1I1,2I2,1I2,1W1,2W2,1W2
        """,
    ),
    "flexible": (
        flexible((0, 0, 1, 0, 1), 2),
        """
        0F0,0F1,1F0,1F1,3F0,3F1,3B0,3B1,1B0,0B0,1B1,0B1
        2F0,2F1,4F0,4B0,4F1,4B1,2B0,2B1
        """,
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_schedule_is_as_drawn(name: str) -> None:
    schedule, table = TABLES[name]
    drawn = "\n".join(line.strip() for line in table.strip().splitlines())
    assert str(schedule) == drawn
    assert Schedule.parse(drawn) == schedule
