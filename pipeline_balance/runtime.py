"""Training over stages that may change. A door: the code is in `pipeline_balance.pipeline`."""

from pipeline_balance.pipeline.model import Microbatch, ModuleChain, PipelineModel
from pipeline_balance.pipeline.rebuild import Prepared, Rebuilt
from pipeline_balance.pipeline.trainer import ElasticPipeline

__all__ = ["ElasticPipeline", "Microbatch", "ModuleChain", "PipelineModel", "Prepared", "Rebuilt"]
