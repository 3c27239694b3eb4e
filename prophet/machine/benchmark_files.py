"""Calibrating from files that the benchmarks have written, instead of measuring again.

`benchmarks.a2a`, `benchmarks.expert_compute` and `benchmarks.trans_agg` write JSON with the name of the benchmark and
its rows. A file comes from outside: it is bounded, and refused with its name, the field and what was expected.

Shape legend: R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from prophet.errors import BenchmarkFileError
from prophet.files import is_number, read_json, shown
from prophet.machine.calibrate import Calibration, calibration_of, shape_of
from prophet.machine.fit import Point
from prophet.machine.measure import Measured

# Bounds on a file from outside: far above what the benchmarks write
MAX_FILE_BYTES = 1 << 24
MAX_ROWS = 100_000
MAX_RANKS = 1 << 16
BENCHMARKS = ("a2a", "expert_compute", "trans_agg")
_DTYPES = ("float32", "bfloat16", "float16")
Measurable = Literal["gelu", "swiglu"]
# Of any number of bytes or tokens
_LIMIT = 1 << 50


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertKind:
    """One expert that was measured; None where the caller leaves it to the file.

    Attributes:
        dim: D, width of a token.
        hidden: Inner width.
        activation: Between its layers.
        dtype: Name of the elements' type, such as "float32".
    """

    dim: int | None = None
    hidden: int | None = None
    activation: Measurable | None = None
    dtype: str | None = None

    def fits(self, other: ExpertKind) -> bool:
        """Whether `other`, which leaves nothing open, is one of this kind."""
        wanted = (self.dim, self.hidden, self.activation, self.dtype)
        found = (other.dim, other.hidden, other.activation, other.dtype)
        return all(w is None or w == f for w, f in zip(wanted, found, strict=True))

    def __str__(self) -> str:
        return f"{self.dim} x {self.hidden} {self.activation} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Found:
    """What files hold.

    Attributes:
        calibration: The fit to them.
        kind: The expert that was measured.
        device: Where it was measured.
        repeats: Samples per size.
    """

    calibration: Calibration
    kind: ExpertKind
    device: str
    repeats: int


@dataclass(frozen=True, slots=True)
class _Row:
    """One row that is wanted.

    Attributes:
        where: The file and row, for messages.
        operation: What was timed.
        ranks: On how many.
        point: Size and seconds.
        by_rank: Seconds of each rank, where they are known.
        kind: The expert; None for an exchange.
    """

    where: str
    operation: str
    ranks: int
    point: Point
    by_rank: tuple[float, ...] = ()
    kind: ExpertKind | None = None


def calibrate_from(
    files: Sequence[Path],
    *,
    kind: ExpertKind,
    ranks: int | None = None,
    ranks_per_node: int | None = None,
    free_bytes: int = 1 << 30,
    held_out: bool = False,
    name: str = "calibrated",
) -> Found:
    """Fit the performance model to the rows of files; of each benchmark there may be several.

    Experts that were measured on one rank count for all.

    Args:
        files: Written by the benchmarks.
        kind: The expert, where the files hold several.
        ranks: Expected of the files; None takes theirs.
        ranks_per_node: None for one node. With several, the all-to-all counts as one between nodes.
        free_bytes: Bytes that replicas may take on every rank, for the topology.
        held_out: Keep every other size out of the fit, and compare it.
        name: Of the topology.

    Raises:
        BenchmarkFileError: For a file that cannot be read, and where files do not fit together or lack something.
    """
    # Rows of all files together: forward and backward may be in one file, exchanges in another.
    rows: list[_Row] = []
    device, repeats = "cpu", 0
    for file in files:
        found, table = _read(file)
        rows += found
        about = table.get("environment")
        if isinstance(about, Mapping):
            repeats = max(repeats, about["repeats"] if isinstance(about.get("repeats"), int) else 0)
            device = str(about.get("device", device))
    try:
        calibration, own = _calibrated(
            rows, kind, ranks, ranks_per_node, free_bytes=free_bytes, held_out=held_out, name=name
        )
    except BenchmarkFileError as error:
        # A fault of one file is named already; others belong to all files together.
        if any(str(file) in str(error) for file in files):
            raise
        raise BenchmarkFileError(f"{', '.join(map(str, files))}: {error}") from None
    return Found(calibration, own, device, repeats)


def _calibrated(
    rows: Sequence[_Row],
    kind: ExpertKind,
    ranks: int | None,
    ranks_per_node: int | None,
    *,
    free_bytes: int,
    held_out: bool,
    name: str,
) -> tuple[Calibration, ExpertKind]:
    """The fit to the rows of all files, and its expert."""
    chosen, own = _of_kind(rows, kind)
    size = _ranks(chosen, ranks)
    per_node = ranks_per_node or size
    if size % per_node:
        raise BenchmarkFileError(f"ranks_per_node: expected a number that divides {size} ranks, got {per_node}")
    measured: dict[str, Measured] = {}
    for operation in dict.fromkeys(r.operation for r in chosen):
        of_it = [r for r in chosen if r.operation == operation]
        # An exchange with everybody crosses the links between nodes, and waits for them.
        known_as = f"a2a_{'intra' if per_node == size else 'inter'}" if operation == "a2a" else operation
        measured[known_as] = _measured(known_as, of_it, size, held_out)
    for needed in ("expert_forward", "expert_backward"):
        if needed not in measured:
            raise BenchmarkFileError(f"no rows of {needed}: expected a file of benchmarks.expert_compute among them")
    forward, backward = measured["expert_forward"], measured["expert_backward"]
    # Rank for rank and row for row both are added up in `calibration_of`.
    if _sizes(forward) != _sizes(backward):
        raise BenchmarkFileError(
            "expert_forward, expert_backward: expected rows of the same tokens and experts for both"
        )
    if size > 1 and not any(o.startswith("a2a") for o in measured):
        raise BenchmarkFileError(f"no rows of an even all-to-all of {size} ranks: expected a file of benchmarks.a2a")
    shape = shape_of(own.dim or 1, own.hidden or 1, own.activation or "gelu", _dtype(own.dtype or "float32"))
    found = calibration_of(measured, shape, size, ranks_per_node=per_node, free_bytes=free_bytes, name=name)
    return found, own


def _sizes(measured: Measured) -> list[tuple[float, float]]:
    return [(p.size, p.count) for p in (*measured.fitted, *measured.held_out)]


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _of_kind(rows: Sequence[_Row], kind: ExpertKind) -> tuple[list[_Row], ExpertKind]:
    """The rows of all exchanges, and of the one expert that is meant; and that expert."""
    kinds = list(dict.fromkeys(r.kind for r in rows if r.kind is not None))
    fitting = [k for k in kinds if kind.fits(k)]
    if kinds and len(fitting) != 1:
        raise BenchmarkFileError(
            f"the files hold {len(fitting)} experts that fit, expected one: name its dim, hidden, activation and "
            f"dtype; there are {'; '.join(map(str, kinds))}"
        )
    return [r for r in rows if r.kind is None or r.kind in fitting], fitting[0] if fitting else kind


def _ranks(rows: Sequence[_Row], wanted: int | None) -> int:
    """The number of ranks that all rows agree on. Experts that were measured on one rank agree with any."""
    sizes = sorted({r.ranks for r in rows if r.kind is None or r.ranks > 1})
    if len(sizes) > 1:
        raise BenchmarkFileError(f"ranks: expected files of one number of ranks, got {sizes}")
    size = sizes[0] if sizes else wanted or 1
    if wanted is not None and wanted != size:
        raise BenchmarkFileError(f"ranks: expected {wanted}, the files are of {size}")
    return size


def _measured(operation: str, rows: Sequence[_Row], ranks: int, held_out: bool) -> Measured:
    """One operation's points, sorted by size; with `held_out` every other size between the ends is kept apart."""
    sizes = sorted({r.point.size for r in rows})
    if len(sizes) < 2:
        raise BenchmarkFileError(f"{rows[0].where}: {operation}: expected at least two sizes, got {sizes}")
    # The ends stay in the fit, so that no held-out size lies beyond them.
    apart = set(sizes[1:-1:2]) if held_out else set()
    ordered = sorted(rows, key=lambda r: (r.point.size in apart, r.point.count, r.point.size))
    by_rank = np.array([_by_rank(r, ranks) for r in ordered], dtype=np.float64)
    return Measured(
        operation,
        "token" if rows[0].kind is not None else "byte",
        tuple(r.point for r in ordered if r.point.size not in apart),
        tuple(r.point for r in ordered if r.point.size in apart),
        by_rank,
    )


