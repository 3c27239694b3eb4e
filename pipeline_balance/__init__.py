"""Keeps the pipeline stages of a dynamic model equally busy and moves training state between layouts.

>>> import pipeline_balance                                   # doctest: +SKIP
>>> balanced = pipeline_balance.attach(pipeline)              # an ElasticPipeline; all ranks alike
>>> loss = balanced.step(inputs, target)                      # and train as before
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline_balance.control.controller import Controller, ControllerConfig
    from pipeline_balance.pipeline.trainer import ElasticPipeline
    from pipeline_balance.spec import RankLimits

__all__ = ["attach"]


def attach(
    pipeline: ElasticPipeline,
    limits: Sequence[RankLimits] | None = None,
    config: ControllerConfig | None = None,
) -> Controller:
    """Balance `pipeline` from now on: train with the returned controller's `step` instead of the pipeline's."""
    from pipeline_balance.control.controller import Controller

    return Controller(pipeline, limits, config)
