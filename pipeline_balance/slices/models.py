"""Models that run by `SliceOptions`, with one slice too: what `ElasticPipeline` and `Job` build from `slices`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from pipeline_balance.pipeline.model.layers import LossFn, PipelineModel
from pipeline_balance.slices.adapter import SlicedTransformers
from pipeline_balance.slices.auto.choice import Auto, AutoSlices
from pipeline_balance.slices.auto.choosing import ChosenChain, ChosenTransformers
from pipeline_balance.slices.chain import SlicedChain
from pipeline_balance.slices.options import SliceOptions
from pipeline_balance.slices.saved.recompute import Recomputing
from prophet.errors import SpecError


def transformers(slices: SliceOptions | AutoSlices | Auto, model: nn.Module, **options: Any) -> PipelineModel:
    """A transformers model as a pipeline runs it; see `SlicedTransformers`. With one slice, as `TransformersModel`.

    Args:
        slices: How sequences are cut, and what layers compute again; "auto" chooses all of it.
        model: The model.
        **options: Those of `TransformersModel`.
    """
    asked = AutoSlices() if isinstance(slices, str) else slices
    if isinstance(asked, AutoSlices):
        return ChosenTransformers(model, asked, **options)
    if asked.slices > 1:
        return SlicedTransformers(model, asked, **options)
    whole = Recomputing(model, recompute=asked.recompute, **options)
    # one slice may still have several stages per rank, and their order
    whole.slicing = asked
    return whole


def chain(
    slices: SliceOptions | AutoSlices | Auto, layers: nn.Module | Sequence[nn.Module], loss_fn: LossFn, **options: Any
) -> PipelineModel:
    """Modules in a row; see `SlicedChain`.

    Args:
        slices: How sequences are cut; "auto" chooses it.
        layers: The modules.
        loss_fn: As `SlicedChain` takes it.
        **options: Those of `ModuleChain`.

    Raises:
        SpecError: For options with `recompute`.
    """
    # nobody knows which parts of a user's own layer attend, and those must not run twice
    asked = AutoSlices(recompute="none") if isinstance(slices, str) else slices
    if asked.recompute not in ("none", "auto"):
        raise SpecError("recompute is for transformers models: checkpoint your own layers by torch.utils.checkpoint")
    if isinstance(asked, AutoSlices):
        return ChosenChain(layers, loss_fn, asked, **options)
    return SlicedChain(layers, loss_fn, asked, **options)
