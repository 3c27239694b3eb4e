"""Data parallelism around expert parallelism: which gradients DistributedDataParallel averages, and who does the rest.

With R processes and an expert-parallel (EP) group of P of them, every expert lives R / P times. DDP averages the
gradients of all other parameters over the R processes. An expert's gradient comes out of the backward pass as the mean
over its EP group; `ExpertReplicas` averages it over the R / P processes that hold the same expert (the expert-data-
parallel group), so that in the end it is the mean over all R, like every other gradient.

Shape legend: R processes, P ranks of an EP group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from prophet.layer.moe import MoE, moe_layers
from prophet.ranks.collective import Collective
from prophet.ranks.messages import share
from prophet.ranks.operation import Operation
from prophet.spec import IntArray


def expert_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The experts' parameters of all MoE layers of `model`, by name."""
    return [(n, p) for n, p in model.named_parameters() if getattr(p, "prophet_expert", False)]


def leave_out_of_ddp(model: nn.Module) -> None:
    """Tell DistributedDataParallel which parameters belong to experts; refuse a model it already wraps."""
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
    """Undo `leave_out_of_ddp` for parameters that are no experts' any more."""
    known = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    model._ddp_params_and_buffers_to_ignore = sorted(known - _compiled_or_not(names))  # type: ignore[assignment]


def _compiled_or_not(names: Iterable[str]) -> set[str]:
    """The names that parameters have in the model, and in what `torch.compile` makes of it: DDP may wrap either."""
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
    """Clip by the norm over *all* ranks' experts and the (replicated) other parameters; the same on every rank.

    experts: the expert-parallel group; device: where it exchanges tensors. norm_type: as of torch's function, any
    positive number or infinity. Returns the norm before clipping, in float64. A norm that is NaN makes all gradients
    NaN, as with torch's own; `max_norm` infinite only measures. Collective. Raises ValueError for another `norm_type`.
    """
    power = float(norm_type)
    if not power > 0:
        raise ValueError(f"norm_type: expected a positive number, as 1, 2 or inf, got {norm_type!r}")
    held = [(p, p.grad) for p in parameters if p.grad is not None]
    figures = torch.zeros(2, dtype=torch.float64, device=device)  # of what ranks share, and of this rank's experts
    for p, grad in held:
        figure = _figure(grad.detach().double(), power)
        own = figures[int(bool(getattr(p, "prophet_expert", False)))]  # a view
        own.copy_(torch.maximum(own, figure.to(device)) if power == math.inf else own + figure)
    of_ranks = torch.cat([figures[:1], share(experts, figures[1:], op=Operation("gradient norm")).view(-1)])
    total = of_ranks.sum()
    norm = of_ranks.amax() if power == math.inf else total.sqrt() if power == 2 else total.pow(1.0 / power)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if max_norm == float("inf") or (factor.device.type == "cpu" and float(factor) == 1.0):
        return norm  # elsewhere looking at the factor would make the host wait
    for _, grad in held:
        part = grad.to_local() if hasattr(grad, "to_local") else grad
        here = factor.to(part.device, non_blocking=part.device.type != "cpu")  # the host has to wait for its copy
        if part.dtype in (torch.float16, torch.bfloat16) and part.device.type != "cpu":
            part.copy_(part.float() * here)  # a product in sixteen bits would round the factor first
        else:
            part.mul_(here)
    return norm


def _figure(grad: Tensor, power: float) -> Tensor:
    """Of the whole gradient, of which FSDP leaves every rank a part: the sum of powers, or the greatest number."""
    cut: Any = grad if hasattr(grad, "full_tensor") else None
    if power == math.inf:
        if (
            cut is not None
        ):  # amax() of a part without elements is an error, so the ranks exchange what is along the cut
            along = {placement.dim for placement in cut.placements if placement.is_shard()}
            others = [d for d in range(cut.ndim) if d not in along]
            grad = (cut.abs().amax(others) if others else cut).full_tensor()
        return grad.abs().amax() if grad.numel() else grad.new_zeros(())
    total: Any = grad.square().sum() if power == 2 else grad.abs().pow(power).sum()
    whole: Tensor = total if cut is None else total.full_tensor()
    return whole


