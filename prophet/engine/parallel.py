"""Data parallelism around expert parallelism: the gradients that DDP averages, and those that it must not.

With R processes and an expert-parallel (EP) group of P of them, every expert lives R / P times. DDP averages the
gradients of all other parameters over the R processes. An expert's gradient comes out of the backward pass as the mean
over its EP group; `ExpertReplicas` averages it over the R / P processes that hold the same expert (the expert-data-
parallel group), so that in the end it is the mean over all R, like every other gradient.

Shape legend: R processes, P ranks of an EP group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from prophet.layer.moe import MoE, moe_layers
from prophet.ranks.collective import Collective
from prophet.ranks.gradient_means import average_gradients_
from prophet.ranks.messages import share
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import figures_of_parts
from prophet.ranks.stretches import in_parts, sum_of_powers
from prophet.spec import IntArray


def expert_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """List the experts' parameters of all MoE layers of `model`, with their names."""
    return [(n, p) for n, p in model.named_parameters() if getattr(p, "prophet_expert", False)]


def leave_out_of_ddp(model: nn.Module) -> None:
    """Have DistributedDataParallel ignore the parameters of experts.

    Raises:
        ValueError: For a model that it already wraps, experts included.
    """
    names = {n for n, _ in expert_parameters(model)}
    if isinstance(model, nn.parallel.DistributedDataParallel):
        averaged = {n.removeprefix("module.") for n in names} - set(model.parameters_to_ignore)
        if averaged:
            raise ValueError(
                f"DistributedDataParallel already averages expert gradients over ranks ({min(averaged)}, ...): "
                f"call prophet.attach(model, optimizer) before wrapping the model"
            )
        return
    known = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    model._ddp_params_and_buffers_to_ignore = sorted(known | _compiled_or_not(names))  # type: ignore[assignment]


def put_back_into_ddp(model: nn.Module, names: Iterable[str]) -> None:
    """Undo `leave_out_of_ddp` for parameters that no longer belong to experts."""
    known = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    model._ddp_params_and_buffers_to_ignore = sorted(known - _compiled_or_not(names))  # type: ignore[assignment]


def _compiled_or_not(names: Iterable[str]) -> set[str]:
    """Return names as in the model, and as in the module that `torch.compile` makes of it: DDP may wrap either."""
    bare = [name.removeprefix(_COMPILED) for name in names]
    return {*bare, *(_COMPILED + name for name in bare)}


_COMPILED = "_orig_mod."


def clip_grad_norm_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    experts: Collective,
    device: torch.device,
    norm_type: float = 2.0,
) -> Tensor:
    """Clip by the norm over *all* ranks' experts and the (replicated) other parameters; collective.

    No gradient is copied as a whole: a large one is read, and scaled, in parts.

    Args:
        parameters: This rank's parameters, experts and others.
        max_norm: The norm that gradients are scaled down to; infinite only measures. A norm that is NaN makes all
            gradients NaN, as with torch's own function.
        experts: The expert-parallel group.
        device: Where it exchanges tensors.
        norm_type: As of torch's function, any positive number or infinity.

    Returns:
        The norm before clipping, in float64, the same on every rank.

    Raises:
        ValueError: For another `norm_type`.
    """
    power = float(norm_type)
    if not power > 0:
        raise ValueError(f"norm_type: expected a positive number, as 1, 2 or inf, got {norm_type!r}")
    held = [(p, p.grad) for p in parameters if p.grad is not None]
    # Of the parameters that ranks share, and of this rank's experts
    figures = torch.zeros(2, dtype=torch.float64, device=device)
    for p, grad in held:
        figure = _figure(grad.detach(), power)
        # A view, written to in place: no value comes to the host
        own = figures[int(bool(getattr(p, "prophet_expert", False)))]
        own.copy_(torch.maximum(own, figure.to(device)) if power == math.inf else own + figure)
    # The shared parameters once, the experts of every rank
    of_ranks = torch.cat([figures[:1], share(experts, figures[1:], op=Operation("gradient norm")).view(-1)])
    total = of_ranks.sum()
    norm = of_ranks.amax() if power == math.inf else total.sqrt() if power == 2 else total.pow(1.0 / power)
    # 1e-6 as in torch's function
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # Only on the host: to read the factor of an accelerator would make the host wait
    if max_norm == float("inf") or (factor.device.type == "cpu" and float(factor) == 1.0):
        return norm
    for _, grad in held:
        part = grad.to_local() if hasattr(grad, "to_local") else grad
        # A copy to the host is read at once, so that one has to be waited for
        here = factor.to(part.device, non_blocking=part.device.type != "cpu")
        # A product in sixteen bits would round the factor first
        if part.dtype in (torch.float16, torch.bfloat16) and part.device.type != "cpu" and not part.is_sparse:
            for piece in in_parts(part):
                piece.copy_(piece.float().mul_(here))
        else:
            part.mul_(here)
    return norm


