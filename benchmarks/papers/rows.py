"""Printed numbers beside ours: the data file, a row for every number, and what is said of it."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown

PRINTED = Path(__file__).with_name("printed.csv")
# How far from a printed number is still met
NEAR = 0.2
# From the bound to infinity, for a row whose ours is the least or the most that is possible
Value = float | tuple[float, float]
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A printed number.

    Attributes:
        paper: Its name.
        table: The table, figure or equation.
        cell: Which one there, as words "name=value".
        printed: The number.
        aim: "same" for what describes somebody's system, "more" or "less" where that is better, "at least" and "at
            most" for what is printed as a limit, "no: reason" for what cannot be derived.
    """

    paper: str
    table: str
    cell: str
    printed: float
    aim: str = "same"

    @property
    def at(self) -> dict[str, str]:
        """The cell's words by name."""
        return dict(word.split("=", 1) for word in self.cell.split())


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumption:
    """Something that a paper does not state: what is assumed, and what else it might be."""

    assumed: str
    instead: str


# Ours for a number, with one assumption changed where a name is given
Derive = Callable[[Number, str | None], Value]


def printed(file: Path = PRINTED) -> list[Number]:
    """Read the data file."""
    with file.open(newline="", encoding="utf-8") as lines:
        return [Number(**row | {"printed": float(row["printed"])}) for row in csv.DictReader(lines)]  # type: ignore[arg-type]


def ratio_of(number: Number, ours: Value) -> float:
    """Ours over the printed number: the least that is possible, or where there is a most, 1 up to it."""
    low, high = ours if isinstance(ours, tuple) else (ours, ours)
    if math.isinf(high):
        return low / number.printed
    return min(max(1.0, low / number.printed), high / number.printed)


def verdict_of(number: Number, ours: Value) -> str:
    """Say what ours makes of a printed number: met, beaten, missed or bounds."""
    ratio, aim = ratio_of(number, ours), number.aim
    low, high = ours if isinstance(ours, tuple) else (ours, ours)
    if low < high and low <= number.printed <= high and not (math.isinf(high) and ratio >= 1 - NEAR):
        return "bounds"
    if aim == "at most":
        return "met" if ratio <= 1 + NEAR else "missed"
    if aim == "at least":
        return "met" if ratio >= 1 - NEAR else "missed"
    if 1 - NEAR <= ratio <= 1 + NEAR:
        return "met"
    if (aim == "more" and ratio > 1) or (aim == "less" and ratio < 1):
        return "beaten"
    return "missed"


def row_of(number: Number, derive: Derive, assumptions: Mapping[str, Assumption], *, causes: bool = True) -> Row:
    """Return the row of a number.

    Args:
        number: The printed number.
        derive: Ours.
        assumptions: What may be changed alone to find why a number is missed.
        causes: Whether to look for that.
    """
    row: Row = {"table": f"{number.paper}, {number.table}", "cell": number.cell, "paper": number.printed}
    if number.aim.startswith("no: "):
        return row | {"ours": None, "ratio": None, "verdict": f"not derivable: {number.aim.removeprefix('no: ')}"}
    ours = derive(number, None)
    verdict = verdict_of(number, ours)
    row |= {"ours": _plain(ours), "ratio": ratio_of(number, ours), "verdict": verdict}
    if verdict == "missed" and causes:
        row["cause"] = cause_of(number, ours, derive, assumptions)
    return row


def cause_of(number: Number, ours: Value, derive: Derive, assumptions: Mapping[str, Assumption]) -> str:
    """Name the assumption that brings a missed number nearest to what is printed, changed alone."""
    found = [(_distance(number, other), name, other) for name in assumptions for other in (derive(number, name),)]
    if not found:
        return "nothing is assumed"
    distance, name, other = min(found)
    words = assumptions[name]
    if distance >= _distance(number, ours) * 0.999:
        return "no assumption alone brings it nearer"
    return f"{name}: {words.instead} instead of {words.assumed} gives {shown(other)}"


def _distance(number: Number, ours: Value) -> float:
    """How far ours is off; nothing where it is better than what is printed."""
    ratio = ratio_of(number, ours)
    if ratio <= 0:
        return 0.0 if number.aim in ("less", "at most") else math.inf
    off = math.log(ratio)
    if number.aim in ("less", "at most"):
        return max(off, 0.0)
    return max(-off, 0.0) if number.aim in ("more", "at least") else abs(off)


def _plain(value: Value) -> float | list[float | None]:
    """A value as JSON has it: without infinity, and a number where both ends are one."""
    if not isinstance(value, tuple):
        return float(value)
    low, high = value
    return float(low) if low == high else [float(low), None if math.isinf(high) else float(high)]


def shown(value: float | Sequence[float | None] | None) -> str:
    """A value as it stands in a table."""
    if value is None:
        return ""
    if isinstance(value, Sequence):
        low, high = value
        return f"at least {low:.3g}" if high is None or math.isinf(high) else f"{low:.3g} to {high:.3g}"
    return f"{value:.3g}"


def section(paper: str, rows: Sequence[Row]) -> str:
    """How many rows of a paper have each verdict, and a table of all."""
    lines = [
        [
            row["table"].removeprefix(f"{paper}, "),
            row["cell"],
            f"{row['paper']:g}",
            shown(row["ours"]),
            "" if row["ratio"] is None else f"{row['ratio']:.2f}",
            row["verdict"],
            row.get("cause", ""),
        ]
        for row in rows
    ]
    counts = ", ".join(f"{n} {name}" for name, n in counted(rows).items() if n)
    head = ["table", "cell", "paper", "ours", "ratio", "verdict", "what moves a miss most"]
    return f"{len(rows)} rows: {counts}.\n\n{markdown(head, lines)}"


def counted(rows: Sequence[Row]) -> dict[str, int]:
    """How many rows have each verdict."""
    names = [row["verdict"].partition(":")[0] for row in rows]
    return {name: names.count(name) for name in ("met", "beaten", "bounds", "missed", "not derivable")}
