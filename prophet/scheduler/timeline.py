"""What every rank did and when, as a trace that Chrome's and Perfetto's viewers open.

A span is a stretch of time of one stream of one rank. A `Recorder` keeps at most a given number of them; `to_trace`
turns them (recorded ones, simulated ones, or both side by side) into the Trace Event format: one process per rank, one
thread per stream, complete events ("ph": "X") in microseconds.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prophet.errors import TraceError
from prophet.files import read_json

MAX_FILE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """`name` ran on `stream` ("compute", "tokens", "weights", "plan") of `rank` from start_s to end_s.

    Times are seconds on any clock that all spans of a trace share; order is by start.
    """

    start_s: float
    end_s: float
    rank: int
    stream: str
    name: str

    def __post_init__(self) -> None:
        if not self.end_s >= self.start_s:
            raise ValueError(f"span {self.name!r} ends before it starts: {self.start_s!r} to {self.end_s!r}")
        if self.rank < 0:
            raise ValueError(f"span {self.name!r} has rank {self.rank}, expected 0 or more")

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Recorder:
    """Collects one rank's spans from any thread; once `limit` is reached the oldest give way to the newest."""

    def __init__(self, rank: int, *, limit: int = 100_000) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        self.rank = rank
        self.dropped = 0
        self._spans: deque[Span] = deque(maxlen=limit)
        self._lock = threading.Lock()

    def add(self, name: str, stream: str, start_s: float, end_s: float) -> None:
        """Keep one span."""
        span = Span(start_s, end_s, self.rank, stream, name)
        with self._lock:
            self.dropped += len(self._spans) == self._spans.maxlen
            self._spans.append(span)

    def spans(self) -> tuple[Span, ...]:
        """What is kept, by start."""
        with self._lock:
            return tuple(sorted(self._spans))


def to_trace(groups: Mapping[str, Iterable[Span]]) -> dict[str, Any]:
    """Spans by group ("measured", "simulated", or "" for just one) as a Trace Event document.

    Every group starts at time zero, so that a measured and a simulated step lie side by side. Process numbers run
    group by group in the order given, ranks within them; thread numbers follow the streams' names.
    """
    listed = {name: sorted(spans) for name, spans in groups.items()}
    streams = sorted({s.stream for spans in listed.values() for s in spans})
    thread = {name: i + 1 for i, name in enumerate(streams)}
    width = 1 + max((s.rank for spans in listed.values() for s in spans), default=0)
    events: list[dict[str, Any]] = []
    for g, (group, spans) in enumerate(listed.items()):
        zero = spans[0].start_s if spans else 0.0
        for rank in sorted({s.rank for s in spans}):
            pid = g * width + rank
            label = f"rank {rank}" if not group else f"{group}, rank {rank}"
            events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": label}})
            events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
            for name in sorted({s.stream for s in spans if s.rank == rank}):
                events.append(
                    {"ph": "M", "name": "thread_name", "pid": pid, "tid": thread[name], "args": {"name": name}}
                )
        for s in spans:
            events.append(
                {
                    "ph": "X",
                    "name": s.name,
                    "cat": s.stream,
                    "pid": g * width + s.rank,
                    "tid": thread[s.stream],
                    "ts": round((s.start_s - zero) * 1e6, 3),
                    "dur": round(s.seconds * 1e6, 3),
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: str | os.PathLike[str], groups: Mapping[str, Iterable[Span]]) -> None:
    """Write `to_trace(groups)` as JSON; the file appears complete or not at all."""
    target = Path(path)
    part = target.with_name(target.name + ".part")
    with part.open("w", encoding="utf-8") as f:
        json.dump(to_trace(groups), f, separators=(",", ":"), allow_nan=False)
    part.replace(target)


def read_trace(path: str | os.PathLike[str]) -> dict[str, list[Span]]:
    """Read what `write_trace` wrote, by group; times start at zero. `TraceError` names the file and the field."""
    file = Path(path)
    document = read_json(file, most_bytes=MAX_FILE_BYTES, expected="a timeline", error=TraceError)
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        raise TraceError(f"{file}: expected an object with a list traceEvents")
    processes: dict[int, tuple[str, int]] = {}
    threads: dict[tuple[int, int], str] = {}
    groups: dict[str, list[Span]] = {}
    for i, event in enumerate(events):
        try:
            if event["ph"] == "M" and event["name"] == "process_name":
                group, _, rank = str(event["args"]["name"]).rpartition("rank ")
                processes[event["pid"]] = (group.removesuffix(", "), int(rank))
            elif event["ph"] == "M" and event["name"] == "thread_name":
                threads[event["pid"], event["tid"]] = str(event["args"]["name"])
            elif event["ph"] == "X":
                group, number = processes[event["pid"]]
                start_s = float(event["ts"]) / 1e6
                stream = threads[event["pid"], event["tid"]]
                span = Span(start_s, start_s + float(event["dur"]) / 1e6, number, stream, str(event["name"]))
                groups.setdefault(group, []).append(span)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise TraceError(f"{file}: traceEvents[{i}] is not an event of a timeline ({error!r:.200})") from error
    return groups
