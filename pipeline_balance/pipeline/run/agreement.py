"""What ranks compare before data moves, so that a mistake on one rank is one named error on all of them.

Shape legend: P ranks, M microbatches.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeline_balance.pipeline.model.layers import Activations, Batch, Inputs, Labels, Microbatch, PipelineModel
from pipeline_balance.pipeline.model.ownership import Ownership, number_of
from pipeline_balance.pipeline.run.executor import Executor
from pipeline_balance.pipeline.run.optimizers import Optimizers
from pipeline_balance.pipeline.run.stages import PipelineGroups
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from prophet.ranks.collective import Collective
from prophet.ranks.json_messages import gather_json, reasons_text
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import at_work

# of a tensor that are compared at every step: some milliseconds
_WHOLE_BYTES = 1 << 24
# elements that are taken together of a larger one
_RUN = 256
# of an error that travel to other ranks
_MOST_CHARACTERS = 2000
# what is compared, and among whom; errors begin with "ranks [...]", so each is a verb with its object
_COMPARED = (
    ("hold a model with other names, shapes or types", "all"),
    ("train (requires_grad) other parameters", "all"),
    ("call with other arguments", "all"),
    ("follow another schedule", "all"),
    ("have other options (such as the learning rate) in their optimizers' groups", "all"),
    ("have inputs of other shapes", "replica"),
    ("were given other inputs or labels", "data"),
    ("hold other weights of the same stages", "column"),
    ("would run the stages that share experts in another order, or on other microbatches,", "column"),
)


@dataclass(frozen=True, kw_only=True)
class Passing:
    """A batch that is about to pass the stages.

    Attributes:
        microbatches: How many there are here.
        parts: Microbatches [M], or their slices [M N].
        shapes: The activations of every part, without memory.
        counted: How many labels count; once agreed on, of all replicas.
        data: A digest of inputs and labels.
        rows: The largest microbatch's size; once agreed on, of all replicas.
        asks: Whether the model is to choose first how it is cut; once agreed on, whether any rank says so.
    """

    microbatches: int
    parts: list[Microbatch]
    shapes: list[list[Activations]]
    counted: float
    data: int
    rows: int
    asks: bool = False

    @classmethod
    def nothing(cls) -> Passing:
        """What a process passes that has no stages."""
        return cls(microbatches=0, parts=[], shapes=[], counted=0, data=0, rows=0)


def batch_of(
    model: PipelineModel,
    inputs: Batch,
    labels: Labels,
    microbatches: int,
    first: int,
    device: torch.device,
    *,
    rows_each: int | None = None,
) -> Passing:
    """Cut a batch into microbatches and find their shapes.

    Args:
        model: The model, which cuts.
        inputs: A tensor, tensors by name, or a sequence of either, which is microbatches already.
        labels: Labels, or a sequence of them with a sequence of inputs.
        microbatches: How many parts to make.
        first: Number of the first part.
        device: Where this rank computes.
        rows_each: Rows of a part (None: as `microbatches` make). With it there may be any number of parts.

    Raises:
        SpecError: The batch is not of these kinds, or cannot be cut.
    """
    whole: list[Microbatch] = []
    checksums: list[str] = []
    for one, its, count in _given(inputs, labels, microbatches, rows_each):
        here = one.to(device) if isinstance(one, Tensor) else {n: t.to(device) for n, t in one.items()}
        whole += model.cut(here, its.to(device) if its is not None else None, count, first + len(whole))
        tensors = [one] if isinstance(one, Tensor) else list(one.values())
        # of what was given and not of the copy on the device, which would have to come back
        checksums += [_checksum(t) for t in (*tensors, *([its] if its is not None else []))]
    parts = [part for one in whole for part in model.sliced(one)]
    # most parts are alike, and models look through all their modules to see whether they have changed
    shapes = {part.shapes(): model.activations(part) for part in {part.shapes(): part for part in parts}.values()}
    return Passing(
        microbatches=len(whole),
        parts=parts,
        shapes=[shapes[part.shapes()] for part in parts],
        counted=sum(model.counted(part) for part in parts),
        data=number_of(" ".join(checksums)),
        rows=max((next(iter(part.inputs.values())).shape[0] for part in parts), default=0),
        asks=model.asks,
    )


def _given(
    inputs: Any, labels: Any, microbatches: int, rows_each: int | None
) -> list[tuple[Inputs, Tensor | None, int]]:
    """What was given, each with the number of microbatches that it is to be cut into."""
    by_microbatch = isinstance(inputs, list | tuple)
    if by_microbatch:
        wanted = max(len(inputs), 1) if rows_each is not None else microbatches
        theirs = [None] * len(inputs) if labels is None else labels
        if not isinstance(theirs, list | tuple) or not len(inputs) == len(theirs) == wanted:
            raise SpecError(f"inputs and labels by microbatch must be two sequences of {wanted}")
        every = [(one, its, 1) for one, its in zip(inputs, theirs, strict=True)]
    else:
        every = [(inputs, labels, microbatches)]
    for one, its, _ in every:
        tensors = list(one.values()) if isinstance(one, Mapping) else [one]
        if not tensors or not all(isinstance(t, Tensor) for t in tensors):
            raise SpecError(f"every rank needs the batch: expected a tensor or a dictionary of them, got {one!r:.100}")
        if its is not None and not isinstance(its, Tensor):
            raise SpecError(f"labels must be a tensor or None, got a {type(its).__name__}")
    if rows_each is None or by_microbatch:
        return every
    # 0 rows each: no training step has shown yet how many fit
    rows = (inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))).shape[0]
    return [(inputs, labels, max(-(-rows // rows_each), 1) if rows_each else min(microbatches, max(rows, 1)))]


def _checksum(tensor: Tensor) -> str:
    """A checksum of a tensor: of all of it up to `_WHOLE_BYTES`, of as many in even distances where it has more."""
    flat = tensor.detach().reshape(-1)
    every = -(-flat.numel() * flat.element_size() // _WHOLE_BYTES)
    if every > 1:
        # runs of neighbours instead of single elements, which would cost a cache line each
        flat = flat[: flat.numel() // _RUN * _RUN].view(-1, _RUN)[::every]
    return str(zlib.crc32(flat.cpu().contiguous().view(torch.uint8).numpy().data))


def actions_of(executor: Executor | None, *, training: bool) -> Callable[[Passing], str]:
    """Return a function that describes what an executor will do with a batch; an empty text without an executor."""

    def actions(passing: Passing) -> str:
        if executor is None:
            return ""
        steps = executor.training if training else executor.evaluation(len(passing.parts))
        return " ".join(map(str, steps))

    return actions


def from_all(attempt: Callable[[], Any], collective: Collective, op: Operation, *, waits: bool = False) -> list[Any]:
    """Call `attempt` on every rank and gather the results, by rank, as JSON holds them; collective.

    Args:
        attempt: What each rank does; local.
        collective: Over all ranks.
        op: What errors call it.
        waits: Whether `attempt` may take longer on some ranks than a wait for another rank may.

    Raises:
        SpecError: On all ranks where it fails on one, with that rank and its reason.
    """
    found, failed = None, None
    try:
        with at_work(str(op)) if waits else nullcontext():
            found = attempt()
    except Exception as error:
        failed = error
    # unlike a collective, `meet` waits as long as the others are at work
    if waits:
        collective.meet(op)
    return _gather_or_refuse(failed, found, collective, op)


def alike(attempt: Callable[[], str], collective: Collective, op: Operation) -> list[str]:
    """Gather as `from_all` does, quickly where all ranks return the same text.

    Args:
        attempt: What each rank does; local.
        collective: Over all ranks.
        op: What errors call it.

    Raises:
        SpecError: On all ranks where it fails on one, with that rank and its reason.
    """
    found, failed = "", None
    try:
        found = attempt()
    except Exception as error:
        failed = error
    # a digest travels; the texts themselves only where they differ
    mine = torch.tensor([int(failed is not None), number_of(found)])
    every = collective.gather_at_once(mine, op=op).tolist()
    if not any(bad for bad, _ in every) and all(number == every[0][1] for _, number in every):
        return [found] * collective.size
    return _gather_or_refuse(failed, found, collective, op)


def _gather_or_refuse(failed: Exception | None, found: Any, collective: Collective, op: Operation) -> list[Any]:
    every = gather_json([error_text(failed), found], collective, op)
    refuse(failed, [reason for reason, _ in every])
    return [value for _, value in every]


def write_alone(write: Callable[[], None], what: str, collective: Collective) -> None:
    """Call `write` on rank 0; all ranks return once it has, however long that takes; collective.

    Args:
        write: Writes; local.
        what: What errors call it.
        collective: Over all ranks.

    Raises:
        SpecError: On all ranks where it fails, with the reason.
    """
    from_all(lambda: write() if collective.rank == 0 else None, collective, Operation(what), waits=True)


def error_text(failed: Exception | None) -> str:
    """Describe a rank's failure in at most 2,000 characters; empty without one."""
    if failed is None:
        return ""
    # texts of `SpecError` are written for users, others mean little without their type
    kind = "" if isinstance(failed, SpecError) else f"{type(failed).__name__}: "
    return f"{kind}{failed}"[:_MOST_CHARACTERS]


