"""Records of a log, put together into one trace.

A record is one forward pass of one router: a step, a layer, a rank, and the tokens of some experts. Which ranks form a
group is taken from what the records hold. Where the layers fall into sets that share no rank, and each set has as many
ranks, the sets are pipeline stages: every layer's ranks are numbered from zero. Otherwise all ranks are one group.

Shape legend: T steps, L layers, R ranks, E experts, N records, C cells (record, expert).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prophet.errors import TraceError
from prophet.spec import IntArray
from prophet.traces.npz import MAX_TRACE_BYTES, RoutingTrace
from prophet.traces.regroup import regrouped

NO_RANK = -1  # of a record that sums over ranks, or does not say
_FREE_BYTES = 1 << 28  # any log may make as large a table; of a larger one, one cell in _MOST_EMPTY is in the log
_MOST_EMPTY = 64
_TELLING = 16  # different counts of a rank, in which another does not agree by chance or because somebody made them up
_LAYER_BITS = 21


def layer_key(block: int, depth: int, layer: int) -> int:
    """One number for a layer, that sorts by block, then depth, then layer; `depth` and `layer` to 2^20."""
    return (block << 2 * _LAYER_BITS) + (depth << _LAYER_BITS) + layer


def _layer_number(key: int) -> int:
    return key & ((1 << _LAYER_BITS) - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Which groups recorded ranks form. job: would-be ranks of the whole job; None: as recorded, see `regrouped`.

    group: consecutive ranks of one expert-parallel group; None: all ranks are one.
    """

    job: int | None = None
    group: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """What a log holds. step, microbatch, layer (as `layer_key`), rank: [N]; record, expert, count: [C].

    complete: whether a rank that has no record of a layer and step is a gap, and not a zero.
    """

    step: IntArray
    microbatch: IntArray
    layer: IntArray
    rank: IntArray
    record: IntArray
    expert: IntArray
    count: IntArray
    complete: bool


