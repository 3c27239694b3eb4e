"""The coordinate space of training state: every tensor in its complete, unsharded form, and boxes within it.

Shape legend: n dimensions of a tensor. A box is half open in every dimension; a tensor without dimensions has one box,
which holds its one element. After the virtual parameter space of DynaTran (Section 4.1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import le, sub
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from prophet.errors import LayoutError

StateKind = Literal["parameter", "gradient", "optimizer", "rng", "buffer", "index", "registered"]

_KINDS = frozenset(get_args(StateKind))

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "complex64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by the name of its type."""


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements with start[d] <= index[d] < stop[d] in every dimension d."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise LayoutError(f"a box needs as many starts as stops, got {self.start} and {self.stop}")
        if min(self.start, default=0) < 0 or not all(map(le, self.start, self.stop)):
            raise LayoutError(f"a box needs 0 <= start <= stop, got {self.start} and {self.stop}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(int(n) for n in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Length in every dimension."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"

    def contains(self, other: Box) -> bool:
        """Whether `other` lies within this box; a box of another number of dimensions does not."""
        return len(self.start) == len(other.start) and all(
            a <= c and d <= b for a, b, c, d in zip(self.start, self.stop, other.start, other.stop, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """The common elements, or None if there are none."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        # Boxes that only touch have no element in common
        if any(b <= a for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def subtract(self, other: Box) -> list[Box]:
        """Disjoint boxes that hold what `other` does not: at most 2n of them."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.elements else []
        rest: list[Box] = []
        start, stop = list(self.start), list(self.stop)
        # Slabs before and behind the common part are cut off one dimension after the other. What is left shrinks to the
        # common part, so the slabs are disjoint.
        for d in range(len(start)):
            if start[d] < common.start[d]:
                rest.append(Box(tuple(start), (*stop[:d], common.start[d], *stop[d + 1 :])))
            if common.stop[d] < stop[d]:
                rest.append(Box((*start[:d], common.stop[d], *start[d + 1 :]), tuple(stop)))
            start[d], stop[d] = common.start[d], common.stop[d]
        return rest

    def slices(self, within: Box) -> tuple[slice, ...]:
        """The index of this box in a tensor that holds the box `within`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, within.start, strict=True))

    def shift(self, offset: Sequence[int]) -> Box:
        """The box moved by `offset`."""
        return Box(
            tuple(a + o for a, o in zip(self.start, offset, strict=True)),
            tuple(b + o for b, o in zip(self.stop, offset, strict=True)),
        )


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The boxes of a range of elements of a row-major tensor, in that order: at most 2n - 1 of them.

    A ZeRO shard is such a range of a flattened buffer; DynaTran, Section 4.2.2.

    Args:
        shape: Lengths of the tensor; one without dimensions has a single element.
        start: First element.
        stop: The element behind the last one.

    Raises:
        LayoutError: The range is outside the tensor.
    """
    total = math.prod(shape)
    if not 0 <= start <= stop <= total:
        raise LayoutError(f"elements {start}..{stop} are outside a tensor of {total} elements")
    if start == stop:
        return []
    if len(shape) == 0:
        return [Box((), ())]
    if len(shape) == 1:
        return [Box((start,), (stop,))]
    rest = tuple(shape[1:])
    row = math.prod(rest)
    first_row, last_row = start // row, (stop - 1) // row
    # Within one row: its part, found among the other dimensions
    if first_row == last_row:
        inner = flat_boxes(rest, start - first_row * row, stop - first_row * row)
        return [Box((first_row, *b.start), (first_row + 1, *b.stop)) for b in inner]
    boxes: list[Box] = []
    # Otherwise a part of the first row, then whole rows as one box, then a part of the last row
    if start % row:
        head = flat_boxes(rest, start - first_row * row, row)
        boxes += [Box((first_row, *b.start), (first_row + 1, *b.stop)) for b in head]
        first_row += 1
    full_stop = stop // row
    if first_row < full_stop:
        boxes.append(Box((first_row, *(0,) * len(rest)), (full_stop, *rest)))
    if stop % row:
        tail = flat_boxes(rest, 0, stop - full_stop * row)
        boxes += [Box((full_stop, *b.start), (full_stop + 1, *b.stop)) for b in tail]
    return boxes


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor of the training state in its unsharded form.

    Attributes:
        name: Name, unlike that of any other tensor of the space.
        shape: Lengths.
        dtype: Element type, one of `ITEM_BYTES`.
        kind: What the tensor is to training.
        layer: The pipeline layer that it belongs to; None: it belongs to none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    kind: StateKind = "parameter"
    layer: int | None = None

    def __post_init__(self) -> None:
        # The class is frozen; a `torch.Size` or list becomes a tuple of ints, so that specs compare and hash alike
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        if self.dtype not in ITEM_BYTES:
            raise LayoutError(f"{self.name}: element type must be one of {sorted(ITEM_BYTES)}, got {self.dtype!r}")
        if self.kind not in _KINDS:
            raise LayoutError(f"{self.name}: kind must be one of {list(get_args(StateKind))}, got {self.kind!r}")
        if any(n < 0 for n in self.shape):
            raise LayoutError(f"{self.name}: lengths must not be negative, got {list(self.shape)}")

    @property
    def box(self) -> Box:
        """The whole tensor."""
        return Box.whole(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Space:
    """All tensors of the training state, in an order that every rank shares."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(self.tensors))
        if len(self._by_name) != len(self.tensors):
            twice = sorted(name for name, times in Counter(t.name for t in self.tensors).items() if times > 1)
            raise LayoutError(f"tensor names must differ; these appear twice: {twice[:8]}")

    @cached_property
    def number(self) -> dict[str, int]:
        """Place of every name in the order."""
        return {t.name: k for k, t in enumerate(self.tensors)}

    @cached_property
    def shapes(self) -> npt.NDArray[np.int64]:
        """Lengths of every tensor in every dimension, [tensors, D]; 1 behind the last one of a tensor."""
        dims = max((len(t.shape) for t in self.tensors), default=0) or 1
        # All boxes fit into one array if tensors of fewer dimensions get 0:1 behind theirs
        rows = [(*t.shape, *(1,) * (dims - len(t.shape))) for t in self.tensors]
        return np.array(rows, dtype=np.int64).reshape(-1, dims)

    @cached_property
    def item_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of an element of every tensor, [tensors]."""
        return np.array([t.item_bytes for t in self.tensors], dtype=np.int64)

    @cached_property
    def types(self) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
        """Names of the types of elements, the widest first, and which of them every tensor has, [tensors]."""
        # Widest first: a chunk's elements are packed in this order, so that none needs padding
        # (`prophet.state.streams`)
        names = tuple(sorted({t.dtype for t in self.tensors}, key=lambda name: (-ITEM_BYTES[name], name)))
        return names, np.array([names.index(t.dtype) for t in self.tensors], dtype=np.int64)

    @cached_property
    def _by_name(self) -> dict[str, TensorSpec]:
        return {t.name: t for t in self.tensors}

    def __getitem__(self, name: str) -> TensorSpec:
        found = self._by_name.get(name)
        if found is None:
            raise LayoutError(f"the space has no tensor {name!r}")
        return found
