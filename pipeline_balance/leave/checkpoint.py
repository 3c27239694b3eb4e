"""A pipeline's training state through a checkpoint, written by one set of ranks and read by any other.

It holds tensors in torch's distributed format and, in JSON beside them, what they are. Nothing that stands in them is
run: `prophet.state.tensor_index` reads torch's index, which is a pickle.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from pipeline_balance.pipeline.agreement import from_all, refuse_where, write_alone
from pipeline_balance.pipeline.optimizers import meant, said
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.pipeline.training_state import MAX_DESCRIPTION_BYTES, Held, base_name, by_layer, share
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from prophet.files import read_json, shown
from prophet.ranks.collective import Operation
from prophet.ranks.process_group import at_work
from prophet.state.space import Space, TensorSpec
from prophet.state.streams import torch_dtype
from prophet.state.tensor_index import TensorReader

DESCRIPTION = "pipeline.json"
_MOST = 1 << 53  # of any whole number


class Stateful(Protocol):
    """What else a run has that is saved with it: a scheduler, a scaler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What a checkpoint says of itself: the next step, and the stage map that the next run is meant to use.

    `options` are the optimizers' groups, `progress` the run's counters, `also` what was saved beside them.
    """

    step: int
    stage_map: StageMap
    space: Space
    scalars: dict[str, Any]
    frozen: frozenset[str]
    options: list[Any]
    progress: dict[str, Any]
    also: dict[str, Any]


def save_checkpoint(
    pipeline: ElasticPipeline,
    folder: str | Path,
    *,
    step: int,
    stage_map: StageMap | None = None,
    also: Mapping[str, Stateful] | None = None,
) -> None:
    """Write parameters, buffers, optimizers with their groups, and the run's counters; collective, between updates.

    Names are the unsplit model's. `stage_map` is for the run that reads it, on any number of ranks (None: the one in
    force). `also` holds schedulers and the like, equal on all ranks, by a name of yours. The description is written
    last: a folder without it holds no checkpoint. Raises `SpecError` on all ranks where it cannot be written.
    """
    folder = Path(folder)
    world, device = pipeline.collective, pipeline.config.device
    held, parts = Held(), dict[str, Any]()

    def collect() -> list[Any]:
        nonlocal held
        after = stage_map if stage_map is not None else pipeline.stage_map
        after.check_layers(pipeline.stage_map.layers)
        if pipeline.progress.parts:
            raise SpecError(
                "an update is under way and its gradients would be lost: save after a step with update=True"
            )
        held = pipeline.held()
        parts.update(
            step=step,
            boundaries=list(after.boundaries),
            ranks=list(after.ranks),
            frozen=sorted(n for n, p in pipeline.owned.parameters.items() if not p.requires_grad),
            options=pipeline.optimizers.options(pipeline.owned.parameters),
            progress=pipeline.progress.to_json(),
            also={name: said(it.state_dict(), name) for name, it in (also or {}).items()},
        )
        return [str(folder), step, parts["boundaries"], parts["ranks"], sorted(parts["also"])]

    op = Operation("collecting a checkpoint")
    refuse_where(from_all(collect, world, device, op), "save to another folder, or another step, map or `also`,")
    space, scalars = share(held, world, device, "nothing was saved")
    tensors = [[t.name, list(t.shape), t.dtype, t.kind, t.layer] for t in space.tensors]

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / DESCRIPTION).unlink(missing_ok=True)

    def finish() -> None:
        part = folder / f"{DESCRIPTION}.part"
        part.write_text(json.dumps({**parts, "tensors": tensors, "scalars": scalars}), encoding="utf-8")
        part.replace(folder / DESCRIPTION)

    write_alone(begin, f"making {folder}", world, device)
    try:
        with at_work(f"writing {folder}"):
            save_tensors(dict(held.tensors), checkpoint_id=folder, process_group=pipeline.groups.group)
    except CheckpointException as error:  # of any rank; all ranks get it
        raise SpecError(f"{folder}: {_first_failure(error)} cannot write its tensors") from error
    write_alone(finish, f"finishing {folder}", world, device)


def _first_failure(error: CheckpointException) -> str:
    """The first rank that has failed, and why."""
    rank, (why, _) = next(iter(error.failures.items()))
    return f"rank {rank} ({type(why).__name__}: {why})"


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """The description of a checkpoint, without its tensors. Raises `SpecError`, naming the file, if it is none."""
    path = Path(folder) / DESCRIPTION
    found = read_json(path, most_bytes=MAX_DESCRIPTION_BYTES, expected="a finished checkpoint", error=SpecError)
    if not isinstance(found, dict):
        raise SpecError(f"{path}: expected an object written by save_checkpoint, got {shown(found)}")

    def field(name: str, fits: Callable[[Any], bool], expected: str) -> Any:
        if not fits(found.get(name)):
            raise SpecError(f"{path}: {name}: expected {expected}, got {shown(found.get(name))}")
        return found[name]

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
    return Checkpoint(
        step=step,
        stage_map=stage_map,
        space=space,
        scalars=scalars,
        frozen=frozenset(frozen),
        options=field("options", _are_options, "the optimizers' groups"),
        progress=field("progress", lambda p: isinstance(p, dict), "the run's counters"),
        also=field("also", lambda a: isinstance(a, dict), "what was saved beside the model"),
    )


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


def _are_options(value: Any) -> bool:
    """Whether it is a list of optimizers' lists of groups."""

    def is_group(group: Any) -> bool:
        if not isinstance(group, dict) or not isinstance(group.get("options"), dict):
            return False
        names = group.get("parameters")
        return isinstance(names, list) and all(isinstance(n, str) for n in names)

    return isinstance(value, list) and all(isinstance(o, list) and all(map(is_group, o)) for o in value)


