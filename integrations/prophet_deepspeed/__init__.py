"""DeepSpeed with experts that stay balanced: `initialize` takes the place of `deepspeed.initialize`.

>>> import prophet_deepspeed  # doctest: +SKIP
>>> config = {"train_batch_size": 64, "zero_optimization": {"stage": 2}, "prophet": {"ep_size": 4}}
>>> engine, *_ = prophet_deepspeed.initialize(model=model, config=config)  # doctest: +SKIP
"""

from prophet.errors import CheckpointError
from prophet_deepspeed.pipeline import decide_stages, measure_layers, pipeline_module
from prophet_deepspeed.section import ConfigError, ProphetSection
from prophet_deepspeed.start import initialize

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ProphetSection",
    "decide_stages",
    "initialize",
    "measure_layers",
    "pipeline_module",
]
