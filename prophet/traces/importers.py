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
import math
import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from prophet.errors import TraceError
from prophet.files import shown
from prophet.spec import IntArray
from prophet.traces.npz import MAX_COUNT, MAX_TRACE_BYTES, RoutingTrace, read_trace

MAX_LINE_BYTES = 16 << 20
MAX_INDEX = 1 << 20  # of a layer, a rank or an expert
_MAX_FILES = 1 << 14
_ROW_BYTES = 512  # of a record in memory, besides its counts
_FREE_BYTES = 1 << 28  # any log may make as large a table; of a larger one, one cell in _MOST_EMPTY is in the log
_MOST_EMPTY = 64

_STEP, _LAYER, _RANK = ("step", "iteration"), ("layer", "layer_number", "layer_idx"), ("rank", "ep_rank")
_CHOSEN, _COUNTS = ("top_indices", "topk_indices"), ("tokens_per_expert",)
_COLUMNS = ("step", "layer", "rank", "expert", "count")

# A layer's place in the model: decoder layers first, then those of multi-token prediction.
_LayerKey = tuple[int, int, int]


@dataclass(slots=True)
class _Row:
    """One forward pass of one router: tokens by expert, as the experts that have any and their counts."""

    step: int
    microbatch: int
    layer: _LayerKey
    rank: int
    experts: IntArray
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
    columns = [array("q") for _ in _COLUMNS]  # a log has many rows
    most = [MAX_COUNT if name in ("step", "count") else MAX_INDEX for name in _COLUMNS]
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
                for column, place, limit, name in zip(columns, places, most, _COLUMNS, strict=True):
                    column.append(_whole(fields[place], limit, f"{where}: {name}"))
        except csv.Error as error:
            raise TraceError(f"{file}: line {reader.line_num}: expected comma-separated values: {error}") from None
    if not columns[0]:
        raise TraceError(f"{file}: expected at least one record, the log is empty")
    steps, layers, ranks, expert, count = (np.frombuffer(column, dtype=np.int64) for column in columns)
    numbers, places_of = zip(*(np.unique(c, return_inverse=True) for c in (steps, layers, ranks)), strict=True)
    sizes = [len(n) for n in numbers]
    shape = (*sizes, _experts(file, int(expert.max()), sizes[2], experts))
    counts = _zeros(file, shape, len(count))
    np.add.at(counts, (*places_of, expert), count)
    return _checked(file, counts, numbers[0], {"source": f"{file.name} (CSV)"})


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
                budget -= _ROW_BYTES + row.experts.nbytes + row.counts.nbytes
                if budget < 0:
                    raise TraceError(f"{place}: expected records of at most {MAX_TRACE_BYTES} bytes")
                rows.append(row)
    counts, places, iteration = _table(place, rows, experts)
    for row in rows:
        counts[(*places(row), row.experts)] += row.counts
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
    experts, counts, chosen = _counts(record, where)
    return _Row(number(_STEP, MAX_COUNT), 0, layer, number(_RANK, MAX_INDEX), experts, counts), chosen


def _counts(record: dict[str, Any], where: str) -> tuple[IntArray, IntArray, int]:
    """The experts that have tokens, how many they have, and the experts per token if the record lists them."""
    for name in (*_CHOSEN, *_COUNTS):
        if name not in record:
            continue
        chosen = name in _CHOSEN
        limit = MAX_INDEX if chosen else MAX_COUNT
        value = record[name]
        found = _integers(value, 2 if chosen else 1)
        if found is None or (found.size and not (found.min() >= 0 and found.max() <= limit)):
            expected = "a list of lists of expert indices" if chosen else "a list of counts"
            raise TraceError(f"{where}: {name}: expected {expected} from 0 to {limit}, all of one length")
        if chosen:
            experts, counts = np.unique(found, return_counts=True)
            return experts, counts.astype(np.int64), int(found.shape[1]) if found.size else 0
        if found.size > MAX_INDEX + 1:
            raise TraceError(f"{where}: {name}: expected at most {MAX_INDEX + 1} counts, got {found.size}")
        (experts,) = np.nonzero(found)
        return experts, found[experts], 0
    raise TraceError(f"{where}: {_CHOSEN[0]}: expected it or {_COUNTS[0]}, the record has neither")


