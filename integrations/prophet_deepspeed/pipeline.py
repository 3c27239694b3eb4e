"""A measured partition for DeepSpeed's `PipelineModule`.

DeepSpeed cuts a pipeline by `uniform`, `parameters` or `type:regex` and takes no list of boundaries. Its `parameters`
rule balances figures that the module itself counts. So the module made here counts figures of which the wanted
partition is the only even one. DeepSpeed's own code then finds it, prints it and builds it. What it found is compared
with what was wanted before any layer is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_balance.maps.partition import partition_by_time
from pipeline_balance.pipeline.measure.meter_alone import Build, measure_alone
from pipeline_balance.spec import LayerCost, RankLimits, StageMap
from prophet.errors import SpecError
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import collective_for
from prophet.spec import digest


def measure_layers(layers: Sequence[Any], inputs: Tensor, **options: Any) -> list[LayerCost]:
    """Measure the costs of a PipelineModule's layers for one microbatch.

    One layer is built and run at a time, on this process alone. A tied layer counts wherever it stands: every stage
    that uses it holds a copy.

    Args:
        layers: Modules, `LayerSpec`, `TiedLayerSpec` or functions.
        inputs: Of the first layer, one microbatch.
        **options: `target`, `loss_fn`, `make_optimizer`, `repeats` and `device` of
            `pipeline_balance.pipeline.measure.meter_alone`.
    """
    return measure_alone([_builder(layer) for layer in layers], inputs, **options)


def decide_stages(
    costs: Sequence[LayerCost], num_stages: int, *, microbatches: int, limits: Sequence[RankLimits] | None = None
) -> StageMap:
    """Find the exact best partition for the median over all processes of measured costs; collective, equal on all.

    Args:
        costs: Of every layer, as this process measured them.
        num_stages: Stages of the pipeline.
        microbatches: Per step.
        limits: [num_stages] memory and speed of the stages' ranks; None sets no limits.

    Raises:
        PartitionError: If no partition fits.
    """
    collective = collective_for(None)
    mine = torch.tensor(
        [[c.forward_s, c.backward_input_s, c.backward_weight_s] for c in costs], dtype=torch.float64
    ).reshape(len(costs), 3)
    every = collective.all_gather(mine, op=Operation("comparing layer times"))
    # The median: a process that was disturbed while it measured does not count.
    agreed = [
        replace(cost, forward_s=row[0], backward_input_s=row[1], backward_weight_s=row[2])
        for cost, row in zip(costs, every.median(dim=0).values.tolist(), strict=True)
    ]
    limits = tuple(limits) if limits is not None else RankLimits.uniform(num_stages)
    if len(limits) != num_stages:
        raise SpecError(f"limits needs one entry per stage ({num_stages}), got {len(limits)}")
    return partition_by_time(agreed, limits, microbatches=microbatches)


def pipeline_module(layers: Sequence[Any], stage_map: StageMap, *, base: type | None = None, **options: Any) -> Any:
    """Make a DeepSpeed `PipelineModule` whose stages are those of a map; collective over all processes.

    Stage k runs on DeepSpeed's k-th pipeline coordinate.

    Args:
        layers: As for a PipelineModule.
        stage_map: Which layers each stage gets.
        base: The class to build, PipelineModule or one of yours.
        **options: Its further arguments: `loss_fn`, `topology`, `activation_checkpoint_interval` and so on. Not
            `partition_method`; `num_stages` follows from the map.

    Raises:
        SpecError: On every process, before any layer is built, if the map does not suit the layers or the topology, or
            differs between processes.
    """
    pipe: Any = importlib.import_module("deepspeed.pipe")
    base = base if base is not None else pipe.PipelineModule
    if not issubclass(base, pipe.PipelineModule):
        raise SpecError(f"base must be a PipelineModule, got {base.__name__}")
    for name in ("partition_method", "num_stages"):
        if name in options:
            raise SpecError(f"{name} follows from the stage map: leave it out")
    _check(stage_map, len(layers), options.get("topology"))
    if options.get("topology") is None:
        options["num_stages"] = stage_map.stages
    return _with_stages(base, stage_map)(layers=list(layers), **options)


def stage_weights(stage_map: StageMap) -> list[int]:
    """Positive whole figures, [L], that add up to the same sum in every stage of the map, and of no other.

    The first layer of each stage fills it up to the longest stage; every other layer counts one. Sums from the first
    layer rise strictly, so only one set of cuts divides them evenly.
    """
    longest = max(len(stage_map.layers_of(s)) for s in range(stage_map.stages))
    weights = [1] * stage_map.layers
    for s in range(stage_map.stages):
        members = stage_map.layers_of(s)
        # Every stage then sums to the longest stage's number of layers
        weights[members.start] = longest - len(members) + 1
    return weights


def _with_stages(base: Any, stage_map: StageMap) -> Any:
    """Make a subclass of `base` that is cut as the map says."""

    def count(self: Any) -> list[int]:
        return stage_weights(stage_map)

    def partition(self: Any, method: str = "parameters") -> None:
        # `method` is the default of the base class, whatever that is
        super(made, self)._partition_layers(method="parameters")
        found = tuple(int(p) for p in self.parts)
        if found != stage_map.boundaries:
            raise SpecError(
                f"this version of DeepSpeed cut the layers at {list(found)} instead of {list(stage_map.boundaries)}: "
                f"please report it"
            )

    # DeepSpeed recognises some models by the name of their class, so the name stays.
    made: Any = type(base.__name__, (base,), {"_count_layer_params": count, "_partition_layers": partition})
    return made


def _check(stage_map: StageMap, layers: int, topology: Any) -> None:
    problem = ""
    if stage_map.layers != layers:
        problem = f"the stage map is of {stage_map.layers} layers, {layers} were given"
    elif stage_map.ranks != tuple(range(stage_map.stages)):
        problem = f"DeepSpeed runs stage k on its k-th rank; the stage map has ranks {list(stage_map.ranks)}"
    elif topology is not None and topology.get_dim("pipe") != stage_map.stages:
        problem = f"the topology has {topology.get_dim('pipe')} stages, the stage map {stage_map.stages}"
    map_numbers = torch.tensor([*stage_map.boundaries, *stage_map.ranks, layers], dtype=torch.int64)
    # A digest, as maps of different lengths could not be compared in one exchange.
    mine = torch.tensor([digest(map_numbers.numpy()), int(bool(problem))], dtype=torch.int64)
    every = collective_for(None).all_gather(mine, op=Operation("comparing stage maps"))
    # A process that raised before the exchange would leave the others waiting in it.
    wrong = [r for r, row in enumerate(every.tolist()) if row[1]]
    if problem or wrong:
        raise SpecError(problem or f"the stage maps of ranks {wrong} do not suit their layers or topology")
    differ = [r for r, row in enumerate(every.tolist()) if row[0] != every[0, 0]]
    if differ:
        raise SpecError(f"ranks {differ} have another stage map than rank 0: decide once, see decide_stages")


class _Function(nn.Module):
    """A function as a layer, as DeepSpeed takes it; `module` is what a tied layer's function works on."""

    def __init__(self, function: Callable[..., Any], module: nn.Module | None = None) -> None:
        super().__init__()
        self.function = function
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.function(x) if self.module is None else self.function(self.module, x)


def _builder(layer: Any) -> nn.Module | Build:
    """A module for this layer, or a function that builds it."""
    pipe: Any = importlib.import_module("deepspeed.pipe")
    if isinstance(layer, nn.Module):
        return layer
    if isinstance(layer, pipe.LayerSpec):
        build: Build = layer.build
        function = getattr(layer, "forward_fn", None)
        # A tied layer runs by a function of its module, not by the module's forward.
        return build if function is None else lambda: _Function(function, layer.build())
    if callable(layer):
        return _Function(layer)
    raise SpecError(f"a layer must be a module, a LayerSpec or a function, got {type(layer).__name__}")
