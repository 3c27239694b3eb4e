"""`balance`: convert a model's Tutel layers, attach an engine, and keep what Tutel's users rely on.

Tutel leaves an expert's gradient as the sum over the ranks of its group. Users' loops average gradients but for those
of parameters that carry a mark of their choice, such as `skip_allreduce`. Both stay so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import prophet
from prophet.convert import ConversionReport, RoutedExperts, converted, find, standard_adapters
from prophet.convert.layers.cut import CutExperts
from prophet.convert.sources.tutel import TutelMoE, source_names
from prophet.engine.parallel import expert_parameters
from prophet.ranks.collective import DEFAULT_TIMEOUT_S
from prophet.ranks.process_group import processes
from prophet.spec import checked
from prophet_tutel.layout import keep_original_layout


class TutelError(ValueError):
    """A model or an optimizer cannot be balanced as it is; the message says what was expected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Balanced:
    """A model whose Tutel layers are balanced; see `balance`.

    Attributes:
        model: Without a DistributedDataParallel around it.
        engine: The engine that balances.
        report: What was converted.
    """

    model: nn.Module
    engine: prophet.Engine
    report: ConversionReport

    def close(self) -> None:
        """Stop balancing. The model stays converted, with plain expert parallelism; calling it again is harmless."""
        self.engine.close()

    def revert(self) -> None:
        """Stop balancing and give the model its own Tutel experts back, with the values they have now; collective.

        The parameters are new objects with the old marks: build the optimizer again.
        """
        self.close()
        prophet.revert(self.model)


@checked
def balance(
    model: nn.Module,
    optimizer: Any,
    *,
    config: prophet.EngineConfig | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    verify: bool = True,
) -> Balanced:
    """Balance the `tutel.moe.moe_layer`s of `model` from now on; collective over the processes of their group.

    The training loop stays as it is. `l_aux` is set on the layer and on its output, and new parameters carry the marks
    of the old ones. An expert's gradient is complete when `backward()` returns, and is the sum over the ranks of the
    layer's group. `state_dict` is in Tutel's layout. Lists of parameters that the loop keeps are made after this call.

    Args:
        model: As it is, or in a DistributedDataParallel that leaves the experts alone.
        optimizer: The one that trains it, any of torch's or a `TutelDistributedOptimizer`; it may have made steps.
        config: How to balance; None takes the defaults.
        timeout_s: Seconds that any wait for other ranks may take.
        verify: Compare layers that hold all experts before and after on a few tokens.

    Raises:
        TutelError: Where there is no Tutel layer, layers have different groups, DistributedDataParallel averages
            experts, or the optimizer is none or lacks experts. What `prophet.convert` and `prophet.attach` raise comes
            as it is. Model and optimizer are then as they were.
    """
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    group = _group(inner)
    # Tutel's distributed optimizer wraps the one that steps the experts.
    local = getattr(optimizer, "local_optim", optimizer)
    held = _experts(inner)
    _check_holds(local, held)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        averaged = held.keys() - set(model.parameters_to_ignore)
        if averaged:
            raise TutelError(
                f"DistributedDataParallel averages the experts' {min(averaged)}: name them in the model's "
                f"_ddp_params_and_buffers_to_ignore before wrapping it, as Tutel's helloworld_ddp.py does"
            )
    # `convert` puts the optimizer back itself if it fails; this is for what comes after it.
    before = _Before(local, held)
    report = prophet.convert(inner, optimizer=local, group=group, timeout_s=timeout_s, verify=verify)
    layers = [layer for *_, layer in converted(inner)]
    try:
        for layer in layers:
            _keep_conventions(layer)
        engine = prophet.attach(inner, local, config=config)
    # Ctrl-C too: model and optimizer must be as they were
    except BaseException:
        prophet.revert(inner)
        before.put_back(dict(inner.named_parameters()))
        raise
    for layer in layers:
        keep_original_layout(layer)
    experts = dict(expert_parameters(inner))
    if isinstance(model, nn.parallel.DistributedDataParallel):
        # Under their new names, too
        model.parameters_to_ignore |= experts.keys()
    if local is not optimizer:
        # The wrapper keeps a list of the experts by itself
        optimizer.expert_params[:] = experts.values()
    return Balanced(model=inner, engine=engine, report=report)