def refuse(failed: Exception | None, reasons: Sequence[str]) -> None:
    """Raise `SpecError` with the ranks' reasons, the same on all of them; return where all are empty."""
    if any(reasons):
        # what is wrong on all of them needs no rank
        alike = len(set(reasons)) == 1
        raise SpecError(reasons[0] if alike else reasons_text(reasons, most=len(reasons))) from failed


def refuse_where(every: Sequence[Any], what: str) -> None:
    """Raise `SpecError` on all ranks unless all values are equal; `what` says what the ranks that differ do."""
    differ = [r for r, value in enumerate(every) if value != every[0]]
    if differ:
        raise SpecError(f"ranks {differ} {what} than rank 0")


def agree_on_batch(
    prepare: Callable[[], Passing],
    owned: Ownership,
    optimizers: Optimizers,
    arguments: Sequence[Any],
    groups: PipelineGroups,
    actions: Callable[[Passing], str],
    weights: int,
    schedule: int,
) -> Passing:
    """Prepare a batch, once all ranks mean the same; collective, one small all-gather.

    Args:
        prepare: Makes this rank's part of the batch; local.
        owned: The model's parameters and buffers.
        optimizers: Their options are compared.
        arguments: Arguments of the call, equal on all ranks.
        groups: The pipeline's communicators.
        actions: Describes what this rank would run; equal on the ranks with these stages in all replicas.
        weights: A digest of weights, equal on the same ranks.
        schedule: A digest of all ranks' actions.

    Returns:
        This rank's batch, with the labels and rows of all replicas.

    Raises:
        SpecError: On all ranks where it fails on one, with that rank and its reason, or where ranks differ.
    """
    failed: Exception | None = None
    passing = Passing.nothing()
    try:
        passing = prepare()
    except Exception as error:
        failed = error
    shapes = [[(list(t.shape), str(t.dtype), t.requires_grad) for b in row for t in b] for row in passing.shapes]
    mine = [
        owned.structure(),
        owned.trainable(),
        number_of(repr(tuple(arguments))),
        schedule,
        optimizers.digest(),
        number_of(repr((passing.counted, shapes))),
        passing.data,
        weights,
        number_of(actions(passing)),
    ]
    # one gather for everything: the bits of a float64 travel as an integer
    count = int(torch.tensor(passing.counted, dtype=torch.float64).view(torch.int64))
    row = torch.tensor([int(failed is not None), *mine, int(passing.asks), passing.rows, count], dtype=torch.int64)
    every = groups.world.all_gather(row, op=Operation("agreeing on a batch"))
    if every[:, 0].any():
        # reasons are texts, so they travel only where there are some
        op = Operation("telling what is wrong with a batch")
        refuse(failed, gather_json(error_text(failed), groups.world, op))
    grid = groups.grid
    ranks = range(groups.world.size)
    first_of = {
        "all": [0 for _ in ranks],
        "replica": [grid.first_beside(r) for r in ranks],
        "data": [grid.first_with_data(r) for r in ranks],
        "column": [grid.first_alike(r) for r in ranks],
    }
    for column, (what, among) in enumerate(_COMPARED, start=1):
        values = every[:, column].tolist()
        first = first_of[among]
        differ = [r for r, x in enumerate(values) if x != values[first[r]]]
        if differ:
            raise SpecError(f"ranks {differ} {what} than rank {first[differ[0]]}")
    # one rank of each replica, as all ranks of a replica count the same labels
    counted = float(every[[row[0] for row in grid.rows], -1].view(torch.float64).sum())
    return replace(passing, counted=counted, rows=int(every[:, -2].amax()), asks=bool(every[:, -3].any()))


