"""Routing logs of other tools, read as routing traces.

Two formats, told apart by the file's suffix:

- `.csv`: a header and the columns step, layer, rank, expert, count, in any order (others are ignored). A row that
  comes again adds to the first; cells that never come are zero.
- `.jsonl`, or a folder of such files: what Megatron-LM's router tracer writes with `--moe-routing-trace-path`, a file
  `router_trace_rank<R>.jsonl` per rank with a JSON object per line for a forward pass of a router: `step`, `layer`,
  `rank`, and either `top_indices` (the chosen experts of every token) or `tokens_per_expert` (their counts). Several
  objects for one step, layer and rank are the step's microbatches. `block` and `mtp_idx`, where present, set the
  layers of multi-token prediction apart from those of the decoder. `iteration` stands for `step`, `layer_number` or
  `layer_idx` for `layer`, `ep_rank` for `rank`, and `topk_indices` for `top_indices`; other fields are ignored.

All ranks of a log are taken as one expert-parallel group, so they must be that. Layers and ranks are numbered in the
order of their own numbers. Logs come from outside: bytes, lines and the resulting array are bounded, and what does not
fit is refused with the file, the line, the field and what was expected.

Shape legend: T steps, L layers, R ranks, E experts.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from prophet.errors import TraceError
from prophet.spec import IntArray
from prophet.traces.npz import MAX_COUNT, MAX_TRACE_BYTES, RoutingTrace, read_trace

MAX_LINE_BYTES = 64 << 20
MAX_INDEX = 1 << 20  # of a layer, a rank or an expert
_MAX_FILES = 1 << 14

_STEP, _LAYER, _RANK = ("step", "iteration"), ("layer", "layer_number", "layer_idx"), ("rank", "ep_rank")
_CHOSEN, _COUNTS = ("top_indices", "topk_indices"), ("tokens_per_expert",)
_COLUMNS = ("step", "layer", "rank", "expert", "count")

# A layer's place in the model: decoder layers first, then those of multi-token prediction.
_LayerKey = tuple[int, int, int]


@dataclass(slots=True)
class _Row:
    """One forward pass of one router: tokens by expert, as (expert, count) pairs or a dense array from expert 0."""

    step: int
    microbatch: int
    layer: _LayerKey
    rank: int
    counts: IntArray


def read_any(path: str | os.PathLike[str], *, experts: int | None = None) -> RoutingTrace:
    """Read a routing trace, or a log of another tool, whichever `path` is by its suffix.

    experts: the number of experts, for logs that do not say; None takes the highest that was ever chosen, rounded up
    to a multiple of the ranks. Raises `TraceError`.
    """
    file = Path(path)
    if file.is_dir() or file.suffix == ".jsonl":
        return read_megatron(file, experts=experts)
    if file.suffix == ".csv":
        return read_csv(file, experts=experts)
    return read_trace(file)


def read_csv(path: str | os.PathLike[str], *, experts: int | None = None) -> RoutingTrace:
    """Read `step,layer,rank,expert,count`; see the head of this file."""
    file = Path(path)
    cells: dict[tuple[int, int, int, int], int] = {}
    with _lines(file) as lines:
        reader = csv.reader(lines)
        try:
            header = [name.strip().lower() for name in next(reader, [])]
            missing = [name for name in _COLUMNS if name not in header]
            if missing:
                raise TraceError(f"{file}: line 1: {missing[0]}: expected a header with {','.join(_COLUMNS)}")
            places = [header.index(name) for name in _COLUMNS]
            for fields in reader:
                if not fields:
                    continue
                where = f"{file}: line {reader.line_num}"
                if len(fields) != len(header):
                    raise TraceError(f"{where}: expected {len(header)} fields, got {len(fields)}")
                values = [
                    _whole(fields[place], MAX_COUNT if name in ("step", "count") else MAX_INDEX, f"{where}: {name}")
                    for name, place in zip(_COLUMNS, places, strict=True)
                ]
                key = (values[0], values[1], values[2], values[3])
                cells[key] = cells.get(key, 0) + values[4]
        except csv.Error as error:
            raise TraceError(f"{file}: line {reader.line_num}: expected comma-separated values: {error}") from None
    rows = []
    for (step, layer, rank, expert), count in cells.items():
        counts = np.zeros(0, dtype=np.int64)
        rows.append((_Row(step, 0, (0, 0, layer), rank, counts), expert, count))
    return _csv_trace(file, rows, experts)


def _csv_trace(file: Path, rows: list[tuple[_Row, int, int]], experts: int | None) -> RoutingTrace:
    keys = [row for row, _, _ in rows]
    highest = max((expert for _, expert, _ in rows), default=-1)
    counts, places, iteration = _table(file, keys, highest, experts)
    for row, expert, count in rows:
        counts[(*places(row), expert)] += count
    return _checked(file, counts, iteration, {"source": f"{file.name} (CSV)"})


def read_megatron(path: str | os.PathLike[str], *, experts: int | None = None) -> RoutingTrace:
    """Read a router trace of Megatron-LM, one JSONL file or a folder of them; see the head of this file."""
    place = Path(path)
    files = [place]
    if place.is_dir():
        files = sorted(place.glob("router_trace_rank*.jsonl")) or sorted(place.glob("*.jsonl"))
        if not files or len(files) > _MAX_FILES:
            raise TraceError(f"{place}: expected a folder of 1 to {_MAX_FILES} .jsonl files, got {len(files)}")
    rows: list[_Row] = []
    seen: dict[tuple[int, _LayerKey, int], int] = {}
    top_k, budget = 0, MAX_TRACE_BYTES
    for file in files:
        with _lines(file) as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                row, chosen = _record(line, f"{file}: line {number}")
                key = (row.step, row.layer, row.rank)
                row.microbatch = seen[key] = seen.get(key, -1) + 1
                top_k = max(top_k, chosen)
                budget -= row.counts.nbytes
                if budget < 0:
                    raise TraceError(f"{place}: expected counts of at most {MAX_TRACE_BYTES} bytes")
                rows.append(row)
    highest = max((row.counts.size - 1 for row in rows), default=-1)
    counts, places, iteration = _table(place, rows, highest, experts)
    for row in rows:
        counts[(*places(row), slice(0, row.counts.size))] += row.counts
    meta: dict[str, Any] = {"source": f"{place.name} (Megatron-LM router trace)"}
    return _checked(place, counts, iteration, meta | ({"top_k": top_k} if top_k else {}))


def _record(line: str, where: str) -> tuple[_Row, int]:
    """One line of a router trace, and its experts per token (0 where it does not say)."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: expected a JSON object: {error}") from None
    if not isinstance(record, dict):
        raise TraceError(f"{where}: expected a JSON object, got {type(record).__name__}")

    def number(names: tuple[str, ...], most: int) -> int:
        for name in names:
            if name in record:
                return _whole(record[name], most, f"{where}: {name}")
        raise TraceError(f"{where}: {names[0]}: expected a number from 0 to {most}, the record has no such field")

    block = record.get("block", "decoder")
    if not isinstance(block, str):
        raise TraceError(f"{where}: block: expected a string, got {type(block).__name__}")
    depth = _whole(record.get("mtp_idx", 0), MAX_INDEX, f"{where}: mtp_idx")
    layer = (0 if block == "decoder" else 1, depth, number(_LAYER, MAX_INDEX))
    counts, chosen = _counts(record, where)
    return _Row(number(_STEP, MAX_COUNT), 0, layer, number(_RANK, MAX_INDEX), counts), chosen


