"""Routing logs of other tools, read as routing traces.

| file | what it is |
|---|---|
| `.csv`, `.tsv`, `.txt` | a table: step, layer, rank, expert, count, or SGLang's layer_id, expert_id, count |
| `.jsonl` | Megatron-LM's router trace: a JSON object per forward pass of a router |
| `.safetensors` | TensorRT-LLM's expert statistic: an array `<step>_<layer>` of counts per forward pass of a router |
| `.json` | counts over all ranks: `{"logical_count": ...}` as SGLang takes it, or the bare lists of EPLB and LMDeploy |
| a folder | files of one of the first three kinds, one per rank; or a run of `prophet.monitor` |

`docs/plan.md` describes what each may hold. Ranks and layers are numbered in the order of their own numbers; `table.py`
puts the records together. Files come from outside, so bytes, lines and the resulting array are bounded. What does not
fit is refused with the file, the line, the field and what was expected, or with what the file looks like.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import json
import os
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from prophet.errors import TraceError
from prophet.files import read_bytes, read_json, shown
from prophet.spec import IntArray
from prophet.traces.lookalikes import looks_like
from prophet.traces.npz import MAX_COUNT, MAX_TRACE_BYTES, RoutingTrace, read_trace
from prophet.traces.table import NO_RANK, Groups, Records, grouped, layer_key, to_trace

# Files in the folder of a run that `prophet.monitor` wrote
STEPS, ROUTING = "steps.jsonl", "routing.npz"
MAX_LINE_BYTES = 16 << 20
MAX_JSON_BYTES = 64 << 20
# Highest number of a layer, a rank or an expert
MAX_INDEX = 1 << 20
_MAX_FILES = 1 << 14
# Bytes of a record in memory, besides its counts
_RECORD_BYTES = 64

_CHOSEN, _COUNTS = ("top_indices", "topk_indices"), ("tokens_per_expert",)
# What the columns of a table and the fields of a record are called.
_NAMES = {
    "step": ("step", "iteration"),
    "layer": ("layer", "layer_id", "layer_number", "layer_idx"),
    "rank": ("rank", "ep_rank"),
    "expert": ("expert", "expert_id"),
    "count": ("count",),
}
_MOST = {name: MAX_COUNT if name in ("step", "count") else MAX_INDEX for name in _NAMES}
# pandas writes 25.0 where a cell of the column is missing
_WHOLE = re.compile(r"[0-9]{1,19}(?:[.,]0{1,19})?", re.ASCII)
_RANK_IN_NAME = re.compile(r"rank[_-]?(\d{1,9})", re.IGNORECASE)
_TIME_IN_NAME = re.compile(r"timestamp[_-]?(\d{1,19})(?:\.(\d{1,19}))?", re.IGNORECASE)
# Byte order marks, as Excel and PowerShell write them
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(slots=True)
class _Log:
    """Records as they are read, in arrays as there are many; see `Records` for what each holds."""

    place: Path
    step: array[int] = field(default_factory=lambda: array("q"))
    layer: array[int] = field(default_factory=lambda: array("q"))
    rank: array[int] = field(default_factory=lambda: array("q"))
    # Cells of each record
    sizes: array[int] = field(default_factory=lambda: array("q"))
    expert: array[int] = field(default_factory=lambda: array("q"))
    count: array[int] = field(default_factory=lambda: array("q"))

    def add(self, step: int, layer: int, rank: int, experts: IntArray, counts: IntArray) -> None:
        """Add one forward pass of a router."""
        self.step.append(step)
        self.layer.append(layer)
        self.rank.append(rank)
        self.sizes.append(len(experts))
        # Arrays take eight bytes a number, a list of Python integers about forty.
        self.expert.frombytes(experts.astype(np.int64).tobytes())
        self.count.frombytes(counts.astype(np.int64).tobytes())
        if _RECORD_BYTES * len(self.step) + 16 * len(self.expert) > MAX_TRACE_BYTES:
            raise TraceError(f"{self.place}: expected records of at most {MAX_TRACE_BYTES} bytes")

    def trace(self, meta: dict[str, Any], *, experts: int | None, groups: Groups) -> RoutingTrace:
        """The trace of the records; several of a step, layer and rank are the step's microbatches."""
        step, layer, rank = (np.asarray(a) for a in (self.step, self.layer, self.rank))
        place = np.arange(len(step))
        # A stable sort: of equals, the first stays first
        order = np.lexsort((rank, layer, step))
        new = np.ones(len(step), dtype=bool)
        new[1:] = np.any([key[order][1:] != key[order][:-1] for key in (step, layer, rank)], axis=0)
        microbatch = np.empty_like(place)
        microbatch[order] = place - np.maximum.accumulate(np.where(new, place, 0))
        records = Records(
            step=step,
            microbatch=microbatch,
            layer=layer,
            rank=rank,
            record=np.repeat(place, np.asarray(self.sizes)),
            expert=np.asarray(self.expert),
            count=np.asarray(self.count),
            complete=True,
        )
        return to_trace(self.place, records, meta, experts=experts, groups=groups)


