"""A model of shards: modules that torch's tensor parallelism and FSDP2 have changed.

Every parameter is a `DTensor`: cut over tp by `parallelize_module`, over dp by `fully_shard` with zero 2 and 3, whole
where neither cuts it. Without FSDP2 its units run in stages like any other's. FSDP2 wants the root called, so all units
are one stage then; their random numbers are those of the unsplit model's units.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._pytree import tree_flatten

from pipeline_balance.elastic.shards.fully_sharded import give_back
from pipeline_balance.elastic.shards.module_copies import Copy, Found, sharded_of, without_memory
from pipeline_balance.elastic.shards.same_messages import SameMessages
from pipeline_balance.elastic.shards.tp_styles import Style
from pipeline_balance.pipeline.model.adapter import TransformersModel
from pipeline_balance.pipeline.model.expert_layers import collective_of
from pipeline_balance.pipeline.model.layers import (
    Activations,
    Inputs,
    Microbatch,
    ModuleChain,
    PipelineModel,
    TrainingPass,
    zero_of,
)
from pipeline_balance.pipeline.model.ownership import like_meta
from pipeline_balance.pipeline.move.state import base_name
from pipeline_balance.pipeline.run.generators import unit_seed
from pipeline_balance.schedules.actions import Action
from prophet.errors import SpecError
from prophet.ranks.collective import Collective
from prophet.state.space import Box, Space
from prophet.state.streams import torch_dtype


@dataclass(frozen=True, kw_only=True)
class Shards:
    """How this process's copy is sharded.

    Attributes:
        mesh: Has the dimensions "dp" (zero 2 and 3) and "tp", those of the two that cut.
        tp_styles: How tp cuts each module that has parameters, by name.
        reshard: Parameters are gathered anew for the backward pass.
    """

    mesh: DeviceMesh
    tp_styles: Mapping[str, Style]
    reshard: bool

    @property
    def dp(self) -> DeviceMesh | None:
        """The mesh along dp; None where it does not cut."""
        return self._along("dp")

    @property
    def tp(self) -> DeviceMesh | None:
        """The mesh along tp; None where it does not cut."""
        return self._along("tp")

    def _along(self, name: str) -> DeviceMesh | None:
        names = self.mesh.mesh_dim_names or ()
        if name not in names:
            return None
        return self.mesh if len(names) == 1 else self.mesh[name]


class _Whole(ParallelStyle):
    """A module that has its parameters whole on every tp rank, and computes with what lies there.

    Args:
        partial: Each rank runs it on its part of the activations, so gradients are summed.
    """

    def __init__(self, partial: bool) -> None:
        super().__init__()
        self.partial = partial

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        sums: list[Placement] = [Partial() if self.partial else Replicate()]
        names = [name for name, p in module._parameters.items() if p is not None]
        for name in names:
            p = module._parameters[name]
            assert p is not None
            # no rank sends: parameters are on meta here
            made = distribute_tensor(p, device_mesh, [Replicate()], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(made, requires_grad=p.requires_grad))
        # The parameters, while a forward runs with plain tensors in their place
        kept: dict[str, Any] = {}

        def before(module: nn.Module, args: Any) -> None:
            for name in names:
                whole: Any = module._parameters.pop(name)
                kept[name] = whole
                # This sums the gradients in the backward
                if self.partial:
                    whole = whole.redistribute(placements=[Replicate()])
                module.__dict__[name] = whole.to_local(grad_placements=sums)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            for name in names:
                if name in kept:
                    del module.__dict__[name]
                    module._parameters[name] = kept.pop(name)

        module.register_forward_pre_hook(before)
        # also after an exception: the parameters must come back
        module.register_forward_hook(after, always_call=True)
        return module


def _style(style: Style) -> ParallelStyle:
    """torch's own style for one of ours."""
    if style.how == "column":
        return ColwiseParallel(output_layouts=Replicate()) if style.gathered else ColwiseParallel()
    if style.how == "row":
        return RowwiseParallel()
    if style.how == "vocabulary":
        # torch cuts an embedding over its rows, and sums what each rank finds
        return RowwiseParallel(input_layouts=Replicate())
    return _Whole(style.partial)


