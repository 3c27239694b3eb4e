"""Microbatches after a re-packing: the rows' figures, and all copies on ranks without emulated hosts."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.cluster.host import Host
from benchmarks.pipeline.repacked import CHOSEN, GIVEN, missed, rows_of, trained
from tests.helpers.launch import run_gloo

STEPS = 3
ARGS: dict[str, Any] = {
    "blocks": 6,
    "dim": 16,
    "tokens": 16,
    "microbatches": 8,
    "numbers": [4],
    "slowdown": 1.0,
    "warm_up": 2,
    "steps": STEPS,
    "repetition": 0,
}


def _trained(rank: int, size: int) -> dict[str, Any]:
    return trained(Host(rank, size, "127.0.0.1", "127.0.0.1", 0), ARGS)


def test_all_copies_train_alike_on_half_the_ranks() -> None:
    found = run_gloo(_trained, 2)
    policies = found[0]["policies"]
    assert list(policies) == [GIVEN, CHOSEN, "4"]
    for one in policies.values():
        assert one["losses"] == pytest.approx(policies[GIVEN]["losses"], rel=1e-5)
        assert len(one["step_s"]) == STEPS
    assert [policies[name]["microbatches"] for name in (GIVEN, "4")] == [8, 4]
    (choice,) = policies[CHOSEN]["choices"]
    assert (choice["before"], choice["after"]) == (8, policies[CHOSEN]["microbatches"])
    assert {row["policy"] for row in rows_of([found])} == set(policies)


def _host(given_s: float, chosen_s: float, gain_s: float) -> dict[str, Any]:
    choice = {"reason": "", "before": 8, "after": 4, "gain_s": gain_s, "error_s": 0.01, "step_s": 1.0}
    one = {"losses": [], "microbatches": 8, "choices": []}
    return {
        "policies": {
            GIVEN: {**one, "step_s": [given_s] * STEPS},
            CHOSEN: {**one, "step_s": [chosen_s] * STEPS, "microbatches": 4, "choices": [choice]},
        }
    }


def test_rows_are_ratios_within_a_repetition() -> None:
    # the slower host of each, and repetitions on a machine that is slower each time
    rows = rows_of([[_host(1.0, 0.5, 0.2), _host(0.5, 0.9, 0.2)], [_host(2.0, 1.9, 0.1)], [_host(4.0, 4.4, 0.3)]])
    given, chosen = rows
    assert given["of_given"] == 1.0
    assert (chosen["least"], chosen["of_given"], chosen["most"]) == pytest.approx((0.9, 0.95, 1.1))
    assert chosen["predicted"] == pytest.approx(0.8)
    assert chosen["error"] == pytest.approx(0.01)
    assert missed(rows) == ""
    slower = rows_of([[_host(1.0, 0.98, 0.2)]])
    assert missed(slower) == "chosen: 0.980 of given, needs 0.97"
    # the same number as given: all that differs is noise
    assert missed([{**row, "microbatches": [8]} for row in slower]) == ""
    # no gain to speak of was predicted
    assert missed(rows_of([[_host(1.0, 0.98, 0.01)]])) == ""
