"""What a step really did: recorded from a running engine, beside the simulated one, and drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import collective_for
from prophet.report.picture import around_blocks, block_of, draw_step
from prophet.scheduler.actions import Window
from prophet.scheduler.recording import StepMarks, compute_spans
from prophet.scheduler.schedules import block_wise
from prophet.scheduler.simulate import simulate
from prophet.scheduler.timeline import Span, write_trace
from tests.helpers.launch import on_processes
from tests.helpers.schedules import uniform_durations
from tests.helpers.support import FixedPlanner, everywhere, on_threads
from tests.helpers.timelines import read_timeline
from tests.helpers.training import Case, Run, compare, expected

CASE = Case(ranks=2, blocks=3, shapes=((2, 3), (4,)), slots=8, steps=4, transfers="direct")


def record(group: Collective) -> tuple[list[object], list[Span], int]:
    run = Run(CASE, group, FixedPlanner(everywhere(4, 2)))
    # transfers are cut by measured windows: where a busy machine stretches one, the chunk of another may get no bytes
    run.engine._agreed_us = lambda: {Window("FNEC", CASE.blocks): 1}  # type: ignore[method-assign]  # all alike
    steps = [run.whole_step(0)]
    with run.engine.recording() as recording:
        steps += [run.whole_step(1), run.whole_step(2)]
    recorded = len(recording.recorder.spans())
    steps.append(run.whole_step(3))
    assert len(recording.recorder.spans()) == recorded, "nothing is recorded outside"
    assert recording.steps == 2
    first = {s.name for s in recording.spans(0)}
    spans = recording.spans()
    assert first <= {s.name for s in spans} | {"comparison of placements"}
    run.close()
    return steps, spans, len(recording.recorder.spans())  # type: ignore[return-value]


def check(spans: list[Span], rank: int) -> None:
    assert {s.rank for s in spans} == {rank}
    names = {s.name for s in spans if s.stream == "weights"}
    wanted = {f"{kind} chunk {c} of layer {b}" for kind in ("Trans", "Agg") for b in (1, 2) for c in (0, 1)}
    wanted |= {"Trans chunk 0 of layer 0", "Agg chunk 0 of layer 0"}
    assert names == wanted
    compute = [s.name for s in spans if s.stream == "compute"]
    assert list(dict.fromkeys(compute)) == [
        "start",
        *(f"{w}({i})" for i in range(3) for w in ("route", "FEC", "FNEC")),
        "BEC(2)",
        *(f"{w}({i})" for i in (1, 0) for w in ("BNEC", "BEC")),
        "end",
        "update",
    ]


def test_an_engine_records_its_steps(tmp_path: Path) -> None:
    by_rank = on_threads(2, record)
    compare(expected(CASE), [steps for steps, _, _ in by_rank])  # type: ignore[misc]
    for rank, (_, spans, _) in enumerate(by_rank):
        check(spans, rank)
    d = uniform_durations(3, 2, a2a_s=1e-3, fec_s=1e-3, trans_s=(1e-3, 0), agg_s=(1e-3, 0))
    groups = {
        "measured": [s for _, spans, _ in by_rank for s in spans],
        "simulated": list(simulate(block_wise(3), d, record=True).spans),
    }
    write_trace(tmp_path / "trace.json", groups)
    read = read_timeline(tmp_path / "trace.json")
    assert {name: len(spans) for name, spans in read.items()} == {name: len(spans) for name, spans in groups.items()}
    draw_step(groups, blocks=(0, 1)).savefig(tmp_path / "step.svg")
    assert (tmp_path / "step.svg").stat().st_size > 5000


def arrivals() -> list[bool]:
    import time

    import torch

    group = collective_for(None)
    found = []
    for watched in (False, True):
        pending = group.all_to_all(torch.ones(4), [2, 2], [2, 2], op=Operation("x"), channel="weights")
        began = time.perf_counter()
        if watched:
            pending.watch()
        pending.wait()
        deadline = time.monotonic() + 5
        while watched and pending.arrived_s is None and time.monotonic() < deadline:
            time.sleep(0.01)
        found.append(pending.arrived_s is not None and pending.arrived_s >= began)
    return found


def test_a_watched_transfer_knows_when_it_arrived() -> None:
    assert on_processes(2, arrivals) == [[False, True]] * 2


def test_compute_is_cut_where_the_backward_pass_begins_and_ends() -> None:
    spans = [
        Span(1.0, 2.0, 0, "tokens", "combine of layer 0"),
        Span(5.0, 6.0, 0, "tokens", "combine backward of layer 0"),
    ]
    spans.append(Span(7.0, 8.0, 0, "tokens", "dispatch backward of layer 0"))

    def seen(backward_s: float | None) -> list[str]:
        windows = [(0.0, "start"), (3.0, "FNEC(0)"), (6.5, "BEC(0)"), (8.2, "end"), (9.0, "update")]
        if backward_s is not None:
            windows.insert(2, (backward_s, "BNEC(0)"))
        marks = StepMarks(tuple(windows), 10.0)
        return [f"{s.name} {s.start_s:g}..{s.end_s:g}" for s in compute_spans(spans, marks, 0)]

    after = ["BEC(0) 6..7", "end 8..9", "update 9..10"]
    assert seen(4.0) == ["start 0..1", "FNEC(0) 2..4", "BNEC(0) 4..5", *after]
    assert seen(None) == ["start 0..1", "FNEC(0) 2..5", *after]


def test_two_blocks_of_a_step() -> None:
    step = simulate(
        block_wise(4),
        uniform_durations(4, 2, a2a_s=1, fec_s=2, fnec_s=3, bnec_s=1, bec_s=1, trans_s=(1, 1), agg_s=(1, 1)),
        record=True,
    )
    cut = around_blocks(step.spans, (1, 2))
    computed = {s.name for s in cut if s.stream == "compute"}
    assert computed == {"FEC(1)", "FNEC(1)", "FEC(2)", "FNEC(2)"}
    assert {s.name for s in cut if s.stream == "weights"} == {"Trans(2,0)", "Trans(2,1)", "Trans(3,0)", "Trans(3,1)"}
    assert around_blocks(step.spans, (7,)) == []
    assert [block_of(n) for n in ("FEC(3)", "Trans(2,0)", "dispatch of layer 5", "start")] == [3, 2, None, None]
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_step({"simulated": step.spans}, blocks=(7,))
