"""DeepSpeed with experts that stay balanced: import this, and `deepspeed.initialize` heeds a "prophet" section.

>>> import deepspeed, prophet_deepspeed  # doctest: +SKIP
>>> config = {"train_batch_size": 64, "zero_optimization": {"stage": 2}, "prophet": {"ep_size": 4}}
>>> engine, *_ = deepspeed.initialize(model=model, config=config)  # doctest: +SKIP
"""

from importlib.util import find_spec

from prophet.errors import CheckpointError
from prophet_deepspeed.entry import install
from prophet_deepspeed.first_use import announce
from prophet_deepspeed.pipeline import decide_stages, measure_layers, pipeline_module
from prophet_deepspeed.section import ConfigError, ProphetSection

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ProphetSection",
    "decide_stages",
    "install",
    "measure_layers",
    "pipeline_module",
]

# Its files and sections can be read without DeepSpeed
if find_spec("deepspeed") is not None:
    install()
    announce()
