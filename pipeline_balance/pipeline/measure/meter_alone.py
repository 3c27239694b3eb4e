"""Measuring layers without a pipeline: one process, one layer at a time, before training begins.

For runtimes that fix their stages when the model is built and know nothing of `ElasticPipeline`. Only one layer and its
input are in memory at once, so a model that no single rank could hold can be measured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.measure.meter import Meter, local_costs
from pipeline_balance.spec import LayerCost
from prophet.errors import SpecError
from prophet.ranks.device.clocks import clock_on
from prophet.trials import trying

Build = Callable[[], nn.Module]


def measure_alone(
    layers: Sequence[nn.Module | Build],
    inputs: Tensor,
    *,
    target: Tensor | None = None,
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    repeats: int = 5,
    device: torch.device | None = None,
) -> list[LayerCost]:
    """Measure L layers for one microbatch, each layer fed with the output of the one before it.

    Modules are copied and stay as they are, and the random generators are left as they were. A layer above no trainable
    parameter has no input gradient, as in training.

    Args:
        layers: Modules from one tensor to one tensor, or functions that build one.
        inputs: The microbatch, as layer 0 takes it.
        target: What `loss_fn` compares the last output with.
        loss_fn: The loss, which counts for the last layer (None: it does not count).
        make_optimizer: Makes an optimizer of a layer's parameters, the bytes of whose state count (None: they do not).
        repeats: How many passes count, after one that does not.
        device: Where to measure (None: where `inputs` are).

    Returns:
        [L] costs of a microbatch in seconds and bytes.

    Raises:
        SpecError: A layer returns something else than a tensor, or one of `target` and `loss_fn` is missing.
    """
    if not layers or repeats < 1:
        raise SpecError(f"measuring needs at least one layer and one pass, got {len(layers)} and {repeats}")
    if (target is None) != (loss_fn is None):
        raise SpecError("the loss needs both loss_fn and target")
    device = device or inputs.device
    costs: list[LayerCost] = []
    x, trainable_below = inputs.detach().to(device), False
    with trying(None):
        for index, made in enumerate(layers):
            # an instance is callable too, but calling it would not build it
            module = (copy.deepcopy(made) if isinstance(made, nn.Module) else made()).to(device)
            meter = Meter(clock=clock_on(device), max_samples=repeats)
            ends = loss_fn if index == len(layers) - 1 else None
            parameters = [p for p in module.parameters() if p.requires_grad]
            optimizer = make_optimizer(parameters) if make_optimizer is not None and parameters else None
            out = x
            for run in range(repeats + 1):
                out = _pass(module, index, meter, x, trainable_below, ends, target)
                meter.read()
                if run == 0:
                    # threads started, memory got, activations counted: not what a step takes
                    for samples in (meter.forward, meter.backward):
                        samples.clear()
                    meter.loss.clear()
            if optimizer is not None:
                # optimizers make their state in their first step
                optimizer.step()
            kept = {id(p): entries for p, entries in optimizer.state.items()} if optimizer is not None else {}
            found = local_costs({index: module}, {0: [index]}, meter, kept)[index]
            costs.append(replace(found, name=type(module).__name__))
            x, trainable_below = out, trainable_below or bool(parameters)
    return costs


def _pass(
    module: nn.Module,
    index: int,
    meter: Meter,
    x: Tensor,
    trainable_below: bool,
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None,
    target: Tensor | None,
) -> Tensor:
    """Forward and backward once; the detached output."""
    module.zero_grad(set_to_none=True)
    # each layer has a graph for itself, so only one layer's activations are in memory
    given = x.detach().requires_grad_(trainable_below and x.is_floating_point())

    def forward() -> tuple[Tensor]:
        found = module(given)
        if not isinstance(found, Tensor):
            raise SpecError(f"layer {index} returns a {type(found).__name__}, expected one tensor")
        return (found,)

    (out,) = meter.run_unit(index, module, forward, (given,))
    value = out
    if loss_fn is not None and target is not None:
        value = meter.timed(lambda: loss_fn(out, target.to(out.device)))
    if value.requires_grad:
        # without a loss, any gradient of the right shape takes as long
        meter.run_action("B", 0, lambda: torch.autograd.backward(value, torch.ones_like(value)))
    return out.detach()
