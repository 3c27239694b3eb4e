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

# Rank of a record that sums over ranks, or has none
NO_RANK = -1
# Any log may make as large a table; of a larger one, one cell in _MOST_EMPTY is in the log.
_FREE_BYTES = 1 << 28
_MOST_EMPTY = 64
# Different counts of a rank from which on another rank does not agree by chance, or because somebody made them up
_TELLING = 16
# Layers and depths go to 2^20, which takes 21 bits
_LAYER_BITS = 21


def layer_key(block: int, depth: int, layer: int) -> int:
    """Make one number of a layer, that sorts by block, then depth, then layer.

    Args:
        block: Number of the block's kind.
        depth: Up to 2^20.
        layer: Up to 2^20.
    """
    return (block << 2 * _LAYER_BITS) + (depth << _LAYER_BITS) + layer


def _layer_number(key: int) -> int:
    return key & ((1 << _LAYER_BITS) - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Which groups recorded ranks form.

    Attributes:
        job: Would-be ranks of the whole job; None: as recorded, see `regrouped`.
        group: Consecutive ranks of one expert-parallel group; None: all ranks are one.
    """

    job: int | None = None
    group: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """The content of a log.

    Attributes:
        step: [N].
        microbatch: [N].
        layer: [N], as `layer_key`.
        rank: [N].
        record: [C] number of the record that a cell belongs to.
        expert: [C].
        count: [C] tokens.
        complete: Whether a rank that has no record of a layer and step is a gap, and not a zero.
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
    """Put all records together into one trace.

    Args:
        file: For messages.
        records: The log.
        meta: Of the trace.
        experts: Their number; None takes the highest that has tokens, rounded up to a multiple of the ranks.
        groups: Which groups the ranks form.

    Raises:
        TraceError: For records that do not fit together.
    """
    if not len(records.step):
        raise TraceError(f"{file}: expected at least one record, the log is empty")
    # Step and microbatch in one number, as both are below 2^31
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
    # Not `+=`, which would add the cells of a repeated index once only.
    np.add.at(counts, (t[at], at_layer[at], r[at], records.expert), records.count)
    return grouped(file, counts, steps >> 31, meta, groups, has_ranks=bool((records.rank != NO_RANK).any()))


def grouped(
    file: Path, counts: IntArray, iteration: IntArray, meta: dict[str, Any], groups: Groups, *, has_ranks: bool
) -> RoutingTrace:
    """Make the trace of counts [T, L, R, E].

    Several groups that hold the same layers are balanced apart, so a layer of the second group is a layer more. Counts
    without ranks are shared evenly among the ranks, whose number must then be given.

    Args:
        file: For messages.
        counts: [T, L, R, E].
        iteration: [T].
        meta: Of the trace.
        groups: Which groups the ranks form.
        has_ranks: Whether the counts are those of ranks, and no sums over them.

    Raises:
        TraceError: Where the ranks cannot be grouped so.
    """
    if not has_ranks:
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
    """Find the ranks of every layer, each record's place among those of its layer [N], and how many a layer has."""
    numbers, at_rank = np.unique(rank, return_inverse=True)
    pairs, at_pair = np.unique(at_layer * len(numbers) + at_rank, return_inverse=True)
    begins = np.searchsorted(pairs // len(numbers), np.arange(int(at_layer.max()) + 1))
    of_layer = [numbers[p % len(numbers)] for p in np.split(pairs, begins[1:])]
    stages = {ranks.tobytes(): len(ranks) for ranks in of_layer}
    size = len(of_layer[0])
    # Sets of one size that share no rank: pipeline stages
    if size > 1 and sum(stages.values()) == len(numbers) and set(stages.values()) == {size}:
        return of_layer, at_pair - begins[at_layer], size
    return [numbers] * len(of_layer), at_rank, len(numbers)


def _shared(counts: IntArray, ranks: int) -> IntArray:
    """Share counts [T, L, 1, E] among ranks, [T, L, ranks, E]; the rest begins at another rank for each expert."""
    whole, rest = np.divmod(counts, ranks)
    turn = (np.arange(ranks)[:, None] - np.arange(counts.shape[3])) % ranks  # [ranks, E]
    shared: IntArray = whole + (turn < rest)
    return shared


def _refuse_copies(file: Path, counts: IntArray) -> None:
    """Raise `TraceError` where two ranks routed the same in every step and layer.

    They have routed the same tokens, which would count twice.
    """
    seen: dict[bytes, int] = {}
    for r in range(counts.shape[2]):
        mine = np.ascontiguousarray(counts[:, :, r])
        first = seen.setdefault(hashlib.sha256(mine.data).digest(), r)
        # A short or empty log may have equal ranks by chance
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
    """Make room for the counts, of which `cells` are in the log; far more room than that is refused."""
    size = _room(file, shape)
    if size > max(_FREE_BYTES, 8 * _MOST_EMPTY * cells):
        raise TraceError(f"{file}: expected fewer empty cells: its {list(shape)} take {size} bytes for {cells} counts")
    return np.zeros(shape, dtype=np.int64)
