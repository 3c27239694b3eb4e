"""Weights of a model that was built without memory: each rank reads those of the layers that it runs from a folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.model.ownership import Ownership, put
from pipeline_balance.pipeline.model.vocabulary import rows_of, whole_shape
from pipeline_balance.pipeline.run.agreement import from_all, refuse_where
from pipeline_balance.pipeline.run.failures import fails_together
from prophet.errors import SpecError
from prophet.ranks.operation import Operation
from prophet.state.pretrained import read_pretrained

if TYPE_CHECKING:
    from pipeline_balance.pipeline.trainer import ElasticPipeline


@fails_together("loading weights before step")
def load_pretrained(pipeline: ElasticPipeline, folder: str | Path) -> None:
    """Take the weights that `from_pretrained(folder)` of the model's class gives; collective, between updates.

    Each rank reads those of the layers that it runs, and of what is around all layers. So the model may be built under
    `init_empty_weights()`.

    Raises:
        SpecError: On all ranks, with the pipeline as it was, where one cannot read them, or `folder` does not fit the
            model.
    """
    owned, device, found = pipeline.owned, pipeline.config.device, dict[str, Tensor]()

    def read() -> str:
        if pipeline.owners.sharded:
            raise SpecError("load_pretrained: parameters are shards of tp or zero here: load before the switch to them")
        owned.read()
        found.update(read_units(owned, pipeline.stage_map.layers_on(pipeline.rank), folder))
        return str(folder)

    op = Operation("loading weights")
    refuse_where(from_all(read, pipeline.collective, op, waits=True), "load another folder")
    fill(owned, found, device)


def read_units(owned: Ownership, units: Collection[int], folder: str | Path) -> dict[str, Tensor]:
    """Read what `units` hold of the weights in `folder`, and buffers around the layers, by their names.

    Layers of other units are not read. What is around the layers is, and is forgotten where none of `units` holds it.

    Args:
        owned: The model's parameters and buffers.
        units: The units whose weights are wanted.
        folder: A folder that `save_pretrained` wrote.

    Raises:
        SpecError: `folder` cannot fill the model, or the model would not train with what it says.
    """
    root = owned.model.root
    if not hasattr(type(root), "from_pretrained") or hasattr(type(root), "get_base_model"):
        raise SpecError(
            f"a {type(root).__name__} has no from_pretrained that fills a part of it: load_pretrained is for models of "
            "transformers, before PEFT"
        )
    mine = {id(owned.model.units[unit]) for unit in units}
    others = {id(unit) for unit in owned.model.units} - mine
    # layers of other ranks are left out while reading, so a rank needs memory for its own part only
    without = [name for name, module in root.named_modules() if id(module) in others]
    # the model is read in the type of most of its elements: some parameters are kept wider on purpose
    kinds = Counter[torch.dtype]()
    for p in owned.parameters.values():
        kinds[p.dtype] += p.numel() * p.is_floating_point()
    read = read_pretrained(root, folder, kinds.most_common(1)[0][0], without).state_dict(keep_vars=True)
    _check_ties(owned, read)
    # buffers that no unit holds are on every rank
    buffers = {name for name, _ in root.named_buffers()} - owned.buffers.keys()
    buffers |= {name for name, held in owned.buffers.items() if not set(held.units).isdisjoint(units)}
    wanted = owned.of(units)
    missing = [name for name in wanted if name not in read]
    if missing:
        raise SpecError(f"{folder} has no {missing[0]} for the {type(root).__name__} of this pipeline")
    wanted += [name for name in read if name in buffers]
    own = dict(root.named_buffers()) | owned.parameters
    return {name: _fitting(name, own[name], read[name].detach()) for name in wanted}


def fill(owned: Ownership, values: Mapping[str, Tensor], device: torch.device) -> None:
    """Give parameters and buffers these values, and memory where they have none.

    Args:
        owned: The model's parameters and buffers.
        values: What they are to hold, by name.
        device: Where new memory is taken.
    """
    buffers = {
        f"{path}.{name}" if path else name: (module, name)
        for path, module in owned.model.root.named_modules()
        for name in module._buffers
    }
    with torch.no_grad():
        for name, value in values.items():
            parameter = owned.parameters.get(name)
            if parameter is None:
                module, attribute = buffers[name]
                module._buffers[attribute] = value.to(device)
            elif parameter.is_meta:
                # the object stays the same, as optimizers refer to it
                put(parameter, nn.Parameter(value.to(device), requires_grad=parameter.requires_grad))
            else:
                parameter.copy_(value)


def _fitting(name: str, own: Tensor, read: Tensor) -> Tensor:
    """`read` in the type of the model's own; `SpecError` where it has another shape, or would be rounded."""
    # transformers keeps some parameters in float32 whatever type is asked for, as the routers of DeepSeek-V3
    if read.shape != whole_shape(own):
        raise SpecError(f"{name}: the model has a tensor {list(whole_shape(own))}, the folder {list(read.shape)}")
    rows = rows_of(own)
    # a view would keep the memory of all rows
    read = read if rows is None else read[rows.start : rows.stop].clone()
    # widening is exact; anything else would change the weights in silence
    if torch.promote_types(own.dtype, read.dtype) != own.dtype:
        raise SpecError(
            f"{name}: the class keeps {read.dtype}, the model has {own.dtype}, so it would be rounded: build the model "
            "with from_config(config, dtype=...), which makes each parameter of its type"
        )
    return read.to(own.dtype)


def _check_ties(owned: Ownership, read: Mapping[str, Tensor]) -> None:
    """Raise `SpecError` where what the class ties is several parameters here."""
    first: dict[int, str] = {}
    for name, tensor in read.items():
        other = first.setdefault(id(tensor), name)
        if other != name and other in owned.parameters and name in owned.parameters:
            raise SpecError(
                f"{other} and {name} are one parameter in a {type(owned.model.root).__name__}, and two here: build the "
                "model under pipeline_balance.init_empty_weights(), which keeps what is tied"
            )
