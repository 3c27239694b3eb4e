"""Training over stages that may change. A door: the code is in `pipeline_balance.pipeline`.

`ElasticPipeline` is another name for `PipelineTrainer`.
"""

from pipeline_balance.pipeline.rebuild import Prepared, Rebuilt
from pipeline_balance.pipeline.stages import PipelineConfig
from pipeline_balance.pipeline.trainer import PipelineTrainer
from pipeline_balance.pipeline.trainer import PipelineTrainer as ElasticPipeline

__all__ = ["ElasticPipeline", "PipelineConfig", "PipelineTrainer", "Prepared", "Rebuilt"]
