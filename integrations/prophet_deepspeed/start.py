"""What happens while a DeepSpeed engine is made: blocks are converted, experts get groups, an engine is attached.

DeepSpeed's `__init__` calls two methods at the right moments, and these are taken over for that long:
`_configure_expert_parallel` before anything is built of the model, and `_configure_optimizer`.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import prophet
from prophet.convert import ConversionReport, converted, find, standard_adapters
from prophet.convert.find import find_all
from prophet.convert.trials.elementwise import is_elementwise
from prophet.engine.balanced_layer import BalancedLayer
from prophet.errors import ConversionError
from prophet.layer.moe import moe_layers
from prophet.ranks.collective import DEFAULT_TIMEOUT_S, Collective
from prophet.ranks.process_group import collective_for, processes
from prophet_deepspeed import autoep
from prophet_deepspeed.checkpoint import Checkpoints
from prophet_deepspeed.gradients import Binding
from prophet_deepspeed.groups import Groups, separate_experts
from prophet_deepspeed.hugging_face import export_all_experts
from prophet_deepspeed.section import SECTION, ConfigError, ProphetSection
from prophet_deepspeed.views import show_experts


class Start:
    """A context in which the engine `ds` is made by DeepSpeed's own `__init__`, and balances its experts afterwards.

    Args:
        ds: The engine, not yet made.
        config: DeepSpeed's, without the section.
        section: How to balance.
        given: The arguments of `__init__` by name.

    Raises:
        ConfigError: For what does not work with balanced experts, before anything is changed.
    """

    def __init__(self, ds: Any, config: Mapping[str, Any], section: ProphetSection, given: Mapping[str, Any]) -> None:
        self._ds, self._section = ds, section
        self._model: nn.Module = given["model"]
        self._parameters = given.get("model_parameters")
        self._autoep = autoep.in_use(config)
        self._report: ConversionReport | None = None
        self._ep_size = 0
        self._groups: Groups | None = None
        _check_model(self._model)
        if given.get("mpu") is not None or given.get("mesh_device") is not None:
            raise ConfigError("mpu, mesh_param: tensor and sequence parallelism are not supported")
        if self._autoep:
            autoep.check_config(config, section)

    def __enter__(self) -> None:
        # Before DeepSpeed's __init__ has run, its object takes no attribute but by its dictionary.
        own = vars(self._ds)
        self._configure_experts = type(self._ds)._configure_expert_parallel.__get__(self._ds)
        self._configure_optimizer = type(self._ds)._configure_optimizer.__get__(self._ds)
        own["_configure_expert_parallel"], own["_configure_optimizer"] = self._convert, self._optimize

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for name in ("_configure_expert_parallel", "_configure_optimizer"):
            vars(self._ds).pop(name, None)
        if kind is None:
            self._finish()

    # --- in the order of time ---

    def _convert(self, model: nn.Module, collect_sources: bool | None = None) -> Any:
        """Take the place of `_configure_expert_parallel`: do as that, then let a bank hold the experts."""
        ds, section = self._ds, self._section
        replace = partial(self._configure_experts, model, collect_sources=collect_sources)
        if self._autoep:
            self._ep_size = ds._config.expert_parallel_config.autoep_size
            self._check_topology()
            sources, self._report = autoep.configure(ds._config.expert_parallel_config, model, replace, section)
        else:
            sources = replace()
            self._ep_size = built_for(model, section)
            self._check_topology()
            self._convert_experts(model)
        layers = _layers(model, self._group())
        # DeepSpeed finds layers of its own class only. It also wants a group of experts for the optimizer that it makes
        # up where none is given.
        if not ds.has_moe_layers:
            ds.has_moe_layers = ds.client_optimizer is not None or ds.optimizer_name() is not None
            ds.num_experts.append(layers[0].num_experts)
        return sources

    def _group(self) -> Collective:
        return _expert_group(self._ep_size, self._section.engine.timeout_s or DEFAULT_TIMEOUT_S)

    def _check_topology(self) -> None:
        topology = self._section.engine.topology
        if isinstance(topology, prophet.Topology) and topology.ranks != self._ep_size:
            raise ConfigError(
                f"{SECTION}.topology: {topology.name} is of {topology.ranks} ranks, expected {self._ep_size}"
            )

    def _convert_experts(self, model: nn.Module) -> None:
        ds, section, ep = self._ds, self._section, self._group()
        optimizer = ds.client_optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = None
            if self._parameters is not None:
                self._groups = Groups(self._parameters)
                optimizer = self._groups.optimizer
        # By prophet.convert, or for an engine that was closed
        ready = next(converted(model), None) is not None
        if section.convert and not ready and (find(model, standard_adapters()) or not moe_layers(model)):
            self._report = prophet.convert(model, group=ep, optimizer=optimizer, verify=section.verify)
        if ready or self._report is not None:
            _announce(model, self._ep_size)

    def _optimize(self, client_optimizer: Any, model_parameters: list[Any]) -> None:
        """Take the place of `_configure_optimizer`: experts get groups that DeepSpeed knows by their marks."""
        if isinstance(client_optimizer, torch.optim.Optimizer):
            separate_experts(client_optimizer, self._ds.client_lr_scheduler)
        else:
            model_parameters = (self._groups or Groups(model_parameters)).separated()
            if client_optimizer is not None:
                client_optimizer = _elementwise(client_optimizer)
        trained = any(p.requires_grad for layer in moe_layers(self._model) for p in layer.experts.parameters())
        # With this set, ZeRO demands a parameter group of experts, and frozen experts have none
        self._ds.has_moe_layers = trained
        try:
            self._configure_optimizer(client_optimizer, model_parameters)
        finally:
            self._ds.has_moe_layers = True

    def _finish(self) -> None:
        ds = self._ds
        with warnings.catch_warnings():
            if self._ep_size == 1:
                # Asked for by ep_size, so it is no surprise
                warnings.filterwarnings("ignore", message="the MoE layers hold all experts on every rank")
            balancer = prophet.attach(self._model, config=self._section.engine)
        if ds.optimizer is not None:
            Binding(ds, balancer)
        show_experts(self._model)
        export_all_experts()
        ds.has_moe_layers = True
        ds.prophet, ds.prophet_report = balancer, self._report
        checkpoints = Checkpoints(ds, balancer)
        ds.save_checkpoint, ds.load_checkpoint = checkpoints.save, checkpoints.load
        ds.save_16bit_model = ds.save_fp16_model = checkpoints.save_model


def _elementwise(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Any], torch.optim.Optimizer]:
    """Wrap `make` to raise `ConfigError` for an optimizer that treats several experts in one tensor as a whole."""

    def checked(groups: Any) -> torch.optim.Optimizer:
        optimizer = make(groups)
        for index, group in enumerate(optimizer.param_groups):
            stacked = [p for p in group["params"] if getattr(p, "prophet_expert", False) and p.ndim > 2]
            if stacked and not is_elementwise(optimizer, index, stacked[0]):
                raise ConfigError(
                    f"optimizer: {type(optimizer).__name__} treats experts that share a tensor as a whole: pass an "
                    f"optimizer object, whose experts then get tensors of their own"
                )
        return optimizer

    return checked


def has_experts(model: nn.Module) -> bool:
    """Whether a model has MoE layers, or blocks that would become such."""
    if moe_layers(model) or find(model, standard_adapters()):
        return True
    try:
        return bool(find_all(model, (), None, 0, 1)[0])
    # There is something; converting it will name what is wrong with it
    except ConversionError:
        return True


def _check_model(model: Any) -> None:
    pipe: Any = importlib.import_module("deepspeed.pipe")
    if isinstance(model, pipe.PipelineModule):
        raise ConfigError(
            f"{SECTION}: DeepSpeed's PipelineModule is not supported: its engine schedules backward passes"
        )
    if isinstance(model, DistributedDataParallel) or type(model).__name__ == "FullyShardedDataParallel":
        raise ConfigError(
            f"{SECTION}: the model is wrapped in {type(model).__name__} already, and two frameworks would average its "
            f"gradients: pass the model itself"
        )
    if any(isinstance(layer.port, BalancedLayer) for layer in moe_layers(model)):
        raise ConfigError(
            f"{SECTION}: the model has an engine already, by prophet.attach, another integration or an earlier "
            f"initialize: call its close() first (engine.prophet.close()), or leave this section out"
        )


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
    """The model's MoE layers, checked against the group `ep`, and marked as averaged by DeepSpeed."""
    layers = moe_layers(model)
    if not layers:
        raise ConfigError(f"{SECTION}: the model has no MoE layer that is known; see docs/convert.md")
    # Before the layers are marked, which nothing takes back
    check_biases(layers, processes())
    for layer in layers:
        if (layer.collective.size, layer.collective.rank) != (ep.size, ep.rank):
            raise ConfigError(
                f"{SECTION}.ep_size: {ep.size}, but a prophet.MoE layer is rank {layer.collective.rank} of a group of "
                f"{layer.collective.size}; build it with groups of {ep.size} consecutive processes"
            )
        layer.known_to_deepspeed = True
        for p in layer.experts.parameters():
            p.prophet_averaged = True  # type: ignore[attr-defined]
    return layers


