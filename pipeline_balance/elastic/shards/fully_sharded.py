"""What FSDP2 keeps beside the parameters of modules that it has cut."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

from pipeline_balance.elastic.shards.module_copies import sharded_of
from prophet.engine.regroup import known_references
from prophet.errors import SpecError


def give_back(root: nn.Module) -> None:
    """Have FSDP2 drop the parameters that it has gathered: a pass without a backward keeps some."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def fsdp_groups(module: nn.Module) -> list[Any]:
    """The groups of parameters that FSDP2 gathers together for a module; none where it has not cut that."""
    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # torch 2.11 has one group or none; later releases raise under this name where there are several
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def leaves_of(root: nn.Module, named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The autograd leaves that a graph would hold of parameters: themselves, or what FSDP2 last gathered for them."""
    leaves, names = dict(named), {id(p): name for name, p in named.items()}
    for module in root.modules():
        for param in (p for group in fsdp_groups(module) for p in group.fsdp_params):
            # FSDP2 computes with a gathered parameter, and keeps the object after its memory is freed
            gathered, name = getattr(param, "_unsharded_param", None), names.get(id(param.sharded_param))
            if gathered is not None and name is not None:
                leaves[name] = gathered
    return leaves


def padded(root: nn.Module) -> list[Tensor]:
    """The memory that FSDP2 keeps shards in, with padding: those on other processes may be larger."""
    # FSDP2 pads shards to equal size, so a rank without elements has memory, too
    groups = (group for module in root.modules() for group in fsdp_groups(module))
    found = [param._sharded_param_data for group in groups for param in group.fsdp_params]
    return [memory for memory in found if not memory.is_meta]


def check_weak(root: nn.Module, named: Mapping[str, nn.Parameter]) -> None:
    """Raise `SpecError` for a module or parameter with weak references, which would find the old one or none."""
    # layers of experts refer to the model weakly, and may go on with it
    known, modules = known_references(root), list(sharded_of(root))
    replaced = {id(p) for _, module in modules for p in module._parameters.values()}
    for name, held in (*modules, *((n, p) for n, p in named.items() if id(p) in replaced)):
        # Counted, not listed: a list would outlive an error in its traceback
        others = sum(id(one) not in known for one in weakref.getweakrefs(held))
        # FSDP2 has one itself to each of its modules
        if others > isinstance(held, FSDPModule) + _tagged(held):
            raise SpecError(
                f"something has a weak reference to {name or 'the model'}, and would go on with the old one: drop it, "
                "and take it anew afterwards"
            )


def _tagged(held: object) -> bool:
    """Whether torch.compile has a weak reference: once it was used, it has one to every module that is made."""
    # not imported: where nobody has used torch.compile there is nothing to find
    guard = sys.modules.get("torch._dynamo.mutation_guard")
    return guard is not None and isinstance(held, nn.Module) and held in guard.GenerationTracker.generation_values


def policies_of(root: nn.Module) -> list[MixedPrecisionPolicy]:
    """The different mixed precision policies by which FSDP2 computes `root`'s modules; none where it shards none.

    Raises:
        SpecError: For parameters that it keeps on the host.
    """
    found: list[MixedPrecisionPolicy] = []
    for name, module in root.named_modules():
        groups = fsdp_groups(module)
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        if any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups):
            raise SpecError(f"{name or 'the model'} is offloaded to the host by FSDP2, which cannot be resharded")
        if state._mp_policy not in found:
            found.append(state._mp_policy)
    return found


def counts_unused(root: nn.Module) -> bool:
    """Whether its owner has FSDP2 reduce zeros where a rank has no gradient, by `set_reduce_scatter_unused_params`."""
    # torch 2.11 does not know it
    groups = (group for module in root.modules() for group in fsdp_groups(module))
    return any(getattr(group, "reduce_scatter_unused_params", False) for group in groups)


def options_to_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `fully_shard` or DDP in types that JSON has; `options_from_json` is the inverse."""
    return {name: _option_to_json(option) for name, option in options.items()}


def _option_to_json(option: Any) -> Any:
    if isinstance(option, MixedPrecisionPolicy):
        return {name: _option_to_json(value) for name, value in asdict(option).items()}
    # a dtype is sent by its name
    return str(option).removeprefix("torch.") if isinstance(option, torch.dtype) else option


def options_from_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `fully_shard` or DDP, as `options_to_json` wrote them."""
    return {name: _policy(option) if isinstance(option, dict) else option for name, option in fields.items()}


def _policy(fields: Mapping[str, Any]) -> MixedPrecisionPolicy:
    given = {name: getattr(torch, value) if isinstance(value, str) else value for name, value in fields.items()}
    return MixedPrecisionPolicy(**given)
