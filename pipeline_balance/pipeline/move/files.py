"""The training state of a pipeline in files: what they say, how it is written, and how it takes the place of another.

A checkpoint holds the state of the unsplit model by its names: tensors as boxes, and in its description what is no
tensor. It says nothing of the layout that wrote it. Loading is a move whose state comes from files: the same layouts
say which boxes a process is to have, and the same assignments put them in force once all processes have them.
"""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from pipeline_balance.pipeline.model.ownership import number_of
from pipeline_balance.pipeline.model.registered import MARK
from pipeline_balance.pipeline.move.pipeline_state import (
    Built,
    PipelineState,
    TrainingLayout,
    copies,
    refuse_copies_apart,
)
from pipeline_balance.pipeline.move.stage_map import Change
from pipeline_balance.pipeline.move.state import Held, base_name, spec_rows
from pipeline_balance.pipeline.move.transaction import Assignments, apply
from pipeline_balance.pipeline.run.agreement import from_all, refuse_where
from pipeline_balance.pipeline.run.progress import Progress
from pipeline_balance.pipeline.run.stages import PipelineConfig
from pipeline_balance.spec import StageMap
from prophet.errors import CheckpointError, SpecError
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import at_work
from prophet.state.checkpoint.files import Agree, Files, by_tensor, write
from prophet.state.checkpoint.folder import DESCRIPTION, MAX_DESCRIPTION_BYTES, read_description, tensors_of
from prophet.state.json_values import from_json, to_json
from prophet.state.layout import Layout, Piece
from prophet.state.space import Space, StateKind, TensorSpec
from prophet.state.streams import torch_dtype

# the largest whole number that is accepted: what any reader of JSON holds exactly
_MOST = 1 << 53


class Stateful(Protocol):
    """Something that is saved with a run, such as a scheduler or a scaler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


Also = Mapping[str, Stateful] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What a checkpoint says of itself.

    Attributes:
        tensors: The folder of its tensors.
        step: The next step's number.
        stage_map: The map that the next run is to use, unless it has another.
        space: All tensors by name, shape and type.
        scalars: Plain numbers that optimizers keep, by name.
        frozen: Names of the parameters that did not train.
        optimizers: The optimizers' classes.
        options: Their groups, [optimizer][group].
        progress: The run's counters.
        also: What was saved beside them, by name.
        run: What a job or a pipeline adds.
    """

    tensors: Path
    step: int
    stage_map: StageMap
    space: Space
    scalars: dict[str, Any]
    frozen: frozenset[str]
    optimizers: list[str]
    options: list[Any]
    progress: dict[str, Any]
    also: dict[str, Any]
    run: dict[str, Any]

    def digest(self) -> int:
        """Digest all that it says, for comparing over processes."""
        # the folder is compared by its name alone, as mounts may differ; a set has no order
        values = [getattr(self, f.name) for f in fields(self) if f.name not in ("tensors", "frozen")]
        return number_of(repr([values, sorted(self.frozen)]))


Configured = Callable[[Checkpoint, PipelineConfig], PipelineConfig]
"""What a checkpoint changes about a run's settings; it may not fail."""


