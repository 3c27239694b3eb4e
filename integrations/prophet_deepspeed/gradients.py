"""A DeepSpeed engine and a balancing one on one model: what happens at the end of a backward pass, and at a step.

DeepSpeed averages an expert's gradient as it comes: with ZeRO-1 and 2 from a hook on the parameter, while the replicas'
part is still on other ranks. So its hooks pass over the experts, and they are handed to it when the backward pass has
ended, in one order on all ranks, with the replicas' part in them.

DeepSpeed divides every gradient by the number of all processes and sums an expert's over the processes that hold it.
So experts give the plain sum over their expert-parallel group here, not the mean.

Without ZeRO, DeepSpeed clips by a norm that leaves experts out (16 bit) or averages the ranks' norms (32 bit). With
fp16 it divides gradients by a loss scale that its `backward` has not multiplied by. Here the norm is that over all
experts, each counted once, and the loss is scaled.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import prophet


class Binding:
    """Makes the DeepSpeed engine `ds` drive `engine`: gradients complete before they are averaged, steps ended.

    Takes the place of some of the methods of `ds`, and lives as long.
    """

    def __init__(self, ds: Any, engine: prophet.Engine) -> None:
        self._ds, self._engine = ds, engine
        for layer in engine.layers:
            # DeepSpeed divides by all processes itself, so experts give the sum over their group.
            layer.experts.grad_scale = 1.0
        self._experts = {id(p) for layer in engine.layers for p in layer.experts.parameters()}
        self._zero = ds.optimizer if hasattr(ds.optimizer, "process_gradients") else None
        self._prologue, ds._backward_prologue = ds._backward_prologue, self._before_backward
        self._epilogue, ds._backward_epilogue = ds._backward_epilogue, self._after_backward
        self._update, ds._take_model_step = ds._take_model_step, self._take_step
        ds.clip_fp32_gradients = self._clip
        self._plain_16_bit = self._zero is None and hasattr(ds.optimizer, "fp16_groups")
        if self._plain_16_bit:
            self._backward, ds.backward = ds.backward, self._scaled_backward
            self._unscale, ds.optimizer.unscale_and_clip_grads = ds.optimizer.unscale_and_clip_grads, self._clip_16_bit
        self._scaled_norm = math.nan
        if self._zero is not None:
            self._process, self._zero.process_gradients = self._zero.process_gradients, self._not_yet

    def _not_yet(self, param: nn.Parameter, group: int) -> None:
        """Let DeepSpeed take a gradient as it comes, unless it is an expert's."""
        if id(param) not in self._experts:
            self._process(param, group)

    def _before_backward(self) -> None:
        if not self._ds._running_engine_backward:
            raise RuntimeError(
                "loss.backward() would average experts' gradients before they are complete: call engine.backward(loss)"
            )
        self._prologue()

    def _after_backward(self) -> None:
        """Let DeepSpeed take the experts' gradients, in which the replicas' part is by now."""
        if self._zero is not None:
            # In one order on all ranks: reductions would mix up different experts.
            for group, params in enumerate(self._zero.bit16_groups):
                for param in params:
                    if id(param) in self._experts and param.requires_grad:
                        # No rows here, while other ranks' copies in this reduction may have had some
                        if param.grad is None:
                            param.grad = torch.zeros_like(param)
                        self._process(param, group)
        self._epilogue()

    def _take_step(self, *args: Any, **kwargs: Any) -> None:
        # Measured, not clipped: the bound is infinite
        if self._plain_16_bit:
            self._scaled_norm = float(self._engine.clip_grad_norm_(list(self._ds.module.parameters()), math.inf))
        self._update(*args, **kwargs)
        self._engine.finish_step()

    def _clip(self) -> None:
        """Clip by the norm over all experts: DeepSpeed averages the ranks' norms where there is no ZeRO."""
        norm: Tensor = self._engine.clip_grad_norm_(list(self._ds.module.parameters()), self._ds.gradient_clipping())
        self._ds._global_grad_norm = float(norm)

    def _clip_16_bit(self, *args: Any, **kwargs: Any) -> Any:
        """Clip as `_clip` does, where the optimizer keeps 32-bit copies."""
        # Its own norm, which leaves experts out, is the last of the positional arguments.
        self._ds.optimizer._global_grad_norm = self._scaled_norm / self._loss_scale()
        return self._unscale(*args[:-1], self._scaled_norm, **kwargs)

    def _loss_scale(self) -> float:
        """The loss scale; None stands for no scaling in some of DeepSpeed's optimizers."""
        scale = self._ds.optimizer.loss_scale
        return 1.0 if scale is None else float(scale)

    def _scaled_backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        """Multiply by the loss scale, unless DeepSpeed's `backward` does: what arrives at the loss shows which."""
        unscaled = 1.0 / self._ds.gradient_accumulation_steps() if scale_wrt_gas else 1.0
        scale = self._loss_scale()
        # In 16 bit the product would overflow before the gradients do
        loss_32 = loss.float()

        def once(grad: Tensor) -> Tensor:
            return grad * scale if math.isclose(float(grad), unscaled, rel_tol=1e-6) else grad

        handle = loss_32.register_hook(once)
        try:
            return self._backward(loss_32, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
        finally:
            handle.remove()
