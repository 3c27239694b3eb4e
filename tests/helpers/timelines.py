"""Reads the timelines that `prophet.scheduler.timeline.write_trace` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prophet.scheduler.timeline import Span


def read_timeline(path: Path) -> dict[str, list[Span]]:
    """Spans by group; times start at zero."""
    processes: dict[int, tuple[str, int]] = {}
    threads: dict[tuple[int, int], str] = {}
    groups: dict[str, list[Span]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["name"] == "process_name":
            group, _, rank = event["args"]["name"].rpartition("rank ")
            processes[event["pid"]] = (group.removesuffix(", "), int(rank))
        elif event["name"] == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            group, number = processes[event["pid"]]
            start_s = event["ts"] / 1e6
            stream = threads[event["pid"], event["tid"]]
            span = Span(start_s, start_s + event["dur"] / 1e6, number, stream, event["name"])
            groups.setdefault(group, []).append(span)
    return groups


def events_by_track(document: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The complete events of a Trace Event document by process and thread name; fails where one breaks the format."""
    assert isinstance(document["traceEvents"], list)
    names: dict[tuple[str, Any], str] = {}
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in document["traceEvents"]:
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        if event["ph"] == "M":
            if event["name"] in ("process_name", "thread_name"):
                key = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
                assert (event["name"], key) not in names, "named twice"
                names[event["name"], key] = event["args"]["name"]
            continue
        assert event["ph"] == "X"
        assert event["name"]
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for (pid, tid), events in threads.items():
        open_ns: list[int] = []  # ends of what is open, whole nanoseconds as viewers keep them
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            start_ns = round(1e3 * event["ts"])
            end_ns = start_ns + round(1e3 * event["dur"])
            while open_ns and open_ns[-1] <= start_ns:
                open_ns.pop()
            assert not open_ns or end_ns <= open_ns[-1], f"{event} crosses the one before it"
            open_ns.append(end_ns)
        found.setdefault((names["process_name", pid], names["thread_name", (pid, tid)]), []).extend(events)
    return found