# --- what a checkpoint says ---


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """Read the description of a checkpoint, without its tensors.

    Raises:
        CheckpointError: `folder` holds no checkpoint; names the file. It is a `SpecError`.
    """
    folder = Path(folder)
    path, found = folder / DESCRIPTION, read_description(folder)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected an object written by pipe.save or job.save, got {found!r:.60}")

    # every field is checked before use: a file may be damaged, or written by anyone
    def field(name: str, fits: Callable[[Any], bool], expected: str) -> Any:
        if not fits(found.get(name)):
            raise CheckpointError(f"{path}: {name}: expected {expected}, got {found.get(name)!r:.60}")
        return found[name]

    step = field("step", _is_whole, "a whole number")
    boundaries, ranks = (field(n, _are_whole, "a list of whole numbers") for n in ("boundaries", "ranks"))
    try:
        stage_map = StageMap(tuple(boundaries), tuple(ranks))
    except SpecError as error:
        raise CheckpointError(f"{path}: boundaries, ranks: {error!s:.300}") from error
    tensors = field("tensors", lambda t: isinstance(t, list) and all(map(_is_tensor, t)), "lists of [name, shape, ...]")
    try:
        space = Space(tuple(TensorSpec(name=n, shape=tuple(s), dtype=d, kind=k, layer=i) for n, s, d, k, i in tensors))
    except SpecError as error:
        raise CheckpointError(f"{path}: tensors: {error!s:.300}") from error
    return Checkpoint(
        step=step,
        stage_map=stage_map,
        space=space,
        scalars=field("scalars", lambda s: isinstance(s, dict) and all(map(_is_scalar, s.items())), "numbers by name"),
        frozen=frozenset(field("frozen", _are_names, "a list of names")),
        optimizers=field("optimizers", _are_names, "the optimizers' classes"),
        options=field("options", _are_options, "the optimizers' groups"),
        progress=field("progress", lambda p: isinstance(p, dict), "the run's counters"),
        also=field("also", lambda a: isinstance(a, dict), "what was saved beside the model"),
        run=field("run", lambda r: isinstance(r, dict), "what a job or a pipeline adds"),
        tensors=tensors_of(folder, found),
    )


def _is_whole(value: Any) -> bool:
    # `isinstance` would take true and false for numbers
    return type(value) is int and 0 <= value <= _MOST


def _are_whole(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, str) for n in value)


def _is_scalar(item: tuple[str, Any]) -> bool:
    """Whether it is a number by the name of an optimizer's entry, with the type of its tensor if it was one."""
    _, _, entry = item[0].partition("@")
    dtype, value = entry.partition(":")[2], item[1]
    # the name is looked up in torch later, so it must be one of these
    if dtype and dtype not in _NUMBERS:
        return False
    return value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 63)


_NUMBERS = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


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
        return _are_names(group.get("parameters"))

    return isinstance(value, list) and all(isinstance(o, list) and all(map(is_group, o)) for o in value)


# --- writing ---


def save_state(
    pipeline_state: PipelineState,
    folder: str | Path,
    *,
    step: int,
    stage_map: StageMap,
    also: Also,
    run: Mapping[str, Any] | None = None,
) -> None:
    """Write the state that `pipeline_state` would move, with its counters, between updates; collective over all
    processes.

    Args:
        pipeline_state: The pipeline's training state.
        folder: Where the checkpoint goes, a place that all processes reach.
        step: Number of the next step.
        stage_map: For the run that reads it.
        also: What else to save, by name.
        run: What a job or a pipeline adds, as JSON holds it.

    Raises:
        SpecError: On all processes where one cannot write, with the checkpoint in `folder` as it was.
    """
    with pipeline_state.during("saving before step"):
        pipeline_state.check_static("save or load a checkpoint")
        _save(pipeline_state, Path(folder), step, stage_map, also, run)


