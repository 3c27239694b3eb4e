"""People's own training loops change their layout: see `reshard`.

A model and its optimizer are taken as they are. Modules are made anew beside them, on `meta`, and filled with what the
one mover of training state brings. Once all processes have decided, what is left are assignments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_balance.elastic.groups import SHARDS, Groups, Members, groups_of_world, on_all_processes
from pipeline_balance.elastic.layouts.parallelism import FEWEST_BYTES, Parallelism
from pipeline_balance.elastic.shards.fully_sharded import (
    check_weak,
    counts_unused,
    leaves_of,
    options_from_json,
    options_to_json,
    policies_of,
)
from pipeline_balance.elastic.shards.held_shards import digests, refuse_apart
from pipeline_balance.elastic.shards.job_state import is_sharded, mesh_axes, shards_in
from pipeline_balance.elastic.shards.module_copies import check_copyable, check_parameters
from pipeline_balance.elastic.shards.new_model import NewModel
from pipeline_balance.elastic.shards.sharded import check_parts
from pipeline_balance.elastic.shards.tp_styles import styles_of
from pipeline_balance.elastic.shards.user_model import UserModel
from pipeline_balance.pipeline.model.ownership import check_free
from pipeline_balance.pipeline.move.state import base_name, refuse_odd
from pipeline_balance.pipeline.move.transaction import Assignments, Move, run
from pipeline_balance.pipeline.move.votes import Vote, refuse_against, union
from pipeline_balance.pipeline.run.agreement import refuse_where
from prophet.errors import CollectiveError, ReshardedError, SpecError, TransitionError, in_a_line
from prophet.ranks.collective import DEFAULT_TIMEOUT_S, Collective
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import meet, process_rank, processes
from prophet.state.layout import Piece, layout_from
from prophet.state.route import route
from prophet.state.route_schedule import RouteSchedule
from prophet.state.space import Box, Space
from prophet.state.transition import Moved, State, empty
from prophet.trials import trying


def reshard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
    before: Parallelism,
    after: Parallelism,
    build: Callable[[], nn.Module],
    *,
    device: torch.device | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    budget_bytes: int = 64 << 20,
) -> nn.Module:
    """The model in the layout `after`; the optimizer is changed in place. Collective over all processes.

    Call it after `optimizer.step()`: gradients are dropped. What is returned is wrapped in DDP for dp with zero 0,
    sharded by FSDP2 for dp with zero 2 and 3, and cut by the model's `tp_plan`, which transformers defines, for tp.
    Ranks beyond `after` get it on `meta` and run nothing.

    Modules and parameters are other objects afterwards, so rebuild your own lists of them. The old model refuses to
    run. Hooks and attributes of modules, `training`, attributes of parameters, registered tensors, schedulers, scalers
    and step hooks go on. Buffers are those of the first rank of `before`. If it raises, nothing has changed, unless
    the error is a `ReshardedError`.

    Args:
        model: Plain, wrapped in DDP, or sharded by `fully_shard` or `parallelize_module`, by this function or the
            caller.
        optimizer: Of its parameters; several as a list.
        before: The layout that the model is in.
        after: The layout to come.
        build: Returns the whole model, which is compared with this one; called under `torch.device("meta")`.
        device: Of ranks that have the model on `meta`; None: the CPU.
        timeout_s: Seconds that every wait may take.
        budget_bytes: Of the buffers of the move.

    Returns:
        The model that training goes on with.

    Raises:
        SpecError: On all ranks for what cannot be resharded: other layouts than dp with zero 0, 2 and 3, tp, and dp x
            tp with zero 2 and 3; a model that is not in the layout `before`; hooks on parameters that become shards;
            graphs, weak references, hooks and attributes that would go on with what is replaced; copies that differ; a
            DDP that lets ranks skip modules, with zero 2 and 3 afterwards.
        TransitionError: On all ranks where something fails on the way.
        ReshardedError: On a rank where something fails once all have decided: training goes on with `error.model`.
    """
    found: list[_Own] = []

    def begin() -> None:
        at = device if device is not None else torch.device("cpu")
        found.append(_Own(model, optimizer, before, after, build, at, timeout_s, budget_bytes))

    # what one rank alone can see must still fail on all of them
    on_all_processes("resharding", begin, timeout_s)
    return found[0].made()


@dataclass
class _Own(Move):
    """One call of `reshard` on one rank. Raises `SpecError` when made for what this rank alone can see.

    Attributes:
        returned: The model that training goes on with.
        built: What `build` returned, on `meta`.
        options: Of FSDP2 or DDP, for the new layout.
    """

    what = "a reshard"
    whole = "the model and the optimizer are as they were"

    model: nn.Module
    optimizer: Any
    before: Parallelism
    after: Parallelism
    build: Callable[[], nn.Module]
    device: torch.device
    timeout_s: float
    budget_bytes: int
    user_model: UserModel = field(init=False)
    built: nn.Module = field(init=False)
    options: dict[str, Any] = field(init=False)
    groups: Groups = field(init=False)
    returned: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        rank = process_rank()
        self.groups = groups_of_world(self.timeout_s)
        for name, layout in (("before", self.before), ("after", self.after)):
            _check_layout(name, layout)
        self.user_model = user_model = UserModel(self.model, self.optimizer, self.device)
        self.device, self.allocate = user_model.device, empty
        user_model.compare(self.before, rank)
        # building must not draw from the generators that training draws from
        with trying(None), torch.device("meta"):
            self.built = built = self.build()
        if not isinstance(built, nn.Module):
            raise SpecError(f"build() must return the whole model, got a {type(built).__name__}")
        user_model.match(built)
        # a module may count the heads of its rank, which another tp changes
        if self.before.tp > 1 and self.before.tp != self.after.tp:
            user_model.match_numbers(built)
        check_copyable(user_model.root, None)
        check_weak(user_model.root, user_model.parameters)
        # DDP holds parameters as a graph does, so graphs cannot be told apart from it
        if user_model.wrapper is None:
            check_free(leaves_of(user_model.root, user_model.parameters))
        if is_sharded(self.before) or is_sharded(self.after):
            check_parameters(user_model.parameters)
        if is_sharded(self.after):
            _check_shardable(user_model)
        if self.after.tp > 1:
            styles_of(built, self.after.tp)
        self.options = self._options()

    def _options(self) -> dict[str, Any]:
        """Options of FSDP2 or DDP that the new wrapper takes; `SpecError` for those that it cannot."""
        policies, options = policies_of(self.user_model.root), dict(self.user_model.ddp_options())
        over_dp = "dp" in mesh_axes(self.after)
        skips = [name for name in ("find_unused_parameters", "static_graph") if options.get(name)]
        if over_dp and skips:
            # it packs the gradients that a rank has, without their names: findings/fsdp2_mixes_experts.sh
            raise SpecError(
                f"the model is wrapped in DistributedDataParallel with {skips[0]}=True: where ranks skip different "
                "modules, FSDP2 would average these modules' gradients. Wrap it without, if none does"
            )
        unused = counts_unused(self.user_model.root)
        if over_dp and len(policies) <= 1:
            return {**({"mp_policy": policies[0]} if policies else {}), **({"unused": True} if unused else {})}
        # one policy goes to FSDP2 again, above; nothing else takes any
        if any(p.param_dtype or p.reduce_dtype or p.output_dtype for p in policies):
            raise SpecError("the model computes in other types by FSDP2's MixedPrecisionPolicy, which would be lost")
        if is_sharded(self.after):
            return {}
        # DDP's word for the same
        return {**options, "find_unused_parameters": True} if unused and self.after.dp > 1 else options

    # --- what ranks agree on ----------------------------------------------------------------------------------

    def made(self) -> nn.Module:
        """The model in its new layout; collective."""
        self._agree()
        state: tuple[Members, str] = (tuple(range(processes())), "state")
        axes = mesh_axes(self.after) or (["dp"] if self.after.dp > 1 else [])
        wanted = [state, *((members, SHARDS) for axis in axes for members in self.after.groups(axis))]
        self.groups.make_everywhere(wanted)
        carrier, decided = self.groups.get(*state), list[bool]()
        try:
            run(self, world=carrier, carrier=carrier, then=[lambda: decided.append(True)])
        except Exception as error:
            if decided:
                raise ReshardedError(in_a_line(error), self.returned) from error
            if isinstance(error, TransitionError | CollectiveError):
                # It may be stuck in an exchange; the next call makes another
                self.groups.drop([state])
            raise
        return self.returned

    def _agree(self) -> None:
        """Agree, before groups are made, on layouts, and on options among the processes that have the model.

        Processes that the model comes to take those options, too.
        """
        rank = process_rank()
        mine = options_to_json(self.options) if self.before.place(rank) is not None else None
        mine_text = json.dumps([str(self.before), str(self.after), mine])
        texts = meet(Operation("agreeing on layouts and options"), mine_text, timeout_s=self.timeout_s)
        every = list(map(json.loads, texts))
        refuse_where([row[:2] for row in every], "were given other layouts")
        # processes without the model have no options to compare
        first = every[self.before.rank_of_place[0]][2]
        refuse_where([first if row[2] is None else row[2] for row in every], "have other options of FSDP2 or DDP")
        self.options = options_from_json(first)

    def vote(self) -> Vote:
        user_model = self.user_model
        self._held, pieces = user_model.held(), user_model.pieces()
        self._made = self._new_model()
        return Vote.of(
            self._held,
            alike={
                "have other parameters in the optimizer's groups": user_model.groups(),
                "train (requires_grad) other parameters": [
                    n for n, p in user_model.parameters.items() if p.requires_grad
                ],
            },
            # buffers differ between ranks in ordinary training (running statistics): they are not compared
            copies=digests({n: t for n, t in user_model.tensors().items() if n not in user_model.buffers}),
            more={
                "held": {name: box for name, box in pieces.items() if name in self._held.tensors},
                "boxes": {name: [box.start, box.stop] for name, box in self._made.boxes().items()},
            },
        )

    def compare(self, votes: Sequence[Vote]) -> None:
        refuse_against(votes, self.whole)
        refuse_apart([vote.copies for vote in votes])
        self._space, self._numbers = union(votes, self.whole)
        self._boxes = [(vote.more["held"], vote.more["boxes"]) for vote in votes]

    def route_schedule(self, carrier: Collective) -> RouteSchedule:
        space, first, world = self._space, self.before.rank_of_place[0], len(self._boxes)
        before = {
            # buffers come from one rank, since they may differ
            r: [(n, _box(b)) for n, b in held.items() if space[n].kind != "buffer" or r == first]
            for r, (held, _) in enumerate(self._boxes)
        }
        after = {
            r: _afterwards(space, {n: _box(b) for n, b in boxes.items()}) for r, (_, boxes) in enumerate(self._boxes)
        }
        layout = layout_from(space, world, before)
        # a part that no rank holds could not be brought
        layout.check_complete()
        return RouteSchedule(route(layout, layout_from(space, world, after)), carrier.rank)

    def state(self, pieces: Sequence[Piece]) -> State:
        return {piece: self._held.tensors[piece.name] for piece in pieces}

    def assemble(self, moved: Moved) -> Assignments:
        values = {piece.name: tensor for piece, tensor in moved.state.items()}
        # scalars that an optimizer keeps as numbers are the same everywhere, and need no route
        numbers = self._numbers if self.after.place(process_rank()) is not None else {}
        self.returned = self._made.filled(values, self._space, numbers)
        return [self._made.make]

    def _new_model(self) -> NewModel:
        """The model in its new layout on this rank, on `meta`."""
        rank, after, user_model = process_rank(), self.after, self.user_model
        runs, wrap = after.place(rank) is not None, None
        shards = shards_in(after, self.built, self.groups, rank, user_model.device)
        if runs and after.dp > 1 and not is_sharded(after):
            group = self.groups.process_group(after.group("dp", rank), SHARDS)
            # init_sync would broadcast parameters, which have just been brought
            wrap = partial(nn.parallel.DistributedDataParallel, process_group=group, init_sync=False)
            wrap = partial(wrap, **self.options)
        return NewModel(user_model, runs=runs, shards=shards, wrap=wrap, options=self.options)


def _afterwards(space: Space, boxes: Mapping[str, Box]) -> list[tuple[str, Box]]:
    """What a rank holds that has these boxes of the parameters; nothing where it has none of any."""
    found: list[tuple[str, Box]] = []
    for tensor in space.tensors if boxes else ():
        name = base_name(tensor.name)
        # buffers and step counts are whole wherever a rank has anything
        if tensor.kind == "buffer" or (tensor.name != name and tensor.shape != space[name].shape):
            found.append((tensor.name, tensor.box))
        elif boxes[name].elements:
            found.append((tensor.name, boxes[name]))
    return found


def _box(bounds: list[list[int]]) -> Box:
    return Box(tuple(bounds[0]), tuple(bounds[1]))


def _check_layout(name: str, layout: Parallelism) -> None:
    if not isinstance(layout, Parallelism):
        raise SpecError(f"{name}: expected a layout, such as elastic.Parallelism(dp=4, zero=3), got {layout!r:.100}")
    wrong = [f"{axis}{getattr(layout, axis)}" for axis in ("pp", "ep", "slices") if getattr(layout, axis) > 1]
    wrong += ["zero1"] if layout.zero == 1 else []
    wrong += [f"dp{layout.dp} x tp{layout.tp} with zero 0"] if layout.tp > 1 and layout.dp > 1 > layout.zero else []
    wrong += ["an order that is still to be chosen"] if layout.order == FEWEST_BYTES else []
    if wrong:
        raise SpecError(
            f"{name} = {layout}: {' and '.join(wrong)} cannot be resharded; expected dp with zero 0, 2 or 3, tp, or dp "
            "x tp with zero 2 or 3"
        )
    # an open order was refused above
    if max(layout.rank_of_place) >= processes():
        raise SpecError(f"{name} = {layout} needs rank {max(layout.rank_of_place)}, the world has {processes()} ranks")


def _check_shardable(user_model: UserModel) -> None:
    """Raise `SpecError` or `LayoutError` for what torch cannot shard."""
    check_parts(user_model.root)
    for name, p in user_model.parameters.items():
        for entry, value in user_model.optimizers.state().get(id(p), {}).items():
            if isinstance(value, Tensor):
                # factored moments, for instance, have another shape than their parameter
                refuse_odd(f"{name}@{entry}", value.shape, p.shape)
