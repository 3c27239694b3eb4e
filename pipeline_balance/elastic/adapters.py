"""What runs a job's model in a layout: microbatches whole, or in slices that pass the stages one by one.

All of them are of the same modules and parameters. A switch between layouts therefore moves tensors as between any
others, and puts another of these in its place by an assignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.elastic.shards.experts import has_experts
from pipeline_balance.elastic.shards.job_state import mesh_axes
from pipeline_balance.elastic.shards.sharded import ShardedModel
from pipeline_balance.pipeline.model.adapter import TransformersModel
from pipeline_balance.pipeline.model.layers import CountLabels, LossFn, PipelineModel
from pipeline_balance.slices import SliceOptions
from pipeline_balance.slices.models import chain, transformers
from prophet.errors import SpecError


class Adapters:
    """Makes what runs the model that `build()` returned; `plain` runs whole microbatches.

    Args:
        built: What `build()` returned.
        loss_fn: The loss of layers in a row.
        counted: How many labels of a microbatch count, for layers in a row.
        slices: What layouts with slices take beside their number and that of stages per rank; None: the defaults.
        device: Where the model runs.

    Raises:
        SpecError: For `slices` that have such numbers, and for what is no model.
    """

    def __init__(
        self,
        built: nn.Module | Sequence[nn.Module] | PipelineModel,
        loss_fn: LossFn | None,
        counted: CountLabels | None,
        slices: SliceOptions | None,
        device: torch.device,
    ) -> None:
        self._options = options = slices if slices is not None else SliceOptions(1)
        if not isinstance(options, SliceOptions) or options.slices > 1 or options.stages_per_rank > 1:
            raise SpecError(
                f"slices: expected SliceOptions(1, ...), got {options!r}: a layout says how many slices it has "
                "(slices), and how many stages a rank (v)"
            )
        self._loss_fn, self._counted, self._device = loss_fn, counted, device
        self._named: dict[str, Any] = {}
        # a pipeline model of the user's own class runs as it is: nobody knows how to cut its sequences
        self._cuts = not isinstance(built, PipelineModel) or type(built) is TransformersModel
        if isinstance(built, PipelineModel) and built.vocabulary is not None:
            raise SpecError("a job cannot split the vocabulary over its ranks, as they change: split_vocabulary=False")
        if not self._cuts:
            assert isinstance(built, PipelineModel)
            self.plain = built
            return
        # a model in the user's adapter is taken out, with what the user said about it, and adapted again for slices
        root: Any = built
        if isinstance(built, TransformersModel):
            root = built.root
            layers = (name for name, module in root.named_modules() if module is built.layers)
            self._named = {"layers": next(layers), "example": built.example}
        self.plain = self._made(root, options)
        # Whole microbatches may pass in any order
        self.plain.slicing = None

    def of(self, layout: Parallelism, now: PipelineModel | None = None) -> PipelineModel:
        """What runs the model in this layout.

        Args:
            layout: Any layout.
            now: What is in force; None before the first.

        Raises:
            SpecError: Where nothing can run the model in it.
        """
        options = self._options
        if layout.slices == 1:
            if options.recompute != "none" and "dp" in mesh_axes(layout):
                raise SpecError(
                    f"{layout}: with zero 2 and 3 the model's own forward runs whole, so nothing is computed again; "
                    f'leave out recompute="{options.recompute}"'
                )
            return self.plain
        layout.check_trainable(experts=has_experts(self.plain.root))
        if not self._cuts:
            raise SpecError(
                f"{layout}: a {type(self.plain).__name__} cannot be cut into slices: let build() return the model "
                "itself, or its layers"
            )
        options = replace(options, slices=layout.slices, stages_per_rank=layout.v)
        if options.exchanges and layout.tp > 1:
            raise SpecError(
                f'{layout}: balance="exchange" plans for all heads of an attention, and tp ranks have a part of them '
                'each: give Job slices with balance="none"'
            )
        # hooks of sharding sit on the user's modules, and would run while shapes are traced
        with now.copy.apart() if isinstance(now, ShardedModel) else nullcontext():
            return self._made(self.plain.root, options)

    def _made(self, root: Any, options: SliceOptions) -> PipelineModel:
        if isinstance(root, nn.Sequential | nn.ModuleList | list | tuple):
            if self._loss_fn is None:
                raise SpecError("layers in a row need a loss_fn")
            return chain(options, root, self._loss_fn, counted=self._counted, device=self._device)
        if not isinstance(root, nn.Module):
            raise SpecError(f"build() must return layers or a model, got a {type(root).__name__}")
        return transformers(options, root, device=self._device, **self._named)
