"""`initialize`, with the signature of `deepspeed.initialize`."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import prophet
from prophet.convert import find, standard_adapters
from prophet.layer.moe import moe_layers
from prophet.ranks.collective import DEFAULT_TIMEOUT_S, Collective
from prophet.ranks.process_group import collective_for, processes
from prophet_deepspeed.checkpoint import Checkpoints
from prophet_deepspeed.gradients import Binding
from prophet_deepspeed.groups import Group, ParameterGroups
from prophet_deepspeed.section import SECTION, ConfigError, ProphetSection, read_config

PORT = 29500


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Group] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | Path | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | dict[str, Any] | None = None,
) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize` for a model whose experts stay balanced; collective over all processes.

    The arguments and the result, (engine, optimizer, dataloader, scheduler), are those of `deepspeed.initialize`. The
    config may have a `"prophet"` section, see `ProphetSection`. MoE blocks are converted, so an `optimizer` that is an
    object must not hold their experts; a callable, or the config's optimizer, sees the converted model. On the engine,
    `prophet` is the `prophet.Engine`, `prophet_report` says what was converted, and `save_checkpoint` and
    `load_checkpoint` use a layout that does not depend on the number of ranks.

    Raises `ConfigError` for a wrong section and for what does not work with balanced experts, and what
    `prophet.convert` and `prophet.attach` raise.
    """
    if model is None:
        raise ConfigError("model: expected a module")
    deepspeed: Any = importlib.import_module("deepspeed")
    if isinstance(model, deepspeed.pipe.PipelineModule):
        raise ConfigError("model: DeepSpeed's PipelineModule is not supported: its engine schedules backward passes")
    if mpu is not None or mesh_param is not None:
        raise ConfigError("mpu, mesh_param: tensor and sequence parallelism are not supported")
    args, config = _config_of(args, config, config_params)
    plain, section = read_config(config)
    deepspeed.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)

    given = ParameterGroups(model, model_parameters)
    ep_size = _ep_size(model, section)
    ep = _expert_group(ep_size, section.engine.timeout_s or DEFAULT_TIMEOUT_S)
    if (topology := section.engine.topology) is not None and topology.ranks != ep_size:
        raise ConfigError(f"{SECTION}.topology: {topology.name} is of {topology.ranks} ranks, expected {ep_size}")
    report = None
    if section.convert and find(model, standard_adapters()):
        report = prophet.convert(model, group=ep, verify=section.verify)
        _announce(model, ep_size)
    layers = _layers(model, ep)
    if isinstance(optimizer, torch.optim.Optimizer):
        _check_optimizer(optimizer, model)
    moe_utils: Any = importlib.import_module("deepspeed.moe.utils")
    with _marked(model, layers):
        engine, wrapped, data, scheduler = deepspeed.initialize(
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=moe_utils.configure_moe_param_groups(given.renewed()),
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            distributed_port=distributed_port,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=plain,
        )
    with warnings.catch_warnings():
        if ep_size == 1:  # asked for: every process holds all experts, and DeepSpeed averages them
            warnings.filterwarnings("ignore", message="the MoE layers hold all experts on every rank")
        balancer = prophet.attach(model, config=section.engine)
    if wrapped is not None:
        Binding(engine, balancer)
    engine.prophet, engine.prophet_report = balancer, report
    checkpoints = Checkpoints(engine, balancer)
    engine.save_checkpoint, engine.load_checkpoint = checkpoints.save, checkpoints.load
    engine.save_16bit_model = engine.save_fp16_model = checkpoints.save_model
    return engine, wrapped, data, scheduler


def _expert_group(ep_size: int, timeout_s: float) -> Collective:
    """The ranks that share the experts, in DeepSpeed's own groups, which are made where they are missing."""
    if processes() % ep_size:
        raise ConfigError(f"{SECTION}.ep_size: {processes()} processes cannot be divided into groups of {ep_size}")
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    name = f"ep_size_{ep_size}"
    if name not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(ep_size)
    return collective_for(groups._get_expert_parallel_group(name), timeout_s=timeout_s)