def _by_rank(row: _Row, ranks: int) -> Sequence[float]:
    # Experts measured on one rank stand for all of them
    return row.by_rank if len(row.by_rank) == ranks else (row.point.seconds,) * ranks


# --- reading ------------------------------------------------------------------------------------------------------


def _read(file: Path) -> tuple[list[_Row], Mapping[str, Any]]:
    """The rows of one file that a calibration can use, and the file's whole content."""
    table = read_json(file, most_bytes=MAX_FILE_BYTES, expected="a benchmark's rows", error=BenchmarkFileError)
    if not isinstance(table, dict) or table.get("benchmark") not in BENCHMARKS:
        got = table.get("benchmark") if isinstance(table, dict) else type(table).__name__
        raise BenchmarkFileError(f"{file}: benchmark: expected one of {', '.join(BENCHMARKS)}, got {shown(got)}")
    rows = table.get("rows")
    if not isinstance(rows, list) or len(rows) > MAX_ROWS or not all(isinstance(r, dict) for r in rows):
        raise BenchmarkFileError(f"{file}: rows: expected a list of at most {MAX_ROWS} objects")
    take = _READERS[table["benchmark"]]
    found = []
    for i, row in enumerate(rows):
        # The benchmark's own check failed, so its time means nothing
        if "wrong" in row:
            continue
        taken = take(row, f"{file}: rows[{i}]")
        if taken is not None:
            found.append(taken)
    return found, table