def to_trace(
    file: Path, records: Records, meta: dict[str, Any], *, experts: int | None, groups: Groups
) -> RoutingTrace:
    """The trace of all records.

    experts: their number; None takes the highest that has tokens, rounded up to a multiple of the ranks.
    Raises `TraceError`, with `file`.
    """
    if not len(records.step):
        raise TraceError(f"{file}: expected at least one record, the log is empty")
    steps, t = np.unique(records.step << 31 | records.microbatch, return_inverse=True)
    layers, at_layer = np.unique(records.layer, return_inverse=True)
    of_layer, r, size = _ranks_of_layers(at_layer, records.rank)
    highest = int(records.expert.max(initial=-1))
    if experts is None:
        multiple = groups.group or groups.job or size
        experts = max(-(-(highest + 1) // multiple), 1) * multiple
    if highest >= experts:
        raise TraceError(f"{file}: expected experts below {experts}, got expert {highest}")
    counts = _zeros(file, (len(steps), len(layers), size, experts), len(records.count))
    if records.complete:
        seen = np.zeros(counts.shape[:3], dtype=bool)
        seen[t, at_layer, r] = True
        if not seen.all():
            gap = np.argwhere(~seen)[0]
            raise TraceError(
                f"{file}: expected a record of every layer and rank in every step; there is none of step "
                f"{steps[gap[0]] >> 31}, layer {_layer_number(int(layers[gap[1]]))}, rank {of_layer[gap[1]][gap[2]]} "
                f"(microbatch {steps[gap[0]] & (1 << 31) - 1})"
            )
    at = records.record
    np.add.at(counts, (t[at], at_layer[at], r[at], records.expert), records.count)
    return grouped(file, counts, steps >> 31, meta, groups, says_rank=bool((records.rank != NO_RANK).any()))


def grouped(
    file: Path, counts: IntArray, iteration: IntArray, meta: dict[str, Any], groups: Groups, *, says_rank: bool
) -> RoutingTrace:
    """The trace of counts [T, L, R, E] in `groups`.

    Several groups that hold the same layers are balanced apart, so a layer of the second group is a layer more.
    Counts that say no rank are shared evenly among the ranks, whose number must then be given. Raises `TraceError`.
    """
    if not says_rank:
        size = groups.job or groups.group
        if size is None:
            raise TraceError(
                f"{file}: ranks: its counts do not say which rank routed them. If files of all ranks lie in one "
                f"folder, pass the folder; else say how many ranks there were: prophet plan --ep N, or "
                f"read_any(..., ranks=N), shares the tokens evenly among N ranks"
            )
        _room(file, (*counts.shape[:2], size, counts.shape[3]))
        counts = _shared(counts, size)
        meta = meta | {"source": f"{meta['source']}, shared evenly among {size} ranks"}
    else:
        _refuse_copies(file, counts)
    try:
        if groups.job not in (None, counts.shape[2]):
            counts, iteration = regrouped(counts, iteration, groups.job)
        steps, layers, size, experts = counts.shape
        ranks = groups.group or size
        if size % ranks:
            raise TraceError(f"ranks: expected a multiple of {ranks}, its layers have {size} ranks")
        if size != ranks:
            apart = counts.reshape(steps, layers, size // ranks, ranks, experts)
            counts = apart.swapaxes(1, 2).reshape(steps, -1, ranks, experts)
            meta = meta | {"groups": size // ranks}
        return RoutingTrace(counts, iteration.astype(np.int32), meta)
    except TraceError as error:
        raise TraceError(f"{file}: {error}") from None


def _ranks_of_layers(at_layer: IntArray, rank: IntArray) -> tuple[list[IntArray], IntArray, int]:
    """The ranks of every layer, each record's place among those of its layer [N], and how many a layer has."""
    numbers, at_rank = np.unique(rank, return_inverse=True)
    pairs, at_pair = np.unique(at_layer * len(numbers) + at_rank, return_inverse=True)
    begins = np.searchsorted(pairs // len(numbers), np.arange(int(at_layer.max()) + 1))
    of_layer = [numbers[p % len(numbers)] for p in np.split(pairs, begins[1:])]
    stages = {ranks.tobytes(): len(ranks) for ranks in of_layer}
    size = len(of_layer[0])
    if size > 1 and sum(stages.values()) == len(numbers) and set(stages.values()) == {size}:
        return of_layer, at_pair - begins[at_layer], size
    return [numbers] * len(of_layer), at_rank, len(numbers)


def _shared(counts: IntArray, ranks: int) -> IntArray:
    """Counts [T, L, 1, E] as [T, L, ranks, E] with the same sum; what is left over begins at another rank each time."""
    whole, rest = np.divmod(counts, ranks)
    turn = (np.arange(ranks)[:, None] - np.arange(counts.shape[3])) % ranks  # [ranks, E]
    shared: IntArray = whole + (turn < rest)
    return shared


def _refuse_copies(file: Path, counts: IntArray) -> None:
    """Two ranks that routed the same in every step and layer have routed the same tokens: they are counted twice."""
    seen: dict[bytes, int] = {}
    for r in range(counts.shape[2]):
        mine = np.ascontiguousarray(counts[:, :, r])
        first = seen.setdefault(hashlib.sha256(mine.data).digest(), r)
        if first != r and len(np.unique(mine)) >= _TELLING:
            raise TraceError(
                f"{file}: ranks {first} and {r} (in order) have the same counts in every step and layer, so they "
                f"routed the same tokens, as tensor-parallel ranks do: leave one of them out"
            )


def _room(file: Path, shape: tuple[int, ...]) -> int:
    size = 8 * math.prod(shape)
    if size > MAX_TRACE_BYTES:
        raise TraceError(f"{file}: expected counts of at most {MAX_TRACE_BYTES} bytes, its {list(shape)} take more")
    return size


def _zeros(file: Path, shape: tuple[int, ...], cells: int) -> IntArray:
    """Room for the counts, of which `cells` are in the log; far more of it than that is refused."""
    size = _room(file, shape)
    if size > max(_FREE_BYTES, 8 * _MOST_EMPTY * cells):
        raise TraceError(f"{file}: expected fewer empty cells: its {list(shape)} take {size} bytes for {cells} counts")
    return np.zeros(shape, dtype=np.int64)
