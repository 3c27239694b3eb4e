"""ZeRO stage 1 around the user's one optimizer: within a column every tensor has one owner, which alone updates it.

The replicas of a stage hold the same parameters and, once averaged, the same gradients. Each tensor's moments live with
its owner. Before the optimizers' step the others drop their gradients, so torch leaves those parameters alone; after it
the owners send what they have updated. The bits are those of an update without owners.

Shape legend: R replicas, P pipeline ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.model.ownership import Ownership, local
from pipeline_balance.pipeline.run.replicas import Grid
from pipeline_balance.pipeline.run.stages import PipelineGroups
from pipeline_balance.spec import StageMap
from prophet.ranks.operation import Operation
from prophet.state.layout import zero_owners


class Owners:
    """Who updates what under a stage map and a grid.

    The owners are those of `zero_owners`; replica 0 has what was frozen then or is added later. Where replicas share
    experts, each part of them has an owner among its copies.

    Args:
        owned: The model's parameters.
        grid: The processes' places.
        stage_map: Which pipeline rank runs which layers; None where nobody is an owner.
        zero: 0 (every holder updates), 1 (one owner per column), 2 or 3 (every replica has other shards, and updates
            those).
        shards: Into how many shards others are cut, by name (None: parameters are no shards).
        shapes: Shapes of whole parameters, where they differ from the parts in force.
        read: What `owned` was as it was read, in another thread.
    """

    def __init__(
        self,
        owned: Ownership,
        grid: Grid,
        stage_map: StageMap | None,
        zero: int,
        *,
        shards: Mapping[str, int] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        read: Ownership | None = None,
    ) -> None:
        self.sharded = shards is not None
        self.owned, self.grid, self.stage_map = owned, grid, stage_map
        self.zero = zero if grid.replicas > 1 else 0
        self.table: list[dict[str, int]] = []
        if self.zero == 1 and stage_map is not None:
            seen = read if read is not None else owned
            requires_grad = seen.trained()
            for rank in range(grid.pipeline_ranks):
                trained = [n for n in seen.of(stage_map.layers_on(rank)) if n in requires_grad]
                self.table.append({})
                # experts have fewer holders than other parameters, so they are shared out apart
                for experts, every in ((False, 1), (True, grid.ep)):
                    names = [n for n in trained if self._is_expert(n) == experts]
                    whole = [(shapes or {}).get(n, seen.whole(n).shape) for n in names]
                    sizes = [math.prod(x) // (shards or {}).get(n, 1) for n, x in zip(names, whole, strict=True)]
                    found = zero_owners(sizes, grid.replicas // every)
                    self.table[-1] |= dict(zip(names, found.tolist(), strict=True))

    def under(self, stage_map: StageMap) -> Owners:
        """Who updates what under another map, shared out among the parameters that train now."""
        return Owners(self.owned, self.grid, stage_map, self.zero)

    def parted(self, name: str) -> bool:
        """Whether replicas have different parts of a parameter, as of shared experts."""
        return self._every(name) > 1

    def _every(self, name: str) -> int:
        """Every how many replicas the same part of a parameter comes again."""
        return self.grid.ep if self._is_expert(name) else 1

    def _is_expert(self, name: str) -> bool:
        return bool(getattr(self.owned.parameters.get(name), "prophet_expert", False))

    def updaters(self, name: str, pipeline_rank: int) -> tuple[int, ...]:
        """Return the processes of a column that update a parameter and keep the optimizer's state; none for rank P."""
        column = self.grid.column(pipeline_rank)
        return tuple(p for r, p in enumerate(column) if self.updates(name, pipeline_rank, r))

    def updates(self, name: str, pipeline_rank: int, replica: int) -> bool:
        """Return whether a replica updates a parameter.

        Args:
            name: The parameter's name.
            pipeline_rank: The rank whose stages have it.
            replica: The replica.
        """
        return self.zero != 1 or self.table[pipeline_rank].get(name, 0) == replica // self._every(name)

    def drop_others(self, groups: PipelineGroups) -> None:
        """Forget gradients of parameters that other replicas own, before the optimizers' step."""
        for _, owner, parameter in self._mine(groups):
            if owner != groups.replica:
                # torch's optimizers leave a parameter without a gradient alone
                parameter.grad = None

    @torch.no_grad()
    def share(self, groups: PipelineGroups) -> None:
        """Take over what other replicas have updated, after the optimizers' step; collective over the column."""
        flat: dict[tuple[int, int], list[Tensor]] = {}
        for every, owner, parameter in self._mine(groups):
            if parameter.requires_grad:
                flat.setdefault((every, owner), []).append(local(parameter))
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        came: list[tuple[Tensor, list[Tensor]]] = []
        for (every, owner), parameters in sorted(flat.items(), key=lambda item: item[0]):
            if owner == groups.replica:
                # as bytes: one message whatever the parameters' types
                packed = torch.cat([p.contiguous().view(-1).view(torch.uint8) for p in parameters])
                sends += [(r, packed) for r in range(owner % every, groups.replicas, every) if r != owner]
            else:
                size = sum(p.numel() * p.element_size() for p in parameters)
                came.append((torch.empty(size, dtype=torch.uint8, device=parameters[0].device), parameters))
                receives.append((owner, came[-1][0]))
        if sends or receives:
            groups.column.exchange(sends, receives, op=Operation("parameters of their owners")).wait()
        for memory, parameters in came:
            offset = 0
            for p in parameters:
                size = p.numel() * p.element_size()
                # cloned: a view as another type needs memory that is aligned to it
                p.copy_(memory[offset : offset + size].clone().view(p.dtype).view(p.shape))
                offset += size

    def _mine(self, groups: PipelineGroups) -> Iterator[tuple[int, int, nn.Parameter]]:
        """The parameters of this rank's stages, every how many replicas they come again, and who owns what is here.

        Nothing without owners.
        """
        if self.zero == 1 and not groups.spare:
            owner = self.table[groups.rank]
            assert self.stage_map is not None
            for name in self.owned.of(self.stage_map.layers_on(groups.rank)):
                every = self._every(name)
                yield every, owner.get(name, 0) * every + groups.replica % every, self.owned.parameters[name]
