"""Shapes and types of what passes between units: found without memory, agreed on before a step, checked when sent.

torch posts every receive into a buffer that was made before. `fit_buffers` puts one of the right size there for each
microbatch. `agree` has all ranks of a replica compare the inputs that these sizes follow from. `check_sent` compares
what a unit returned with what was said. Shapes that depend on the data are refused: such a layer keeps its full size
and masks what it leaves out.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only

from pipeline_balance.pipeline.model import Boundary, Microbatch, _needs_data
from pipeline_balance.pipeline.skeleton import copy_of, only_before
from pipeline_balance.pipeline.training_state import gather_json
from prophet.errors import SpecError
from prophet.ranks.collective import Collective, Operation

_FROM_TORCH = "raised by a module of torch"

Shape = tuple[tuple[int, ...], torch.dtype]


def output_of(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[list[Any], TreeSpec]:
    """What `module` returns for these arguments, as leaves and structure, with tensors on `meta`.

    A copy of the module runs on fake tensors, under the autocast that is in force, so it makes no difference where the
    module's parameters are, and nothing of it changes. A part of it that branches on values is taken to keep the shape
    and type of its first floating-point argument.
    """
    with torch.no_grad(), _quiet(), FakeTensorMode(allow_non_fake_inputs=True):

        def fake(tensor: Tensor) -> Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

        copy = copy_of(module, lambda name, parameter: fake(parameter), {}, hooks=only_before)
        for part in copy.modules():
            part.__dict__["_buffers"] = {n: None if b is None else fake(b) for n, b in part._buffers.items()}
            part.__dict__.update({n: fake(t) for n, t in part.__dict__.items() if isinstance(t, Tensor)})
            part.__dict__["forward"] = _without_values(part, fake, whole=part is copy)
        given = tree_map_only(Tensor, fake, (tuple(args), dict(kwargs)))
        leaves, structure = tree_flatten(copy(*given[0], **given[1]))
    return [on_meta(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure


@contextmanager
def _quiet() -> Iterator[None]:
    """Within, torch does not log kernels that cannot tell their shapes: such a part is known to keep its own."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


def _without_values(part: nn.Module, fake: Callable[[Tensor], Tensor], *, whole: bool) -> Callable[..., Any]:
    """The forward of `part`; if it cannot run on shapes alone, its first floating-point argument stands for its result.

    That is so where values decide, and for kernels whose shapes torch cannot tell. Modules of torch always can, so what
    they raise is raised, and so is what the `whole` layer raises for another reason than a want of values.
    """
    forward, torchs = type(part).forward, type(part).__module__.startswith("torch.nn.")

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(part, *args, **kwargs)
        except Exception as error:
            given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor) and t.is_floating_point()]
            if torchs:
                error.add_note(_FROM_TORCH)
            stays = _FROM_TORCH in getattr(error, "__notes__", ()) or whole
            if not given or (stays and not _needs_data(error)):
                raise
            return torch.empty_like(given[0])

    return run


def on_meta(tensor: Tensor) -> Tensor:
    """The shape and type of `tensor`, contiguous, without memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def shape_of(tensor: Tensor) -> Shape:
    return tuple(tensor.shape), tensor.dtype


def agree(microbatches: Sequence[Microbatch], collective: Collective, device: torch.device) -> None:
    """Raise `SpecError` on every rank unless all were given microbatches of the same names, shapes and types.

    One small collective where they agree; a second one says what each rank has where they do not.
    """
    mine = [[[name, None if of is None else str(of)] for name, of in part.shapes()] for part in microbatches]
    digest = torch.tensor(list(_digest(json.dumps(mine))), dtype=torch.int64, device=device)
    rows = collective.all_gather(digest, op=Operation("comparing the microbatches' shapes")).cpu().reshape(-1, 2)
    if bool((rows == rows[0]).all()):
        return
    said = gather_json(mine, collective, device, Operation("telling the microbatches' shapes"))
    other = next(r for r, one in enumerate(said) if one != said[0])
    at = next((i for i, (a, b) in enumerate(zip(said[0], said[other], strict=False)) if a != b), None)
    here = f"{len(said[0])} microbatches, rank {other} {len(said[other])}" if at is None else None
    here = here or f"{dict(said[0][at or 0])} in microbatch {at}, rank {other} {dict(said[other][at or 0])}"
    raise SpecError(f"all ranks must be given the same inputs and labels: rank 0 has {here}")


def _digest(text: str) -> tuple[int, int]:
    """Two numbers of 63 bits that differ where texts do."""
    found = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(found[:8], "big") >> 1, int.from_bytes(found[8:16], "big") >> 1


def fit_buffers(stage: Any, chunk: int, before: Boundary, after: Boundary, device: torch.device) -> None:
    """Give torch's stage buffers of the right shapes and types to receive microbatch `chunk`.

    `before` [tensors] comes in from the stage in front, and gradients of `after` [tensors] come back; both as `meta`
    tensors. A buffer that fits is kept.
    """
    for infos, wanted in ((stage.args_recv_info, before), (stage.grad_recv_info, after)):
        received = [info for info in infos.get(chunk, ()) if getattr(info, "buffer", None) is not None]
        expected = list(wanted) if infos is stage.args_recv_info else [t for t in wanted if t.requires_grad]
        if len(received) not in (0, len(expected)):
            raise SpecError(f"stage {stage.stage_index} receives {len(received)} tensors, {len(expected)} were agreed")
        for info, tensor in zip(received, expected, strict=False):
            if shape_of(info.buffer) != shape_of(tensor):
                info.buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def check_sent(unit: int, said: Boundary, came: Boundary) -> None:
    """Raise `SpecError` unless `unit` returned tensors of the shapes and types that were agreed on."""
    if [shape_of(t) for t in said] == [shape_of(t) for t in came]:
        return
    words = [" and ".join(f"{list(t.shape)} of {t.dtype}" for t in boundary) for boundary in (said, came)]
    raise SpecError(
        f"unit {unit} returned {words[1]}, where {words[0]} was agreed on: what passes between layers may not depend "
        "on the data; keep the full size and mask what is left out"
    )
