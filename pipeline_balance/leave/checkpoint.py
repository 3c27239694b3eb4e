"""A pipeline's training state through a checkpoint, written by one set of ranks and read by any other.

It holds tensors in torch's distributed format and, in JSON beside them, what they are. Read only checkpoints that you
wrote yourself: torch keeps its index of them as a pickle.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from pipeline_balance.pipeline.trainer import PipelineTrainer
from pipeline_balance.pipeline.training_state import MAX_DESCRIPTION_BYTES, by_layer, collect, share
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from prophet.files import read_json
from prophet.ranks.collective import Operation
from prophet.state.space import Space, TensorSpec
from prophet.state.transition import torch_dtype

DESCRIPTION = "pipeline.json"


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
    if pipeline.collective.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / DESCRIPTION).unlink(missing_ok=True)
    _meet(pipeline, "starting a checkpoint")
    save_tensors(dict(held.tensors), checkpoint_id=folder, process_group=pipeline.groups.group)
    if pipeline.collective.rank == 0:
        said = {
            "step": step,
            "boundaries": list(after.boundaries),
            "ranks": list(after.ranks),
            "tensors": [[t.name, list(t.shape), t.dtype, t.kind, t.layer] for t in space.tensors],
            "scalars": scalars,
            "frozen": sorted(frozen),
        }
        part = folder / f"{DESCRIPTION}.part"
        part.write_text(json.dumps(said), encoding="utf-8")
        part.replace(folder / DESCRIPTION)
    _meet(pipeline, "finishing a checkpoint")


def read_checkpoint(folder: Path) -> Checkpoint:
    """The description of a checkpoint, without its tensors. Raises `SpecError`, naming the file, if it is none."""
    path = folder / DESCRIPTION
    said = read_json(path, most_bytes=MAX_DESCRIPTION_BYTES, expected="a finished checkpoint", error=SpecError)
    try:
        return Checkpoint(
            step=int(said["step"]),
            stage_map=StageMap(tuple(said["boundaries"]), tuple(said["ranks"])),
            space=Space(
                tuple(
                    TensorSpec(name=name, shape=tuple(shape), dtype=dtype, kind=kind, layer=layer)
                    for name, shape, dtype, kind, layer in said["tensors"]
                )
            ),
            scalars=dict(said["scalars"]),
            frozen=frozenset(said["frozen"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise SpecError(f"{path}: expected a description written by save_checkpoint ({error!r})") from error


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
    load_tensors(
        {piece.name: tensor for piece, tensor in state.items()},
        checkpoint_id=folder,
        process_group=pipeline.groups.group,
    )
    pipeline.adopt(layers, state, saved.scalars, set(saved.frozen))
    return saved


def _meet(pipeline: PipelineTrainer, why: str) -> None:
    pipeline.collective.all_gather(torch.zeros(1, dtype=torch.int64, device=pipeline.config.device), op=Operation(why))
