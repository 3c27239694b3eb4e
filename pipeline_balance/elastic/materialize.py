"""Weights of a model that was built on `meta`: each module draws its own, so no layout changes them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import torch
from torch import nn

from pipeline_balance.pipeline.model.layers import PipelineModel
from pipeline_balance.pipeline.model.ownership import put
from pipeline_balance.pipeline.model.skeleton import BUILD_EMPTY
from pipeline_balance.pipeline.run.generators import seeded
from prophet.errors import SpecError


@torch.no_grad()
def materialize(model: PipelineModel, units: Collection[int], seed: int, device: torch.device) -> None:
    """Give what `units` hold memory on `device` where it has none, with values of the modules' `reset_parameters`.

    Each module draws from a separate generator, by `seed` and its name. A tied parameter is that of the first module
    in the unsplit model.

    Args:
        model: The unsplit model.
        units: The pipeline layers that this process runs.
        seed: Of the job.
        device: Where memory is made.

    Raises:
        SpecError: For a module that cannot set its values itself.
    """
    mine = {m for unit in units for m in model.units[unit].modules()}
    needed = {p for m in mine for p in m._parameters.values() if p is not None and p.is_meta}
    for name, module in model.root.named_modules():
        if module in mine and any(b is not None and b.is_meta for b in module._buffers.values()):
            raise SpecError(f"{name or 'the model'} has buffers on meta, which no layout fills: {BUILD_EMPTY}")
        # the first module in the whole model that has a parameter draws it, on whatever process that is
        first = [p for p in module._parameters.values() if p is not None and p in needed]
        if not first:
            continue
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise SpecError(
                f"{name or 'the model'} is on meta and cannot set its values (it needs reset_parameters): give the job "
                "weights=folder, or build the model on a device"
            )
        drawn = set(first)
        needed -= drawn
        for parameter in first:
            memory = torch.empty_like(parameter, device=device)
            put(parameter, nn.Parameter(memory, requires_grad=parameter.requires_grad))
        # `reset_parameters` sets all of a module: tied parameters that were drawn before get their values back
        others = [p for p in module._parameters.values() if p is not None and p not in drawn and not p.is_meta]
        kept = [p.clone() for p in others]
        # by name, not by number drawn: a process draws the same whichever other layers it has
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
        # 63 bits, which every generator takes as a seed
        with seeded(int.from_bytes(digest, "little") >> 1, device):
            reset()
        for parameter, values in zip(others, kept, strict=True):
            parameter.copy_(values)
