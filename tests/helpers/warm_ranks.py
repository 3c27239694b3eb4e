"""What the server imports and loads from which the tests' ranks are forked: see `tests.helpers.launch`.

Only what starts no thread and keeps no state: a rank must find everything as in a process that has just imported it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed looks for one when it is imported: ranks are on the host
IMPORTED = (
    "hypothesis",  # by files of tests, which ranks import, too
    "pytest",
    "torch._dynamo",  # by torch's optimizers and by FSDP
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "accelerate",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "prophet.convert.record",  # names of `prophet` load when they are used
    "prophet.monitor.writer",
    "tests.helpers.unmeasured",
    "tests.helpers.training",
    "tests.helpers.elastic_experts",
    "tests.helpers.sliced_models",
)
if importlib.util.find_spec("deepspeed"):  # accelerate looks for it, too
    IMPORTED += ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")
for name in IMPORTED:
    importlib.import_module(name)
gc.freeze()  # ranks look for garbage, and for what holds on to their models, among what they make themselves
atexit.register(gc.unfreeze)  # in the server; ranks end without