def agree_on_model(
    describe: Callable[[], Mapping[str, Any]], collective: Collective
) -> tuple[StageMap, list[int], dict[str, Any]]:
    """Compare the ranks' models and find the stage map of those that know it; collective.

    Args:
        describe: Describes this rank's pipeline: its "model", the "settings", the "map" (None where it is not known)
            with a digest of its "schedule", the "microbatches" in force and those to go on with, and the "progress".
        collective: Over all ranks.

    Returns:
        The stage map, both numbers of microbatches and the counters of the run, of the first rank that knows them.

    Raises:
        SpecError: On all ranks where one cannot be described, or any of them differ.
    """
    every = from_all(describe, collective, Operation("comparing the ranks' models"))
    slices = [row["settings"]["slices"] for row in every]
    differ = [r for r, cut in enumerate(slices) if cut != slices[0]]
    if differ:
        raise SpecError(f"ranks {differ} cut microbatches by {slices[differ[0]]}, rank 0 by {slices[0]}")
    for name in every[0]["settings"]:
        refuse_where([row["settings"][name] for row in every], f"have another setting of {name}")
    refuse_where([row["model"] for row in every], "hold another model")
    knowing = [row for row in every if row["map"] is not None]
    if not knowing:
        raise SpecError("no rank of the group knows the stage map")
    for name, what in (
        ("map", "were given another stage map"),
        ("schedule", "follow another schedule"),
        ("microbatches", "cut batches into another number of microbatches"),
    ):
        differ = [r for r, row in enumerate(every) if row["map"] is not None and row[name] != knowing[0][name]]
        if differ:
            raise SpecError(f"ranks {differ} {what} than the first")
    stage_map = StageMap(tuple(knowing[0]["map"][0]), tuple(knowing[0]["map"][1]))
    return stage_map, knowing[0]["microbatches"], knowing[0]["progress"]


def agree_on_optimizers(
    make: Callable[[], Optimizers], owned: Ownership, collective: Collective, *, joins: bool
) -> Optimizers:
    """Make the optimizers and compare them among all ranks; collective.

    Args:
        make: Makes this rank's optimizers; local.
        owned: The model's parameters.
        collective: Over all ranks.
        joins: Whether this rank takes over the options of one that does not join.

    Raises:
        SpecError: On all ranks where optimizers cannot be made on one, or their groups differ.
    """
    made: list[Optimizers] = []

    def describe() -> list[Any]:
        made.append(make())
        return [joins, made[0].options(owned.parameters)]

    every = from_all(describe, collective, Operation("comparing the ranks' optimizers"))
    groups = [[[g["parameters"] for g in o] for o in options] for _, options in every]
    refuse_where(groups, "have other optimizer groups")
    knowing = [options for joining, options in every if not joining]
    if joins and knowing:
        made[0].set_options(knowing[0])
    return made[0]
