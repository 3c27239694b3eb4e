"""`balance`: convert a model's Tutel layers, attach an engine, and keep what Tutel's users rely on.

Tutel leaves an expert's gradient as the sum over the ranks of its group, and users' loops pass over parameters that
carry a mark of their choice (`skip_allreduce`, say) when they average the others. Both stay so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import prophet
from prophet.convert import ConversionReport, RoutedExperts, converted, find, standard_adapters
from prophet.convert.tutel import NAMES, TutelMoE
from prophet.engine.parallel import expert_parameters
from prophet.ranks.collective import DEFAULT_TIMEOUT_S
from prophet.ranks.process_group import processes
from prophet_tutel.layout import keep_original_layout

Factory = Callable[[Iterator[nn.Parameter]], Any]


class TutelError(ValueError):
    """A model or an optimizer cannot be balanced as it is; the message says what was expected."""


@dataclass(slots=True)
class Balanced:
    """A model whose Tutel layers are balanced; see `balance`.

    optimizer: what the factory made. engine: the engine that drives. report: what was converted.
    """

    model: nn.Module
    optimizer: Any
    engine: prophet.Engine
    report: ConversionReport

    def close(self) -> None:
        """Stop balancing. The model stays converted, plain expert parallelism; again is harmless."""
        self.engine.close()

    def revert(self) -> None:
        """Stop balancing and give the model its own Tutel experts back, with the values they have now; collective.

        The parameters are new objects with the old marks: build the optimizer again.
        """
        self.close()
        prophet.revert(self.model)


def balance(
    model: nn.Module,
    optimizer: Factory,
    *,
    config: prophet.EngineConfig | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    verify: bool = True,
) -> Balanced:
    """Balance the `tutel.moe.moe_layer`s of `model` from now on; collective over the processes of their group.

    optimizer: makes the optimizer from the converted model's parameters, such as `lambda params:
    torch.optim.AdamW(params, lr=1e-3)`, or Tutel's `TutelDistributedOptimizer`. config: how to balance. timeout_s:
    limit on every wait. verify: compare layers that hold all experts before and after on a few tokens.

    The training loop stays: `l_aux` is set on the layer and on its output, the new parameters carry the marks of the
    old ones, an expert's gradient is complete when `backward()` returns and is the sum over the ranks of the layer's
    group, and `state_dict` is in Tutel's layout. Call it before wrapping the model in DistributedDataParallel.

    Raises `TutelError` where there is no Tutel layer, where layers have different groups, and for an optimizer that is
    none or lacks parameters; and what `prophet.convert` and `prophet.attach` raise. The model is then as it was.
    """
    group = _group(model)
    if not callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer):
        raise TutelError(
            "optimizer: expected a function that makes one from the converted model's parameters, such as "
            f"`lambda params: torch.optim.AdamW(params)`, got {type(optimizer).__name__}"
        )
    report = prophet.convert(model, group=group, timeout_s=timeout_s, verify=verify)
    layers = [layer for *_, layer in converted(model)]
    try:
        for layer in layers:
            _keep_conventions(layer)
        made = optimizer(model.parameters())
        engine = prophet.attach(model, _driven(made, model), config=config)
    except BaseException:
        prophet.revert(model)
        raise
    for layer in layers:
        keep_original_layout(layer)
    return Balanced(model, made, engine, report)


def _group(model: nn.Module) -> dist.ProcessGroup | None:
    """The group that all Tutel layers of `model` share."""
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
    if dist.is_initialized():
        (first, wanted), *others = [(name, dist.get_process_group_ranks(layer.group)) for name, layer in layers]
        for name, found in others:
            if found != wanted:
                raise TutelError(
                    f"{name}: its group is of the processes {found}, that of {first} of {wanted}; expected one group "
                    f"for all layers"
                )
    return layers[0][1].group  # type: ignore[no-any-return]


def _keep_conventions(layer: RoutedExperts) -> None:
    """Marks of the old parameters on the new ones, and gradients that are sums."""
    ours = list(layer.experts.parameters())
    for theirs, p in zip(NAMES, ours, strict=False):  # in the same order; there may be no biases
        for key, value in layer.origin.attributes.get(theirs, {}).items():
            setattr(p, key, value)
    layer.experts.grad_scale = 1.0
    if layer.collective.size < processes():
        for p in ours:
            p.prophet_averaged = True  # type: ignore[attr-defined]  # or not, as the user's loop has it


def _driven(made: Any, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer whose steps end ours, checked to hold the experts."""
    inner = getattr(made, "local_optim", made)  # Tutel's distributed one wraps another
    if not isinstance(inner, torch.optim.Optimizer):
        raise TutelError(f"optimizer: expected the function to make a torch.optim.Optimizer, got {type(made).__name__}")
    held = {id(p) for group in inner.param_groups for p in group["params"]}
    lost = [n for n, p in expert_parameters(model) if p.requires_grad and id(p) not in held]
    if lost:
        raise TutelError(
            f"optimizer: it lacks experts of the converted model ({lost[0]}); give it all parameters it gets"
        )
    return inner
