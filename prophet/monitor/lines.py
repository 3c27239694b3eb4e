"""What a line of a run's file must be: the start of a run, or one of its steps. Other lines are left out and counted.

A file comes from outside. What passes here can be shown without another check, and holds nothing but what is shown.

Shape legend: L layers, R ranks, E experts.
"""

from __future__ import annotations

import json
from typing import Any

from prophet.errors import MonitorError
from prophet.monitor.sinks import FORMAT, Row

MAX_LINE_BYTES = 8 << 20
# Layers, ranks or experts of a layer
_MOST = 1 << 16
# Numbers up to this one: integers stay exact in a float
_LARGEST = float(1 << 53)
_BY_LAYER = ("max_mean", "max_mean_static", "copies", "dropped", "rows")
_BY_LAYER_AT_TIMES = ("gain_predicted",)
_AT_TIMES = ("step_s", "gain_measured", "skipped")
_WHOLE = {"copies", "dropped", "rows", "experts", "rank_load", "rank_load_static", "skipped"}


def parsed(line: bytes) -> Any:
    """Parse a line of JSON.

    Raises:
        MonitorError: It is none, or too long.
    """
    if len(line) > MAX_LINE_BYTES:
        raise MonitorError(f"expected at most {MAX_LINE_BYTES} bytes")
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise MonitorError("expected a line of JSON") from None


def is_start(row: Any) -> bool:
    """Whether a line is meant as the start of a run."""
    return isinstance(row, dict) and "start" in row


def start_of(row: Row) -> Row:
    """Check the header in a run's first line, and return the fields that are used.

    Raises:
        MonitorError: A field does not fit; the error names it.
    """
    if row.get("format") != FORMAT:
        raise MonitorError(f"format: expected {FORMAT}, got {row.get('format')!r:.40}")
    start = row["start"]
    if not isinstance(start, dict):
        raise MonitorError("start: expected an object")
    for name in ("layers", "ranks"):
        if not (_number(start.get(name), whole=True) and 1 <= start[name] <= _MOST):
            raise MonitorError(f"start.{name}: expected a number from 1 to {_MOST}, got {start.get(name)!r:.40}")
    experts: Any = start.get("experts")
    if not (_numbers(experts, start["layers"], whole=True) and all(1 <= e <= _MOST for e in experts)):
        raise MonitorError(f"start.experts: expected {start['layers']} numbers from 1 to {_MOST}, one per layer")
    notes = start.get("notes", {})
    if not (isinstance(notes, dict) and all(isinstance(v, str) for v in notes.values())):
        raise MonitorError("start.notes: expected an object of strings")
    planner = start.get("planner", "unknown")
    if not isinstance(planner, str):
        raise MonitorError("start.planner: expected a string")
    return {"layers": start["layers"], "ranks": start["ranks"], "experts": experts, "notes": notes, "planner": planner}


def step_of(row: Any, header: Row) -> Row:
    """Check a step's line, and return the fields that are shown.

    Raises:
        MonitorError: A field does not fit the run's header; the error names it.
    """
    if not isinstance(row, dict):
        raise MonitorError("expected an object")
    layers = header["layers"]
    found: Row = {}

    def take(name: str, fits: bool, expected: str) -> None:
        if not fits:
            raise MonitorError(f"{name}: expected {expected}, got {row.get(name)!r:.40}")
        found[name] = row[name]

    take("step", _number(row.get("step"), whole=True), "a whole number")
    for name in ("time_s", "exposed_s"):
        take(name, _number(row.get(name)), "a number")
    for name in _BY_LAYER:
        take(name, _numbers(row.get(name), layers, whole=name in _WHOLE), f"{layers} numbers, one per layer")
    take("hottest", _hottest(row.get("hottest"), layers), f"{layers} lists of [expert, share]")
    seconds = row.get("seconds")
    take("seconds", isinstance(seconds, dict) and all(map(_number, seconds.values())), "numbers by activity")
    # These are left out or null where there was nothing to measure
    for name in _AT_TIMES:
        if row.get(name) is not None:
            take(name, _number(row[name], whole=name in _WHOLE), "a number")
    if row.get("loss") is not None:
        take("loss", _number(row["loss"], signed=True), "a number")
    for name in _BY_LAYER_AT_TIMES:
        if row.get(name):
            take(name, _numbers(row[name], layers), f"{layers} numbers, one per layer")
    ranks, experts = header["ranks"], max(header["experts"])
    for name, wide in (("experts", experts), ("rank_load", ranks), ("rank_load_static", ranks)):
        if name in row:
            table = row[name]
            # Without a limit by the header, a single line could ask a view for a table of any size
            fits = (
                isinstance(table, list) and len(table) == layers and all(_numbers(t, wide, whole=True) for t in table)
            )
            take(name, fits, f"{layers} lists of {wide} whole numbers")
    return found


def _number(value: object, *, whole: bool = False, signed: bool = False) -> bool:
    """Whether it is a number that every view can show: not NaN, and not negative unless it is `signed`."""
    # `True` is an int to Python. A comparison with NaN is false, so NaN fails too
    kinds = int if whole else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and -signed * _LARGEST <= value <= _LARGEST


def _numbers(value: object, count: int, *, whole: bool = False) -> bool:
    return isinstance(value, list) and len(value) == count and all(_number(v, whole=whole) for v in value)


def _hottest(value: object, layers: int) -> bool:
    """[L][n][expert, choices over the mean]."""
    if not isinstance(value, list) or len(value) != layers:
        return False
    return all(isinstance(chosen, list) and all(_numbers(pair, 2) for pair in chosen) for chosen in value)