def _layers(model: nn.Module, ep: Collective) -> list[prophet.MoE]:
    """The model's MoE layers, checked against the group `ep`; DeepSpeed averages their experts' gradients."""
    layers = moe_layers(model)
    if not layers:
        raise ConfigError(f"{SECTION}: the model has no MoE layer that is known; see docs/convert.md")
    check_biases(layers, processes())
    for layer in layers:
        if (layer.collective.size, layer.collective.rank) != (ep.size, ep.rank):
            raise ConfigError(
                f"{SECTION}.ep_size: {ep.size}, but a prophet.MoE layer is rank {layer.collective.rank} of a group of "
                f"{layer.collective.size}; build it with groups of {ep.size} consecutive processes"
            )
        for p in layer.experts.parameters():
            p.prophet_averaged = True  # type: ignore[attr-defined]  # DeepSpeed does it
    return layers


def check_biases(layers: list[prophet.MoE], ranks: int) -> None:
    """Raise `ConfigError` where copies of a gate would become different ones."""
    for layer in layers:
        if layer.gate.bias is not None and layer.collective.size < ranks:
            raise ConfigError(
                f"{SECTION}.ep_size: {layer.collective.size} with {ranks} processes is not supported for gates with a "
                f"balancing bias (bias_update_rate): each group would count its own choices only"
            )


def _config_of(args: Any, config: Any, config_params: Any) -> tuple[Any, Any]:
    """The config from wherever DeepSpeed accepts one, and `args` without it."""
    from_args = getattr(args, "deepspeed_config", None)
    found = [c for c in (config, config_params, from_args) if c is not None]
    if len(found) != 1:
        raise ConfigError(f"config: expected one of config, config_params, args.deepspeed_config; got {len(found)}")
    if from_args is not None:
        args = copy.copy(args)
        args.deepspeed_config = None
    return args, found[0]


def _ep_size(model: nn.Module, section: ProphetSection) -> int:
    """What the section says, else what the layers were built for, else all processes."""
    sizes: list[Any] = [m.ep_size for m in model.modules() if _is_deepspeed(m)]
    built: set[int] = {int(size) for size in sizes if size != 1}
    built |= {m.collective.size for m in moe_layers(model)}
    if len(built) > 1:
        raise ConfigError(f"{SECTION}.ep_size: layers were built for different sizes, {sorted(built)}; expected one")
    size = next(iter(built), None)
    if section.ep_size is not None and size is not None and section.ep_size != size:
        raise ConfigError(f"{SECTION}.ep_size: {section.ep_size}, but the model's layers were built for {size}")
    return section.ep_size or size or processes()


def _is_deepspeed(module: Any) -> bool:
    layer: Any = importlib.import_module("deepspeed.moe.layer")
    return isinstance(module, layer.MoE)


def _announce(model: nn.Module, ep_size: int) -> None:
    """DeepSpeed's layers say for how many ranks they are now."""
    for module in model.modules():
        if _is_deepspeed(module):
            outer: Any = module
            outer.ep_size, outer.num_local_experts = ep_size, outer.num_experts // ep_size
            outer.expert_group_name = f"ep_size_{ep_size}"


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    if any(p.requires_grad and id(p) not in held for p in model.parameters()):
        raise ConfigError(
            "optimizer: it lacks parameters of the converted model; pass a callable, `optimizer=lambda params: "
            "torch.optim.AdamW(params)`, or describe it in the config"
        )
    for group in optimizer.param_groups:
        kinds = {bool(getattr(p, "prophet_expert", False)) for p in group["params"]}
        if True in kinds and (len(kinds) > 1 or not group.get("moe")):
            raise ConfigError(
                "optimizer: experts need groups of their own, with 'moe': True and the name of their ranks; pass a "
                "callable, `optimizer=lambda params: torch.optim.AdamW(params)`, which is given such groups"
            )


@contextmanager
def _marked(model: nn.Module, layers: list[prophet.MoE]) -> Iterator[None]:
    """DeepSpeed looks for layers of its own class to know that there are experts: while it looks, there is one."""
    layer: Any = importlib.import_module("deepspeed.moe.layer")
    attribute = "prophet_experts_are_here"

    class Mark(layer.MoE):  # type: ignore[misc]
        def __init__(self, experts: int) -> None:
            nn.Module.__init__(self)
            self.num_experts = experts

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            """The groups are there already."""

    needed = not any(_is_deepspeed(m) for m in model.modules())
    if needed:
        setattr(model, attribute, Mark(layers[0].num_experts))
    try:
        yield
    finally:
        if needed:
            delattr(model, attribute)
