"""Timelines: what is written can be read by a viewer and by us, and recording never grows without bound."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from prophet.scheduler.schedules import block_wise
from prophet.scheduler.simulate import simulate
from prophet.scheduler.timeline import Recorder, Span, to_trace, write_trace
from tests.helpers.schedules import uniform_durations
from tests.helpers.timelines import events_by_track, read_timeline

SPANS = [
    Span(10.0, 10.5, 0, "compute", "FEC(0)"),
    Span(10.25, 10.75, 0, "weights", "Trans(1,0)"),
    Span(10.0, 11.0, 1, "compute", "FEC(0)"),
]


def test_one_track_per_rank_and_stream() -> None:
    document = to_trace({"": SPANS})
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["compute", "compute", "weights"]
    ranks = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert sorted(ranks.values()) == ["rank 0", "rank 1"]
    complete = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in complete if e["cat"] == "weights"] == [
        ("Trans(1,0)", 250000.0, 500000.0)
    ]
    # what the viewers require of a complete event
    assert all(set(e) >= {"name", "ph", "ts", "dur", "pid", "tid"} and e["ts"] >= 0 <= e["dur"] for e in complete)
    assert all((e["pid"], e["tid"]) in names for e in complete)


def test_measured_and_simulated_lie_side_by_side(tmp_path: Path) -> None:
    d = uniform_durations(2, 2, a2a_s=0.25, fec_s=1, fnec_s=2, bnec_s=1, bec_s=2, trans_s=(1, 1), agg_s=(1, 1))
    simulated = simulate(block_wise(2), d, record=True).spans
    path = tmp_path / "trace.json"
    write_trace(path, {"measured": SPANS, "simulated": simulated})
    back = read_timeline(path)
    assert list(back) == ["measured", "simulated"]
    assert sorted(back["simulated"]) == sorted(simulated)
    assert sorted(s.start_s for s in back["measured"]) == [0.0, 0.0, 0.25]  # every group starts at zero
    pids = {e["pid"] for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"}
    assert len(pids) == 4
    assert list(tmp_path.iterdir()) == [path]


def test_spans_that_cross_are_on_tracks_of_their_own() -> None:
    """As transfers do, which are several at a time; what is nested or apart shares one."""
    rng = np.random.default_rng(0)
    starts_s = rng.uniform(1e5, 1e5 + 1e-2, 200)  # seconds since a host was started: rounding must not make any cross
    spans = [
        Span(s, s + d, int(r), "weights", "x")
        for s, d, r in zip(starts_s, rng.exponential(2e-4, 200), starts_s * 1e6 % 2, strict=True)
    ]
    spans += [Span(1.0, 2.0, 2, "weights", "a"), Span(1.25, 1.5, 2, "weights", "b"), Span(2.0, 3.0, 2, "weights", "c")]
    document = to_trace({"": spans})
    tracks = events_by_track(document)
    assert {track: len(events) for track, events in tracks.items()} == {
        (f"rank {rank}", "weights"): sum(s.rank == rank for s in spans) for rank in range(3)
    }
    assert len({e["tid"] for e in tracks["rank 0", "weights"]}) > 1
    assert len({e["tid"] for e in tracks["rank 2", "weights"]}) == 1
    with pytest.raises(AssertionError, match="crosses"):
        events_by_track({"traceEvents": [{**e, "tid": 1} if e["ph"] == "X" else e for e in document["traceEvents"]]})


def test_empty_and_single_groups(tmp_path: Path) -> None:
    write_trace(tmp_path / "a.json", {"": []})
    assert read_timeline(tmp_path / "a.json") == {}
    write_trace(tmp_path / "b.json", {"": SPANS})
    assert [s.rank for s in read_timeline(tmp_path / "b.json")[""]] == [0, 1, 0]


def test_recording_is_bounded_and_keeps_the_newest() -> None:
    recorder = Recorder(3, limit=10)
    for i in range(25):
        recorder.add(f"op {i}", "compute", float(i), i + 0.5)
    assert [s.name for s in recorder.spans()] == [f"op {i}" for i in range(15, 25)]
    assert {s.rank for s in recorder.spans()} == {3}


def test_recording_from_several_threads() -> None:
    recorder = Recorder(0, limit=10_000)

    def work(stream: str) -> None:
        for i in range(500):
            recorder.add("x", stream, float(i), float(i))

    threads = [threading.Thread(target=work, args=(f"s{t}",)) for t in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(recorder.spans()) == 2000


def test_impossible_spans() -> None:
    with pytest.raises(ValueError, match="ends before it starts"):
        Span(1.0, 0.5, 0, "compute", "x")
    with pytest.raises(ValueError, match="ends before it starts"):
        Span(float("nan"), 0.5, 0, "compute", "x")
    with pytest.raises(ValueError, match="rank -1"):
        Span(0.0, 0.5, -1, "compute", "x")
    with pytest.raises(ValueError, match="limit"):
        Recorder(0, limit=0)
