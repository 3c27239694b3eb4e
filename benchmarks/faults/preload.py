"""What the server loads that ranks are forked from, so that a fault is not timed with its imports."""

import torch._dynamo  # by torch's optimizers
import torch.distributed.checkpoint

import benchmarks.faults.program

LOADED = (torch._dynamo, torch.distributed.checkpoint, benchmarks.faults.program)
