"""What every rank did and when, as a trace that Chrome's and Perfetto's viewers open.

`to_trace` turns spans (recorded, simulated, or both side by side) into the Trace Event format: one process per rank,
a thread per stream, complete events ("ph": "X") in microseconds. Events of one thread must be nested or apart: where
spans of a stream cross, as transfers do, there are several threads of its name.
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


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """`name` ran on a stream of a rank from start_s to end_s; order is by start.

    Attributes:
        start_s, end_s: Seconds on any clock that all spans of a trace share.
        rank: 0 or more.
        stream: "compute", "tokens", "weights", "plan" or "waits".
        name: What ran.
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
    """Collects one rank's spans from any thread.

    Args:
        rank: The rank of its spans.
        limit: Most spans that are kept: once it is reached the oldest give way to the newest.
    """

    def __init__(self, rank: int, *, limit: int = 100_000) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        self.rank = rank
        self._spans: deque[Span] = deque(maxlen=limit)
        self._lock = threading.Lock()

    def add(self, name: str, stream: str, start_s: float, end_s: float) -> None:
        """Keep one span.

        Args:
            name: What ran.
            stream: On which stream, see `Span`.
            start_s: Seconds.
            end_s: Seconds.
        """
        span = Span(start_s, end_s, self.rank, stream, name)
        # callbacks of a backend record arrivals in other threads
        with self._lock:
            self._spans.append(span)

    def spans(self) -> tuple[Span, ...]:
        """Return the spans that are kept, by start."""
        with self._lock:
            return tuple(sorted(self._spans))


def to_trace(groups: Mapping[str, Iterable[Span]]) -> dict[str, Any]:
    """Return spans as a Trace Event document.

    Every group starts at time zero, so that a measured and a simulated step lie side by side. Process numbers run group
    by group in the order given, ranks within them; thread numbers follow the streams' names.

    Args:
        groups: Spans by group: "measured", "simulated", or "" for just one.
    """
    listed = {name: sorted(spans) for name, spans in groups.items()}
    width = 1 + max((s.rank for spans in listed.values() for s in spans), default=0)
    events: list[dict[str, Any]] = []
    for g, (group, spans) in enumerate(listed.items()):
        zero = spans[0].start_s if spans else 0.0
        places: list[tuple[Span, dict[str, int]]] = []
        for rank in sorted({s.rank for s in spans}):
            # a rank of each group is a process for the viewer: numbers must not meet
            pid = g * width + rank
            label = f"rank {rank}" if not group else f"{group}, rank {rank}"
            events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": label}})
            # viewers sort processes by name unless told: rank 10 would come before rank 2
            events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
            for thread, (stream, track) in enumerate(_tracks([s for s in spans if s.rank == rank]), start=1):
                place = {"pid": pid, "tid": thread}
                events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": stream}})
                places += [(s, place) for s in track]
        for s, place in sorted(places, key=lambda both: both[0]):
            # both ends are rounded: what was nested or apart stays so
            start_us, end_us = (round((at_s - zero) * 1e6, 3) for at_s in (s.start_s, s.end_s))
            about = {"name": s.name, "cat": s.stream, "ts": start_us, "dur": round(end_us - start_us, 3)}
            events.append({"ph": "X", **place, **about})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _tracks(spans: Iterable[Span]) -> list[tuple[str, list[Span]]]:
    """Return tracks by stream on which spans are nested or apart, as few as the order of their starts allows."""
    # what is on a track, and the ends of the spans that are open there
    tracks: dict[str, list[tuple[list[Span], list[float]]]] = {}
    # of spans that start together the longest first: the others nest in it
    for s in sorted(spans, key=lambda s: (s.start_s, -s.end_s)):
        lanes = tracks.setdefault(s.stream, [])
        for lane in lanes:
            ends = lane[1]
            while ends and ends[-1] <= s.start_s:
                ends.pop()
            if not ends or s.end_s <= ends[-1]:
                break
        else:
            lane = ([], [])
            lanes.append(lane)
        lane[0].append(s)
        lane[1].append(s.end_s)
    return [(stream, track) for stream, lanes in sorted(tracks.items()) for track, _ in lanes]


def write_trace(path: str | os.PathLike[str], groups: Mapping[str, Iterable[Span]]) -> None:
    """Write `to_trace(groups)` as JSON; the file appears complete or not at all."""
    write_document(Path(path), to_trace(groups))


def write_document(target: Path, document: Mapping[str, Any]) -> None:
    """Write a Trace Event document as JSON; the file appears complete or not at all, also if several ranks write it."""
    # named by process and thread, as ranks may be either; `replace` is atomic within a folder
    part = target.with_name(f"{target.name}.{os.getpid()}-{threading.get_ident()}.part")
    with part.open("w", encoding="utf-8") as f:
        json.dump(document, f, separators=(",", ":"), allow_nan=False)
    part.replace(target)
