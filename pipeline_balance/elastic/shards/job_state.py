"""Switching between the layouts of a job: what each parameter is in both decides how it gets there.

A parameter is whole, a stack of experts of which a process has a part, or a shard (`DTensor`). The first two stay the
same objects and get other contents. Shards are of other modules, which are made and filled on the side. Once all
processes have decided, what is left are assignments: contents, the groups that share experts, the model, the
parameters in the optimizers' groups, the keys of their state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_balance.elastic.groups import SHARDS, Groups
from pipeline_balance.elastic.layouts.boxes import How, ModelDescription, Parameter, cut_dimension, layout_of
from pipeline_balance.elastic.layouts.parallelism import Axis, Parallelism
from pipeline_balance.elastic.shards.experts import as_boxes, has_experts, stacks
from pipeline_balance.elastic.shards.fully_sharded import check_weak, leaves_of, padded
from pipeline_balance.elastic.shards.held_shards import box_of, digests, refuse_apart
from pipeline_balance.elastic.shards.module_copies import Found, check_copyable, check_parameters, found_in, sharded_of
from pipeline_balance.elastic.shards.sharded import (
    ShardedModel,
    Shards,
    add_empty,
    entries_like,
    mesh_of,
    shard_like,
    sharded,
)
from pipeline_balance.elastic.shards.tp_styles import styles_of
from pipeline_balance.pipeline.model.layers import PipelineModel
from pipeline_balance.pipeline.model.ownership import Ownership, attributes_of, check_free, like_meta
from pipeline_balance.pipeline.model.registered import registered, settings
from pipeline_balance.pipeline.move.pipeline_state import Built, Going, PipelineState, TrainingLayout
from pipeline_balance.pipeline.move.stage_map import Change
from pipeline_balance.pipeline.move.state import Held, Item, base_name, refuse_odd, state_entries
from pipeline_balance.pipeline.run.experts import StageExperts
from pipeline_balance.pipeline.run.optimizers import Optimizers
from pipeline_balance.pipeline.run.stages import RankAssignment, alone
from pipeline_balance.pipeline.run.zero1 import Owners
from prophet.engine.regroup import regroup
from prophet.errors import LayoutError, SpecError, TransitionError
from prophet.state.layout import Layout, layout_from
from prophet.state.space import Box, Space
from prophet.state.transition import State

Ahead = Callable[[Shards], ShardedModel | None]
"""Makes the modules of a layout of shards before a switch."""


@dataclass(frozen=True, kw_only=True)
class JobLayout(TrainingLayout):
    """A layout of a job; `rules` say how tp cuts its modules."""

    layout: Parallelism
    rules: Mapping[str, How] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ShardedLayout(JobLayout):
    """A layout of shards, which are None on a process without a place.

    `ahead` is the model in it, without memory, where that was made before the switch.
    """

    shards: Shards | None
    ahead: ShardedModel | None = None


def describe(owned: Ownership, rules: Mapping[str, How] | None = None) -> ModelDescription:
    """The model of a job as far as layouts go, with AdamW's state; buffers are left out.

    Of weights that are stored sparse it has the dense form.
    """
    found = []
    stacked = stacks(owned.model.root)
    for name, p in owned.parameters.items():
        shape, dtype = tuple(owned.whole(name).shape), str(p.dtype).removeprefix("torch.")
        # rules are by the exact name of the module that holds the parameter
        dim = cut_dimension((rules or {}).get(name.rpartition(".")[0], "whole"), shape)
        given: dict[str, Any] = {"layers": owned.units_of[name], "dim": dim}
        if name in stacked:
            # a process has a part; layouts are of the whole
            shape = stacked[name].shape
            given |= {"blocks": (stacked[name].block,), "experts": True}
        found.append(Parameter(name=name, shape=shape, dtype=dtype, **given))
    return ModelDescription(name="job", layers=len(owned.model.units), parameters=tuple(found))


def as_held(model: ModelDescription, owned: Ownership, space: Space, sharded: bool) -> ModelDescription:
    """The description with the form that parameters have in `space`, such as that of sparse weights.

    Args:
        model: With the form of checkpoints.
        owned: The model's parameters.
        space: All tensors of the state.
        sharded: Whether they are shards.

    Raises:
        LayoutError: Parameters in another form would have to be cut.
    """
    found = []
    for parameter in model.parameters:
        name = parameter.name
        shape = space[name].shape if name in space.number else parameter.shape
        other = tuple(shape) != tuple(owned.whole(name).shape) and not parameter.experts
        if other and sharded:
            raise LayoutError(f"{name} is stored sparse, and cannot be cut into shards: save a checkpoint and load it")
        found.append(replace(parameter, shape=shape, dim=None) if other else parameter)
    return replace(model, parameters=tuple(found))


def layout_in(
    layout: Parallelism, space: Space, model: ModelDescription, owners: Owners, processes: int, *, first: bool
) -> Layout:
    """Which box of which tensor each process holds.

    Args:
        layout: With its order chosen.
        space: All tensors of the state.
        model: How parameters are cut.
        owners: With zero 1, which replica updates which parameter.
        processes: Size of the world.
        first: Buffers count as the first process's of a stage alone.

    Raises:
        LayoutError: For an optimizer's entry that is neither of its parameter's shape nor one number.
    """
    home = layout.stage_map(model.layers).assignment()
    # owners decide below who has optimizer state, as the pipeline shares it out
    alike = replace(layout, zero=0) if layout.zero == 1 else layout
    held = layout_of(model, alike, ranks=processes).by_tensor()

    def updates(name: str, rank: int) -> bool:
        place = layout.place(rank)
        return place is not None and owners.updates(name, place.pp, place.dp)

    found: dict[int, list[tuple[str, Box]]] = {}
    for tensor in space.tensors:
        name = base_name(tensor.name)
        if tensor.kind == "buffer":
            assert tensor.layer is not None
            ranks = layout.grid[home[tensor.layer]].reshape(-1).tolist()
            # buffers may differ between replicas: one is the source, all are targets
            places = [(rank, tensor.box) for rank in (ranks[:1] if first else ranks)]
        elif tensor.kind == "optimizer" and tensor.shape != space[name].shape:
            refuse_odd(tensor.name, tensor.shape, space[name].shape)
            # whoever keeps a step count keeps any other scalar
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
    """A change that also regroups the experts of all layers, and puts other modules in force.

    Attributes:
        root: The model that the user built.
        shared: What balances experts now, which is released.
        rank_assignment: Of the new layout.
        old_model, new_model: Models of shards, before and after; None without shards.
        optimizers: Get the new parameters.
        new_owner: What stands for each parameter in the optimizers, by the id of the old one.
        entries: What they keep for it, likewise.
        requires_grad: Parameters with the flag and the attributes that they get.
    """

    root: nn.Module | None = None
    shared: StageExperts | None = None
    rank_assignment: RankAssignment | None = None
    old_model: ShardedModel | None = None
    new_model: ShardedModel | None = None
    optimizers: Optimizers | None = None
    new_owner: dict[int, nn.Parameter] = field(default_factory=dict)
    entries: dict[int, dict[str, Any]] = field(default_factory=dict)
    requires_grad: list[tuple[nn.Parameter, bool, dict[str, Any]]] = field(default_factory=list)

    def make(self) -> None:
        # first: the originals must have their hooks and attributes back before others take them
        if self.old_model is not None:
            self.old_model.leave()
        if self.new_model is not None:
            self.new_model.copy.make()
        super().make()
        for parameter, flag, attributes in self.requires_grad:
            parameter.requires_grad_(flag)
            parameter.__dict__.update(attributes)
        if self.optimizers is not None:
            self.optimizers.exchange(self.new_owner, self.entries)
        assert self.root is not None
        assert self.shared is not None
        assert self.rank_assignment is not None
        self.shared.release()
        # a process without shared experts runs all of them itself
        group = self.rank_assignment.experts if self.rank_assignment.experts is not None else alone()
        regroup(self.root, group, self.rank_assignment.copies, self.rank_assignment.alike)


@dataclass
class JobState(PipelineState):
    """The training state of a job in its `present` layout, whatever kinds of parameters the model has.

    Attributes:
        plain: The model that the user built.
        present: The layout in force.
        before: Likewise with its shards; None where there are none.
        remakes: One of the two layouts has shards, so that modules are other ones.
    """

    plain: PipelineModel
    present: Parallelism
    before: ShardedLayout | None
    remakes: bool

    moves_experts = True

    def __post_init__(self) -> None:
        self.stacked = stacks(self.mover.owned.model.root)

    def layout(self, space: Space, target: TrainingLayout | None, processes: int) -> Layout:
        owned = self.mover.owned
        if target is not None:
            assert isinstance(target, JobLayout)
            model = as_held(describe(owned, target.rules), owned, space, is_sharded(target.layout))
            return layout_in(target.layout, space, model, target.owners, processes, first=False)
        # a layer is stored sparse in one piece
        model = describe(owned, self.before.rules if self.before is not None else {})
        model = as_held(model, owned, space, is_sharded(self.present))
        return layout_in(self.present, space, model, self.passes.owners, processes, first=True)

    def described(self, found: list[Item] | str) -> Held | str:
        held = super().described(found)
        if isinstance(held, Held):
            boxes: Held | str = self.mover.attempt(lambda: as_boxes(held, self.mover.owned, self.stacked))
            return boxes
        return held

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return super().shapes() | {name: stack.shape for name, stack in self.stacked.items()}

    @property
    def now_sharded(self) -> ShardedModel | None:
        """The model of shards that is in force on this process; None without."""
        model = self.mover.owned.model
        return model if isinstance(model, ShardedModel) else None

    def check_free(self) -> None:
        if not self.remakes:
            super().check_free()
            return
        now, named = self.now_sharded, self.mover.owned.parameters
        root = self.plain.root if now is None else now.copy.root
        check_free(leaves_of(root, named))
        check_weak(root, named)

    def copies(self) -> dict[str, Any]:
        """Digests of what tp ranks have whole: parameters, with what is kept for them."""
        if self.before is None or self.before.layout.tp == 1:
            return {}
        owned, state = self.mover.owned, self.mover.optimizers.state()
        found: dict[str, Tensor] = {}
        for parameter in describe(owned, self.before.rules).parameters:
            if parameter.dim is None:
                name, p, stack = parameter.name, owned.parameters[parameter.name], self.stacked.get(parameter.name)
                entries = {f"{name}@{e}": t for e, t in state.get(id(p), {}).items() if isinstance(t, Tensor)}
                mine = {name: p, **entries, **{key: handle.tensor for key, handle in registered(name, p)}}
                # ranks of one tp group have different experts: only equal parts are compared
                part = f" from row {stack.first}" if stack is not None else ""
                found |= {f"{key}{part}": tensor for key, tensor in mine.items()}
        return digests(found)

    def compare(self, every: Sequence[Mapping[str, Any]]) -> None:
        refuse_apart(every)

    def describe(self) -> Held | str:
        return self.refusal() or super().describe()

    def refusal(self) -> str:
        """The reason why modules cannot be made anew here; nothing if they can, or need not be."""
        if not self.remakes:
            return ""

        def checked() -> str:
            now = self.now_sharded
            check_copyable(self.plain.root, now.copy if now is not None else None)
            replaced = {id(p) for _, m in sharded_of(self.mover.owned.model.root) for p in m._parameters.values()}
            check_optimizers(self.mover.optimizers, mixed=has_experts(self.plain.root))
            check_parameters({n: p for n, p in self.mover.owned.parameters.items() if id(p) in replaced})
            return ""

        return str(self.mover.attempt(checked))

    def build(self, to: Going, boxes: Mapping[str, Box]) -> Built:
        if not self.remakes:
            return super().build(to, boxes)
        target = to.target
        shards = target.shards if isinstance(target, ShardedLayout) else None
        now, mover = self.now_sharded, self.mover
        owned = to.new_owner or Ownership(self.plain)
        mover.check_put(owned.parameters)
        model = target.model or self.plain
        if shards is not None:
            assert isinstance(target, ShardedLayout)
            # modules that were made ahead serve unless the user has changed something since
            made = target.ahead
            if made is None or not made.copy.stands():
                made = self._modules(model, shards, self._found())
            made.update(now, to.config.seed)
            model, twins = made, made.copy.twins()
            for name in owned.of(to.layers):
                if id(owned.parameters[name]) not in twins:
                    continue
                box = box_of(twins[id(owned.parameters[name])])
                # torch cuts the modules, our layouts say what is sent: values would land in wrong rows
                if box.elements and box != boxes.get(name):
                    raise TransitionError(f"torch's shard of {name} is {box}, the layout's is {boxes.get(name)}")
        return Built(stages=self._stages(replace(mover.builder, model=model), to), owned=owned, model=model)

    def ahead(self, runs: PipelineModel) -> Ahead:
        """Read the modules as they are; what is returned makes new ones for `runs` from that, in any thread.

        That returns None where it fails: then the switch makes them, and says why it cannot.
        """
        # a loss that is kept as an attribute would hold a graph until the switch
        found = [one.lasting() for one in self._found()]
        index = None if self.mover.device.type == "cpu" else torch.accelerator.current_device_index()

        def made(shards: Shards) -> ShardedModel | None:
            try:
                # The current device is per thread
                with torch.accelerator.device_index(index):
                    return self._modules(runs, shards, found)
            except Exception:
                return None

        return made

    def _found(self) -> list[Found]:
        now = self.now_sharded
        return found_in(self.plain.root, now.copy if now is not None else None)

    def _modules(self, runs: PipelineModel, shards: Shards, found: Sequence[Found]) -> ShardedModel:
        """The model `runs` with modules like those that were `found`, cut into shards, without memory."""
        # Not this object, which refers to what is in force now
        passes = self.passes
        return sharded(runs, found, shards, lambda: passes.progress.updates)

    def beside(self, others: list[Tensor]) -> list[Tensor]:
        now = self.now_sharded
        return others if now is None else [*others, *padded(now.root)]

    def drop(self) -> None:
        now, mover = self.now_sharded, self.mover
        if now is not None:
            for handle, tensor in settings(mover.owned.parameters, {}):
                handle.tensor = tensor
            # the state is to be freed: optimizers would hold the shards
            gone = now.leave()
            for optimizer in mover.optimizers.all:
                for group in optimizer.param_groups:
                    group["params"][:] = [gone.get(id(p), p) for p in group["params"]]
            mover.owned.read()
        super().drop()

    def change(self, to: Going, built: Built, state: State, numbers: Mapping[str, Any]) -> Change:
        values = {piece.name: tensor for piece, tensor in state.items()}
        if self.remakes:
            change = self._remodelled(to, built, values, numbers)
        else:
            # the same change, which can also regroup experts
            change = Remodel(**vars(super().change(to, built, state, numbers)))
        change.root, change.shared, change.rank_assignment = (
            self.plain.root,
            self.passes.experts,
            to.target.rank_assignment,
        )
        self._share(change, to.target, values)
        change.check()
        return change

    def _share(self, change: Remodel, target: TrainingLayout, values: Mapping[str, Tensor]) -> None:
        """Give parameters of experts the size that processes have of them in `target`, on spare ones too."""
        assert isinstance(target, JobLayout)
        contents = {id(parameter): k for k, (parameter, _) in enumerate(change.contents)}
        for name, stack in self.stacked.items():
            parameter, part = self.mover.owned.parameters[name], stack.part(0, target.layout.ep).shape
            memory = values.get(name)
            if memory is None:
                # nothing came: the layer lives elsewhere, and keeps the shape that its engine expects
                memory = torch.empty(part, dtype=parameter.dtype, device="meta")
                mine = {id(handle) for _, handle in registered(name, parameter)}
                change.settings = [(h, t.new_empty(part) if id(h) in mine else t) for h, t in change.settings]
            if tuple(memory.shape) != part:
                raise LayoutError(f"{name} has come as {list(memory.shape)}, expected {list(part)}")
            put_in = (parameter, nn.Parameter(memory, requires_grad=parameter.requires_grad))
            if id(parameter) in contents:
                change.contents[contents[id(parameter)]] = put_in
            elif tuple(parameter.shape) != part:
                change.contents.append(put_in)
                change.grads.append((parameter, None))

    def _remodelled(self, to: Going, built: Built, values: dict[str, Tensor], numbers: Mapping[str, Any]) -> Remodel:
        """The change to other modules; a parameter that none of them replaces gets other contents."""
        now, mover, plain = self.now_sharded, self.mover, built.owned
        new_model = built.model if isinstance(built.model, ShardedModel) else None
        assert plain is not None
        change = Remodel(optimizers=mover.optimizers, old_model=now, new_model=new_model)
        own = plain.parameters
        here_too = {name: own[name] for name in plain.of(to.layers)}
        # this also adds empty moments to `values`, which `state_entries` reads
        twins = self._filled(new_model, here_too, values, to.space) if new_model is not None else {}
        change.owned = Ownership(new_model) if new_model is not None else plain
        entries = state_entries(values, to.updates(numbers, mover.groups.world.rank))
        for name, before in mover.owned.parameters.items():
            original = own[name]
            after = twins.get(id(original), original)
            change.new_owner[id(before)] = after
            if entries.get(name):
                mine = entries[name]
                cut = id(original) in twins
                change.entries[id(before)] = entries_like(after, mine, name, to.space) if cut else mine
            # gradients are of the old contents
            change.grads.append((original, None))
            if id(original) not in twins and name in values:
                made = nn.Parameter(values[name], requires_grad=before.requires_grad)
                change.contents.append((original, made))
            # frees what lives elsewhere from now on
            elif not original.is_meta:
                change.contents.append((original, like_meta(original)))
            # the original keeps marks as well: it may be in force again after the next switch
            kept, both = attributes_of(before), {id(original): original, id(after): after}
            change.requires_grad += [(p, before.requires_grad, kept) for p in both.values()]
        self._buffers(change, plain, values)
        change.settings = settings(
            mover.owned.parameters,
            values,
            lambda n, t: shard_like(twins[id(own[n])], t) if id(own[n]) in twins else t,
            lambda n: twins.get(id(own[n]), own[n]),
        )
        return change

    def _filled(
        self, model: ShardedModel, own: Mapping[str, nn.Parameter], values: dict[str, Tensor], space: Space
    ) -> dict[int, nn.Parameter]:
        """The parameters of `model`, which get the values that have come for their shards."""
        twins = model.copy.twins()
        mine = {name: box_of(twins[id(p)]) for name, p in own.items() if id(p) in twins}
        add_empty(values, mine, space, self.mover.device)
        return model.fill({id(own[name]): values[name] for name in mine})

    def _buffers(self, change: Change, owned: Ownership, values: Mapping[str, Tensor]) -> None:
        for name, buffer in owned.buffers.items():
            if name in values:
                change.buffers.append((buffer, values[name]))
            elif not buffer.tensor.is_meta:
                change.buffers.append((buffer, buffer.tensor.to("meta")))

    def unsplit(self, root: nn.Module) -> None:
        regroup(root, alone(), None)

    @property
    def whole(self) -> Ownership:
        return self.mover.owned if self.now_sharded is None else Ownership(self.plain)


def check_optimizers(optimizers: Optimizers, *, mixed: bool) -> None:
    """Raise `SpecError` for an optimizer that cannot update shards beside other parameters.

    With `mixed` it is to have both.
    """
    for option in ("foreach", "fused"):
        # torch's foreach and fused kernels take lists of one kind of tensor
        if mixed and any(group.get(option) for one in optimizers.all for group in one.param_groups):
            raise SpecError(f"an optimizer with {option}=True cannot update shards beside experts: leave it out")


def is_sharded(layout: Parallelism) -> bool:
    """Whether parameters are `DTensor`s in this layout."""
    return bool(mesh_axes(layout))


def mesh_axes(layout: Parallelism) -> list[Axis]:
    """The axes along which tensors are shards: those of a mesh."""
    # dp first: FSDP2 wants the outer dimension of the mesh
    axes: list[Axis] = ["dp"] if layout.zero >= 2 and layout.dp > 1 else []
    return [*axes, "tp"] if layout.tp > 1 else axes


def shards_in(layout: Parallelism, root: nn.Module, groups: Groups, rank: int, device: torch.device) -> Shards | None:
    """How the model is sharded on a rank in this layout.

    Args:
        layout: With its order chosen.
        root: The unsplit model.
        groups: Those of the layout, made before.
        rank: This process's.
        device: Where it computes.

    Returns:
        None without shards, or for a rank without a place.
    """
    axes = mesh_axes(layout)
    if not axes or layout.place(rank) is None:
        return None
    along = [groups.process_group(layout.group(axis, rank), SHARDS) for axis in axes]
    tp_styles = styles_of(root, layout.tp) if layout.tp > 1 else {}
    mesh = mesh_of(along, axes, layout.grid[0], device)
    return Shards(mesh=mesh, tp_styles=tp_styles, reshard=layout.zero == 3)