def cut_over_tp(copy: Copy, shards: Shards) -> None:
    """Have tp cut a copy without memory, each module in its style."""
    if shards.tp is None:
        return
    for name, style in shards.tp_styles.items():
        parallelize_module(copy.root.get_submodule(name), shards.tp, _style(style), src_data_rank=None)
    first: dict[int, nn.Parameter] = {}
    # Tied parameters were cut once per module, all alike: they become one object again
    for original, module, name in copy.slots():
        module._parameters[name] = first.setdefault(id(original), module._parameters[name])  # type: ignore[arg-type]


def cut_over_dp(
    root: nn.Module,
    groups: Callable[[], Sequence[Sequence[nn.Module]]],
    shards: Shards,
    *,
    unused: bool = False,
    **options: Any,
) -> None:
    """Have FSDP2 cut `root`.

    Args:
        root: A copy without memory.
        groups: Lists modules whose parameters are gathered together, the root last.
        shards: Its mesh along dp; without one nothing happens.
        unused: Whether FSDP2 reduces zeros where a rank has no gradient.
        **options: More of `fully_shard`.
    """
    mesh = shards.dp
    if mesh is None:
        return
    for modules in groups():
        fully_shard(list(modules), mesh=mesh, reshard_after_forward=shards.reshard, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule) and mesh.device_type == "cpu":
            # gloo has no other reduction than a sum
            module.set_force_sum_reduction_for_comms(True)
        if isinstance(module, FSDPModule) and unused:
            module.set_reduce_scatter_unused_params(True, recurse=False)


