"""What ranks compare before data moves, so that a mistake on one rank is one named error on all of them.

Shape legend: P ranks, M microbatches.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeline_balance.pipeline.executor import Executor
from pipeline_balance.pipeline.model import Batch, Boundary, Inputs, Labels, Microbatch, PipelineModel
from pipeline_balance.pipeline.optimizers import Optimizers
from pipeline_balance.pipeline.ownership import Ownership, number_of
from pipeline_balance.pipeline.progress import Progress
from pipeline_balance.pipeline.stages import PipelineConfig, PipelineGroups
from pipeline_balance.pipeline.training_state import gather_json
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from prophet.ranks.collective import Collective, Operation

NO_ROWS: Any = "no rows"
"""What a replica is given that has no part of a batch to evaluate."""

_SAMPLE_BYTES = 1 << 16
# what is compared, and among whom
_COMPARED = (
    ("hold a model with other names, shapes or types", "all"),
    ("train (requires_grad) other parameters", "all"),
    ("call with other arguments", "all"),
    ("have other options (such as the learning rate) in their optimizers' groups", "all"),
    ("have inputs of other shapes", "replica"),
    ("were given other inputs or labels", "replica"),
    ("would run the stages that share experts in another order, or on other microbatches,", "column"),
)


@dataclass(frozen=True, kw_only=True)
class Passing:
    """A batch on its way: its `parts`, their boundaries without memory, and how many labels count.

    Parts are microbatches [M], or their slices [M N]. Once agreed on, `counted` is of all replicas.
    """

    microbatches: int
    parts: list[Microbatch]
    shapes: list[list[Boundary]]
    counted: float
    data: int

    @classmethod
    def nothing(cls) -> Passing:
        """What a process passes that has no stages."""
        return cls(microbatches=0, parts=[], shapes=[], counted=0, data=0)


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
    """The batch in `microbatches` parts numbered from `first`; with `rows_each`, in as many as that size makes.

    A sequence of inputs, with one of labels, is microbatches already; `rows_each` allows any number of them.
    """
    whole: list[Microbatch] = []
    samples: list[str] = []
    for one, its, count in _given(inputs, labels, microbatches, rows_each):
        here = one.to(device) if isinstance(one, Tensor) else {n: t.to(device) for n, t in one.items()}
        whole += model.cut(here, its.to(device) if its is not None else None, count, first + len(whole))
        tensors = [one] if isinstance(one, Tensor) else list(one.values())
        samples += [_sample(t) for t in (*tensors, *([its] if its is not None else []))]
    parts = [part for one in whole for part in model.sliced(one)]
    return Passing(
        microbatches=len(whole),
        parts=parts,
        shapes=[model.boundaries(part) for part in parts],
        counted=sum(model.counted(part) for part in parts),
        data=number_of(" ".join(samples)),
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
    rows = (inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))).shape[0]
    return [(inputs, labels, max(-(-rows // rows_each), 1) if rows_each else min(microbatches, max(rows, 1)))]


def _sample(tensor: Tensor) -> str:
    """A checksum of a tensor's first bytes."""
    flat = tensor.detach().reshape(-1)[: _SAMPLE_BYTES // tensor.element_size()].cpu().contiguous()
    return str(zlib.crc32(flat.view(torch.uint8).numpy().tobytes()))


def actions_of(executor: Executor | None, *, trains: bool) -> Callable[[Passing], str]:
    """What an executor will do with a batch, in words; nothing without one."""

    def actions(passing: Passing) -> str:
        if executor is None:
            return ""
        steps = executor.training if trains else executor.evaluation(len(passing.parts))
        return " ".join(map(str, steps))

    return actions


def agree_on_batch(
    prepare: Callable[[], Passing],
    owned: Ownership,
    optimizers: Optimizers,
    arguments: Sequence[Any],
    groups: PipelineGroups,
    device: torch.device,
    actions: Callable[[Passing], str],
) -> Passing:
    """What `prepare` makes of the batch, once all ranks mean the same; collective, one small all-gather.

    `actions` says what this rank would run, which must be the same on the ranks with these stages in all replicas.
    Where it fails on a rank, all ranks raise `SpecError`: that one with its reason, the others with its rank too.
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
        optimizers.digest(),
        number_of(repr((passing.counted, shapes))),
        passing.data,
        number_of(actions(passing)),
    ]
    count = int(torch.tensor(passing.counted, dtype=torch.float64).view(torch.int64))  # its bits
    row = torch.tensor([int(failed is not None), *mine, count], dtype=torch.int64, device=device)
    every = groups.world.all_gather(row, op=Operation("agreeing on a batch")).cpu()
    if every[:, 0].any():
        text = f"{type(failed).__name__}: {failed}" if failed is not None else ""
        words = gather_json(text[:2000], groups.world, device, Operation("telling what is wrong with a batch"))
        if isinstance(failed, SpecError):
            raise failed
        if failed is not None:
            raise SpecError(text) from failed
        raise SpecError("; ".join(f"rank {r}: {said}" for r, said in enumerate(words) if said))
    grid = groups.grid
    ranks = range(groups.world.size)
    first_of = {
        "all": [0 for _ in ranks],
        "replica": [(grid.replica(grid.replica_of(r)) or (r,))[0] for r in ranks],
        "column": [(grid.column(grid.pipeline_rank_of(r)) or (r,))[0] for r in ranks],
    }
    for column, (what, among) in enumerate(_COMPARED, start=1):
        said = every[:, column].tolist()
        first = first_of[among]
        differ = [r for r, x in enumerate(said) if x != said[first[r]]]
        if differ:
            raise SpecError(f"ranks {differ} {what} than rank {first[differ[0]]}")
    return replace(passing, counted=float(every[[row[0] for row in grid.rows], -1].view(torch.float64).sum()))


def agree_on_model(
    known: StageMap | None,
    owned: Ownership,
    optimizers: Optimizers,
    progress: Progress,
    collective: Collective,
    config: PipelineConfig,
) -> StageMap:
    """The stage map of the ranks that know it, compared among them; collective.

    A rank that does not know it takes over the counters and the optimizers' options of one that does. Raises
    `SpecError` on all ranks where models, optimizers' groups, settings or maps differ.
    """
    mine = {
        "model": owned.structure(),
        "settings": [config.microbatches, config.seed, config.split_backward, str(owned.model.slicing)],
        "map": [list(known.boundaries), list(known.ranks)] if known is not None else None,
        "progress": progress.to_json(),
        "options": optimizers.options(owned.parameters),
    }
    every = gather_json(mine, collective, config.device, Operation("comparing the ranks' models"))
    for what, field in (
        ("hold another model", "model"),
        ("have other settings (microbatches, seed, slices)", "settings"),
    ):
        differ = [r for r, said in enumerate(every) if said[field] != every[0][field]]
        if differ:
            raise SpecError(f"ranks {differ} {what} than rank 0")
    groups = [[[g["parameters"] for g in o] for o in said["options"]] for said in every]
    differ = [r for r, found in enumerate(groups) if found != groups[0]]
    if differ:
        raise SpecError(f"ranks {differ} have other optimizer groups than rank 0: make them alike on every rank")
    knowing = [said for said in every if said["map"] is not None]
    if not knowing:
        raise SpecError("no rank of the group knows the stage map")
    differ = [r for r, said in enumerate(every) if said["map"] is not None and said["map"] != knowing[0]["map"]]
    if differ:
        raise SpecError(f"ranks {differ} were given another stage map than the first")
    if known is None:
        progress.take(knowing[0]["progress"])
        optimizers.set_options(knowing[0]["options"])
    return StageMap(tuple(knowing[0]["map"][0]), tuple(knowing[0]["map"][1]))