def _a2a(row: Mapping[str, Any], where: str) -> _Row | None:
    """Read an even exchange in one step; None for any other.

    The benchmark's size counts what a rank keeps, too. Here it is only what a rank sends to others.
    """
    if _number(row, "uneven", where, 0, 1) != 0 or _number(row, "levels", where, 1, 2) != 1:
        return None
    ranks = _integer(row, "ranks", where, 2, MAX_RANKS)
    # An even exchange keeps one part in `ranks` at home
    size = _integer(row, "bytes", where, 1, _LIMIT) * (ranks - 1) / ranks
    return _Row(where, "a2a", ranks, _exchange_point(row, where, size))


def _expert(row: Mapping[str, Any], where: str) -> _Row:
    operation = _choice(row, "operation", where, ("expert_forward", "expert_backward"))
    ranks = _integer(row, "ranks", where, 1, MAX_RANKS)
    size, count = _integer(row, "tokens", where, 1, _LIMIT), _integer(row, "experts", where, 1, MAX_RANKS)
    by_rank = row.get("seconds_by_rank")
    if not isinstance(by_rank, list) or len(by_rank) != ranks:
        raise BenchmarkFileError(f"{where}.seconds_by_rank: expected a list of {ranks} numbers, got {shown(by_rank)}")
    kind = ExpertKind(
        dim=_integer(row, "dim", where, 1, 1 << 16),
        hidden=_integer(row, "hidden", where, 1, 1 << 16),
        activation="swiglu" if _choice(row, "activation", where, ("gelu", "swiglu")) == "swiglu" else "gelu",
        dtype=_choice(row, "dtype", where, _DTYPES),
    )
    each = tuple(_number({"": s}, "", f"{where}.seconds_by_rank", 0, math.inf) for s in by_rank)
    return _Row(where, operation, ranks, Point(size, count, *_seconds(row, where)), each, kind)


def _transfer(row: Mapping[str, Any], where: str) -> _Row | None:
    """Read a direct transfer in which every rank sends and receives alike; None for any other."""
    homes, form = _choice(row, "homes", where, ("all", "one")), _choice(row, "form", where, ("direct", "two-phase"))
    if homes != "all" or form != "direct":
        return None
    operation = _choice(row, "operation", where, ("trans", "agg"))
    size = _integer(row, "busiest_bytes", where, 1, _LIMIT)
    return _Row(where, operation, _integer(row, "ranks", where, 2, MAX_RANKS), _exchange_point(row, where, size))


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], _Row | None]] = {
    "a2a": _a2a,
    "expert_compute": _expert,
    "trans_agg": _transfer,
}


def _exchange_point(row: Mapping[str, Any], where: str, size: float) -> Point:
    """A point with the median of an exchange's samples, as in `prophet.machine.measure`."""
    seconds, spread = _seconds(row, where)
    # A row has the lower quartile as its seconds; the median lies `spread` above.
    return Point(size, 1, seconds * (1.0 + spread), spread)


def _seconds(row: Mapping[str, Any], where: str) -> tuple[float, float]:
    """The seconds of a row, and how far the median lies above them."""
    seconds = _number(row, "seconds", where, 0, math.inf)
    if seconds == 0:
        raise BenchmarkFileError(f"{where}.seconds: expected a positive number, got 0")
    return seconds, _number(row, "median_s", where, seconds, math.inf) / seconds - 1.0


def _number(row: Mapping[str, Any], key: str, where: str, low: float, high: float) -> float:
    value = row.get(key)
    if not is_number(value) or not low <= value <= high:  # type: ignore[operator]
        raise BenchmarkFileError(f"{where}.{key}: expected a number from {low:g} to {high:g}, got {shown(value)}")
    return float(value)  # type: ignore[arg-type]


def _integer(row: Mapping[str, Any], key: str, where: str, low: int, high: int) -> int:
    value = row.get(key)
    # In Python a bool is an int
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BenchmarkFileError(f"{where}.{key}: expected an integer from {low} to {high}, got {shown(value)}")
    return value


def _choice(row: Mapping[str, Any], key: str, where: str, among: Sequence[str]) -> str:
    value = row.get(key)
    if not isinstance(value, str) or value not in among:
        raise BenchmarkFileError(f"{where}.{key}: expected one of {', '.join(among)}, got {shown(value)}")
    return value
