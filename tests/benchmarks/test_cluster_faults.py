"""Faults on the emulated cluster: every one ends in a named error in time, or in the right gradients."""

from __future__ import annotations

import re

import pytest

from benchmarks.cluster.profiles import uniform
from benchmarks.cluster.testbed import Running, Testbed
from tests.helpers.cluster_faults import KILL, STEPS, STOP
from tests.helpers.cluster_testbed import needs_testbed

FAULTS = "tests.helpers.cluster_faults"
TIMEOUT_S = 3.0


pytestmark = [pytest.mark.slow, needs_testbed]


@pytest.mark.parametrize(
    ("operation", "at", "number"),
    [("Trans chunk 0", 1, STOP), ("dispatch", 3, STOP), ("Agg chunk 1", 1, STOP), ("combine backward", 3, KILL)],
)
def test_a_host_that_stops_is_a_named_error_in_time(operation: str, at: int, number: int) -> None:
    """The other host says which rank, layer and operation, within its time limit; nobody hangs."""
    with Testbed(uniform("two", hosts=2, share=0.6, link_mbit_per_s=50)) as bed:
        running = bed.start(
            f"{FAULTS}:train",
            {"timeout_s": TIMEOUT_S, "stop": [1, operation, at, number]},
            timeout_s=60,
        )
        survivor, victim = running.wait(grace_s=0.5)
    assert "stopping in" in victim.log, victim.log
    assert operation in victim.log
    assert survivor.error_type in ("CollectiveTimeout", "PeerLost"), survivor.log
    assert survivor.error is not None
    assert re.match(r"rank 0: .+ of layer [01] failed: ", survivor.error)
    if number == STOP and operation == "dispatch":
        assert "dispatch of layer 0" in survivor.error
    assert survivor.error_type == "PeerLost" or f"within {TIMEOUT_S:g} s" in survivor.error
    assert bed.leftovers() == []


def test_slow_links_and_hosts_change_no_gradient() -> None:
    """A link 10x slower, then a host 3x slower for a while: the same gradients, bit by bit, as undisturbed."""
    args = {"timeout_s": 30.0, "pause_s": 0.1}

    def slow_link(running: Running) -> None:
        running.wait_for(1, "step 0 ended", timeout_s=60)
        bed.set_rate(1, 20)
        running.wait_for(0, f"step {STEPS - 1} ended", timeout_s=60)
        bed.set_rate(1, 200)

    def slow_host(running: Running) -> None:
        running.wait_for(2, "step 0 ended", timeout_s=60)
        bed.set_share(2, 0.15)
        running.wait_for(2, "step 2 ended", timeout_s=60)
        bed.set_share(2, 0.45)

    with Testbed(uniform("three", hosts=3, share=0.45)) as bed:
        calm = bed.run(f"{FAULTS}:train", args, timeout_s=90)
        assert all(len(set(digests)) == STEPS for digests in calm)
        for fault in (slow_link, slow_host):
            assert bed.run(f"{FAULTS}:train", args, timeout_s=90, while_running=fault) == calm


def test_the_plan_after_a_slowdown_uses_the_measured_speed() -> None:
    def slow_host(running: Running) -> None:
        running.wait_for(2, "measured once", timeout_s=60)
        bed.set_share(2, 0.05)

    # small shares, which a busy machine can still give
    with Testbed(uniform("three", hosts=3, share=0.15)) as bed:
        found = bed.run(f"{FAULTS}:replan", {"pause_s": 0.5}, timeout_s=90, while_running=slow_host)
    before, after = found[0]["flops_per_s"]
    assert all(f == found[0] for f in found)  # all ranks plan from the same figures
    assert after[2] < 0.6 * before[2]
    assert after[2] < 0.6 * min(after[:2])
    # the slow host is given less to compute, in the proportion of the measured speeds
    equal, shifted = found[0]["rank_load"]
    assert shifted[2] < 0.8 * equal[2]
    ideal = sum(shifted) * after[2] / sum(after)
    assert shifted[2] == pytest.approx(ideal, rel=0.25)
