"""What the server imports and loads from which the tests' ranks are forked: see `tests.helpers.launch`.

Only what starts no thread and keeps no state: a rank must find everything as in a process that has just imported it.
"""

from __future__ import annotations

import importlib

IMPORTED = (
    "hypothesis",  # by files of tests, which ranks import, too
    "pytest",
    "torch._dynamo",  # by torch's optimizers and by FSDP
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "tests.helpers.training",
)
for name in IMPORTED:
    importlib.import_module(name)
