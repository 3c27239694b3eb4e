"""Any stage map gets a schedule that runs, within the activations that the partition reckons with."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_balance.schedules.actions import Action, Schedule
from pipeline_balance.schedules.flexible import flexible
from pipeline_balance.schedules.simulate import Durations, simulate
from pipeline_balance.spec import in_flight


@st.composite
def runs(draw: st.DrawFn) -> tuple[Schedule, Durations]:
    ranks = draw(st.integers(1, 4))
    extra = draw(st.lists(st.integers(0, ranks - 1), max_size=5))
    homes = draw(st.permutations([*range(ranks), *extra]))
    microbatches = draw(st.integers(1, 6))
    stages = len(homes)

    def figures(n: int) -> np.ndarray:
        return np.array(draw(st.lists(st.integers(0, 8), min_size=n, max_size=n)), dtype=np.float64)

    durations = Durations(
        forward_s=figures(stages),
        input_s=figures(stages),
        weight_s=figures(stages),
        forward_transfer_s=figures(stages - 1),
        backward_transfer_s=figures(stages - 1),
        activation_bytes=(1,) * stages,
    )
    split = draw(st.booleans())
    return flexible(homes, microbatches, durations=durations, split_backward=split), durations


@given(runs())
@settings(max_examples=150, deadline=None)
def test_flexible_runs_on_any_map(run: tuple[Schedule, Durations]) -> None:
    schedule, durations = run
    ran = simulate(schedule, durations)
    work = [0.0] * schedule.ranks
    for s, rank in enumerate(schedule.stage_ranks):
        parts = durations.forward_s[s] + durations.input_s[s] + durations.weight_s[s]
        work[rank] += schedule.microbatches * float(parts)
    assert list(ran.busy_s) == work
    assert ran.makespan_s >= max(work)
    for rank in range(schedule.ranks):
        caps = [
            in_flight(s, schedule.stages, schedule.microbatches)
            for s, home in enumerate(schedule.stage_ranks)
            if home == rank
        ]
        assert ran.peak_activation_bytes[rank] <= sum(caps)
    assert Schedule.parse(str(schedule)) == schedule


@given(runs())
@settings(max_examples=100, deadline=None)
def test_simulation_obeys_every_dependency(run: tuple[Schedule, Durations]) -> None:
    schedule, durations = run
    ran = simulate(schedule, durations)
    home = schedule.stage_ranks
    for action, start in ran.start_s.items():
        s, m = action.stage, action.microbatch
        if action.kind == "F" and s > 0:
            link = durations.forward_transfer_s[s - 1] if home[s] != home[s - 1] else 0.0
            assert start >= ran.end_s[Action(s - 1, "F", m)] + link
        if action.kind in ("I", "B") and s + 1 < schedule.stages:
            link = durations.backward_transfer_s[s] if home[s] != home[s + 1] else 0.0
            assert start >= ran.end_s[Action(s + 1, action.kind, m)] + link
    for row in schedule.actions:
        for earlier, later in pairwise(row):
            assert ran.start_s[later] >= ran.end_s[earlier]
