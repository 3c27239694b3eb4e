"""A model as somebody's own loop has it: plain, wrapped by DDP, or sharded by torch. It is read, and compared.

What a process holds is read off the live objects. The layout that the caller names is only compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline_balance.elastic.groups import members_of
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.elastic.shards.fully_sharded import give_back
from pipeline_balance.elastic.shards.held_shards import cut_over, pieces_of
from pipeline_balance.elastic.shards.job_state import is_sharded
from pipeline_balance.pipeline.model.ownership import check_names, local
from pipeline_balance.pipeline.model.registered import registered
from pipeline_balance.pipeline.move.state import Held
from pipeline_balance.pipeline.run.optimizers import Optimizers
from prophet.errors import SpecError

_NOT_DDP = {
    "FullyShardedDataParallel": "use fully_shard",
    "DataParallel": "use DistributedDataParallel",
    "OptimizedModule": "give the model from before torch.compile, and compile the one that is returned",
    "DeepSpeedEngine": "its optimizer holds one flat parameter",
    "PipelineEngine": "its optimizer holds one flat parameter",
}
# as far as this version of torch has them; the last one is how older ones call the one before
_OPTIONS = (
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
    "forward_sync_buffers",
    "broadcast_buffers",
)


class UserModel:
    """A model with its optimizer, as a user's loop has them.

    `root` is without its DDP `wrapper`. Tied parameters have the first of their names.

    Args:
        model: Plain, wrapped in DDP, or sharded by torch.
        optimizer: Of its parameters; several as a list.
        device: Where a process works that has nothing of the model.

    Raises:
        SpecError: For a kind of model that cannot be resharded, and where the optimizer has other parameters.
    """

    def __init__(self, model: nn.Module, optimizer: Any, device: torch.device) -> None:
        self.wrapper = model if isinstance(model, DistributedDataParallel) else None
        self.root: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        for name, module in self.root.named_modules():
            kind = type(module).__name__
            if kind in _NOT_DDP or isinstance(module, DistributedDataParallel):
                hint = _NOT_DDP.get(kind, "wrap the whole model")
                raise SpecError(f"{name or 'the model'} is a {kind}, which cannot be resharded: {hint}")
        # gathered parameters would be read in place of shards
        give_back(self.root)
        self.parameters = dict(self.root.named_parameters())
        self.names = {id(p): name for name, p in self.parameters.items()}
        # by every name of a tied parameter, the first one
        self.first = {n: self.names[id(p)] for n, p in self.root.named_parameters(remove_duplicate=False)}
        self.buffers = dict(self.root.named_buffers())
        check_names([*self.parameters, *self.buffers])
        self.device = next((local(p).device for p in self.parameters.values() if not p.is_meta), device)
        self.optimizers = Optimizers(lambda _: optimizer, self.parameters)
        for number, group in enumerate(g for o in self.optimizers.all for g in o.param_groups):
            if any(id(p) not in self.names for p in group["params"]):
                raise SpecError(
                    f"group {number} of the optimizer has a parameter that the model does not have, so it would train "
                    "nothing: make the optimizer after the model was sharded"
                )

    def groups(self) -> list[list[str]]:
        """The names of the parameters of every group of the optimizers."""
        return [[self.names[id(p)] for p in g["params"]] for o in self.optimizers.all for g in o.param_groups]

    def held(self) -> Held:
        """This process's parameters, buffers, optimizer state and registered tensors; of a `DTensor` its shard.

        Raises `LayoutError` for what cannot be moved.
        """
        held, state = Held(), self.optimizers.state()
        for name, p in self.parameters.items():
            if p.is_meta:
                continue
            held.add(name, p, "parameter", 0)
            for entry, value in state.get(id(p), {}).items():
                held.add_state(name, entry, value, local(p).device, 0)
            for key, handle in registered(name, p):
                held.add(key, handle.tensor, "registered", 0)
        for name, buffer in self.buffers.items():
            if not buffer.is_meta:
                held.add(name, buffer, "buffer", 0)
        return held

    def pieces(self) -> dict[str, list[Any]]:
        """Which box this process has of every tensor, as [start, stop]; what has no elements here is left out."""
        found: dict[str, list[Any]] = {}
        for name, tensor in self.tensors().items():
            for piece in pieces_of(name, tensor):
                # torch may shard with strides, where a rank has several runs of rows
                if local(tensor).shape != piece.box.shape:
                    raise SpecError(f"{name}: a shard of several runs, which cannot be resharded")
                found[name] = [piece.box.start, piece.box.stop]
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Parameters, buffers, optimizer state and registered tensors, as this process has them."""
        found: dict[str, Tensor] = {**self.parameters, **self.buffers}
        state = self.optimizers.state()
        for name, p in self.parameters.items():
            entries = state.get(id(p), {})
            found |= {f"{name}@{entry}": t for entry, t in entries.items() if isinstance(t, Tensor)}
            found |= {key: handle.tensor for key, handle in registered(name, p)}
        return found

    # --- comparing --------------------------------------------------------------------------------------------

    def compare(self, layout: Parallelism, rank: int) -> None:
        """Raise `SpecError`, with names, where `rank` does not hold what it holds in this layout."""
        place = layout.place(rank)
        wrong = [f"{n}: {difference}" for n, p in self.parameters.items() if (difference := _differs(p, layout, rank))]
        if not wrong and place is not None and layout.tp > 1:
            tp = set(layout.group("tp", rank))
            # norms are whole with tp, too: at least one parameter must be cut
            if not any(set(ranks) == tp for p in self.parameters.values() for ranks in cut_over(p)):
                wrong.append(f"no parameter is cut over the tp ranks {sorted(tp)}")
        if self.wrapper is not None and (is_sharded(layout) or layout.dp == 1):
            wrong.append("the model is wrapped in DistributedDataParallel")
        elif self.wrapper is not None and place is not None:
            # DDP over other ranks would mean another dp
            members = members_of(self.wrapper.process_group)
            if sorted(members) != sorted(layout.group("dp", rank)):
                wrong.append(f"DistributedDataParallel averages over ranks {members}")
        if wrong:
            raise SpecError(f"the model is not in the layout {layout}: {'; '.join(wrong[:3])}")

    def match(self, built: nn.Module) -> None:
        """Raise `SpecError`, with names, where what `build` returned is another model, or shares other parameters."""
        theirs = dict(built.named_parameters(remove_duplicate=False))
        differ = sorted(set(theirs) ^ set(self.first))
        if differ:
            who = "build() has, and the model has not" if differ[0] in theirs else "the model has, and build() has not"
            raise SpecError(f"{differ[0]} is a parameter that {who}")
        first: dict[int, str] = {}
        for name, p in theirs.items():
            mine = self.parameters[self.first[name]]
            if tuple(mine.shape) != tuple(p.shape):
                raise SpecError(f"{name} is {list(mine.shape)} in the model and {list(p.shape)} in build()")
            # a pair that is tied on one side only would be trained apart
            tied = first.setdefault(id(p), name)
            if self.first[name] != tied:
                raise SpecError(
                    f"{name} and {min(tied, self.first[name])} are one parameter on one side only: the "
                    "model's or build()'s"
                )

    def match_numbers(self, built: nn.Module) -> None:
        """Raise `SpecError` where a module counts differently than `build` made it, such as heads of one rank."""
        theirs = dict(built.named_modules())
        for name, module in self.root.named_modules():
            for attribute, value in vars(theirs.get(name, module)).items():
                mine = vars(module).get(attribute, value)
                if type(value) is int and mine != value:
                    raise SpecError(
                        f"{name}.{attribute} is {mine} in the model and {value} in build(): with tp it cannot be told "
                        "which one holds afterwards"
                    )

    def ddp_options(self) -> Mapping[str, Any]:
        """The options of DDP that another DDP takes; `SpecError` for what it cannot."""
        ddp: Any = self.wrapper
        if ddp is None:
            return {}
        if ddp._comm_hooks or ddp.mixed_precision is not None or ddp.parameters_to_ignore:
            raise SpecError(
                "DistributedDataParallel has communication hooks, mixed precision or parameters that it "
                "ignores, which would be lost"
            )
        kept = {name: vars(ddp)[name] for name in _OPTIONS if name in vars(ddp)}
        # DDP keeps it in bytes, and takes it in MiB
        return {**kept, "bucket_cap_mb": ddp.bucket_bytes_cap / (1 << 20)}


def _differs(tensor: Tensor, layout: Parallelism, rank: int) -> str:
    """How a parameter lies differently than in `layout`, as text; nothing if it does not."""
    if layout.place(rank) is None:
        return "" if tensor.is_meta else f"rank {rank} has no place, so it must be on meta"
    if tensor.is_meta:
        return "it has no memory"
    dp, tp = sorted(layout.group("dp", rank)), sorted(layout.group("tp", rank))
    try:
        cuts = [sorted(ranks) for ranks in cut_over(tensor)]
    except SpecError as error:
        return str(error)
    over_dp = layout.zero >= 2 and layout.dp > 1
    for ranks in cuts:
        if not (ranks == dp and over_dp) and not (ranks == tp and layout.tp > 1):
            return f"it is cut over ranks {ranks}"
    return f"it is not cut over the dp ranks {dp}" if over_dp and dp not in cuts else ""