def _figure(grad: Tensor, power: float) -> Tensor:
    """Sum the powers of a whole gradient, or take its greatest number; collective where FSDP has cut it."""
    figures = figures_of_parts(grad, lambda part: sum_of_powers(part, power))
    return figures.amax() if power == math.inf else figures.sum()


def update_biases(layers: Sequence[MoE], choices: Sequence[IntArray]) -> None:
    """Update the gates' balancing biases; collective where expert replicas share them.

    Args:
        layers: The layers.
        choices: Each layer's choices [E] in one step, over this EP group.
    """
    biased = [
        (layer, torch.from_numpy(c)) for layer, c in zip(layers, choices, strict=True) if layer.gate.bias is not None
    ]
    if not biased:
        return
    counts, replicas = torch.cat([c for _, c in biased]), biased[0][0].replicas
    # The copies of a gate must stay equal, so the choices of all EP groups are added
    if replicas is not None and replicas.size > 1:
        counts = counts.to(biased[0][0].experts.device, non_blocking=True)
        counts = replicas.all_gather(counts, op=Operation("choices of all replicas"), channel="weights").sum(0)
    for (layer, _), total in zip(biased, counts.split([c.numel() for _, c in biased]), strict=True):
        layer.gate.update_bias(total)


class ExpertReplicas:
    """Averages expert gradients over the processes that hold the same experts, at the end of every backward pass.

    The average is complete when `backward()` returns, replicas' gradients brought home first where an engine is
    attached, so clipping sees complete gradients. With several backward passes per step (gradient accumulation) it runs
    with each of them, which is correct because the mean of a mean changes nothing. At the start the experts' parameters
    are overwritten by those of replica 0. Balancing biases of gates follow the choices of all replicas. The constructor
    is collective.

    A layer that did not run in a pass contributes zeros, unless it ran on none of the processes. A process on which no
    layer ran while another's did is an error after the collective's time limit. A parameter that has a gradient on none
    of them keeps None.

    The average takes buckets of bounded size: at most 128 MiB beside the gradients, see
    `prophet.ranks.gradient_means`.

    Where fewer backward passes run in a step than the engine expects, it completes gradients in `optimizer.step()`,
    after this average: call `engine.runtime.finish_gradients()` and `average()` before the step then.

    Args:
        model: The model, before it is wrapped in DistributedDataParallel.
        replicas: The expert-data-parallel collective; see `expert_groups`.

    Attributes:
        enabled: Whether backward passes average; with gradient accumulation False saves all averages but the last.

    Raises:
        ValueError: For a model without MoE layers.
    """

    def __init__(self, model: nn.Module, replicas: Collective) -> None:
        layers = moe_layers(model)
        if not layers:
            raise ValueError("the model has no prophet.MoE layer")
        for layer in layers:
            layer.experts.check_parameters()
        leave_out_of_ddp(model)
        self.replicas = replicas
        self.enabled = True
        self._layers = layers
        for layer in layers:
            layer.replicas = replicas
        self._params = [p for layer in layers for p in layer.experts.parameters()]
        self._task = -1
        for p in self._params:
            p.prophet_averaged = True  # type: ignore[attr-defined]
        if replicas.size == 1:
            return
        with torch.no_grad():
            for p in self._params:
                p.copy_(replicas.all_gather(p, op=Operation("experts of replica 0"), channel="weights")[0])

        # A function: a copy of the model shares it, whereas a bound method would be copied with this object
        def ran(layer: MoE) -> None:
            self._ran(layer)

        for layer in layers:
            layer.on_backward = ran

    def _ran(self, layer: MoE) -> None:
        """Queue an average for the end of this backward pass, which has reached a layer of experts."""
        # Called by layers and not by hooks of parameters: those of experts without rows get no gradient
        task = torch._C._current_graph_task_id()
        # A copied model calls, too
        ours = any(layer is own for own in self._layers)
        # Once per backward pass. The engine has queued its own end before, so the gradients are home by then.
        if ours and self.enabled and task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._task = -1
        self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Average now; collective over the replicas. A second call changes nothing."""
        params = [p for p in self._params if p.requires_grad]
        average_gradients_(params, self.replicas, op=Operation("average of expert gradients over replicas"))

    def close(self) -> None:
        """Stop averaging."""
        for layer in self._layers:
            layer.replicas = layer.on_backward = None
        for p in self._params:
            p.prophet_averaged = False  # type: ignore[attr-defined]