def _save(
    pipeline_state: PipelineState,
    folder: Path,
    step: int,
    stage_map: StageMap,
    also: Also,
    run: Mapping[str, Any] | None,
) -> None:
    agree, mover = _agreement(pipeline_state), pipeline_state.mover
    here, kept = mover.groups.world.rank, [Held()]
    parts = dict[str, Any]()

    def describe() -> dict[str, Any]:
        stage_map.check_layers(pipeline_state.now.stage_map.layers)
        if pipeline_state.passes.progress.parts:
            raise SpecError(
                "an update is under way and its gradients would be lost: save after a step with update=True"
            )
        # modules may have come since the last step, whose state belongs into the checkpoint
        pipeline_state.passes.read_model()
        held = pipeline_state.describe()
        if isinstance(held, str):
            raise SpecError(held)
        kept[0] = held = held.dense(mover.owned)
        parts.update(
            step=step,
            boundaries=list(stage_map.boundaries),
            ranks=list(stage_map.ranks),
            frozen=sorted(n for n, p in mover.owned.parameters.items() if not p.requires_grad),
            optimizers=[type(o).__name__ for o in mover.optimizers.all],
            options=mover.optimizers.options(mover.owned.parameters),
            progress=pipeline_state.passes.progress.to_json(),
            also={name: to_json(it.state_dict(), name) for name, it in (also or {}).items()},
            run=dict(run or {}),
        )
        # apart from the other settings, as users can tell these from a call
        alike = [str(folder), step, parts["boundaries"], parts["ranks"], sorted(parts["also"])]
        settings_digest = number_of(
            json.dumps([parts[n] for n in ("frozen", "options", "progress", "run")], sort_keys=True)
        )
        state = {"tensors": spec_rows(held.specs), "scalars": pipeline_state.numbers_to_vote(held)}
        return {"alike": alike, "settings": settings_digest, "number": secrets.randbits(48), **state}

    every = agree("collecting a checkpoint", describe)
    refuse_where([row["alike"] for row in every], "save to another folder, or another step, map or `also`,")
    refuse_where([row["settings"] for row in every], "have other options, counters or frozen parameters")
    layouts: list[tuple[Space, Layout]] = []

    def compare() -> dict[str, int]:
        layouts.append(pipeline_state.held_by([row["tensors"] for row in every]))
        scalars = dict[str, Any]()
        for row in reversed(every):
            # of the lowest process
            scalars.update(row["scalars"])
        parts.update(tensors=spec_rows(layouts[0][0].tensors), scalars=scalars)
        # found now, as the checkpoint would be written and then refused by every reader
        if len(json.dumps(parts)) > MAX_DESCRIPTION_BYTES - 100:
            raise SpecError(f"{folder}: a description of more than {MAX_DESCRIPTION_BYTES} bytes could not be read")
        return copies(layouts[0][1], here, kept[0])

    # one copy of each tensor is written, so copies that differ would be lost in silence
    refuse_copies_apart(agree("comparing copies", compare))
    space, layout = layouts[0]
    state = {piece: kept[0].tensors[piece.name] for piece in layout.on(here)}
    # the first process's random number names the folder of tensors, the same one for all
    number = int(every[0]["number"])
    write(folder, number, parts, by_tensor(space, state), agree, group=mover.groups.group, first=here == 0)


def _agreement(pipeline_state: PipelineState) -> Agree:
    """How processes agree: what fails on one is raised on all, as `SpecError`. One that is at work is waited for."""
    world = pipeline_state.mover.groups.world

    def agree(what: str, call: Callable[[], Any]) -> list[Any]:
        # reading and writing may take longer than a wait for another rank may
        return from_all(call, world, Operation(what), waits=True)

    return agree


# --- reading ---


def load_state(
    pipeline_state: PipelineState,
    target: TrainingLayout,
    folder: str | Path,
    *,
    also: Also,
    check: Callable[[Checkpoint], None] = lambda saved: None,
    configured: Configured = lambda saved, config: config,
    then: Assignments = (),
) -> Checkpoint:
    """Go to the layout `target` with the state in `folder`; collective over all processes, all or nothing.

    Args:
        pipeline_state: The pipeline's training state.
        target: Who is to run what.
        folder: A checkpoint.
        also: What gets back what was saved beside the state, by name.
        check: Refuses more checkpoints, by raising.
        configured: From the settings in force there to those that the run goes on with.
        then: Assignments that follow those of the state.

    Returns:
        What the checkpoint says.

    Raises:
        SpecError: On all processes, with all as it was, where the checkpoint does not fit or cannot be read.
    """
    with pipeline_state.during("loading before step"):
        pipeline_state.check_static("save or load a checkpoint")
        return _load(pipeline_state, target, Path(folder), also, check, configured, then)


