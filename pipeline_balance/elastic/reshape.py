"""Switching to shards, from shards, and among them: other modules, the same optimizer, all of it or nothing.

Modules are made and filled on the side. Once all processes have decided, what is left are assignments: the model, the
parameters in the optimizers' groups, the keys of their state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_balance.elastic.copies import check_copyable, check_parameters
from pipeline_balance.elastic.describe import Rule
from pipeline_balance.elastic.experts import stacks
from pipeline_balance.elastic.layouts import ModelDescription, Parameter, layout_of
from pipeline_balance.elastic.parallelism import Axis, Parallelism
from pipeline_balance.elastic.sharded import ShardedModel, Shards, shard_like, sharded
from pipeline_balance.pipeline.model import PipelineModel
from pipeline_balance.pipeline.ownership import Ownership, like_meta
from pipeline_balance.pipeline.rebuild import Change
from pipeline_balance.pipeline.registered import settings
from pipeline_balance.pipeline.reseat import Arrangement, Reseater, Way
from pipeline_balance.pipeline.stages import Stages
from pipeline_balance.pipeline.training_state import Held, base_name, state_entries
from prophet.errors import LayoutError, TransitionError
from prophet.ranks.collective import Collective
from prophet.state.layout import Layout, layout_from
from prophet.state.space import Box, Space
from prophet.state.streams import torch_dtype
from prophet.state.transition import Moved


@dataclass(frozen=True, kw_only=True)
class ShardedArrangement(Arrangement):
    """A layout of shards. `rules` say how tp cuts; `shards` are None on a process without a place."""

    layout: Parallelism
    rules: Mapping[str, Rule]
    shards: Shards | None


def describe(owned: Ownership, rules: Mapping[str, Rule] | None = None) -> ModelDescription:
    """The model of a job as far as layouts go, with AdamW's state; buffers are left out."""
    found = []
    stacked = stacks(owned.model.root)
    for name, p in owned.parameters.items():
        whole, shape, experts = Rule(how="whole"), tuple(p.shape), name in stacked
        dim, blocks = (rules or {}).get(name.rpartition(".")[0], whole).cut(name, shape)
        if experts:
            shape, blocks = stacked[name].shape, (stacked[name].block,)
        dtype = str(p.dtype).removeprefix("torch.")
        given: dict[str, Any] = {"layers": owned.units_of[name], "dim": dim, "blocks": blocks, "experts": experts}
        found.append(Parameter(name=name, shape=shape, dtype=dtype, **given))
    return ModelDescription(name="job", layers=len(owned.model.units), parameters=tuple(found))


def sharded_layout(
    space: Space, model: ModelDescription, at: ShardedArrangement, processes: int, first: bool
) -> Layout:
    """Which box of which tensor each process holds; `first`: buffers count as the first process's alone.

    Raises `LayoutError` for an optimizer's entry that is neither of its parameter's shape nor one number.
    """
    layout, home = at.layout, at.stage_map.assignment()
    alike = replace(layout, zero=0) if layout.zero == 1 else layout
    held = layout_of(model, alike, ranks=processes).by_tensor()

    def updates(name: str, rank: int) -> bool:
        place = layout.place(rank)
        return place is not None and at.owners.updates(name, place.pp, place.dp)

    found: dict[int, list[tuple[str, Box]]] = {}
    for tensor in space.tensors:
        name = base_name(tensor.name)
        if tensor.kind == "buffer":
            assert tensor.layer is not None
            ranks = layout.grid[home[tensor.layer]].reshape(-1).tolist()
            places = [(rank, tensor.box) for rank in (ranks[:1] if first else ranks)]
        elif tensor.kind == "optimizer" and tensor.shape != space[name].shape:
            if tensor.shape not in ((), (1,)):
                raise LayoutError(
                    f"{tensor.name} is {list(tensor.shape)}, of neither its parameter's shape nor one number"
                )
            places = [(rank, tensor.box) for rank, _ in held[f"{name}@step"]]
        else:
            places = held[name]
        if tensor.kind == "optimizer":
            places = [(rank, box) for rank, box in places if updates(name, rank)]
        for rank, box in places:
            found.setdefault(rank, []).append((tensor.name, box))
    return layout_from(space, processes, found)


@dataclass
class Remodel(Change):
    """Also other modules, with their parameters in the optimizers."""

    leaves: ShardedModel | None = None
    enters: ShardedModel | None = None
    groups: list[tuple[list[nn.Parameter], list[nn.Parameter]]] = field(default_factory=list)
    keyed: list[tuple[torch.optim.Optimizer, nn.Parameter, nn.Parameter, dict[str, Any] | None]] = field(
        default_factory=list
    )
    trains: list[tuple[nn.Parameter, bool, dict[str, Any]]] = field(default_factory=list)

    def make(self) -> None:
        if self.leaves is not None:
            self.leaves.leave()
        if self.enters is not None:
            self.enters.copy.make()
        super().make()
        for parameter, flag, attributes in self.trains:
            parameter.requires_grad_(flag)
            parameter.__dict__.update(attributes)
        for present, others in self.groups:
            present[:] = others
        for optimizer, before, after, entries in self.keyed:
            optimizer.state.pop(before, None)
            if entries is not None:
                optimizer.state[after] = entries