def read_any(
    path: str | os.PathLike[str], *, experts: int | None = None, ranks: int | None = None, job: int | None = None
) -> RoutingTrace:
    """Read a routing trace, or a log of another tool, whichever `path` is by its suffix.

    Args:
        path: a file, or a folder with a file per rank.
        experts: the number of experts, for logs without it; None takes the highest that was ever chosen, rounded up to
            a multiple of the ranks.
        ranks: of one expert-parallel group. A log of more is taken as several groups of consecutive ranks. The counts
            of a log without ranks are shared evenly among so many.
        job: ranks of the whole job; what was recorded on another number is regrouped first.

    Raises:
        TraceError: for what cannot be read; it says what was expected, or what the file looks like.
    """
    file = _of_run(Path(path))
    files = _of_folder(file) if file.is_dir() else [file]
    reader = _READERS.get(files[0].suffix.lower())
    if reader is not None:
        return reader(file, files, experts, Groups(job=job, group=ranks))
    _refuse_known(file)
    # Any other suffix is read as a trace, whose own refusals say what was expected.
    trace = read_trace(file)
    if ranks in (None, trace.ranks) and job in (None, trace.ranks):
        return trace
    counts, iteration = trace.counts.astype(np.int64), trace.iteration.astype(np.int64)
    return grouped(file, counts, iteration, dict(trace.meta), Groups(job=job, group=ranks), has_ranks=True)


def _of_run(path: Path) -> Path:
    """The routing of a run, given its folder or its steps; any other path as it is."""
    steps = path / STEPS if path.is_dir() else path
    if steps.name != STEPS or not steps.is_file():
        return path
    routing = steps.with_name(ROUTING)
    if not routing.is_file():
        raise TraceError(
            f"{path}: expected {ROUTING} beside {STEPS}: this is a run of prophet.monitor without it (no step has "
            f"ended yet, an older release wrote it, or its layers differ in experts); prophet report {steps.parent} "
            f"shows it"
        )
    return routing


def _of_folder(folder: Path) -> list[Path]:
    """The files of the first kind that a folder has any of."""
    # One kind only: a folder may hold a run's other tables beside its logs.
    for pattern in ("router_trace_rank*.jsonl", "*.jsonl", "rank*.safetensors", "*.csv", "*.tsv", "*.txt"):
        files = sorted(itertools.islice(folder.glob(pattern), _MAX_FILES + 1))
        if len(files) > _MAX_FILES:
            raise TraceError(f"{folder}: expected a folder of 1 to {_MAX_FILES} {pattern} files, got more")
        if files:
            return files
    for file in sorted(itertools.islice(folder.iterdir(), _MAX_FILES)):
        _refuse_known(file)
    raise TraceError(
        f"{folder}: expected a folder of 1 to {_MAX_FILES} .jsonl, .safetensors or .csv files of one run, got none"
    )


def _refuse_known(file: Path) -> None:
    known = looks_like(file)
    if known:
        raise TraceError(f"{file}: expected a routing trace or log, {known}")


# ------------------------------------------------------------------------------------------------------ tables


