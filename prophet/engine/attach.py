"""attach(model, optimizer): checks that a model can be balanced, and attaches an engine to it."""

from __future__ import annotations

import logging
import warnings

import torch
from torch import nn

from prophet.engine.balanced_layer import BalancedLayer
from prophet.engine.config import EngineConfig, Experiment, agree_on_training, check_equal, check_optimizer
from prophet.engine.engine import Engine
from prophet.engine.overflow import share_overflows
from prophet.engine.parallel import leave_out_of_ddp
from prophet.layer.moe import moe_layers
from prophet.ranks.process_group import processes
from prophet.spec import checked

_log = logging.getLogger(__name__)


@checked
def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    config: EngineConfig | None = None,
    experiment: Experiment | None = None,
) -> Engine:
    """Balance the MoE layers of `model` from now on; collective over their expert-parallel group.

    The optimizer is hooked, so the user's loop needs no other change.

    Args:
        model: The model, not yet wrapped in DistributedDataParallel: its experts are marked here, so that DDP leaves
            their gradients alone.
        optimizer: The one that trains it. Without it the caller ends every step with
            `engine.runtime.finish_gradients()`, an update, and `engine.finish_step()`.
        config: How to balance; None for the defaults. The same on all ranks.
        experiment: For benchmarks and tests. The same on all ranks.

    Raises:
        ValueError: Where there is no MoE layer, where a layer is already attached, where DDP already averages expert
            gradients, or where FSDP has cut experts. Also where the optimizer holds none of the model's parameters, or
            mixes the experts of different ranks, as LBFGS and `ZeroRedundancyOptimizer` do.
        ConfigMismatch: Where ranks differ.
        ReplicaMemoryError: Where the budget holds no replica.
    """
    config = EngineConfig() if config is None else config
    experiment = Experiment() if experiment is None else experiment
    layers = moe_layers(model)
    if not layers:
        raise ValueError("the model has no prophet.MoE layer to balance")
    if any(isinstance(layer.port, BalancedLayer) for layer in layers):
        raise ValueError(
            "a layer of this model is already attached to an engine: call close() of that one first, which ends "
            "balancing and leaves converted experts converted"
        )
    # All that can be checked here comes before the first message: a rank that refuses leaves no others waiting in it
    for layer in layers:
        layer.check()
    leave_out_of_ddp(model)
    first = layers[0].collective
    for layer in layers:
        if (layer.collective.size, layer.collective.rank) != (first.size, first.rank):
            raise ValueError("all MoE layers of a model must use the same expert-parallel group")
    if first.size == 1 and processes() > 1:
        warnings.warn(
            "the MoE layers hold all experts on every rank: they were built for a single rank, or before "
            "init_process_group; build them afterwards, or pass their group",
            stacklevel=3,
        )
    elif first.size < processes() and not getattr(next(layers[0].experts.parameters()), "prophet_averaged", False):
        warnings.warn(
            f"{processes()} processes, but an expert-parallel group of {first.size}: the copies of one expert drift "
            f"apart unless their gradients are averaged: make a prophet.parallel.ExpertReplicas before attaching",
            stacklevel=3,
        )
    if optimizer is not None:
        check_optimizer(model, optimizer, first.size)
    check_equal(layers, config, experiment, first)
    # Before the engine, since the sizes of replicas' gradients depend on it
    agree_on_training(layers, first)
    collective = first if config.timeout_s is None else first.with_timeout(config.timeout_s)
    engine = Engine(layers, collective, config, experiment)
    engine.follow(model, optimizer)
    share_overflows(layers)
    if first.rank == 0:
        _log.info("attached %r, topology %s", engine, engine.contexts[0].topology.name)
    return engine