def sharing(units: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Units that have parameters; those that share some are in one group."""
    groups: list[tuple[list[nn.Module], set[int]]] = []
    for unit in dict.fromkeys(units):
        modules, mine = [unit], {id(p) for p in unit.parameters()}
        if not mine:
            continue
        for other in [g for g in groups if g[1] & mine]:
            groups.remove(other)
            modules, mine = [*other[0], *modules], mine | other[1]
        groups.append((modules, mine))
    return [modules for modules, _ in groups]


class ShardedModel(PipelineModel):
    """The model `plain` as shards: without memory until `fill`.

    Any thread may make it; `update` then takes in what has changed since.

    Args:
        plain: The model that the user built.
        found: Its modules, as they were found.
        shards: How it is cut.
        updates: Says how many updates were made, which with the seed decides what units that run as one draw.
    """

    metered = False

    def __init__(
        self, plain: PipelineModel, found: Sequence[Found], shards: Shards, updates: Callable[[], int]
    ) -> None:
        self.plain, self.shards, self._seed, self._updates = plain, shards, 0, updates
        # what knows batches, and runs units where the root is not called
        self._runs, self.slicing = plain, plain.slicing
        self.in_stages = shards.dp is None
        self._part: Microbatch | None = None
        self.copy = Copy(found, without_memory)
        self.root = self.copy.root
        self.units = self._units()
        self._cut_over_tp()
        # hooks of tp see what the layer itself takes and returns, so they run within the user's
        self.copy.inner = self.copy.take_hooks()
        self._draw_by_unit()
        self._cut_over_dp()
        self._messages = SameMessages(self._called, self.units) if shards.dp is not None else None
        # FSDP2 gathers before any other hook may read parameters
        self.copy.outer = self.copy.take_hooks()
        self.copy.sharded()
        self._structure = self._ids()
        mesh = shards.mesh
        # of ranks that compute the same, one counts
        self.leads = shards.tp is None or shards.tp.get_local_rank() == 0
        self._first = [mesh.get_local_rank(d) == 0 for d in range(mesh.ndim)]

    # --- making it --------------------------------------------------------------------------------------------

    def update(self, now: ShardedModel | None, seed: int) -> None:
        """Take in what may have changed since modules were found: `now` is the model in force, if it is of shards."""
        self._seed = seed
        self.copy.update(now.copy if now is not None else None)

    def _units(self) -> tuple[nn.Module, ...]:
        return tuple(self.copy.of(unit) for unit in self.plain.units)

    def _draw_by_unit(self) -> None:
        """Have units that this class does not call draw from their own generators."""

    def _cut_over_tp(self) -> None:
        cut_over_tp(self.copy, self.shards)

    def _cut_over_dp(self) -> None:
        cut_over_dp(self.root, self._groups, self.shards)

    def _groups(self) -> list[list[nn.Module]]:
        """What is gathered together: units, those that share parameters as one."""
        return sharing(self.units)

    @property
    def _called(self) -> nn.Module:
        """What is called where FSDP2 cuts."""
        return self.root

    def fill(self, values: Mapping[int, Tensor]) -> dict[int, nn.Parameter]:
        """Parameters that have these values for their shards, each put in its places.

        Args:
            values: By the id of the original parameter; what has no value stays without memory.

        Returns:
            The new parameters, by the id of the original.
        """
        made = self.copy.twins()
        for key, like in made.items():
            if key in values:
                made[key] = nn.Parameter(shard_like(like, values[key]), requires_grad=like.requires_grad)
        self.copy.put(made)
        self._structure = self._ids()
        self._hold(made)
        return made

    def leave(self) -> dict[int, nn.Parameter]:
        """Give hooks and attributes back to the originals. Cannot fail.

        Who still refers to this model finds no values, rather than old ones.

        Returns:
            What stands for every parameter from here on, by the id of the shard.
        """
        self.copy.unmake()
        found: dict[int, nn.Parameter] = {}
        made: dict[int, nn.Parameter] = {}
        for key, twin in self.copy.twins().items():
            shard: Any = twin
            made[key] = found[id(shard)] = like_meta(shard)
            # frees the memory even where somebody holds the parameter
            shard._local_tensor = shard._local_tensor.to("meta")
        self.copy.put(made)
        self._hold(made)
        return found

    def _hold(self, made: Mapping[int, nn.Parameter]) -> None:
        """Register parameters that units list without being their modules."""

    def _ids(self) -> list[int]:
        return [id(m) for m in self.root.modules()]

    # --- running it -------------------------------------------------------------------------------------------

    def run(self, unit: int, activations: Activations, microbatch: Microbatch) -> Activations:
        """Run the whole model as the first unit, since torch wants the root called; other units pass their input on.

        Args:
            unit: Its number.
            activations: What the unit before returned.
            microbatch: Inputs and labels.
        """
        if unit:
            return activations
        self._part = microbatch
        with self._messages.forward() if self._messages is not None else nullcontext():
            return self._whole(microbatch)

    @abstractmethod
    def _whole(self, microbatch: Microbatch) -> Activations:
        """What the last unit returns."""

    def _draw(self, unit: int) -> None:
        """From here on random numbers are those of `unit`; outside of a pass nothing changes."""
        if self._part is not None:
            seed = unit_seed(self._seed, unit, self._updates(), self._part.number, None)
            # the global generators: the root's forward goes from unit to unit by itself
            torch.manual_seed(seed)
            random.seed(seed)

    def look(self) -> None:
        if self._ids() != self._structure:
            raise SpecError("modules were added or replaced in a layout of shards: do it in one of pp and dp")

    def cut(self, inputs: Inputs, labels: Tensor | None, microbatches: int, first: int = 0) -> list[Microbatch]:
        return self._runs.cut(inputs, labels, microbatches, first)

    def counted(self, microbatch: Microbatch) -> float:
        return self._runs.counted(microbatch)

    def loss(self, activations: Activations, microbatch: Microbatch) -> Tensor:
        return self._runs.loss(activations, microbatch)

    def sliced(self, microbatch: Microbatch) -> list[Microbatch]:
        # also one slice, in which layers may attend as in slices
        return self._runs.sliced(microbatch)

    @contextmanager
    def working(self, microbatch: Microbatch) -> Iterator[None]:
        with self._runs.working(microbatch):
            yield

    def activations(self, microbatch: Microbatch) -> list[Activations]:
        # No other stage waits for them
        return [()] * (len(self.units) + 1)

    def measures(self, parameter: nn.Parameter, replica: int) -> bool:
        # None in a layer of experts: all have it whole
        placements = getattr(parameter, "placements", None)
        copies = [p.is_replicate() for p in placements] if placements is not None else [True] * len(self._first)
        # of ranks that have the same shard, the first one adds it to the gradients' norm
        first = all(here for here, copied in zip(self._first, copies, strict=True) if copied)
        return first and (self.shards.dp is not None or replica == 0)

    def begin_pass(self, given: TrainingPass) -> None:
        self._runs.begin_pass(given)

    @contextmanager
    def acting(self, action: Action) -> Iterator[None]:
        messages = self._messages
        # an "I" is a whole backward here: the first stage passes no gradient on
        backward = messages.backward() if messages is not None and action.kind in "BI" else nullcontext()
        with self._runs.acting(action), backward:
            yield

    def settle_gradients(self, shards: Sequence[Collective]) -> None:
        if self._messages is not None:
            # dp comes first
            self._messages.drop_unused(shards[0])

    def end_pass(self) -> None:
        """Give memory of gathered parameters back, which a pass without a backward would keep."""
        self._part = None
        give_back(self.root)
        self._runs.end_pass()

    def rest(self) -> None:
        self._runs.rest()


class _Row(nn.Module):
    """All layers of a row, which torch wants to see called from one module.

    `call` runs a microbatch through them.
    """

    def __init__(self, units: Sequence[nn.Module], call: Callable[[Microbatch], Activations]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self.call = call

    def forward(self, microbatch: Microbatch) -> Activations:
        return self.call(microbatch)


class ShardedChain(ShardedModel):
    """Modules in a row as shards."""

    plain: ModuleChain

    def _groups(self) -> list[list[nn.Module]]:
        self._row = _Row(self.units, self._through)
        return [*super()._groups(), [self._row]]

    @property
    def _called(self) -> nn.Module:
        return self._row

    def _through(self, microbatch: Microbatch) -> Activations:
        plain, activations = self.plain, cast(Activations, ())
        for unit, module in enumerate(self.units):
            self._draw(unit)
            args, kwargs = plain.arguments_of(unit, activations, microbatch)
            leaves, structure = tree_flatten(module(*args, **kwargs))
            activations, plain.structures = tuple(leaves), (*plain.structures[:unit], structure)
        return activations

    def _whole(self, microbatch: Microbatch) -> Activations:
        found: Activations = self._row(microbatch)
        return found


class _Listed(nn.Module):
    """The parameters of a unit that is no module."""


class ShardedTransformers(ShardedModel):
    """A transformers model as shards: in stages, or its own forward whole as the first unit."""

    plain: TransformersModel

    def update(self, now: ShardedModel | None, seed: int) -> None:
        super().update(now, seed)
        if self.in_stages:
            self._runs = self.plain.over(self.copy.of, self.units, self.copy.apart)

    def run(self, unit: int, activations: Activations, microbatch: Microbatch) -> Activations:
        if self.in_stages:
            return self._runs.run(unit, activations, microbatch)
        return super().run(unit, activations, microbatch)

    def activations(self, microbatch: Microbatch) -> list[Activations]:
        if self.in_stages:
            return self._runs.activations(microbatch)
        return super().activations(microbatch)

    def _units(self) -> tuple[nn.Module, ...]:
        return (_Listed(), *(self.copy.of(layer) for layer in self.plain.layers), _Listed())

    def _groups(self) -> list[list[nn.Module]]:
        return [*([layer] for layer in self.units[1:-1]), [self.root]]

    def _hold(self, made: Mapping[int, nn.Parameter]) -> None:
        for unit, theirs in ((self.units[0], self.plain.units[0]), (self.units[-1], self.plain.units[-1])):
            for name, parameter in theirs._parameters.items():
                # the first and the last unit list parameters that modules of the root own
                unit.register_parameter(name, made[id(parameter)])

    def _draw_by_unit(self) -> None:
        if self.in_stages:
            return
        layers = self.units[1:-1]
        for number, layer in enumerate(layers, start=1):
            # before all other hooks of the layer, which may draw, too
            layer.register_forward_pre_hook(lambda *_, unit=number: self._draw(unit), prepend=True)
        # the last unit is what follows the last layer in the root's forward
        layers[-1].register_forward_hook(lambda *_: self._draw(len(layers) + 1))

    def _whole(self, microbatch: Microbatch) -> Activations:
        # a mean over no labels is NaN: such a microbatch adds zero
        counts = self.counted(microbatch) > 0
        out = self.root(**self.plain.kwargs_of(microbatch, labels=microbatch.labels if counts else None))
        loss = out[0] if isinstance(out, tuple) else out["loss" if counts else "logits"]
        if not counts:
            return (zero_of((loss,)),)
        # 16-bit losses lose digits when microbatches are added up
        return (loss.float() if loss.dtype.itemsize < torch.float32.itemsize else loss,)


def sharded(plain: PipelineModel, found: Sequence[Found], shards: Shards, updates: Callable[[], int]) -> ShardedModel:
    """The model as shards, without memory.

    Args:
        plain: The model that the user built.
        found: Its modules, as they were found.
        shards: How it is cut.
        updates: Says how many updates were made.

    Raises:
        SpecError: For a kind of model that cannot be sharded.
    """
    if isinstance(plain, TransformersModel):
        return ShardedTransformers(plain, found, shards, updates)
    if isinstance(plain, ModuleChain):
        return ShardedChain(plain, found, shards, updates)
    raise SpecError(f"a {type(plain).__name__} cannot be sharded: expected layers in a row or a transformers model")


def check_shardable(model: PipelineModel, *, in_stages: bool) -> None:
    """Raise `SpecError` for a model that cannot be sharded; with `in_stages` its units run one by one."""
    if not isinstance(model, TransformersModel | ModuleChain) or model.slicing is not None:
        raise SpecError(f"a {type(model).__name__} cannot be sharded: expected layers in a row or a transformers model")
    if isinstance(model, TransformersModel) and model.router_loss is not None and not in_stages:
        raise SpecError("a model whose routers add a loss cannot be sharded with zero 2 and 3")
    check_no_scalars(model.root)


def check_no_scalars(root: nn.Module) -> None:
    """Raise `SpecError` for a parameter that torch cannot shard."""
    for name, module in sharded_of(root):
        for attribute, p in module._parameters.items():
            if p is not None and not p.dim():
                where = f"{name}.{attribute}" if name else attribute
                raise SpecError(f"{where} is a scalar, which torch cannot shard: give it one dimension")


def check_parts(root: nn.Module) -> None:
    """Raise `SpecError` for a parameter or module that torch cannot shard."""
    check_no_scalars(root)
    for name, module in root.named_modules():
        if collective_of(module) is not None:
            raise SpecError(f"{name} has experts on several ranks, which cannot be sharded")


def mesh_of(groups: Sequence[Any], names: Sequence[str], ranks: Any, device: torch.device) -> DeviceMesh:
    """The mesh of process groups that exist; nothing is sent.

    Args:
        groups: One per dimension, this process's.
        names: Of the dimensions.
        ranks: Of the whole mesh, one axis per dimension.
        device: Its type is the mesh's.
    """
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device.type, mesh_dim_names=tuple(names))
    return DeviceMesh.from_group(list(groups), device.type, mesh=torch.tensor(ranks), mesh_dim_names=tuple(names))


def is_wide(space: Space, name: str) -> bool:
    """Whether a tensor is kept for a parameter, by an optimizer or by a user, in its shape."""
    if name not in space.number or space[name].kind not in ("optimizer", "registered"):
        return False
    return space[name].shape == space[base_name(name)].shape


def entries_like(like: Tensor, entries: Mapping[str, Any], name: str, space: Space) -> dict[str, Any]:
    """What an optimizer keeps for a parameter: as shards like it where it is of its shape.

    Args:
        like: The parameter.
        entries: Values by the optimizer's names.
        name: The parameter's name in `space`.
        space: All tensors of the state.
    """
    return {e: shard_like(like, v) if is_wide(space, f"{name}@{e}") else v for e, v in entries.items()}


def add_empty(values: dict[str, Tensor], boxes: Mapping[str, Box], space: Space, device: torch.device) -> None:
    """Add the parts without elements, which do not travel: of parameters, and of what is kept in their shape.

    Args:
        values: Gets them, by the names of training state.
        boxes: What this process has of every parameter.
        space: All tensors of the state.
        device: Where they are made.
    """
    for spec in space.tensors:
        box = boxes.get(base_name(spec.name))
        if box is not None and not box.elements and (spec.kind == "parameter" or is_wide(space, spec.name)):
            values[spec.name] = torch.empty(box.shape, dtype=torch_dtype(spec), device=device)


def shard_like(like: Any, values: Tensor) -> DTensor:
    """A tensor of the shape and placements of `like`, of which this process has `values`."""
    # the constructor has no types
    kind: Any = DTensor
    spec = like._spec
    if values.dtype != like.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=values.dtype))
    # `from_local` makes a graph, which takes ten times as long
    made: DTensor = kind(values, spec, requires_grad=False)
    return made
