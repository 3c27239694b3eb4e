"""Pipelines over slices of sequences (SlimPipe): a slice attends to the kept keys and values of those before it.

>>> from pipeline_balance.slices import SliceOptions                       # doctest: +SKIP
>>> pipe = ElasticPipeline.from_transformers(model, slices=SliceOptions(slices=8), ...)  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline_balance.slices.attention import attend
    from pipeline_balance.slices.auto.choice import AutoSlices
    from pipeline_balance.slices.options import SliceOptions

__all__ = ["AutoSlices", "SliceOptions", "attend"]

# options are read without torch
_MODULE_OF = {
    "AutoSlices": "pipeline_balance.slices.auto.choice",
    "SliceOptions": "pipeline_balance.slices.options",
    "attend": "pipeline_balance.slices.attention",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
