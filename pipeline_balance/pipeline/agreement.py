"""What ranks compare before data moves, so that a mistake on one rank is one named error on all of them.

Shape legend: P ranks, M microbatches.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline_balance.pipeline.model import Boundary, Inputs, Microbatch, PipelineModel
from pipeline_balance.pipeline.optimizers import Optimizers
from pipeline_balance.pipeline.ownership import Ownership, number_of
from pipeline_balance.pipeline.progress import Progress
from pipeline_balance.pipeline.stages import PipelineConfig
from pipeline_balance.pipeline.training_state import gather_json
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from prophet.ranks.collective import Collective, Operation

_SAMPLE_BYTES = 1 << 16
_COMPARED = (
    "hold another model: names, shapes or types of its parameters differ",
    "train other parameters: call requires_grad_ alike on every rank",
    "call with other arguments",
    "have inputs of other shapes",
    "have other inputs or labels: every rank must be given the same batch",
)
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")


@dataclass(frozen=True, kw_only=True)
class Passing:
    """A batch on its way: its microbatches [M], their boundaries without memory, and how many labels count."""

    parts: list[Microbatch]
    shapes: list[list[Boundary]]
    counted: int
    data: int


def check_layers(model: PipelineModel) -> None:
    """Raise `SpecError` for layers that average or shard by themselves."""
    for unit, module in enumerate(model.units):
        for part in module.modules():
            kinds = {kind.__name__ for kind in type(part).__mro__}
            found = next((name for name in _WRAPPERS if name in kinds), None)
            if found is not None:
                raise SpecError(f"layer {unit} is wrapped in {found}, which a pipeline cannot move: pass it unwrapped")


def batch_of(
    model: PipelineModel,
    inputs: Inputs,
    labels: Tensor | None,
    microbatches: int,
    first: int,
    device: torch.device,
    *,
    rows_each: int | None = None,
) -> Passing:
    """The batch in `microbatches` parts numbered from `first`; with `rows_each`, in as many as that size makes."""
    named = {"input": inputs} if isinstance(inputs, Tensor) else inputs
    if not named or not all(isinstance(t, Tensor) for t in named.values()):
        raise SpecError(f"every rank needs the batch: expected a tensor or a dictionary of them, got {inputs!r:.100}")
    if labels is not None and not isinstance(labels, Tensor):
        raise SpecError(f"labels must be a tensor or None, got a {type(labels).__name__}")
    if rows_each is not None:
        rows = next(iter(named.values())).shape[0]
        microbatches = max(-(-rows // rows_each), 1) if rows_each else min(microbatches, max(rows, 1))
    given = inputs.to(device) if isinstance(inputs, Tensor) else {n: t.to(device) for n, t in inputs.items()}
    parts = model.cut(given, labels.to(device) if labels is not None else None, microbatches, first)
    tensors = [*named.values(), *([labels] if labels is not None else [])]
    return Passing(
        parts=parts,
        shapes=[model.boundaries(part) for part in parts],
        counted=sum(model.counted(part) for part in parts),
        data=number_of(" ".join(_sample(t) for t in tensors)),
    )


def _sample(tensor: Tensor) -> str:
    """A checksum of a tensor's first bytes."""
    flat = tensor.detach().reshape(-1)[: _SAMPLE_BYTES // tensor.element_size()].cpu().contiguous()
    return str(zlib.crc32(flat.view(torch.uint8).numpy().tobytes()))


def agree_on_batch(
    prepare: Callable[[], Passing],
    owned: Ownership,
    arguments: Sequence[Any],
    collective: Collective,
    device: torch.device,
) -> Passing:
    """What `prepare` makes of the batch, once it is the same on all ranks; collective, one small all-gather.

    Where it fails on a rank, that error is raised there and a `SpecError` that names it on the others.
    """
    failed: Exception | None = None
    passing = Passing(parts=[], shapes=[], counted=0, data=0)
    try:
        passing = prepare()
    except Exception as error:
        failed = error
    shapes = [[(list(t.shape), str(t.dtype), t.requires_grad) for b in row for t in b] for row in passing.shapes]
    mine = [
        owned.structure(),
        owned.trainable(),
        number_of(repr(tuple(arguments))),
        number_of(repr((len(passing.parts), passing.counted, shapes))),
        passing.data,
    ]
    row = torch.tensor([int(failed is not None), *mine], dtype=torch.int64, device=device)
    every = collective.all_gather(row, op=Operation("agreeing on a batch")).cpu()
    if every[:, 0].any():
        text = f"{type(failed).__name__}: {failed}" if failed is not None else ""
        said = gather_json(text[:2000], collective, device, Operation("telling what is wrong with a batch"))
        if failed is not None:
            raise failed
        raise SpecError("; ".join(f"rank {r}: {words}" for r, words in enumerate(said) if words))
    for column, what in enumerate(_COMPARED, start=1):
        differ = [r for r, x in enumerate(every[:, column].tolist()) if x != int(every[0, column])]
        if differ:
            raise SpecError(f"ranks {differ} {what} than rank 0" if "other" in what else f"ranks {differ} {what}")
    return passing


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
        "settings": [config.microbatches, config.seed, config.split_backward],
        "map": [list(known.boundaries), list(known.ranks)] if known is not None else None,
        "progress": progress.to_json(),
        "options": optimizers.options(owned.parameters),
    }
    every = gather_json(mine, collective, config.device, Operation("comparing the ranks' models"))
    for what, field in (("hold another model", "model"), ("have other settings (microbatches, seed)", "settings")):
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
