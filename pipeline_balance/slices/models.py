"""Models that run by `SliceOptions`, with one slice too: what `ElasticPipeline` and `Job` build from `slices`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from pipeline_balance.pipeline.model.layers import LossFn, PipelineModel
from pipeline_balance.slices.adapter import SlicedTransformers
from pipeline_balance.slices.chain import SlicedChain
from pipeline_balance.slices.options import SliceOptions
from pipeline_balance.slices.recompute import Recomputing
from prophet.errors import SpecError


def transformers(slices: SliceOptions, model: nn.Module, **options: Any) -> PipelineModel:
    """A transformers model as a pipeline runs it; see `SlicedTransformers`. With one slice, as `TransformersModel`.

    Args:
        slices: How sequences are cut, and what layers compute again.
        model: The model.
        **options: Those of `TransformersModel`.
    """
    if slices.slices > 1:
        return SlicedTransformers(model, slices, **options)
    whole = Recomputing(model, recompute=slices.recompute, **options)
    # one slice may still have several stages per rank, and their order
    whole.slicing = slices
    return whole


def chain(
    slices: SliceOptions, layers: nn.Module | Sequence[nn.Module], loss_fn: LossFn, **options: Any
) -> PipelineModel:
    """Modules in a row; see `SlicedChain`.

    Args:
        slices: How sequences are cut.
        layers: The modules.
        loss_fn: As `SlicedChain` takes it.
        **options: Those of `ModuleChain`.

    Raises:
        SpecError: For options with `recompute`.
    """
    # nobody knows which parts of a user's own layer attend, and those must not run twice
    if slices.recompute != "none":
        raise SpecError("recompute is for transformers models: checkpoint your own layers by torch.utils.checkpoint")
    return SlicedChain(layers, loss_fn, slices, **options)