def _integers(value: object, dimensions: int) -> IntArray | None:
    """A list of integers, or of such lists of one length, as an array; None for anything else.

    The items' types are looked at first: from strings numpy makes an array in which each takes as much as the longest.
    """
    if not isinstance(value, list) or (dimensions == 2 and not all(isinstance(row, list) for row in value)):
        return None
    rows = value if dimensions == 2 else [value]
    if len({len(row) for row in rows}) > 1 or not all(set(map(type, row)) <= {int} for row in rows):
        return None
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError:
        return None


def _whole(value: object, most: int, where: str) -> int:
    """A whole number from 0 to `most`, from JSON or from text."""
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise TraceError(f"{where}: expected a number from 0 to {most}, got {shown(value)}")
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


def _experts(file: Path, highest: int, ranks: int, experts: int | None) -> int:
    """The number of experts: what the caller says, or enough for the highest that was chosen."""
    if experts is None:
        experts = -(-(highest + 1) // ranks) * ranks
    if highest >= experts:
        raise TraceError(f"{file}: expected experts below {experts}, got expert {highest}")
    return max(experts, 1)


def _zeros(file: Path, shape: tuple[int, ...], cells: int) -> IntArray:
    """Room for the counts, of which `cells` are in the log; far more of it than that is refused."""
    size = 8 * math.prod(shape)
    if size > MAX_TRACE_BYTES:
        raise TraceError(f"{file}: expected counts of at most {MAX_TRACE_BYTES} bytes, its {list(shape)} take more")
    if size > max(_FREE_BYTES, 8 * _MOST_EMPTY * cells):
        raise TraceError(f"{file}: expected fewer empty cells: its {list(shape)} take {size} bytes for {cells} counts")
    return np.zeros(shape, dtype=np.int64)


def _table(
    file: Path, rows: list[_Row], experts: int | None
) -> tuple[IntArray, Callable[[_Row], tuple[int, int, int]], IntArray]:
    """Zeros [T, L, R, E] for the rows, the place (t, l, r) of a row in them, and each step's iteration [T]."""
    if not rows:
        raise TraceError(f"{file}: expected at least one record, the log is empty")
    steps = sorted({(row.step, row.microbatch) for row in rows})
    layers = sorted({row.layer for row in rows})
    ranks = sorted({row.rank for row in rows})
    highest = max((int(row.experts[-1]) for row in rows if row.experts.size), default=-1)
    shape = (len(steps), len(layers), len(ranks), _experts(file, highest, len(ranks), experts))
    counts = _zeros(file, shape, sum(row.experts.size for row in rows))
    at_step = {key: i for i, key in enumerate(steps)}
    at_layer = {key: i for i, key in enumerate(layers)}
    at_rank = {key: i for i, key in enumerate(ranks)}
    found: set[tuple[tuple[int, int], _LayerKey, int]] = {((r.step, r.microbatch), r.layer, r.rank) for r in rows}
    if len(found) < math.prod(shape[:3]):
        absent = next((s, a, r) for s in steps for a in layers for r in ranks if (s, a, r) not in found)
        raise TraceError(
            f"{file}: expected a record of every layer and rank in every step; there is none of step {absent[0][0]}, "
            f"layer {absent[1][2]}, rank {absent[2]} (microbatch {absent[0][1]})"
        )
    iteration = np.array([step for step, _ in steps], dtype=np.int64)

    def places(row: _Row) -> tuple[int, int, int]:
        return at_step[row.step, row.microbatch], at_layer[row.layer], at_rank[row.rank]

    return counts, places, iteration


def _checked(file: Path, counts: IntArray, iteration: IntArray, meta: dict[str, Any]) -> RoutingTrace:
    try:
        return RoutingTrace(counts, iteration.astype(np.int32), meta)
    except TraceError as error:
        raise TraceError(f"{file}: {error}") from None
