"""What a process holds, read off the live objects: what a layout says it should hold can be compared with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from pipeline_balance.elastic.shards.experts import stacks
from pipeline_balance.pipeline.model.ownership import local, sum_of_bits
from prophet.errors import SpecError
from prophet.state.layout import Piece
from prophet.state.space import Box, flat_boxes


def held(model: nn.Module, *optimizers: Any) -> tuple[Piece, ...]:
    """The pieces that this process has memory for, by the names of training state: parameters, buffers, moments.

    `3.weight` is a parameter or a buffer, `3.weight@exp_avg` what an optimizer keeps for it. A tied parameter has the
    first of its names. What is on `meta` lives elsewhere. Of a `DTensor` it is this process's shard. Of a DeepSpeed
    engine with ZeRO 1 or 2 `3.weight@master` and moments are the range of elements that is here.

    Args:
        model: A module; of a DeepSpeed engine its `module`.
        *optimizers: Of its parameters.

    Raises:
        SpecError: For DeepSpeed's ZeRO 3.
    """
    names, stacked = {id(p): name for name, p in model.named_parameters()}, stacks(model)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    found: list[Piece] = []

    def add(name: str, parameter: str, tensor: Tensor) -> None:
        stack, pieces = stacked.get(parameter), pieces_of(name, tensor)
        # A part of experts: its rows are counted in the whole stack
        if stack is not None and tensor.shape == shapes[parameter]:
            pieces = [Piece(piece.name, _moved(piece.box, stack.first)) for piece in pieces]
        found.extend(pieces)

    for name, tensor in _tensors(model):
        add(name, name, tensor)
        found += _range_of(name, tensor)
    for optimizer in optimizers:
        for parameter, entries in optimizer.state.items():
            for entry, value in entries.items():
                if isinstance(value, Tensor) and id(parameter) in names:
                    add(f"{names[id(parameter)]}@{entry}", names[id(parameter)], value)
    return tuple(sorted(found))


def _range_of(name: str, parameter: Tensor) -> list[Piece]:
    """What DeepSpeed's ZeRO 1 and 2 keep here for a parameter: consecutive elements, which are one box or more."""
    # only ZeRO 3 sets it
    if hasattr(parameter, "ds_id"):
        raise SpecError(f"{name} is partitioned by DeepSpeed's ZeRO 3, which is not read: expected ZeRO 0, 1 or 2")
    # DeepSpeed links each 16-bit parameter to its fragment of the flat float32 one
    here: Any = getattr(parameter, "_hp_mapping", None)
    if here is None:
        return []
    first, many = here.lp_fragment_address.start, here.lp_fragment_address.numel
    boxes = flat_boxes(parameter.shape, first, first + many)
    return [Piece(f"{name}@{entry}", box) for entry in ("master", *(here.optim_fragment or {})) for box in boxes]


def _moved(box: Box, rows: int) -> Box:
    return Box((box.start[0] + rows, *box.start[1:]), (box.stop[0] + rows, *box.stop[1:]))


def digests(named: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """The box that this process has of every tensor, as text, with a digest of its bits."""
    found: dict[str, list[Any]] = {}
    for name, tensor in named.items():
        bits = sum_of_bits([tensor]) if pieces_of(name, tensor) else None
        if bits is not None:
            found[name] = [str(box_of(tensor)), int(bits)]
    return found


def refuse_apart(every: Sequence[Mapping[str, Sequence[Any]]]) -> None:
    """Raise `SpecError` where two ranks have the same part of a tensor with other bits, by the `digests` of all."""
    first: dict[tuple[str, str], tuple[int, int]] = {}
    for rank, parts in enumerate(every):
        for name, (box, bits) in parts.items():
            other, theirs = first.setdefault((name, box), (rank, bits))
            if bits != theirs:
                raise SpecError(f"ranks {other} and {rank} have copies of {name} that differ")


def cut_over(tensor: Tensor) -> list[tuple[int, ...]]:
    """The ranks over which each dimension of a `DTensor`'s mesh cuts it, this process's included.

    A mesh dimension that does not cut is left out; of other tensors there are none.

    Raises:
        SpecError: For a tensor that is a sum over ranks.
    """
    if not isinstance(tensor, DTensor):
        return []
    mesh, found = tensor.device_mesh, []
    here = mesh.get_coordinate()
    for d, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise SpecError(f"it is a sum over ranks ({placement})")
        if not placement.is_replicate() and mesh.size(d) > 1 and here is not None:
            # only these ranks' shards make up dimension d: at other coordinates are copies, or other cuts
            at = tuple(slice(None) if k == d else index for k, index in enumerate(here))
            found.append(tuple(int(rank) for rank in mesh.mesh[at]))
    return found


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def pieces_of(name: str, tensor: Tensor) -> list[Piece]:
    """What this process has memory for of a tensor; of a `DTensor` its shard."""
    mine = local(tensor)
    return [] if mine.is_meta or not mine.numel() else [Piece(name, box_of(tensor))]


def box_of(tensor: Tensor) -> Box:
    """The part of a tensor that is this process's: of a `DTensor` its shard."""
    if not isinstance(tensor, DTensor):
        return Box.whole(tensor.shape)
    return _cut(tuple(tensor.shape), tensor.device_mesh, tensor.placements)


# Layers have few shapes, and torch takes its time for each
@lru_cache(maxsize=256)
def _cut(whole: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Box:
    shape, offset = compute_local_shape_and_global_offset(whole, mesh, placements)
    return Box(tuple(offset), tuple(o + n for o, n in zip(offset, shape, strict=True)))
