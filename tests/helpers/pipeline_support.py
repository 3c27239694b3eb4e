"""Random and sparse spaces, layouts and states for the tests of `prophet.state`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from prophet.errors import LayoutError
from prophet.spec import IntArray
from prophet.state.layout import Layout, Piece, layout_from
from prophet.state.space import Box, Space, TensorSpec, flat_boxes
from prophet.state.streams import torch_dtype

DTYPES = ("float64", "float32", "bfloat16", "int64", "uint8", "bool")


def random_space(rng: np.random.Generator, *, max_tensors: int = 3, max_length: int = 5) -> Space:
    """A few parameters with their gradients and moments, a step counter and a generator state each."""
    tensors: list[TensorSpec] = []
    for i in range(int(rng.integers(1, max_tensors + 1))):
        shape = tuple(int(n) for n in rng.integers(1, max_length + 1, size=rng.integers(0, 4)))
        dtype = DTYPES[int(rng.integers(len(DTYPES)))]
        tensors.append(TensorSpec(name=f"p{i}", shape=shape, dtype=dtype))
        tensors.append(TensorSpec(name=f"p{i}.exp_avg", shape=shape, kind="optimizer"))
        tensors.append(TensorSpec(name=f"p{i}.exp_avg_sq", shape=shape, dtype="float64", kind="optimizer"))
        tensors.append(TensorSpec(name=f"p{i}.step", shape=(), kind="optimizer"))
    tensors.append(TensorSpec(name="rng", shape=(48,), dtype="uint8", kind="rng"))
    return Space(tuple(tensors))


def random_boxes(rng: np.random.Generator, box: Box) -> list[Box]:
    """Cut a box along random dimensions into a few disjoint ones."""
    boxes = [box]
    for _ in range(int(rng.integers(0, 4))):
        i = int(rng.integers(len(boxes)))
        shape = boxes[i].shape
        long = [d for d, n in enumerate(shape) if n > 1]
        if not long:
            continue
        d = long[int(rng.integers(len(long)))]
        old = boxes.pop(i)
        cut = old.start[d] + int(rng.integers(1, shape[d]))
        boxes.append(Box(old.start, (*old.stop[:d], cut, *old.stop[d + 1 :])))
        boxes.append(Box((*old.start[:d], cut, *old.start[d + 1 :]), old.stop))
    return boxes


def random_layout(rng: np.random.Generator, space: Space, ranks: int, *, complete: bool) -> Layout:
    """Every box on a random set of ranks; without `complete` some live nowhere. Ranks may be left with nothing."""
    pieces: dict[int, list[tuple[str, Box]]] = {r: [] for r in range(ranks)}
    for tensor in space.tensors:
        for box in random_boxes(rng, tensor.box):
            copies = int(rng.integers(1 if complete else 0, min(ranks, 3) + 1))
            for rank in rng.permutation(ranks)[:copies]:
                pieces[int(rank)].append((tensor.name, box))
    return layout_from(space, ranks, pieces)


def random_values(rng: np.random.Generator, spec: TensorSpec) -> Tensor:
    """Random bits, so that NaNs and negative zeros count too."""
    dtype = torch_dtype(spec)
    if dtype == torch.bool:
        return torch.from_numpy(rng.integers(0, 2, size=spec.shape).astype(np.bool_).reshape(spec.shape))
    raw = rng.integers(0, 256, size=spec.elements * spec.item_bytes, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(spec.shape)


def states_of(layout: Layout, values: dict[str, Tensor]) -> list[dict[Piece, Tensor]]:
    """What every rank holds under the layout."""
    return [{p: values[p.name][p.box.slices(layout.space[p.name].box)].clone() for p in row} for row in layout.pieces]


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(raw[0], raw[1])


def missing_bytes(before: Layout, after: Layout) -> int:
    """Bytes that some rank wants and does not hold, counted element by element."""
    total = 0
    for rank in range(before.ranks):
        for spec in before.space.tensors:
            total += int((_mask(after, rank, spec) & ~_mask(before, rank, spec)).sum()) * spec.item_bytes
    return total


def _mask(layout: Layout, rank: int, spec: TensorSpec) -> np.ndarray:
    mask = np.zeros(spec.shape, dtype=np.bool_)
    for piece in layout.pieces[rank]:
        if piece.name == spec.name:
            mask[piece.box.slices(spec.box)] = True
    return mask


def held_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def csr_specs(
    name: str, *, rows: int, nonzeros: int, dtype: str = "float32", layer: int | None = None
) -> tuple[TensorSpec, ...]:
    """The tensors of a pruned matrix in compressed sparse rows: row offsets, column indices, values.

    States that follow the values (moments) are further tensors of shape [nonzeros] and are cut by the same boxes.
    """
    return (
        TensorSpec(name=f"{name}.crow", shape=(rows + 1,), dtype="int64", kind="index", layer=layer),
        TensorSpec(name=f"{name}.col", shape=(nonzeros,), dtype="int64", kind="index", layer=layer),
        TensorSpec(name=f"{name}.values", shape=(nonzeros,), dtype=dtype, kind="parameter", layer=layer),
    )


def csr_rows(name: str, crow: IntArray | Sequence[int], first: int, last: int) -> list[Piece]:
    """Rows first .. last-1 of a sparse matrix whose row offsets `crow` [rows + 1] are known to all ranks.

    The piece of offsets has one entry more than rows and counts from the start of the whole matrix; subtract its first
    entry to get the offsets of the rows alone.
    """
    if not 0 <= first <= last < len(crow):
        raise LayoutError(f"{name}: rows {first}..{last} are outside a matrix of {len(crow) - 1} rows")
    values = Box((int(crow[first]),), (int(crow[last]),))
    return [
        Piece(f"{name}.crow", Box((first,), (last + 1,))),
        Piece(f"{name}.col", values),
        Piece(f"{name}.values", values),
    ]


def flat_shard(tensors: Sequence[TensorSpec], parts: int, index: int) -> list[Piece]:
    """One part of tensors laid end to end, as pieces: a ZeRO shard.

    Args:
        tensors: The tensors, in the order of the flattened buffer.
        parts: Number of parts, each ceil(total / parts) elements but for the last ones.
        index: Which part, from 0.

    Raises:
        LayoutError: There is no such part.
    """
    if not 0 <= index < parts:
        raise LayoutError(f"no part {index} of {parts}")
    total = sum(t.elements for t in tensors)
    size = -(-total // parts)
    # Parts are rounded up, so the last ones may be short or empty
    low, high = min(index * size, total), min((index + 1) * size, total)
    pieces: list[Piece] = []
    offset = 0
    for tensor in tensors:
        first, last = max(low - offset, 0), min(high - offset, tensor.elements)
        if first < last:
            # A range of a tensor is several boxes, unless it begins and ends with whole rows
            pieces += [Piece(tensor.name, box) for box in flat_boxes(tensor.shape, first, last)]
        offset += tensor.elements
    return pieces
