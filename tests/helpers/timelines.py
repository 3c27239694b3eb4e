"""Reads the timelines that `prophet.scheduler.timeline.write_trace` wrote."""

from __future__ import annotations

import json
from pathlib import Path

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
