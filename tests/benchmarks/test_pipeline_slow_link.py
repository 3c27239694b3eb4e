"""The rows of the slow link, its oracle, and a run on ranks without emulated hosts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from benchmarks.cluster.host import Host
from benchmarks.pipeline.slow_link import EVERY, ORACLE, STATIC, Bench, climbed, rows_of, shifted
from pipeline_balance.maps.compare import predicted_makespan_s
from pipeline_balance.spec import LayerCost, RankLimits, StageMap
from tests.helpers.launch import run_gloo

COSTS = [LayerCost(forward_s=0.01, backward_input_s=0.02, gradient_bytes=4)] * 24
EVEN, AWAY = StageMap.contiguous((0, 6, 12, 18, 24)), StageMap.contiguous((0, 7, 14, 19, 24))


def test_every_boundary_is_shifted_both_ways_and_no_stage_is_empty() -> None:
    assert [m.boundaries for m in shifted(StageMap.contiguous((0, 1, 3)))] == [(0, 2, 3)]
    assert len(list(shifted(EVEN))) == 6


def test_the_oracle_leaves_a_slow_link_and_stays_on_a_fast_one() -> None:
    limits = RankLimits.uniform(4)
    links = np.full((4, 4), 1e-3)
    assert climbed(COSTS, limits, EVEN, microbatches=8, transfer_s=links) == EVEN
    links[2, 3] = links[3, 2] = 0.06
    found = climbed(COSTS, limits, EVEN, microbatches=8, transfer_s=links)
    before_s, after_s = (
        predicted_makespan_s(COSTS, m, limits, microbatches=8, transfer_s=links) for m in (EVEN, found)
    )
    assert found.boundaries[2] > EVEN.boundaries[2]
    assert after_s < before_s


def test_rows_tell_when_a_policy_has_moved_and_what_that_is_of_the_oracle() -> None:
    steps = 8
    fast, slow, adapted = [1.0] * steps, [2.0] * steps, [2.0] * 4 + [1.5] * 4

    def policy(step_s: list[float], moved_at: int | None) -> dict[str, object]:
        maps = [EVEN if moved_at is None or i < moved_at else AWAY for i in range(2 * steps)]
        return {"step_s": step_s, "maps": [list(m.boundaries) for m in maps], "reasons": []}

    links = [[float("nan") if a == b else 0.01 for a in range(4)] for b in range(4)]
    host = {
        "costs": [[dataclasses.asdict(c) for c in COSTS]] * 2 * steps,
        "links": [links] * 2 * steps,
        "between_s": 0.0,
        "around_s": 0.0,
        "optimizer_s_per_byte": 0.0,
        "policies": {
            "optimal-at-start": policy(fast + slow, None),
            # the decision is at the end of a step, the move before the next one
            "partition": policy(fast + adapted, steps + EVERY),
            "oracle": policy(fast + [1.4] * steps, steps),
        },
    }
    later = {
        **host,
        "policies": {n: {**p, "step_s": [s / 2 for s in p["step_s"]]} for n, p in host["policies"].items()},
    }  # type: ignore[attr-defined]
    static, moved, oracle = rows_of([later, host], steps, 8)
    assert [r["before_s"] for r in (static, moved, oracle)] == [1.0] * 3
    assert [r["after_s"] for r in (static, moved, oracle)] == [2.0, 1.5, 1.4]
    assert [r["decisions_until_moved"] for r in (static, moved, oracle)] == [None, 1, 0]
    assert moved["of_oracle"] == 1.5 / 1.4
    assert static["simulated_before"] > 0
    # what is around a step's actions lengthens the simulated step, here of 1 s
    longer = rows_of([later, {**host, "around_s": 0.25}][::-1], steps, 8)[0]
    assert longer["simulated_before"] - static["simulated_before"] == pytest.approx(0.25)


def _bench(rank: int, size: int, microbatches: int) -> dict[str, Any]:
    args = {"blocks": 2, "steps": 4, "warm_up": 2, "factor": 1, "slowdown": 1.0, "replicas": 1, "link_mbit_per_s": 100}
    policies = [STATIC, ORACLE]
    host = Host(rank, size, "127.0.0.1", "127.0.0.1", 0)
    return Bench(host, {**args, "microbatches": microbatches, "policies": policies}).run()


@pytest.mark.parametrize("microbatches", [3, 8])
def test_a_batch_has_as_many_rows_as_there_are_microbatches(microbatches: int) -> None:
    found = run_gloo(_bench, 2, microbatches)
    assert found[0]["around_s"] == found[1]["around_s"] > 0
    rows = rows_of(found, 4, microbatches)
    assert [row["policy"] for row in rows] == [STATIC, ORACLE]
    assert all(row["simulated_before"] > 0 for row in rows)