def load_checkpoint(
    pipeline: ElasticPipeline, folder: str | Path, *, also: Mapping[str, Stateful] | None = None
) -> Checkpoint:
    """Take over the state that other ranks, of any number, have saved; collective, before the first step.

    The pipeline keeps its own stage map (build it with `read_checkpoint(folder).stage_map` to use the saved one).
    `also` gets what was saved under the same names. Raises `SpecError` on a checkpoint of another model or other
    optimizer groups, with the pipeline as it was.
    """
    folder = Path(folder)
    world, device = pipeline.collective, pipeline.config.device
    found: list[tuple[Checkpoint, dict[Any, Tensor]]] = []

    def check() -> int:
        saved = _fitting(pipeline, folder, also or {})
        layout = by_layer(saved.space, pipeline.stage_map, pipeline.ranks, pipeline.owned.tied())
        state = {
            piece: torch.empty(piece.box.shape, dtype=torch_dtype(saved.space[piece.name]), device=device)
            for piece in layout.pieces[pipeline.rank]
        }
        found.append((saved, state))
        return saved.step

    refuse_where(from_all(check, world, device, Operation("reading a checkpoint")), "read a checkpoint of another step")
    saved, state = found[0]
    try:
        load_tensors(
            {piece.name: tensor for piece, tensor in state.items()},
            storage_reader=TensorReader(folder),
            process_group=pipeline.groups.group,
        )
    except CheckpointException as error:  # of any rank; all ranks get it
        raise SpecError(f"{folder}: {_first_failure(error)} cannot read its tensors") from error
    pipeline.adopt(state, saved.scalars, saved.frozen, saved.options, saved.progress)

    def restore() -> None:
        for name, it in (also or {}).items():
            it.load_state_dict(meant(saved.also[name]))

    from_all(restore, world, device, Operation("loading what was saved beside a model"))
    return saved


def _fitting(pipeline: ElasticPipeline, folder: Path, also: Mapping[str, Stateful]) -> Checkpoint:
    """The checkpoint's description; raises `SpecError` unless it is of this model, these optimizers and `also`."""
    saved = read_checkpoint(folder)
    saved.stage_map.check_layers(pipeline.stage_map.layers)
    missing = sorted(set(also) - set(saved.also))
    if missing:
        raise SpecError(f"{folder}: holds no state of {missing}, only of {sorted(saved.also)}")
    owned = pipeline.owned
    owned.read()
    spaces = {t.name: t for t in saved.space.tensors}
    for name, parameter in owned.parameters.items():
        found = spaces.get(name)
        if found is None or found.shape != tuple(parameter.shape):
            need = f"the model needs {name} of shape {list(parameter.shape)}"
            raise SpecError(f"{folder}: {need}, the checkpoint has {'none' if found is None else list(found.shape)}")
    strange = sorted(n for n in spaces if base_name(n) not in owned.units_of)
    if strange:
        raise SpecError(f"{folder}: holds {strange[0]}, which the model does not have")
    pipeline.optimizers.check(saved.options, owned.parameters)
    return saved
