"""How a model is balanced, the contexts its layers are planned in, and the checks that ranks are configured alike."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

import numpy as np
import torch
from torch import nn

from prophet.engine.parallel import expert_parameters
from prophet.engine.replan import EVERY_STEP, ReplanConfig
from prophet.errors import ArgumentError, ConfigMismatch, ReplicaMemoryError
from prophet.experts.elsewhere import Elsewhere
from prophet.layer.expert_watch import CHECK_EVERY
from prophet.layer.moe import MoE
from prophet.machine.presets import CLUSTERS
from prophet.machine.topology import read_topology
from prophet.planner import PLANNER_NAMES, core, get_planner, planner_with
from prophet.planner.base import EFFORT, Planner
from prophet.ranks.collective import Collective
from prophet.ranks.messages import gather_numbers
from prophet.ranks.operation import Operation
from prophet.scheduler.budget import at_replica
from prophet.scheduler.forms import Transfers
from prophet.scheduler.schedules import NAMES
from prophet.spec import LayerShape, PlanContext, Topology, Windows, checked, digest, odd_ones_out

_PLANNER = ("name", "replicates", "withdraws", "needs_core", "place", "split")


AUTO, UNIFORM = "auto", "uniform"

_SHARE = "a share of the step, from 0 to 1"


@checked
@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How a model is balanced. Must be the same on all ranks.

    Attributes:
        planner: A name from `prophet.planner.PLANNER_NAMES`, or a `prophet.planner.Planner`.
        effort: The share of a step that the planner may search for better placements, from 0 to 1. Work is counted by
            assumed times, never by a clock. Planners that do not search have no use for it; a planner that is passed as
            an object keeps its own.
        topology: The machine, for the performance model. "auto": ranks measure it on first use, in some seconds,
            and remember it (see `prophet.machine.auto`). Otherwise a value, the path of a file that `prophet calibrate`
            wrote, which is read at once, a preset's name such as "h100-ib", or "uniform": one node of equal ranks of 1
            TFLOP/s and 10 GB/s.
        slots_per_rank: Replicas of one layer that a rank may hold.
        replica_memory_bytes: Budget per rank for the replicas of all layers, parameters and gradients, and for what of
            them may be in flight at once; None sets no limit.
        timeout_s: Seconds that every wait may take; None keeps the layers' own limit.
        windows: Seconds of non-MoE compute per block, under which Trans and Agg can be hidden.
        refetch: Drop replicas' parameters after the forward pass, and send them again for the backward pass. Only
            neighbouring layers' parameters then count towards the budget. Without it they stay until the step ends.
        accumulation_steps: Backward passes per optimizer step. Agg then runs once, with the last of them. With the
            default of 1 every backward pass brings its own gradients home, which is correct for any number of them.

    Raises:
        ValueError: For a value outside the ranges above.
        ArgumentError: For a planner that lacks what a `Planner` has.
    """

    planner: str | Planner = "prophet"
    effort: float = field(default=EFFORT, metadata={"expected": _SHARE})
    topology: Topology | str | os.PathLike[str] = AUTO
    slots_per_rank: int = 4
    replica_memory_bytes: int | None = None
    timeout_s: float | None = None
    windows: Windows = field(default_factory=Windows)
    refetch: bool = False
    accumulation_steps: int = 1

    def __post_init__(self) -> None:
        # Called for its error, which lists the names that exist
        if isinstance(self.planner, str) and self.planner not in PLANNER_NAMES:
            get_planner(self.planner)
        # By attributes and not by class: a user's planner need not derive from it
        lacking = [] if isinstance(self.planner, str) else [n for n in _PLANNER if not hasattr(self.planner, n)]
        if lacking:
            raise ArgumentError(
                f"EngineConfig.planner must be a name or a prophet.planner.Planner, got {type(self.planner).__name__} "
                f"without {', '.join(lacking)}: derive your own from that class"
            )
        if not 0 <= self.effort <= 1:
            raise ValueError(f"EngineConfig.effort must be {_SHARE}, got {self.effort!r}")
        # Read now, so that a file that is missing is an error of this line and not of a later step
        if isinstance(self.topology, str | os.PathLike) and self.topology not in (AUTO, UNIFORM, *CLUSTERS):
            object.__setattr__(self, "topology", read_topology(self.topology))
        for name in ("slots_per_rank", "replica_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"EngineConfig.{name} must not be negative, got {value}")
        if self.accumulation_steps < 1:
            raise ValueError(f"EngineConfig.accumulation_steps must be at least 1, got {self.accumulation_steps}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"EngineConfig.timeout_s must be positive, got {self.timeout_s!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """What benchmarks and tests vary and users leave alone. Must be the same on all ranks.

    Attributes:
        schedule: "block-wise" (Pro-Prophet, Algorithm 2), "look-ahead" (over `look_ahead_blocks` blocks, fewer where
            refetched replicas of so many would not fit the budget), and for comparison "operator" (uncut) and
            "blocking" (nothing hidden).
        look_ahead_blocks: Blocks over which "look-ahead" spreads transfers.
        transfers: Form of Trans and Agg: "direct" sends, "two-phase" (scatter and all-gather, reduce-scatter and
            gather), "node-once" (the same within every node), "spread" (the same, where all ranks of the home's node
            send), or "auto", the cheapest by the performance model.
        replan: When placements are planned anew, and for which load; by default for every step, from the last one's
            load.
        check_every: Steps between explicit comparisons of splits and of a sample of the experts over ranks. Placements
            and shared gradients are compared in every step, at no extra message.
    """

    schedule: Literal["block-wise", "look-ahead", "operator", "blocking"] = "block-wise"
    look_ahead_blocks: int = 2
    transfers: Transfers = "auto"
    replan: ReplanConfig = EVERY_STEP
    check_every: int = CHECK_EVERY

    def __post_init__(self) -> None:
        if self.schedule not in NAMES:
            raise ValueError(f"Experiment.schedule must be one of {', '.join(NAMES)}, got {self.schedule!r}")
        if self.transfers not in get_args(Transfers):
            known = ", ".join(get_args(Transfers))
            raise ValueError(f"Experiment.transfers must be one of {known}, got {self.transfers!r}")
        for name in ("look_ahead_blocks", "check_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"Experiment.{name} must be at least 1, got {getattr(self, name)}")


def signature(*values: EngineConfig | Experiment) -> str:
    """Return as text all that must be equal on all ranks: every field, planners by name, and the planner's core."""
    pairs = {f.name: getattr(value, f.name) for value in values for f in fields(value)}
    planner, effort = pairs["planner"], pairs["effort"]
    pairs |= {"planner": getattr(planner, "name", planner), "effort": getattr(planner, "effort", effort)}
    # Cores of two releases may plan differently from equal loads
    pairs["core"] = core.version()
    return " ".join(f"{n}={v}" for n, v in pairs.items())


def planner_of(config: EngineConfig, rank: int) -> Planner:
    """Return the configuration's planner; `static`, with a warning on rank 0, where the core it needs is missing."""
    planner = config.planner
    if isinstance(planner, str):
        planner = planner_with(planner, effort=config.effort)
    if not (planner.needs_core and core.lacking()):
        return planner
    if rank == 0:
        warnings.warn(f"training goes on without balancing: {core.lacking()}", stacklevel=5)
    return get_planner("static")


def topology_for(config: EngineConfig, ranks: int) -> Topology:
    """Return the configuration's machine for a group of `ranks`; `Topology.uniform` where it has to be measured.

    Raises:
        ValueError: Where the configuration's topology has another number of ranks.
    """
    topology = config.topology
    if not isinstance(topology, Topology):
        return CLUSTERS[str(topology)].topology(ranks) if topology in CLUSTERS else Topology.uniform(ranks)
    if topology.ranks != ranks:
        raise ValueError(
            f"the topology {topology.name!r} has {topology.ranks} ranks, the expert-parallel group has {ranks}"
        )
    return topology


def context_of(layer: MoE, topology: Topology, config: EngineConfig) -> PlanContext:
    """Return the context in which a layer is planned.

    Args:
        layer: The layer.
        topology: The machine that its expert-parallel group runs on.
        config: How it is balanced.
    """
    ranks = topology.ranks
    # Homes as plain expert parallelism has them; layers refuse experts that do not divide among the ranks
    per_rank = layer.num_experts // ranks
    budget, shape = config.replica_memory_bytes, layer.experts.shape()
    if budget is not None:
        # planners count parameters and gradients alone, and get the share of those
        budget = budget * shape.replica_bytes // _replica_bytes(config, shape, ranks)
    return PlanContext(
        topology=topology,
        shape=shape,
        home=tuple(e // per_rank for e in range(layer.num_experts)),
        windows=config.windows,
        slots_per_rank=config.slots_per_rank,
        budget_bytes=None if budget is None else (budget,) * ranks,
    )


def _replica_bytes(config: EngineConfig, shape: LayerShape, ranks: int) -> int:
    """Return the most bytes that a replica takes, with what is in flight."""
    sizes = shape.expert_bytes, shape.expert_grad_bytes, shape.expert_sum_bytes
    return sum(at_replica(*sizes, ranks, refetch=config.refetch))


def check_budget(config: EngineConfig, planner: Planner, contexts: Sequence[PlanContext]) -> None:
    """Check that the budget holds a replica.

    Args:
        config: Its budget and slots.
        planner: Whether it makes replicas.
        contexts: Each layer's sizes.

    Raises:
        ReplicaMemoryError: Where replicas are wanted, and the budget holds not even the smallest.
    """
    budget = config.replica_memory_bytes
    if budget is None or config.slots_per_rank == 0 or not planner.replicates:
        return
    # The smallest layer's: a budget that holds replicas of some layers only is of use
    need = min(_replica_bytes(config, c.shape, c.ranks) for c in contexts)
    if budget < need:
        raise ReplicaMemoryError(
            f"replica_memory_bytes is {budget}, but one replica takes {need} bytes (parameters, gradients and "
            f"what is in flight): raise it, or turn balancing off with planner='static'"
        )


# By name: importing them would import packages that nobody may have
_SHARED_OUT = "keeps each state on one rank only, and sends what that one makes of a parameter to all"
_MIXING = {
    "LBFGS": "keeps one flat history of all parameters",
    "ZeroRedundancyOptimizer": _SHARED_OUT,
    # With the package's name, as torch's own Muon sends nothing
    "muon.Muon": _SHARED_OUT,
    "muon.MuonWithAuxAdam": _SHARED_OUT,
}
APART = "give it the other parameters alone, and what prophet.parallel.expert_parameters(model) lists to another one"


def why_not_apart(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why an optimizer cannot hold experts, which differ from rank to rank; None if it can."""
    kinds = (name for kind in type(optimizer).__mro__ for name in (kind.__name__, f"{kind.__module__}.{kind.__name__}"))
    return next((f"{name} {_MIXING[name]}" for name in kinds if name in _MIXING), None)


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: int) -> None:
    """Check that an optimizer can train a model whose experts are balanced; warn where it holds old parameters.

    Args:
        model: The model.
        optimizer: Its optimizer.
        ranks: The size of the expert-parallel group.

    Raises:
        TypeError: For a value that is no optimizer of torch's.
        ValueError: For an optimizer of another model, or one that takes the experts of several ranks for copies of one.
    """
    # A class that derives from torch's may leave out its constructor, and then has no hooks to follow
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    named = {id(p): name for name, p in model.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    held = {id(p) for p in params if not isinstance(p, Elsewhere)}
    # `Elsewhere` stands for experts of other ranks: an optimizer that holds nothing else is in order
    advice = "build it after prophet.convert() and fully_shard(), which make new parameters"
    if not held & set(named) and len(held) == len(params):
        raise ValueError(f"the optimizer holds none of the model's parameters: {advice}")
    why = why_not_apart(optimizer)
    if why is not None and ranks > 1 and any(id(p) in held for _, p in expert_parameters(model)):
        raise ValueError(f"the optimizer holds experts, and {why}: {APART}")
    missing = [named[id(p)] for p in model.parameters() if p.requires_grad and id(p) not in held]
    strangers = len(held - set(named))
    if missing and strangers:
        warnings.warn(
            f"the optimizer does not hold {len(missing)} trainable parameters ({missing[0]}, ...), but {strangers} "
            f"that are not in the model: {advice}",
            stacklevel=4,
        )


def check_equal(layers: list[MoE], config: EngineConfig, experiment: Experiment, collective: Collective) -> None:
    """Check that all ranks have the same configuration and layers; collective.

    Args:
        layers: This rank's layers.
        config: This rank's configuration.
        experiment: This rank's experiment.
        collective: The expert-parallel group.

    Raises:
        ConfigMismatch: Where ranks differ; it names them.
    """
    parts = [signature(config, experiment), *(layer.signature() for layer in layers)]
    digests = [digest(np.frombuffer(part.encode(), np.uint8)) for part in parts]
    # Three numbers whatever the number of layers, since all ranks must send equally many
    numbers = [len(parts), digests[0], digest(np.array(digests[1:]))]
    table = gather_numbers(collective, numbers, op=Operation("comparison of configurations"))
    for column, what in enumerate(("number of MoE layers", "engine configuration", "MoE layers")):
        differ = odd_ones_out(table[:, column])
        if differ:
            mine = parts[0] if column == 1 else "; ".join(parts[1:])
            raise ConfigMismatch(
                f"the {what} of rank(s) {differ} differ from the other ranks'; rank {collective.rank} has: {mine}"
            )


def agree_on_training(layers: list[MoE], collective: Collective) -> None:
    """Give replicas gradients of all parameters that train on at least one rank; collective if experts are modules."""
    own = [layer.experts.requires_grad() for layer in layers]
    flags = [int(on) for one in own for on in one]
    if not flags:
        return
    table = gather_numbers(collective, flags, op=Operation("what trains in experts"))
    anywhere = [bool(column.any()) for column in table.T]
    for layer, one in zip(layers, own, strict=True):
        layer.experts.settle(anywhere[: len(one)])
        anywhere = anywhere[len(one) :]