def check_biases(layers: list[prophet.MoE], ranks: int) -> None:
    """Raise `ConfigError` where copies of a gate would become different ones."""
    for layer in layers:
        if layer.gate.bias is not None and layer.collective.size < ranks:
            raise ConfigError(
                f"{SECTION}.ep_size: {layer.collective.size} with {ranks} processes is not supported for gates with a "
                f"balancing bias (bias_update_rate): each group would count its own choices only"
            )


def built_for(model: nn.Module, section: ProphetSection) -> int:
    """How many ranks share the experts: what the section asks for, else what the layers were built for, else all.

    DeepSpeed's layers, which have an `ep_size`, keep it, 1 as well. Those of 1 hold all experts, so the section may ask
    for any other size.
    """
    found = {int(m.ep_size) for m in _deepspeed_layers(model)} | {m.collective.size for m in moe_layers(model)}
    cut = sorted(found - {1} | {m.collective.size for m in moe_layers(model)})
    if section.ep_size is None:
        if len(found) > 1:
            raise ConfigError(
                f"{SECTION}.ep_size: layers were built for different sizes, {sorted(found)}; expected one"
            )
        return next(iter(found), processes())
    if cut and cut != [section.ep_size]:
        raise ConfigError(f"{SECTION}.ep_size: {section.ep_size}, but the model's layers were built for {cut[0]}")
    return section.ep_size


def _deepspeed_layers(model: nn.Module) -> list[Any]:
    layer: Any = importlib.import_module("deepspeed.moe.layer")
    return [m for m in model.modules() if isinstance(m, layer.MoE)]


def _announce(model: nn.Module, ep_size: int) -> None:
    """Set on DeepSpeed's layers for how many ranks they are now."""
    for module in _deepspeed_layers(model):
        module.ep_size, module.num_local_experts = ep_size, module.num_experts // ep_size
        module.expert_group_name = f"ep_size_{ep_size}"
        # DeepSpeed sets it once, and an earlier engine may have set it
        module.deepspeed_moe.gate.ep_group = None
