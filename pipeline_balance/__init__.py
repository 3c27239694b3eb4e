"""Keeps the pipeline stages of a dynamic model equally busy and moves training state between layouts.

>>> import pipeline_balance                                                   # doctest: +SKIP
>>> pipe = pipeline_balance.ElasticPipeline.from_modules(layers, loss_fn, ...)  # doctest: +SKIP
>>> balanced = pipeline_balance.attach(pipe)  # on all ranks alike
>>> loss = balanced.step(inputs, labels)  # and train as before

Names are imported when they are first asked for, so that `import pipeline_balance` alone needs neither torch nor numpy.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline_balance.control.controller import Controller
    from pipeline_balance.control.decide import ControllerConfig
    from pipeline_balance.elastic.job import Job
    from pipeline_balance.pipeline.measure.meter import Meter
    from pipeline_balance.pipeline.model.added_loss import add_loss
    from pipeline_balance.pipeline.move.files import read_checkpoint
    from pipeline_balance.pipeline.pretrained import load_pretrained
    from pipeline_balance.pipeline.trainer import ElasticPipeline
    from pipeline_balance.spec import RankLimits, StageMap
    from prophet.state.pretrained import init_empty_weights

# a library prints nothing by itself: what is logged is up to the program
logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "ControllerConfig",
    "ElasticPipeline",
    "Job",
    "Meter",
    "StageMap",
    "add_loss",
    "attach",
    "init_empty_weights",
    "load_pretrained",
    "read_checkpoint",
]

_MODULE_OF = {
    "ControllerConfig": "pipeline_balance.control.decide",
    "Job": "pipeline_balance.elastic.job",
    "Meter": "pipeline_balance.pipeline.measure.meter",
    "ElasticPipeline": "pipeline_balance.pipeline.trainer",
    "StageMap": "pipeline_balance.spec",
    "add_loss": "pipeline_balance.pipeline.model.added_loss",
    "init_empty_weights": "prophet.state.pretrained",
    "load_pretrained": "pipeline_balance.pipeline.pretrained",
    "read_checkpoint": "pipeline_balance.pipeline.move.files",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # so that `import pipeline_balance` alone needs neither torch nor numpy
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def attach(
    pipeline: ElasticPipeline, limits: Sequence[RankLimits] | None = None, config: ControllerConfig | None = None
) -> Controller:
    """Balance `pipeline` from now on: train with the returned controller's `step` instead of the pipeline's.

    Call it again after the group has changed.

    Args:
        pipeline: The pipeline, on all ranks alike.
        limits: [P] memory (bytes) and speed of a replica's ranks, equal on all ranks (None: all alike, without a
            limit).
        config: How often to measure and when a move pays, equal on all ranks (None: the defaults).
    """
    # imported here, as it needs torch and numpy
    from pipeline_balance.control.controller import Controller

    return Controller(pipeline, limits, config)
