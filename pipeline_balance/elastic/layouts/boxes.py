"""Layouts of real models: which box of which parameter, and of what the optimizer keeps for it, each rank holds.

Shape legend: P ranks, B blocks (runs of a parameter that are cut apart), N boxes, D dimensions. A model is described by
names, shapes, element types and rules; nothing here knows torch. Shards are those of `torch.chunk`: all of
ceil(n / parts), the last ones shorter or empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from pipeline_balance.elastic.layouts.parallelism import Parallelism
from prophet.errors import LayoutError
from prophet.spec import IntArray
from prophet.state.layout import Layout, zero_owners
from prophet.state.space import Space, StateKind, TensorSpec
from prophet.state.table import Table, flat_ranges, positions_of, starts, table_of, volumes, within

How = Literal["column", "row", "vocabulary", "whole"]
"""How tp cuts the parameters of a module.

"column" and "vocabulary" cut along dimension 0, biases too. "row" cuts weights along dimension 1 and leaves biases
whole. "whole" cuts nothing.
"""


def cut_dimension(how: How, shape: tuple[int, ...]) -> int | None:
    """The dimension that tp cuts of a parameter of this shape; None: it stays whole."""
    dim = {"column": 0, "vocabulary": 0, "row": 1}.get(how)
    # a bias has no dimension 1
    return dim if dim is not None and dim < len(shape) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A run of elements along the dimension that is cut.

    Attributes:
        length: Elements in the run.
        units: How many units it consists of, each of which stays whole (heads); None: one per element.
        repeated: Where there are fewer units than shards, several shards have the same unit (heads of keys and
            values); otherwise the last ones are empty.
    """

    length: int
    units: int | None = None
    repeated: bool = False

    def __post_init__(self) -> None:
        if self.units is not None and (self.units < 1 or self.length % self.units):
            raise LayoutError(f"a block of {self.length} cannot be in {self.units} units")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter (or buffer) of the unsplit model, and how it is cut.

    Attributes:
        name: As `named_parameters` has it.
        shape: Of the unsplit model.
        dtype: torch's name of the type.
        layers: The pipeline layers that use it; tied ones name several.
        dim: The dimension that tp cuts (0: column, vocabulary; 1: row); None: every tp rank has all.
        blocks: What that dimension consists of, in order (fused q, k, v; gate and up); none: one block.
        experts: Dimension 0 counts experts (in units of rows, if a block says so), which ep cuts.
        trained: It has optimizer state.
        kind: A parameter or a buffer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    layers: tuple[int, ...]
    dim: int | None = None
    blocks: tuple[Block, ...] = ()
    experts: bool = False
    trained: bool = True
    kind: StateKind = "parameter"

    def __post_init__(self) -> None:
        if not self.layers:
            raise LayoutError(f"{self.name}: expected at least one layer that uses it")
        if self.experts and (self.dim is not None or not self.shape):
            raise LayoutError(f"{self.name}: experts are cut by ep along dimension 0 and by nothing else")
        if self.dim is not None:
            if not 0 <= self.dim < len(self.shape):
                raise LayoutError(f"{self.name}: dimension {self.dim} of {list(self.shape)} does not exist")
            total = sum(b.length for b in self.blocks)
            if self.blocks and total != self.shape[self.dim]:
                raise LayoutError(f"{self.name}: blocks are {total} long, dimension {self.dim} {self.shape[self.dim]}")

    def cut_blocks(self) -> tuple[Block, ...]:
        """The blocks that are cut; a parameter that is not cut has none."""
        if self.experts:
            return self.blocks or (Block(length=self.shape[0]),)
        if self.dim is None:
            return ()
        return self.blocks or (Block(length=self.shape[self.dim]),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What an optimizer keeps for every trained parameter, as `name@suffix`; a scalar, or of the parameter's shape."""

    suffix: str
    dtype: str = "float32"
    scalar: bool = False


ADAMW = (Entry(suffix="exp_avg"), Entry(suffix="exp_avg_sq"), Entry(suffix="step", scalar=True))
MIXED_ADAMW = (Entry(suffix="master"), Entry(suffix="exp_avg"), Entry(suffix="exp_avg_sq"))


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A model as far as layouts go.

    Attributes:
        name: For reports.
        layers: How many pipeline layers it has.
        parameters: Parameters and buffers.
        entries: What the optimizer keeps for every trained parameter.
        everywhere: Tensors that every rank with a place has whole (loss scale, generators that are common).
    """

    name: str
    layers: int
    parameters: tuple[Parameter, ...]
    entries: tuple[Entry, ...] = ADAMW
    everywhere: tuple[TensorSpec, ...] = ()

    def __post_init__(self) -> None:
        for p in self.parameters:
            if not all(0 <= layer < self.layers for layer in p.layers):
                raise LayoutError(f"{p.name} is used by layers {p.layers}, outside 0..{self.layers - 1}")

    @property
    def has_experts(self) -> bool:
        """Whether ep has anything to cut."""
        return any(p.experts for p in self.parameters)

    @cached_property
    def space(self) -> Space:
        """Every tensor of the training state: each parameter with its entries behind it, then what is everywhere."""
        tensors: list[TensorSpec] = []
        for p in self.parameters:
            layer = p.layers[0]
            tensors.append(TensorSpec(name=p.name, shape=p.shape, dtype=p.dtype, kind=p.kind, layer=layer))
            for e in self.entries if p.trained else ():
                shape = () if e.scalar else p.shape
                name = f"{p.name}@{e.suffix}"
                tensors.append(TensorSpec(name=name, shape=shape, dtype=e.dtype, kind="optimizer", layer=layer))
        return Space((*tensors, *self.everywhere))

    @cached_property
    def tensor_of(self) -> IntArray:
        """Where every parameter [:, 0] and its entries [:, 1:] stand in the space; -1 where there are none."""
        # `space` puts entries directly behind their parameter
        many = 1 + len(self.entries)
        lengths = np.array([many if p.trained else 1 for p in self.parameters], dtype=np.int64)
        first = starts(lengths)[:-1]
        columns = np.arange(many)
        return np.where(columns < lengths[:, None], first[:, None] + columns, -1)


@dataclass(frozen=True, eq=False)
class _Shards:
    """Boxes [N] of parameters with the places that may hold them: base + stride * (0 .. count - 1).

    Attributes:
        parameter: The parameter's number.
        low, high: The box within the whole parameter [N, D].
        base, stride, count: The places, see above; count is dp, or edp for experts.
        offset: Rows (along dimension 0) in front of the box in the rank's part of the parameter.
        local: All rows of that part.
        experts: 1 for experts, which are shared out over edp rather than dp.
    """

    parameter: IntArray
    low: IntArray
    high: IntArray
    base: IntArray
    stride: IntArray
    count: IntArray
    offset: IntArray
    local: IntArray
    experts: IntArray

    @property
    def volume(self) -> IntArray:
        """Elements of every box."""
        return volumes(self.low, self.high)


def layout_of(
    model: ModelDescription, parallelism: Parallelism, *, ranks: int | None = None, flat: bool = False
) -> Layout:
    """Who holds what of `model` under `parallelism`.

    zero 1 gives each parameter's optimizer state whole to one rank of dp, `zero_owners`. zero 2 and 3 cut parameters
    and state along dimension 0 (FSDP2). Experts are shared out over edp in place of dp.

    Args:
        model: What is laid out.
        parallelism: Over how many ranks along each axis; its order must be chosen.
        ranks: Size of the world; None: as many as it takes.
        flat: With zero 1 the states of a rank lie end to end, and each of dp has an equal range (Megatron, DeepSpeed).

    Raises:
        LayoutError: For a world that is too small.
    """
    order = np.array(parallelism.rank_of_place, dtype=np.int64)
    world = int(order.max()) + 1 if ranks is None else ranks
    if world <= order.max():
        raise LayoutError(f"{parallelism} needs rank {order.max()}, the world has {world} ranks")
    shards = _local_shards(model, parallelism)
    wide = np.array([not e.scalar for e in model.entries], dtype=bool)
    states, scalars = 1 + np.flatnonzero(wide), 1 + np.flatnonzero(~wide)
    trained = np.array([p.trained for p in model.parameters], dtype=bool)[shards.parameter]
    buffers = np.array([p.kind == "buffer" for p in model.parameters], dtype=bool)[shards.parameter]
    table = _Rows(model)
    # buffers are whole on every dp rank: neither ZeRO nor FSDP2 shards them
    table.add(_picked(shards, np.flatnonzero(buffers)), 0)
    parameters = _picked(shards, np.flatnonzero(~buffers))
    table.add(_along_rows(parameters) if parallelism.zero >= 2 else parameters, 0)
    # the step count is one number: with zero 2 and 3 every rank keeps it, as FSDP2 does
    holds_scalars = holds_states = _picked(shards, np.flatnonzero(trained))
    if parallelism.zero >= 2:
        holds_states = _along_rows(holds_states)
    elif parallelism.zero == 1 and flat:
        holds_states = _end_to_end(holds_states)
    elif parallelism.zero == 1:
        holds_states = holds_scalars = _to_owner(holds_states)
    for part, columns in ((holds_states, states), (holds_scalars, scalars)):
        for column in columns.tolist():
            table.add(part, column)
    table.add_everywhere(parallelism.ranks)
    return Layout.of(table.build(world, order))


def _local_shards(model: ModelDescription, parallelism: Parallelism) -> _Shards:
    """The part of every parameter that a rank of each stage and each tp (or ep) index computes with."""
    shapes = model.space.shapes[model.tensor_of[:, 0]]
    # a parameter that nothing cuts counts as one empty block, so that it has a row too
    blocks = [(k, p, b) for k, p in enumerate(model.parameters) for b in p.cut_blocks() or (Block(length=0),)]
    number = np.array([k for k, _, _ in blocks], dtype=np.int64)
    length = np.array([b.length for _, _, b in blocks], dtype=np.int64)
    units = np.array([b.units or max(b.length, 1) for _, _, b in blocks], dtype=np.int64)
    repeated = np.array([b.repeated for _, _, b in blocks], dtype=bool)
    experts = np.array([p.experts for _, p, _ in blocks], dtype=bool)
    # -1: not cut
    dim = np.array([0 if p.experts else -1 if p.dim is None else p.dim for _, p, _ in blocks], dtype=np.int64)
    many = np.bincount(number, minlength=len(model.parameters))
    # where each block begins in its parameter
    offset = (np.cumsum(length) - length) - np.repeat(starts(np.bincount(number, length))[:-1].astype(np.int64), many)
    # every block in every shard
    parts = np.where(experts, parallelism.ep, parallelism.tp)
    row, k, of = np.repeat(np.arange(len(blocks)), parts), within(parts), np.repeat(parts, parts)
    # as torch.chunk: all of ceil(units / shards), the last ones shorter or empty
    chunk = -(-units[row] // of)
    # units k * chunk .. (k + 1) * chunk, clipped to what there is
    first, last = np.minimum(k * chunk, units[row]), np.minimum((k + 1) * chunk, units[row])
    # fewer kv heads than shards: neighbouring shards have the same head
    same = repeated[row] & (units[row] < of)
    first = np.where(same, k * units[row] // of, first)
    last = np.where(same, first + 1, last)
    size = length[row] // units[row]
    low, high = np.zeros_like(shapes[number[row]]), shapes[number[row]].copy()
    cut = np.flatnonzero(dim[row] >= 0)
    low[cut, dim[row][cut]] = (offset[row] + first * size)[cut]
    high[cut, dim[row][cut]] = (offset[row] + last * size)[cut]
    # rows in front of the block in the shard, and all of the shard's rows
    rows = high[:, 0] - low[:, 0]
    # one number per (parameter, shard), so that blocks of a shard sort next to each other
    shard = number[row] * (int(parts.max()) + 1) + k
    stacked = np.lexsort([row, shard])
    _, begin = np.unique(shard[stacked], return_index=True)
    lengths = np.diff(np.append(begin, len(shard)))
    upto = np.cumsum(rows[stacked])
    front, local = np.empty_like(rows), np.empty_like(rows)
    base = np.repeat((upto - rows[stacked])[begin], lengths)
    front[stacked] = upto - rows[stacked] - base
    local[stacked] = np.repeat(np.add.reduceat(rows[stacked], begin), lengths)
    # Blocks of a row-parallel weight are side by side: each has all rows
    apart = dim[row] > 0
    front, local = np.where(apart, 0, front), np.where(apart, rows, local)
    # once per stage that uses the parameter
    stage_of = np.array(parallelism.stage_map(model.layers).assignment(), dtype=np.int64)
    used = sorted({(k, int(stage_of[layer])) for k, p in enumerate(model.parameters) for layer in p.layers})
    owner, stage = np.array(used, dtype=np.int64).reshape(-1, 2).T
    by_parameter = starts(np.bincount(owner, minlength=len(model.parameters)))
    uses = np.diff(by_parameter)[number[row]]
    at, stage = np.repeat(np.arange(len(row)), uses), stage[positions_of(by_parameter[number[row]], uses)]
    is_expert = experts[row[at]]
    shards = _Shards(
        parameter=number[row[at]],
        low=low[at],
        high=high[at],
        # places are numbered with tp fastest, then dp, then pp
        base=stage * (parallelism.dp * parallelism.tp) + k[at],
        stride=np.where(is_expert, parallelism.ep, parallelism.tp),
        count=np.where(is_expert, parallelism.edp, parallelism.dp),
        offset=front[at],
        local=local[at],
        experts=is_expert.astype(np.int64),
    )
    # `_runs` needs the boxes of one stage and shard to stand together
    return _picked(shards, np.lexsort([row[at], k[at], stage, is_expert]))


def _picked(shards: _Shards, rows: IntArray, **changes: IntArray) -> _Shards:
    """Some rows, in this order, with other values in some columns."""
    names = ("parameter", "low", "high", "base", "stride", "count", "offset", "local", "experts")
    return _Shards(**({name: getattr(shards, name)[rows] for name in names} | changes))


def _runs(shards: _Shards) -> tuple[IntArray, IntArray]:
    """Where boxes of one stage and one tp (or ep) index begin, and how many there are: they stand together."""
    new = np.ones(len(shards.base), dtype=bool)
    new[1:] = (np.diff(shards.base) != 0) | (np.diff(shards.experts) != 0)
    begin = np.flatnonzero(new)
    return begin, np.diff(np.append(begin, len(new)))


def _to_owner(shards: _Shards) -> _Shards:
    """Every parameter's part whole on one of its places."""
    owner = np.zeros(len(shards.base), np.int64)
    volume = shards.volume
    for begin, many in zip(*_runs(shards), strict=True):
        run = slice(begin, begin + many)
        # a parameter of several blocks is weighed, and owned, as one
        of, first = np.unique(shards.parameter[run], return_inverse=True)
        sizes = np.bincount(first, volume[run], len(of)).astype(np.int64)
        owner[run] = zero_owners(sizes, int(shards.count[begin]))[first]
    every = np.arange(len(owner))
    return _picked(shards, every, base=shards.base + owner * shards.stride, count=np.ones_like(owner))


def _end_to_end(shards: _Shards) -> _Shards:
    """All parts of a stage's shard laid end to end, an equal range on each place."""
    begin, many = _runs(shards)
    volume = shards.volume
    upto = np.cumsum(volume)
    run = np.repeat(np.arange(len(begin)), many)
    start = upto - volume - (upto - volume)[begin][run]
    total = np.add.reduceat(volume, begin) if len(begin) else volume
    # an equal range per place, rounded up: the last one is shorter
    part = np.maximum(-(-total // shards.count[begin]), 1)[run]
    first = start // part
    # a part that crosses the end of a range is on several places
    pieces = np.where(volume > 0, (start + np.maximum(volume, 1) - 1) // part - first + 1, 0)
    row = np.repeat(np.arange(len(volume)), pieces)
    place = first[row] + within(pieces)
    low = np.maximum(place * part[row] - start[row], 0)
    high = np.minimum((place + 1) * part[row] - start[row], volume[row])
    # a range of elements is no box in general: it is cut into several
    of, box_low, box_high = flat_ranges((shards.high - shards.low)[row], low, high)
    row, place = row[of], place[of]
    base = shards.base[row] + place * shards.stride[row]
    one = np.ones_like(base)
    return _picked(shards, row, low=box_low + shards.low[row], high=box_high + shards.low[row], base=base, count=one)


def _along_rows(shards: _Shards) -> _Shards:
    """Every part cut along dimension 0, a chunk on each place; a scalar is on all places."""
    row = np.repeat(np.arange(len(shards.base)), shards.count)
    place = within(shards.count)
    # FSDP2 chunks the rows of the local part, where several blocks may lie in one chunk
    chunk = -(-shards.local // np.maximum(shards.count, 1))[row]
    low = np.maximum(place * chunk - shards.offset[row], 0)
    high = np.minimum((place + 1) * chunk - shards.offset[row], (shards.high - shards.low)[row, 0])
    # ranks beyond the last row hold nothing of this box
    full = low < high
    row, place, low, high = row[full], place[full], low[full], high[full]
    box_low, box_high = shards.low[row].copy(), shards.high[row].copy()
    box_high[:, 0] = box_low[:, 0] + high
    box_low[:, 0] += low
    base = shards.base[row] + place * shards.stride[row]
    return _picked(shards, row, low=box_low, high=box_high, base=base, count=np.ones_like(base))


class _Rows:
    """Collects boxes and places of all tensors."""

    def __init__(self, model: ModelDescription) -> None:
        self.model = model
        self.parts: list[tuple[IntArray, IntArray, IntArray, IntArray, IntArray, IntArray]] = []

    def add(self, shards: _Shards, column: int) -> None:
        """Add these boxes of the parameter (`column` 0) or of entry `column` - 1."""
        tensor = self.model.tensor_of[shards.parameter, column]
        low, high = shards.low, shards.high
        if column and self.model.entries[column - 1].scalar:
            # one number, whatever part of the parameter is here
            low, high = np.zeros_like(low), np.ones_like(high)
        # frozen parameters have no entries (-1); empty boxes hold nothing
        there = (tensor >= 0) & (low < high).all(1)
        columns = (tensor, low, high, shards.base, shards.stride, shards.count)
        self.parts.append(tuple(c[there] for c in columns))

    def add_everywhere(self, places: int) -> None:
        """Add the tensors that every place has whole."""
        many = len(self.model.everywhere)
        tensor = np.arange(many) + len(self.model.space.tensors) - many
        high = self.model.space.shapes[tensor]
        one = np.ones(many, np.int64)
        self.parts.append((tensor, np.zeros_like(high), high, 0 * one, one, places * one))

    def build(self, ranks: int, order: IntArray) -> Table:
        """The table, with ranks for places."""
        tensor, low, high, base, stride, count = (np.concatenate(c) for c in zip(*self.parts, strict=True))
        # from the place to the rank that stands there
        holder = order[np.repeat(base, count) + within(count) * np.repeat(stride, count)]
        return table_of(self.model.space, ranks, tensor, low, high, starts(count), holder)
