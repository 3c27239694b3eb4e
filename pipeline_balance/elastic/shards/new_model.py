"""The model that a resharded loop goes on with, made beside the one in force: see `NewModel`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from pipeline_balance.elastic.shards.held_shards import box_of
from pipeline_balance.elastic.shards.module_copies import Copy, found_in, gone, retire, without_memory
from pipeline_balance.elastic.shards.sharded import (
    Shards,
    add_empty,
    cut_over_dp,
    cut_over_tp,
    entries_like,
    shard_like,
    sharing,
)
from pipeline_balance.elastic.shards.user_model import UserModel
from pipeline_balance.pipeline.model.ownership import attributes_of, take_hooks
from pipeline_balance.pipeline.model.registered import Settings, settings
from pipeline_balance.pipeline.move.state import state_entries
from pipeline_balance.pipeline.move.transaction import apply
from prophet.state.space import Box, Space

_LISTS = (nn.ModuleList, nn.ModuleDict)


class NewModel:
    """Modules made anew from those of `user_model`, on `meta`. After `filled`, `make` puts it in force.

    Args:
        user_model: The model in force.
        runs: Whether this process runs it; if not, it stays on `meta`.
        shards: How it is cut; None: plain.
        wrap: Makes what is returned of a plain one, such as DDP; None: nothing.
        options: More of `fully_shard`.
    """

    def __init__(
        self,
        user_model: UserModel,
        *,
        runs: bool,
        shards: Shards | None,
        wrap: Callable[[nn.Module], nn.Module] | None,
        options: Mapping[str, Any],
    ) -> None:
        self.user_model, self.runs, self.shards, self.wrap = user_model, runs, shards, wrap
        self.copy = copy = Copy(found_in(user_model.root, None), without_memory)
        for original, module in copy.pairs():
            # a dictionary apart: the old model keeps its buffers until `make`
            module.__dict__["_buffers"] = dict(original._buffers)
        if shards is not None:
            # tp first: FSDP2 expects the `DTensor`s of tp
            cut_over_tp(copy, shards)
            copy.inner = copy.take_hooks()
            cut_over_dp(copy.root, lambda: [*_blocks(copy.root), [copy.root]], shards, **options)
            copy.outer = copy.take_hooks()
        self._settings: Settings = []
        self._made: dict[str, nn.Parameter] = {}
        self._entries: dict[str, dict[str, Any]] = {}

    def twins(self) -> dict[str, nn.Parameter]:
        """The new parameter that stands for every parameter of the user's model, by name."""
        return {self.user_model.names[key]: twin for key, twin in self.copy.twins().items()}

    def boxes(self) -> dict[str, Box]:
        """The part of every parameter that this process is to have."""
        return {name: box_of(twin) for name, twin in self.twins().items()} if self.runs else {}

    def filled(self, values: dict[str, Tensor], space: Space, scalars: Mapping[str, Any]) -> nn.Module:
        """The model with these values; `make` is then all that is left.

        Args:
            values: By the names of training state; parts without elements are added to it.
            space: All tensors of the state.
            scalars: What optimizers keep as numbers.

        Raises:
            LayoutError: For registered tensors that are missing.
            Exception: What torch raises where the model cannot be made.
        """
        add_empty(values, self.boxes(), space, self.user_model.device)
        made = self._made = self._parameters(values)
        self._buffers(values)

        def like(name: str, value: Tensor) -> Tensor:
            return shard_like(made[name], value) if self.shards is not None else value

        self._settings = settings(self.user_model.parameters, values, like, lambda name: made[name])
        self._entries = state_entries(values, scalars)
        if self.shards is not None:
            self._entries = {n: entries_like(made[n], e, n, space) for n, e in self._entries.items()}
        return self.copy.root if self.wrap is None else self.wrap(self.copy.root)

    def _parameters(self, values: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
        """The parameters with their values, put in their places; on `meta` where this process does not run them."""
        made: dict[str, nn.Parameter] = {}
        for name, twin in self.twins().items():
            before = self.user_model.parameters[name]
            # without memory on a process that does not run it
            content = twin.detach()
            if self.runs:
                content = shard_like(twin, values[name]) if self.shards is not None else values[name]
            made[name] = nn.Parameter(content, requires_grad=before.requires_grad)
            # libraries keep marks on parameters, such as "no weight decay"
            made[name].__dict__.update(attributes_of(before))
            take_hooks(made[name], before)
        self.copy.put({id(p): made[name] for name, p in self.user_model.parameters.items()})
        return made

    def _buffers(self, values: Mapping[str, Tensor]) -> None:
        names = {id(buffer): name for name, buffer in self.user_model.buffers.items()}
        for _, module in self.copy.pairs():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    # a buffer that has not come is on no process of the layout
                    module._buffers[name] = values.get(names[id(buffer)], buffer.to("meta"))

    def make(self) -> None:
        """Put it in force: the optimizers train it, and the model from before refuses to run. Cannot fail.

        Should a part of it fail all the same, the others are made, and then its error is raised.
        """
        apply([self.copy.make, self._train, self._set, self._retire])

    def _train(self) -> None:
        ids = {name: key for key, name in self.user_model.names.items()}
        entries = {ids[name]: kept for name, kept in self._entries.items()}
        self.user_model.optimizers.exchange({ids[name]: p for name, p in self._made.items()}, entries)

    def _set(self) -> None:
        for handle, tensor in self._settings:
            handle.tensor = tensor

    def _retire(self) -> None:
        if self.user_model.wrapper is not None:
            # DDP would run the old module, and average gradients that nobody uses
            self.user_model.wrapper.__dict__["forward"] = gone
        retire(self.copy)


def _blocks(root: nn.Module) -> list[list[nn.Module]]:
    """What FSDP2 gathers together besides the root's own: elements of the outermost lists and rows.

    Those that share parameters are gathered as one. One that shares some with a module outside stays with the root.
    """
    groups = sharing(list(_elements(root)))
    inside = {id(part) for group in groups for module in group for part in module.modules()}
    # FSDP2 cannot gather a parameter in two groups
    outside = {id(p) for m in root.modules() if id(m) not in inside for p in m._parameters.values()}
    return [group for group in groups if not any(id(p) in outside for module in group for p in module.parameters())]


def _elements(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost lists and rows of modules; lists within lists are opened."""
    rows = isinstance(module, (*_LISTS, nn.Sequential))
    for child in module.children():
        if rows and not isinstance(child, _LISTS):
            yield child
        else:
            yield from _elements(child)
