"""A running job changes its parallel layout in place: layouts of models, who takes which place, what a switch costs.

>>> from pipeline_balance import elastic
>>> layout = elastic.Parallelism(pp=2, dp=2, zero=1)
>>> job = elastic.Job(build, make_optimizer, layout, data=batches, loss_fn=loss, microbatches=4)  # doctest: +SKIP
>>> loss = job.step(max_norm=1.0)  # doctest: +SKIP
>>> report = job.switch(elastic.Parallelism(pp=4))  # doctest: +SKIP

Names are imported when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline_balance.elastic.data import Batches, GlobalBatches
    from pipeline_balance.elastic.job import Job
    from pipeline_balance.elastic.layouts.parallelism import Parallelism
    from pipeline_balance.elastic.own_loop import reshard
    from pipeline_balance.elastic.shards.experts import one_rank
    from pipeline_balance.elastic.shards.held_shards import held
    from pipeline_balance.pipeline.model.registered import register

__all__ = ["Batches", "GlobalBatches", "Job", "Parallelism", "held", "one_rank", "register", "reshard"]

# `from pipeline_balance import elastic` must not import torch for whoever only parses a layout
_MODULE_OF = {
    "Batches": "pipeline_balance.elastic.data",
    "GlobalBatches": "pipeline_balance.elastic.data",
    "Job": "pipeline_balance.elastic.job",
    "Parallelism": "pipeline_balance.elastic.layouts.parallelism",
    "held": "pipeline_balance.elastic.shards.held_shards",
    "one_rank": "pipeline_balance.elastic.shards.experts",
    "register": "pipeline_balance.pipeline.model.registered",
    "reshard": "pipeline_balance.elastic.own_loop",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
