"""The whole model's `state_dict` on one rank, in the unsplit model's names."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pipeline_balance.pipeline.agreement import write_alone
from pipeline_balance.pipeline.ownership import Ownership
from pipeline_balance.pipeline.stages import PipelineConfig
from pipeline_balance.pipeline.training_state import Held, by_layer, share
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from prophet.ranks.collective import Collective
from prophet.state.layout import layout_from
from prophet.state.route import route
from prophet.state.transition import transition


def held_by_root(owned: Ownership, units: Collection[int]) -> Held:
    """What of the root's `state_dict` belongs to `units`, which run here."""
    held = Held()
    wanted = owned.model.root.state_dict(keep_vars=True)
    for name in owned.of(units):
        held.add(name, owned.parameters[name], "parameter", owned.units_of[name][0])
    for name, buffer in owned.buffers.items():
        if name in wanted and not set(buffer.units).isdisjoint(units):
            held.add(name, buffer.tensor, "buffer", buffer.units[0])
    return held


def whole_state(
    held: Held, owned: Ownership, stage_map: StageMap, collective: Collective, config: PipelineConfig, rank: int
) -> dict[str, Tensor]:
    """Every entry of the root's `state_dict`, in the host's memory of `rank`; empty on the others. Collective.

    `held` is what `held_by_root` found on this rank.
    """
    wanted = owned.model.root.state_dict(keep_vars=True)
    by_id = {id(t): name for name, t in wanted.items()}
    space, _ = share(held, collective, config.device, "nothing was gathered")
    before = by_layer(space, stage_map, collective.size, owned.tied())
    after = layout_from(space, collective.size, {rank: [(t.name, t.box) for t in space.tensors]})
    way = route(before, after)
    pieces = {piece: held.tensors[piece.name] for piece in before.pieces[collective.rank]}
    moved = transition(way, pieces, collective, budget_bytes=config.budget_bytes, device=config.device)
    if collective.rank != rank:
        return {}
    found = {piece.name: tensor.detach().cpu() for piece, tensor in moved.state.items()}
    names = {id(p): n for n, p in owned.parameters.items()}
    return {
        name: found[names.get(id(t), by_id[id(t)])] if names.get(id(t), name) in found else t.detach().cpu()
        for name, t in wanted.items()
    }


def write_pretrained(
    model: nn.Module,
    state: dict[str, Tensor],
    folder: str | Path,
    options: dict[str, Any],
    collective: Collective,
    config: PipelineConfig,
) -> None:
    """`model.save_pretrained(folder)` with `state` in place of the model's own, on rank 0; collective.

    Returns when everything is written. Raises `SpecError` on all ranks where that fails.
    """
    write: Any = getattr(model, "save_pretrained", None)

    def save() -> None:
        if write is None:
            raise SpecError(f"a {type(model).__name__} has no save_pretrained: torch.save its state_dict() instead")
        write(folder, state_dict=state, **options)

    write_alone(save, f"writing {folder}", collective, config.device)