def _counts(record: dict[str, Any], where: str) -> tuple[IntArray, int]:
    """Tokens by expert, from expert 0 to the highest in the record, and the experts per token if it lists them."""
    for name in (*_CHOSEN, *_COUNTS):
        if name not in record:
            continue
        expected = "a list of lists of expert indices" if name in _CHOSEN else "a list of counts"
        dimensions = 2 if name in _CHOSEN else 1
        try:
            array = np.array(record[name])
        except (ValueError, OverflowError):
            raise TraceError(f"{where}: {name}: expected {expected} of one length") from None
        if array.size == 0:
            return np.zeros(0, dtype=np.int64), 0
        limit = MAX_INDEX if name in _CHOSEN else MAX_COUNT
        if array.ndim != dimensions or array.dtype.kind != "i" or array.min() < 0 or array.max() > limit:
            raise TraceError(f"{where}: {name}: expected {expected} from 0 to {limit}")
        if name in _CHOSEN:
            return np.bincount(array.reshape(-1)).astype(np.int64), int(array.shape[1])
        return array.astype(np.int64), 0
    raise TraceError(f"{where}: {_CHOSEN[0]}: expected it or {_COUNTS[0]}, the record has neither")


def _whole(value: object, most: int, where: str) -> int:
    """A whole number from 0 to `most`, from JSON or from text."""
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise TraceError(f"{where}: expected a number from 0 to {most}, got {str(value)[:40]!r}")
    return value


