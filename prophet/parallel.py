"""Expert parallelism beside data parallelism. A door: the code is in `prophet.engine.parallel` and `prophet.ranks`."""

from prophet.engine.parallel import (
    ExpertReplicas,
    clip_grad_norm_,
    expert_parameters,
    leave_out_of_ddp,
    put_back_into_ddp,
    update_biases,
)
from prophet.ranks.process_group import expert_groups

__all__ = [
    "ExpertReplicas",
    "clip_grad_norm_",
    "expert_groups",
    "expert_parameters",
    "leave_out_of_ddp",
    "put_back_into_ddp",
    "update_biases",
]