def update_biases(layers: Sequence[MoE], choices: Sequence[IntArray]) -> None:
    """Update the gates' balancing biases from one step's `choices` [E] by layer; collective where replicas share them.

    Every process counts its own EP group's choices. The copies of a gate must stay equal, so the groups' are added.
    """
    biased = [
        (layer, torch.from_numpy(c)) for layer, c in zip(layers, choices, strict=True) if layer.gate.bias is not None
    ]
    if not biased:
        return
    counts, replicas = torch.cat([c for _, c in biased]), biased[0][0].replicas
    if replicas is not None and replicas.size > 1:
        counts = counts.to(biased[0][0].experts.device, non_blocking=True)
        counts = replicas.all_gather(counts, op=Operation("choices of all replicas"), channel="weights").sum(0)
    for (layer, _), total in zip(biased, counts.split([c.numel() for _, c in biased]), strict=True):
        layer.gate.update_bias(total)


class ExpertReplicas:
    """Averages expert gradients over the processes that hold the same experts, at the end of every backward pass.

    replicas: the expert-data-parallel collective, see `expert_groups`. The average is complete when `backward()`
    returns, replicas' gradients brought home first where an engine is attached, so clipping sees what it should. With
    several backward passes per step (gradient accumulation) it runs with each of them, which is correct because the
    mean of a mean changes nothing; `enabled = False` leaves out all but the last. At the start the experts' parameters
    are overwritten by those of replica 0. Balancing biases of gates follow the choices of all replicas.

    A layer that did not run in a pass contributes zeros, unless it ran on none of the processes. A process on which no
    layer ran while another's did is an error after the collective's time limit.

    Where an engine was told of more backward passes per step than ran, it completes gradients in `optimizer.step()`,
    after this average: call `engine.runtime.finish_gradients()` and `average()` before the step then.
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

        def ran(layer: MoE) -> None:  # a function, which a copy of the model shares, as a method would not be
            self._ran(layer)

        for layer in layers:
            layer.on_backward = ran

    def _ran(self, layer: MoE) -> None:
        """Experts run backward: average when this backward pass ends. Queued after the engine's own end.

        Not where a parameter has its gradient: of experts without rows, none has.
        """
        task = torch._C._current_graph_task_id()
        ours = any(layer is own for own in self._layers)  # a copied model calls, too
        if ours and self.enabled and task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._task = -1
        self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Average now; collective over the replicas. Harmless where it has happened already."""
        params = [p for p in self._params if p.requires_grad]
        if self.replicas.size == 1 or not params:
            return
        for dtype in sorted({p.dtype for p in params}, key=str):
            self._average([p for p in params if p.dtype == dtype])

    def _average(self, params: list[nn.Parameter]) -> None:
        # which parameters have a gradient travels with the gradients: no message of its own
        present = torch.stack([params[0].new_tensor(0.0 if p.grad is None else 1.0) for p in params])
        sums = [torch.zeros_like(p) if p.grad is None else p.grad.contiguous() for p in params]
        self.replicas.all_reduce_mean_([present, *sums], op=Operation("average of expert gradients over replicas"))
        for p, mean, anywhere in zip(params, sums, present.tolist(), strict=True):
            if anywhere == 0:
                continue
            if p.grad is None:
                p.grad = mean
            elif p.grad is not mean:
                p.grad.copy_(mean)

    def close(self) -> None:
        """Stop averaging."""
        for layer in self._layers:
            layer.replicas = layer.on_backward = None
        for p in self._params:
            p.prophet_averaged = False  # type: ignore[attr-defined]