def _read_tables(place: Path, files: Sequence[Path], experts: int | None, groups: Groups) -> RoutingTrace:
    """Tables of text. Rows of one cell add up, cells that never come are zero."""
    # A log has many rows, so arrays hold them
    columns = {name: array("q") for name in _NAMES}
    dumps: dict[int, int] = {}
    for file in sorted(files, key=_by_time):
        found = _RANK_IN_NAME.search(file.name) if len(files) > 1 else None
        rank = int(found[1]) if found else NO_RANK
        lacks = _read_table(file, columns, {"step": dumps.get(rank, 0), "rank": rank})
        # A dump without a step column is one step; its place in time is that of its file.
        if "step" in lacks:
            dumps[rank] = dumps.get(rank, 0) + 1
        if lacks and len(files) > 1 and (found is None or rank > MAX_INDEX):
            raise TraceError(f"{file}: {min(lacks)}: expected a column, or the rank in the file's name (rank0_...)")
    if len(set(dumps.values())) > 1:
        few, many = min(dumps, key=dumps.__getitem__), max(dumps, key=dumps.__getitem__)
        raise TraceError(
            f"{place}: expected as many files of every rank, got {dumps[many]} of rank {many}, {dumps[few]} of {few}"
        )
    step, layer, rank_of, expert, count = (np.asarray(c) for c in columns.values())
    cells = np.arange(len(count))
    records = Records(
        step=step, microbatch=np.zeros_like(step), layer=layer, rank=rank_of,
        record=cells, expert=expert, count=count, complete=False,
    )  # fmt: skip
    return to_trace(place, records, {"source": f"{place.name} (CSV)"}, experts=experts, groups=groups)


def _by_time(file: Path) -> tuple[int, str, str]:
    """Files in the order of the times in their names."""
    found = _TIME_IN_NAME.search(file.name)
    return (int(found[1]), found[2] or "", file.name) if found else (0, "", file.name)


def _read_table(file: Path, columns: dict[str, array[int]], absent: dict[str, int]) -> set[str]:
    """Add one file's rows to `columns`; the columns that it lacks, of those in `absent`, whose values they take."""
    with _lines(file) as lines:
        header, delimiter, before = _header(file, lines)
        reader = csv.reader(lines, delimiter=delimiter)
        places = {
            name: next((header.index(alias) for alias in names if alias in header), None)
            for name, names in _NAMES.items()
        }
        lacks = {name for name, place in places.items() if place is None}
        others = [name for name in header if name and not any(name in names for names in _NAMES.values())]
        # With a column that is not known, a name may be misspelt
        if lacks - set(absent) or (lacks and others):
            _refuse_known(file)
            name = next(name for name in _NAMES if name in lacks)
            raise TraceError(
                f"{file}: line {before}: {name}: expected a header with {','.join(_NAMES)} "
                f"(or layer_id,expert_id,count), got {shown(delimiter.join(header))}"
            )
        try:
            for fields in reader:
                # Spreadsheets end with rows of empty cells
                if not any(f.strip() for f in fields):
                    continue
                where = f"{file}: line {reader.line_num + before}"
                if len(fields) != len(header):
                    raise TraceError(f"{where}: expected {len(header)} fields, got {len(fields)}")
                for name, place in places.items():
                    columns[name].append(
                        absent[name] if place is None else _cell(fields[place], name, f"{where}: {name}")
                    )
        except csv.Error as error:
            where = f"{file}: line {reader.line_num + before}"
            raise TraceError(f"{where}: expected comma-separated values: {error}") from None
    return lacks


def _header(file: Path, lines: Iterator[str]) -> tuple[list[str], str, int]:
    """The names of the columns in small letters, what separates them, and the number of lines that were read."""
    first, before = next(lines, ""), 1
    # Written for Excel
    if re.fullmatch(r"sep=.\s*", first):
        first, before = next(lines, ""), 2
    known = {name for names in _NAMES.values() for name in names}
    best: tuple[list[str], str] = ([], ",")
    for delimiter in ",;\t|":
        try:
            names = [name.strip().lower() for name in next(csv.reader([first], delimiter=delimiter), [])]
        except csv.Error as error:
            raise TraceError(f"{file}: line {before}: expected comma-separated values: {error}") from None
        # The separator that gives the most known names wins; a comma where none does.
        if not best[0] or len(known & set(names)) > len(known & set(best[0])):
            best = names, delimiter
    return *best, before


def _cell(text: str, name: str, where: str) -> int:
    """A whole number, perhaps written as 25.0 or 25,0; an empty count is zero, as a row that never comes is."""
    text = text.strip()
    if not text and name == "count":
        return 0
    return _whole(re.split("[.,]", text)[0] if _WHOLE.fullmatch(text) else text, _MOST[name], where)


# --------------------------------------------------------------------------------------- Megatron-LM's router trace