@dataclass
class Reshaper(Reseater):
    """Takes a pipeline from shards to other shards or to none. `before`: the shards' layout in force, None of none."""

    plain: PipelineModel
    before: ShardedArrangement | None

    def layout(self, space: Space, target: Arrangement | None, processes: int) -> Layout:
        at = self.before if target is None else target
        if isinstance(at, ShardedArrangement):
            model = describe(self.mover.owned, at.rules)
            return sharded_layout(space, model, at, processes, target is None)
        return super().layout(space, target, processes)

    @property
    def now_sharded(self) -> ShardedModel | None:
        """What this process has of shards now."""
        model = self.mover.owned.model
        return model if isinstance(model, ShardedModel) else None

    def describe(self) -> Held | str:
        return self.refusal() or super().describe()

    def refusal(self) -> str:
        """In words, why modules cannot be made anew here; nothing if they can."""

        def checked() -> str:
            now = self.now_sharded
            check_copyable(self.plain.root, now.copy if now is not None else None)
            check_parameters(self.mover.owned.parameters)
            return ""

        return str(self.mover.attempt(checked))

    def _agreed_way(
        self, held: Held | str, target: Arrangement, collective: Collective, way: Way | None
    ) -> tuple[Way, dict[str, Any]]:
        way, scalars = super()._agreed_way(held, target, collective, way)
        self._space = way.route.space
        return way, scalars

    def _assembled(
        self, target: Arrangement, moved: Moved, scalars: Mapping[str, Any], place: int, config: Any
    ) -> tuple[Stages, Change]:
        shards = target.shards if isinstance(target, ShardedArrangement) else None
        now, mover = self.now_sharded, self.mover
        values = {piece.name: tensor for piece, tensor in moved.state.items()}
        boxes = {piece.name: piece.box for piece in moved.state}
        model = target.model or self.plain
        enters = None
        if shards is not None:
            enters = model = sharded(self.plain, shards, now, config.seed, lambda: self.passes.progress.updates)
        change = Remodel(leaves=now, enters=enters)
        plain = self.becomes or Ownership(self.plain)
        own = plain.parameters
        here_too = {name: own[name] for name in plain.of(target.stage_map.layers_on(place))}
        twins = self._filled(enters, here_too, values, boxes) if enters is not None else {}  # and empty moments
        change.owned = Ownership(model) if enters is not None else plain
        here = mover.groups.world.rank
        updates = {n: v for n, v in scalars.items() if here in target.owners.updaters(base_name(n), place)}
        entries = state_entries(values, updates)
        optimizer_of, becomes = mover.optimizers.of(), {}
        for name, before in mover.owned.parameters.items():
            original = own[name]
            after = twins.get(id(original), original)
            becomes[id(before)] = after
            change.grads.append((original, None))
            if enters is None and name in values:
                made = nn.Parameter(values[name], requires_grad=before.requires_grad)
                change.contents.append((original, made))
            elif not original.is_meta:
                change.contents.append((original, like_meta(original)))
            kept = {k: v for k, v in vars(before).items() if k != "_is_param"}
            change.trains += [
                (p, before.requires_grad, kept) for p in {id(original): original, id(after): after}.values()
            ]
            optimizer = optimizer_of.get(id(before))
            if optimizer is not None:
                mine = dict(entries.get(name, {}))
                if enters is not None:
                    mine = {k: shard_like(after, v) if self._is_wide(f"{name}@{k}") else v for k, v in mine.items()}
                change.keyed.append((optimizer, before, after, mine or None))
        for optimizer in mover.optimizers.all:
            for group in optimizer.param_groups:
                change.groups.append((group["params"], [becomes.get(id(p), p) for p in group["params"]]))
        self._buffers(change, plain, values)
        change.settings = settings(
            mover.owned.parameters, values, lambda n, t: shard_like(twins[id(own[n])], t) if twins else t
        )
        stages = replace(mover.builder, model=model).build(target.stage_map, rank=place, config=config)
        change.check()
        return stages, change

    def _filled(
        self,
        model: ShardedModel,
        own: Mapping[str, nn.Parameter],
        values: dict[str, Tensor],
        boxes: Mapping[str, Box],
    ) -> dict[int, nn.Parameter]:
        """The shards with what has come for them, once they are what the layout says."""
        found: dict[int, Tensor] = {}
        theirs = model.boxes()
        for name, original in own.items():
            like, box = theirs[id(original)]
            if box.elements and box != boxes.get(name):
                raise TransitionError(f"torch's shard of {name} is {box}, the layout's is {boxes.get(name)}")
            if not box.elements:
                values[name] = torch.empty(box.shape, dtype=like.dtype, device=self.mover.device)
            found[id(original)] = values[name]
        for spec in self._space.tensors:
            name, kept = base_name(spec.name), spec.kind in ("optimizer", "registered")
            box = theirs[id(own[name])][1] if kept and name in own else spec.box
            if not box.elements and self._is_wide(spec.name):
                values[spec.name] = torch.empty(box.shape, dtype=torch_dtype(spec), device=self.mover.device)
        return model.fill(found)

    def _is_wide(self, name: str) -> bool:
        """Whether it is kept for a parameter, in its shape."""
        number, space = self._space.number, self._space
        kept = name in number and space[name].kind in ("optimizer", "registered")
        return kept and space[name].shape == space[base_name(name)].shape

    def _buffers(self, change: Change, owned: Ownership, values: Mapping[str, Tensor]) -> None:
        for name, buffer in owned.buffers.items():
            if name in values:
                change.buffers.append((buffer, values[name]))
            elif not buffer.tensor.is_meta:
                change.buffers.append((buffer, buffer.tensor.to("meta")))


def is_sharded(layout: Parallelism) -> bool:
    """Whether parameters are `DTensor`s in this layout."""
    return bool(mesh_axes(layout))


def mesh_axes(layout: Parallelism) -> list[Axis]:
    """The axes along which tensors are shards: those of a mesh."""
    axes: list[Axis] = ["dp"] if layout.zero >= 2 and layout.dp > 1 else []
    return [*axes, "tp"] if layout.tp > 1 else axes
