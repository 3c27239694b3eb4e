"""A pipeline's training state through a checkpoint, written by one set of ranks and read by any other.

It holds tensors in torch's distributed format and, in JSON beside them, what they are. Nothing that stands in them is
run: `prophet.state.tensor_index` reads torch's index, which is a pickle.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from pipeline_balance.pipeline.trainer import PipelineTrainer
from pipeline_balance.pipeline.training_state import MAX_DESCRIPTION_BYTES, by_layer, collect, share
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from prophet.files import read_json, shown
from prophet.ranks.collective import Operation
from prophet.ranks.process_group import at_work
from prophet.state.space import Space, TensorSpec
from prophet.state.tensor_index import TensorReader
from prophet.state.transition import torch_dtype

DESCRIPTION = "pipeline.json"
_MOST = 1 << 53  # of any whole number


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What a checkpoint says of itself: the next step, and the stage map that the next run is meant to use."""

    step: int
    stage_map: StageMap
    space: Space
    scalars: dict[str, Any]
    frozen: frozenset[str]


def save_checkpoint(pipeline: PipelineTrainer, folder: Path, *, step: int, stage_map: StageMap | None = None) -> None:
    """Write parameters, buffers, optimizer state and random streams of all layers; collective, between steps.

    `stage_map` is for the run that reads it, on any number of ranks (None: the one in force). Gradients are not saved.
    The description is written last: a folder without it holds no checkpoint.
    """
    after = stage_map if stage_map is not None else pipeline.stage_map
    after.check_layers(pipeline.stage_map.layers)
    held = collect(pipeline.layers, pipeline.optimizer, gradients=False)
    space, scalars, frozen = share(held, pipeline.collective, pipeline.config.device)
    said = {
        "step": step,
        "boundaries": list(after.boundaries),
        "ranks": list(after.ranks),
        "tensors": [[t.name, list(t.shape), t.dtype, t.kind, t.layer] for t in space.tensors],
        "scalars": scalars,
        "frozen": sorted(frozen),
    }
    writer = pipeline.collective.rank == 0
    with at_work(f"writing {folder}"):
        if writer:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / DESCRIPTION).unlink(missing_ok=True)
        pipeline.collective.meet(Operation("starting a checkpoint"))
        save_tensors(dict(held.tensors), checkpoint_id=folder, process_group=pipeline.groups.group)
        if writer:
            part = folder / f"{DESCRIPTION}.part"
            part.write_text(json.dumps(said), encoding="utf-8")
            part.replace(folder / DESCRIPTION)
        pipeline.collective.meet(Operation("finishing a checkpoint"))


def read_checkpoint(folder: Path) -> Checkpoint:
    """The description of a checkpoint, without its tensors. Raises `SpecError`, naming the file, if it is none."""
    path = folder / DESCRIPTION
    said = read_json(path, most_bytes=MAX_DESCRIPTION_BYTES, expected="a finished checkpoint", error=SpecError)
    if not isinstance(said, dict):
        raise SpecError(f"{path}: expected an object written by save_checkpoint, got {shown(said)}")

    def field(name: str, fits: Callable[[Any], bool], expected: str) -> Any:
        if not fits(said.get(name)):
            raise SpecError(f"{path}: {name}: expected {expected}, got {shown(said.get(name))}")
        return said[name]

    step = field("step", _is_whole, "a whole number")
    boundaries, ranks = (field(n, _are_whole, "a list of whole numbers") for n in ("boundaries", "ranks"))
    try:
        stage_map = StageMap(tuple(boundaries), tuple(ranks))
    except SpecError as error:
        raise SpecError(f"{path}: boundaries, ranks: {error!s:.300}") from error
    tensors = field("tensors", lambda t: isinstance(t, list) and all(map(_is_tensor, t)), "lists of [name, shape, ...]")
    scalars = field("scalars", lambda s: isinstance(s, dict) and all(map(_is_scalar, s.values())), "numbers by name")
    frozen = field("frozen", lambda f: isinstance(f, list) and all(isinstance(n, str) for n in f), "a list of names")
    try:
        space = Space(tuple(TensorSpec(name=n, shape=tuple(s), dtype=d, kind=k, layer=i) for n, s, d, k, i in tensors))
    except SpecError as error:
        raise SpecError(f"{path}: tensors: {error!s:.300}") from error
    return Checkpoint(step=step, stage_map=stage_map, space=space, scalars=scalars, frozen=frozenset(frozen))


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _are_whole(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 63)


def _is_tensor(value: Any) -> bool:
    """Whether it is [name, shape, dtype, kind, layer]."""
    if not isinstance(value, list) or len(value) != 5:
        return False
    name, shape, dtype, kind, layer = value
    return all(isinstance(t, str) for t in (name, dtype, kind)) and _are_whole(shape) and _is_whole(layer)


def load_checkpoint(pipeline: PipelineTrainer, folder: Path) -> Checkpoint:
    """Take over the state that other ranks, of any number, have saved; collective, before the first step.

    The pipeline keeps its own stage map (build it with `read_checkpoint(folder).stage_map` to use the saved one).
    Raises `SpecError` on a checkpoint of another model, with the pipeline as it was.
    """
    saved = read_checkpoint(folder)
    saved.stage_map.check_layers(pipeline.stage_map.layers)
    layers = pipeline.builder.new_layers(pipeline.stage_map)
    pieces = by_layer(saved.space, pipeline.stage_map, pipeline.ranks).pieces[pipeline.rank]
    shapes = {piece.name: piece.box.shape for piece in pieces}
    for index, layer in layers.items():
        for name, parameter in layer.module.named_parameters():
            found = shapes.get(f"{index}/{name}")
            if found != tuple(parameter.shape):
                need = f"layer {index} needs {name} of shape {list(parameter.shape)}"
                raise SpecError(f"{folder}: {need}, the checkpoint has {'none' if found is None else list(found)}")
    state: dict[Any, Tensor] = {
        piece: torch.empty(piece.box.shape, dtype=torch_dtype(saved.space[piece.name]), device=pipeline.config.device)
        for piece in pieces
    }
    try:
        load_tensors(
            {piece.name: tensor for piece, tensor in state.items()},
            storage_reader=TensorReader(folder),
            process_group=pipeline.groups.group,
        )
    except CheckpointException as error:  # of any rank; all ranks get it
        rank, (why, _) = next(iter(error.failures.items()))
        raise SpecError(f"{folder}: rank {rank} cannot read its tensors: {why}") from error
    pipeline.adopt(layers, state, saved.scalars, set(saved.frozen))
    return saved