def _read_megatron(place: Path, files: Sequence[Path], experts: int | None, groups: Groups) -> RoutingTrace:
    log, top_k = _Log(place), 0
    for file in files:
        with _lines(file) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    top_k = max(top_k, _record(log, line, f"{file}: line {number}"))
    meta: dict[str, Any] = {"source": f"{place.name} (Megatron-LM router trace)"}
    return log.trace(meta | ({"top_k": top_k} if top_k else {}), experts=experts, groups=groups)


def _record(log: _Log, line: str, where: str) -> int:
    """Add one line of a router trace; returns its experts per token, 0 where it lists none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: expected a JSON object: {error}") from None
    if not isinstance(record, dict):
        raise TraceError(f"{where}: expected a JSON object, got {type(record).__name__}")

    def number(name: str) -> int:
        for alias in _NAMES[name]:
            if alias in record:
                return _whole(record[alias], _MOST[name], f"{where}: {alias}")
        raise TraceError(f"{where}: {name}: expected a number from 0 to {_MOST[name]}, the record has no such field")

    # `block` and `mtp_idx` tell layers of one number apart
    block = record.get("block", "decoder")
    if not isinstance(block, str):
        raise TraceError(f"{where}: block: expected a string, got {type(block).__name__}")
    depth = _whole(record.get("mtp_idx", 0), MAX_INDEX, f"{where}: mtp_idx")
    layer = layer_key(0 if block == "decoder" else 1, depth, number("layer"))
    found, counts, chosen = _counts(record, where)
    log.add(number("step"), layer, number("rank"), found, counts)
    return chosen


def _counts(record: dict[str, Any], where: str) -> tuple[IntArray, IntArray, int]:
    """Read the experts that have tokens, how many they have, and the experts per token if the record lists them."""
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


# ----------------------------------------------------------------------------------- TensorRT-LLM's expert statistic


def _read_tensorrt(place: Path, files: Sequence[Path], experts: int | None, groups: Groups) -> RoutingTrace:
    """Read safetensors: eight bytes with the length of a JSON header, the header, the arrays."""
    log, most = _Log(place), 0
    for file in files:
        found = _RANK_IN_NAME.search(file.name)
        if found is None or int(found[1]) > MAX_INDEX:
            raise TraceError(f"{file}: rank: expected the rank in the file's name, as in rank0.safetensors")
        data = memoryview(
            read_bytes(file, most_bytes=MAX_TRACE_BYTES, expected="an expert statistic", error=TraceError)
        )
        size = int.from_bytes(data[:8], "little")
        # The length comes from the file, so it is checked before anything of it is read.
        if not 2 <= size <= min(MAX_LINE_BYTES, len(data) - 8):
            raise TraceError(f"{file}: header: expected safetensors, its header of {size} bytes does not fit")
        try:
            header = json.loads(bytes(data[8 : 8 + size]))
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{file}: header: expected a JSON object: {error}") from None
        if not isinstance(header, dict):
            raise TraceError(f"{file}: header: expected a JSON object, got {type(header).__name__}")
        for name, about in header.items():
            if name == "__metadata__":
                continue
            step, layer, counts = _statistic(file, name, about, data[8 + size :])
            (held,) = np.nonzero(counts)
            most = max(most, len(counts))
            log.add(step, layer_key(0, 0, layer), int(found[1]), held, counts[held])
    return log.trace(
        {"source": f"{place.name} (TensorRT-LLM expert statistic)"}, experts=experts or most, groups=groups
    )


def _statistic(file: Path, name: str, about: Any, data: memoryview) -> tuple[int, int, IntArray]:
    """Read step, layer and counts [E] of one array."""
    where = f"{file}: {shown(name)}"
    parts = name.split("_")
    if len(parts) != 2:
        raise TraceError(f"{where}: expected arrays called <step>_<layer>, as TensorRT-LLM's expert statistic has them")
    step, layer = _whole(parts[0], MAX_COUNT, f"{where}: step"), _whole(parts[1], MAX_INDEX, f"{where}: layer")
    if not isinstance(about, dict):
        raise TraceError(f"{where}: expected an object, got {type(about).__name__}")
    dtype = {"I32": "<i4", "I64": "<i8"}.get(str(about.get("dtype")))
    shape, ends = (_integers(about.get(key), 1) for key in ("shape", "data_offsets"))
    if dtype is None or shape is None or ends is None or len(shape) != 1 or len(ends) != 2:
        raise TraceError(f"{where}: expected dtype I32 or I64, a shape [experts] and two data_offsets")
    size, begin, end = int(shape[0]), int(ends[0]), int(ends[1])
    if not 1 <= size <= MAX_INDEX + 1 or end - begin != size * np.dtype(dtype).itemsize:
        raise TraceError(f"{where}: shape: expected one that takes the bytes between the data_offsets, got [{size}]")
    if not 0 <= begin <= end <= len(data):
        raise TraceError(f"{where}: data_offsets: expected them within the {len(data)} bytes of data")
    counts = np.frombuffer(data[begin:end], dtype=dtype).astype(np.int64)
    if counts.min() < 0 or counts.max() > MAX_COUNT:
        raise TraceError(f"{where}: expected counts from 0 to {MAX_COUNT}")
    return step, layer, counts


# ------------------------------------------------------------------------------------------- counts over all ranks


def _read_totals(place: Path, files: Sequence[Path], experts: int | None, groups: Groups) -> RoutingTrace:
    """Read JSON lists [steps, layers, experts] or [layers, experts], of a dump or of the weights that EPLB takes."""
    value = read_json(files[0], most_bytes=MAX_JSON_BYTES, expected="counts of experts", error=TraceError)
    name = "counts"
    if isinstance(value, dict):
        name = "logical_count"
        if name not in value:
            _refuse_known(place)
            raise TraceError(f"{place}: {name}: expected counts [steps, layers, experts], the object has no such field")
        value = value[name]
    counts = _totals(value)
    if counts is None or not counts.size or counts.min() < 0 or counts.max() > MAX_COUNT:
        raise TraceError(
            f"{place}: {name}: expected whole numbers from 0 to {MAX_COUNT}, lists [steps, layers, experts] or "
            f"[layers, experts] of one length each"
        )
    more = (experts or 0) - counts.shape[2]
    if experts is not None and more < 0:
        raise TraceError(f"{place}: expected experts below {experts}, got {counts.shape[2]} of them")
    counts = np.pad(counts, ((0, 0), (0, 0), (0, max(more, 0))))[:, :, None]
    meta = {"source": f"{place.name} (counts over all ranks)"}
    return grouped(place, counts, np.arange(len(counts)), meta, groups, has_ranks=False)


def _totals(value: object) -> IntArray | None:
    """Read lists of counts as an array [T, L, E]; None for anything else."""
    if not isinstance(value, list) or not value or not all(isinstance(row, list) for row in value):
        return None
    # A list of layers alone is one step
    steps = value if all(row and isinstance(row[0], list) for row in value) else [value]
    found = [counts for step in steps if (counts := _integers(step, 2)) is not None and counts.ndim == 2]
    if len(found) < len(steps) or len({counts.shape for counts in found}) > 1:
        return None
    return np.stack(found)


_Reader = Callable[[Path, Sequence[Path], int | None, Groups], RoutingTrace]
_READERS: dict[str, _Reader] = {
    ".csv": _read_tables,
    ".tsv": _read_tables,
    ".txt": _read_tables,
    ".jsonl": _read_megatron,
    ".safetensors": _read_tensorrt,
    ".json": _read_totals,
}


# ------------------------------------------------------------------------------------------------- values and lines


def _integers(value: object, dimensions: int) -> IntArray | None:
    """Read a list of integers, or of such lists of one length, as an array; None for anything else.

    The items' types are checked first. From strings numpy would make an array in which each takes as much room as the
    longest.
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
    """Read a whole number from 0 to `most`, from JSON or from text."""
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
    with file.open("rb") as raw:
        head = raw.read(4)
    encoding = next((name for mark, name in _MARKS if head.startswith(mark)), "utf-8")
    with file.open("r", encoding=encoding, newline="") as stream:
        yield _read(file, stream)


def _read(file: Path, stream: IO[str]) -> Iterator[str]:
    for number in itertools.count(1):
        try:
            # Bounded: a file without line ends would be one line
            line = stream.readline(MAX_LINE_BYTES)
        except UnicodeError:
            _refuse_known(file)
            raise TraceError(f"{file}: line {number}: expected text in UTF-8, or UTF-16 with its mark") from None
        if not line:
            return
        if len(line) == MAX_LINE_BYTES:
            raise TraceError(f"{file}: line {number}: expected at most {MAX_LINE_BYTES} characters")
        yield line