def _blocks(model: nn.Module) -> list[tuple[str, Any]]:
    """The Tutel layers of `model` by name; raises `TutelError` where there are none, or others beside them."""
    layers: list[tuple[str, Any]] = []
    for name, module, adapter in find(model, standard_adapters()):
        layers.append((name, module))
        if not isinstance(adapter, TutelMoE):
            raise TutelError(
                f"{name}: a block of {adapter.family} beside Tutel's; expected Tutel's layers only, whose gradients "
                f"are sums over ranks: use prophet.convert and prophet.attach for this model"
            )
    if not layers:
        raise TutelError("the model has no tutel.moe.moe_layer that is not converted yet")
    return layers


def _experts(model: nn.Module) -> dict[str, nn.Parameter]:
    """The experts' parameters before the conversion, by name."""
    found: dict[str, nn.Parameter] = {}
    for name, block in _blocks(model):
        where = f"{name}.experts" if name else "experts"
        experts = getattr(block, "experts", nn.Module())
        found |= {f"{where}.{part}": p for part, p in experts.named_parameters()}
    return found


def _group(model: nn.Module) -> dist.ProcessGroup | None:
    """The group that all Tutel layers of `model` share; raises `TutelError` where they differ."""
    layers = _blocks(model)
    if dist.is_initialized():
        # Compared by members, as equal groups may be different objects
        (first, wanted), *others = [(name, dist.get_process_group_ranks(layer.group)) for name, layer in layers]
        for name, found in others:
            if found != wanted:
                raise TutelError(
                    f"{name}: its group is of the processes {found}, that of {first} of {wanted}; expected one group "
                    f"for all layers"
                )
    return layers[0][1].group  # type: ignore[no-any-return]


def _check_holds(optimizer: Any, experts: Mapping[str, nn.Parameter]) -> None:
    """Raise `TutelError` unless `optimizer` is one that holds all experts that train."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TutelError(
            f"optimizer: expected a torch.optim.Optimizer, or a TutelDistributedOptimizer after warp_local, got "
            f"{type(optimizer).__name__}"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    lost = [name for name, p in experts.items() if p.requires_grad and id(p) not in held]
    if lost:
        raise TutelError(f"optimizer: it lacks experts of the model ({lost[0]}); give it all parameters that train")


class _Before:
    """What an optimizer held of a model's experts, by name, so that parameters of the same names can take it up."""

    def __init__(self, optimizer: torch.optim.Optimizer, experts: Mapping[str, nn.Parameter]) -> None:
        names = {id(p): name for name, p in experts.items()}
        self._optimizer = optimizer
        self._groups = [[names.get(id(p), p) for p in group["params"]] for group in optimizer.param_groups]
        self._names = [list(group.get("param_names", ())) for group in optimizer.param_groups]
        self._states = {name: optimizer.state[p] for name, p in experts.items() if p in optimizer.state}

    def put_back(self, params: Mapping[str, nn.Parameter]) -> None:
        """Let the optimizer hold what it held, with these parameters by name."""
        held = {id(p) for group in self._groups for p in group if not isinstance(p, str)}
        for p in [p for p in self._optimizer.state if id(p) not in held]:
            del self._optimizer.state[p]
        for group, saved, names in zip(self._optimizer.param_groups, self._groups, self._names, strict=True):
            group["params"][:] = [params[p] if isinstance(p, str) else p for p in saved]
            if names:
                group["param_names"][:] = names
        for name, state in self._states.items():
            self._optimizer.state[params[name]] = state


def _keep_conventions(layer: RoutedExperts) -> None:
    """Put the marks of the old parameters on the new ones, and make gradients sums over ranks, as Tutel's are."""
    if isinstance(layer, CutExperts):
        # A cut expert's parameter is a part of one original; a stacked bank's may come from several.
        pairs = [(name, p) for _, p, name, _ in layer.pieces()]
    else:
        names = source_names(layer.origin.spec)
        pairs = [(names[name], p) for name, p in layer.experts.named_parameters()]
    for name, p in pairs:
        for key, value in layer.origin.attributes.get(name, {}).items():
            setattr(p, key, value)
        if layer.collective.size < processes():
            # Whether to average over groups is up to the user's loop, so the engine must not refuse
            p.prophet_averaged = True  # type: ignore[attr-defined]
    # By default a bank divides by the ranks, which gives the mean that DistributedDataParallel gives.
    layer.experts.grad_scale = 1.0
