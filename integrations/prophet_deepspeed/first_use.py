"""DeepSpeed compiles its operations when they are first used, silently: this says so, and names locks.

Its backend for CPUs does so in `deepspeed.init_distributed`, its optimizers in `deepspeed.initialize`. torch waits
without a limit where an earlier build was interrupted and has left its lock.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

from prophet.doctor.extensions import first_use


def announce() -> None:
    """Print on stderr, by one process of each machine, what `first_use` finds before an operation is loaded."""
    builder: Any = importlib.import_module("deepspeed.ops.op_builder.builder").OpBuilder
    plain = builder.jit_load
    # Replaced already: it would print everything twice
    if hasattr(plain, "of_prophet_deepspeed"):
        return

    @functools.wraps(plain)
    def jit_load(op: Any, *args: Any, **options: Any) -> Any:
        message = first_use(op.name, os.environ)
        # Every process compiles, or waits for the one that does
        if message and os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"prophet_deepspeed: {message}", file=sys.stderr, flush=True)
        return plain(op, *args, **options)

    jit_load.of_prophet_deepspeed = True  # type: ignore[attr-defined]
    builder.jit_load = jit_load