@contextmanager
def _lines(file: Path) -> Iterator[Iterator[str]]:
    """The lines of a text file; refuses one that is missing, too large or not text."""
    if not file.is_file():
        raise TraceError(f"{file}: expected a routing log, there is no such file")
    size = file.stat().st_size
    if size > MAX_TRACE_BYTES:
        raise TraceError(f"{file}: expected at most {MAX_TRACE_BYTES} bytes, the file has {size}")
    with file.open("r", encoding="utf-8", newline="") as stream:
        yield _read(file, stream)


def _read(file: Path, stream: IO[str]) -> Iterator[str]:
    for number in itertools.count(1):
        try:
            line = stream.readline(MAX_LINE_BYTES)
        except UnicodeDecodeError:
            raise TraceError(f"{file}: line {number}: expected text in UTF-8") from None
        if not line:
            return
        if len(line) == MAX_LINE_BYTES:
            raise TraceError(f"{file}: line {number}: expected at most {MAX_LINE_BYTES} characters")
        yield line


def _table(
    file: Path, rows: list[_Row], highest: int, experts: int | None
) -> tuple[IntArray, Callable[[_Row], tuple[int, int, int]], IntArray]:
    """Zeros [T, L, R, E] for the rows, the place (t, l, r) of a row in them, and each step's iteration [T]."""
    if not rows:
        raise TraceError(f"{file}: expected at least one record, the log is empty")
    steps = sorted({(row.step, row.microbatch) for row in rows})
    layers = sorted({row.layer for row in rows})
    ranks = sorted({row.rank for row in rows})
    if experts is None:
        experts = -(-(highest + 1) // len(ranks)) * len(ranks)
    if highest >= experts:
        raise TraceError(f"{file}: expected experts below {experts}, got expert {highest}")
    shape = (len(steps), len(layers), len(ranks), max(experts, 1))
    if 8 * shape[0] * shape[1] * shape[2] * shape[3] > MAX_TRACE_BYTES:
        raise TraceError(f"{file}: expected counts of at most {MAX_TRACE_BYTES} bytes, its {list(shape)} take more")
    at_step = {key: i for i, key in enumerate(steps)}
    at_layer = {key: i for i, key in enumerate(layers)}
    at_rank = {key: i for i, key in enumerate(ranks)}
    found: set[tuple[tuple[int, int], _LayerKey, int]] = {((r.step, r.microbatch), r.layer, r.rank) for r in rows}
    if len(found) < shape[0] * shape[1] * shape[2] and any(row.counts.size for row in rows):
        absent = next((s, a, r) for s in steps for a in layers for r in ranks if (s, a, r) not in found)
        raise TraceError(
            f"{file}: expected a record of every layer and rank in every step; there is none of step {absent[0][0]}, "
            f"layer {absent[1][2]}, rank {absent[2]} (microbatch {absent[0][1]})"
        )
    counts = np.zeros(shape, dtype=np.int64)
    iteration = np.array([step for step, _ in steps], dtype=np.int64)

    def places(row: _Row) -> tuple[int, int, int]:
        return at_step[row.step, row.microbatch], at_layer[row.layer], at_rank[row.rank]

    return counts, places, iteration


def _checked(file: Path, counts: IntArray, iteration: IntArray, meta: dict[str, Any]) -> RoutingTrace:
    try:
        return RoutingTrace(counts, iteration.astype(np.int32), meta)
    except TraceError as error:
        raise TraceError(f"{file}: {error}") from None
