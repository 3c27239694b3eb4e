"""What would not be right with experts on several ranks, refused before anything changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel

import prophet
from prophet.engine.balanced_layer import BalancedLayer
from prophet.layer.moe import moe_layers
from prophet.ranks.process_group import processes

_OTHERS = {
    DistributedType.DEEPSPEED: "with DeepSpeed, leave balance() out: write `import prophet_deepspeed`, and give its "
    'configuration a section "prophet"',
    DistributedType.MEGATRON_LM: "Megatron-LM trains by an engine of its own: leave out `megatron_lm_plugin`",
    DistributedType.XLA: "experts exchange tokens by torch.distributed, not by XLA: use GPUs or CPUs",
}


def check_accelerator(accelerator: Any, config: prophet.EngineConfig | None) -> None:
    """Raise TypeError or ValueError, which names the setting, for an accelerator that cannot train experts."""
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"expected an accelerate.Accelerator, got {type(accelerator).__name__}")
    # A replaced method stands on the instance
    taken = sorted({"prepare", "clip_grad_norm_", "save_state"} & vars(accelerator).keys())
    if taken:
        raise ValueError(
            f"accelerator.{taken[0]} has been replaced already, by balance() or ProphetCallback: one of them per "
            f"Accelerator"
        )
    if accelerator._models:
        raise ValueError(
            "accelerator.prepare() has wrapped a model: call balance(accelerator) right after Accelerator()"
        )
    if config is not None and config.accumulation_steps != 1:
        raise ValueError(
            f"EngineConfig.accumulation_steps: expected 1, got {config.accumulation_steps}: the engine follows "
            f"accelerator.accumulate(), so set Accelerator(gradient_accumulation_steps=...)"
        )
    kind = accelerator.distributed_type
    if kind in _OTHERS:
        raise ValueError(_OTHERS[kind])
    # accelerate starts no process group for CPUs unless it is asked to.
    if accelerator.num_processes != processes():
        raise ValueError(
            f"accelerate knows of {accelerator.num_processes} process(es), and torch.distributed of {processes()}: "
            f"each would train alone; on CPUs, write Accelerator(cpu=True)"
        )
    _check_precision(accelerator)
    _check_parallelism(accelerator)


def _check_precision(accelerator: Any) -> None:
    if accelerator.mixed_precision == "fp8":
        raise ValueError("mixed_precision='fp8': experts have no kernels for it; expected 'no', 'bf16' or 'fp16'")
    scaler = accelerator.scaler
    # Scalers of other devices unscale by themselves, and what they find cannot be shared.
    if scaler is not None and getattr(type(scaler), "unscale_", None) is not torch.amp.GradScaler.unscale_:
        raise ValueError(
            f"mixed_precision='fp16' scales the loss by a {type(scaler).__name__} here, and the ranks can agree on "
            f"what a torch.amp.GradScaler finds: use 'bf16'"
        )


def _check_parallelism(accelerator: Any) -> None:
    mesh = accelerator.parallelism_config
    for name in ("tp", "cp", "sp"):
        if getattr(mesh, f"{name}_enabled", False):
            raise ValueError(
                f"parallelism_config.{name}_size={getattr(mesh, f'{name}_size')}: ranks would share tokens or layers; "
                f"expected 1 with balanced experts"
            )
    if getattr(accelerator.state.dynamo_plugin, "use_regional_compilation", False):
        raise ValueError(
            "dynamo_plugin.use_regional_compilation: it trains copies of the model's blocks; expected False"
        )
    if accelerator.distributed_type != DistributedType.FSDP:
        return
    plugin = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise ValueError(
            f"fsdp_plugin.fsdp_version: expected 2, got {plugin.fsdp_version}: FSDP1 flattens all parameters of a block"
        )
    # Other ranks would have empty parameters until rank 0 sends its values.
    if plugin.cpu_ram_efficient_loading:
        raise ValueError(
            "fsdp_plugin.cpu_ram_efficient_loading: rank 0 alone would have the experts' values, and every rank gives "
            "some away; expected False"
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise ValueError("fsdp_plugin.cpu_offload: experts stay on the device; expected False")
    if plugin.activation_checkpointing:
        raise ValueError(
            "fsdp_plugin.activation_checkpointing renames the blocks: expected False, and "
            "model.gradient_checkpointing_enable() instead"
        )


def check_unwrapped(model: nn.Module) -> None:
    """Raise ValueError for a model that another part has wrapped, or balances."""
    wrappers = (nn.parallel.DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    # By name, as DeepSpeed may not be installed
    engine = any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)
    if engine or any(isinstance(m, wrappers) for m in model.modules()):
        raise ValueError(
            f"the model is wrapped already, in {type(model).__name__}: accelerator.prepare() wraps it, so pass it as "
            f"it was built"
        )
    if any(isinstance(layer.port, BalancedLayer) for layer in moe_layers(model)):
        raise ValueError(
            "the model has an engine already, by prophet.attach or another integration, and accelerator.prepare() "
            "attaches one: call its close() first, or leave it out"
        )


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer], experts: set[int]) -> None:
    """Raise ValueError for optimizers that accelerate and torch cannot use with FSDP2.

    Args:
        optimizers: Those of the model.
        experts: Ids of parameters that FSDP2 leaves whole.
    """
    if len(optimizers) != 1:
        raise ValueError(f"accelerator.prepare() with FSDP2: expected model and one optimizer, got {len(optimizers)}")
    if optimizers[0].state:
        raise ValueError(
            "optimizer: it has taken steps, and accelerator.prepare() with FSDP2 loses its states: prepare first, and "
            "load them then"
        )
    for i, group in enumerate(optimizers[0].param_groups):
        whole = {id(p) in experts for p in group["params"]}
        # torch's fused and foreach steps take all tensors of a group at once: no DTensors beside plain ones.
        method = next((name for name in ("fused", "foreach") if group.get(name)), None)
        if method is not None and len(whole) == 2:
            raise ValueError(
                f"optimizer: {method}=True cannot step group {i}, which mixes experts with parameters that FSDP2 cuts: "
                f"leave {method} out, or give the experts' parameters a group"
            )