def _load(
    pipeline_state: PipelineState,
    target: TrainingLayout,
    folder: Path,
    also: Also,
    check: Callable[[Checkpoint], None],
    configured: Configured,
    then: Assignments,
) -> Checkpoint:
    agree, mover = _agreement(pipeline_state), pipeline_state.mover
    here = mover.groups.world.rank
    found: list[tuple[Checkpoint, Files, dict[Piece, Tensor]]] = []

    def begin() -> list[Any]:
        saved = _fitting(pipeline_state, read_checkpoint(folder), folder, also or {})
        check(saved)
        files = Files(saved.tensors)
        files.check_space(saved.space)
        # new memory: until all have read, the state in force stays whole
        layout = pipeline_state.layout(saved.space, target, mover.groups.world.size)
        state = {
            piece: mover.allocate(piece.box.shape, torch_dtype(saved.space[piece.name]), mover.device)
            for piece in layout.on(here)
        }
        found.append((saved, files, state))
        return [saved.tensors.name, saved.digest()]

    refuse_where(agree("reading a checkpoint", begin), "read another checkpoint")
    saved, files, state = found[0]
    with at_work(f"reading {folder}"):
        files.read(by_tensor(saved.space, state), folder, group=mover.groups.group)
    to = pipeline_state.going(target, saved.space)
    to = replace(to, config=configured(saved, to.config))
    made: list[tuple[Built, Change]] = []
    before: list[tuple[Stateful, Any]] = []

    def assemble() -> None:
        built = pipeline_state.build(to, {piece.name: piece.box for piece in state})
        made.append((built, pipeline_state.change(to, built, state, saved.scalars)))
        # a user's `load_state_dict` may fail halfway, here or on another rank: what was there is kept, to be put back
        for name, it in (also or {}).items():
            before.append((it, copy.deepcopy(it.state_dict())))
            it.load_state_dict(from_json(saved.also[name]))

    try:
        agree("loading a checkpoint", assemble)
    except Exception:
        for it, state_before in before:
            # the error that led here is the one to raise
            with suppress(Exception):
                it.load_state_dict(state_before)
        raise
    # checked by `_fitting` already, so it cannot fail here
    progress = Progress()
    progress.take(saved.progress)

    def options() -> None:
        mover.optimizers.set_options(saved.options)
        for name, parameter in mover.owned.parameters.items():
            parameter.requires_grad_(name not in saved.frozen)

    placed = pipeline_state.assignments(to, *made[0])
    apply(
        [pipeline_state.passes.drop_gradients, *placed, options, lambda: pipeline_state.passes.resume(progress), *then]
    )
    return saved


def _fitting(
    pipeline_state: PipelineState, saved: Checkpoint, folder: Path, also: Mapping[str, Stateful]
) -> Checkpoint:
    """The checkpoint with this model's layers; `SpecError` unless it is of this model, its optimizers and `also`."""
    owned, optimizers = pipeline_state.mover.owned, pipeline_state.mover.optimizers
    saved.stage_map.check_layers(pipeline_state.now.stage_map.layers)
    missing = sorted(set(also) - set(saved.also))
    if missing:
        raise SpecError(f"{folder}: holds no state of {missing}, only of {sorted(saved.also)}")
    owned.read()
    for name, shape in pipeline_state.shapes().items():
        dtype = owned.whole(name).dtype
        found = saved.space[name] if name in saved.space.number else None
        if found is None or found.shape != shape:
            need, got = f"{name} of shape {list(shape)}", "none" if found is None else str(list(found.shape))
            raise SpecError(f"{folder}: the model needs {need}, the checkpoint has {got}")
        if torch_dtype(found) != dtype:
            raise SpecError(f"{folder}: the model needs {name} of {dtype}, the checkpoint has {found.dtype}")
    specs = []
    for spec in saved.space.tensors:
        base = base_name(spec.name)
        if base not in owned.units_of or (base in owned.buffers and spec.name != base):
            raise SpecError(f"{folder}: holds {spec.name}, which the model does not have")
        if spec.kind != _kind(spec.name, base in owned.buffers):
            raise SpecError(f"{folder / DESCRIPTION}: tensors: {spec.name} cannot be of kind {spec.kind!r}")
        # by the layers of this model, whatever the file says
        specs.append(replace(spec, layer=owned.units_of[base][0]))
    mine = [type(o).__name__ for o in optimizers.all]
    if mine != saved.optimizers:
        raise SpecError(f"{folder}: expected the state of {mine}, the checkpoint has that of {saved.optimizers}")
    optimizers.check(saved.options, owned.parameters)
    Progress().take(saved.progress)
    return replace(saved, space=Space(tuple(specs)))


def _kind(name: str, buffer: bool) -> StateKind | None:
    """What a tensor of this name is; None for one that no checkpoint holds."""
    if "#" in name:
        return None
    if "@" in name:
        return "optimizer"
    if MARK in name:
        return "registered"
    return "buffer" if buffer else "parameter"
