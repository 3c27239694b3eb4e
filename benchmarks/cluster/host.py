"""What runs on an emulated host: reads its job, calls the function it names, writes down what came of it."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.pacing import Pace


@dataclass(frozen=True, slots=True)
class Host:
    """One emulated host as its own program sees it."""

    rank: int
    hosts: int
    address: str
    master_address: str
    master_port: int
    slowdown: float = 1.0

    def say(self, text: str) -> None:
        """Print a line that the testbed can wait for."""
        print(text, flush=True)

    def pace(self, *, roams: bool = True) -> Pace:
        """What the main thread computes lasts `slowdown` times as long, apart from all other threads of this host.

        See `benchmarks.pacing`, also for `roams`.
        """
        from benchmarks.pacing import Apart, Pace

        # where no time is stretched, nothing need be kept apart
        return Pace(self.slowdown, apart=Apart() if self.slowdown > 1 else None, roams=roams)

    @contextmanager
    def paced(self) -> Iterator[None]:
        """Inside, the torch operators of the main thread are paced; see `benchmarks.pacing`."""
        from benchmarks.pacing import PacedOperators, compute_at_length
        from prophet.machine.memory import keep_memory

        compute_at_length()
        keep_memory()
        with PacedOperators(self.pace(roams=False)) if self.slowdown > 1 else nullcontext():
            yield

    @contextmanager
    def process_group(self, *, timeout_s: float = 60.0) -> Iterator[None]:
        """A gloo process group over all hosts, as `torch.distributed`'s default group."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{self.master_address}:{self.master_port}",
            rank=self.rank,
            world_size=self.hosts,
            timeout=timedelta(seconds=timeout_s),
        )
        yield
        # Only after success: with a lost peer the orderly end would wait for it.
        dist.barrier()
        dist.destroy_process_group()


def answer(value: Any = None, error: BaseException | None = None) -> dict[str, Any]:
    """What is written to the host's file."""
    if error is None:
        return {"value": value, "error_type": None, "error": None}
    traceback.print_exception(error)
    return {"value": None, "error_type": type(error).__name__, "error": str(error)}


def perform(job: dict[str, Any]) -> dict[str, Any]:
    """Import the job's function (imports are not under the quota), wait to be let go, call it."""
    host = Host(job["rank"], job["hosts"], job["address"], job["master_address"], job["master_port"], job["slowdown"])
    module, _, name = str(job["target"]).partition(":")
    try:
        for extra in job["imports"]:
            importlib.import_module(extra)
        function = getattr(importlib.import_module(module), name)
        Path(job["out"]).with_suffix(".ready").touch()
        if sys.stdin.readline().strip() != "go":
            raise RuntimeError("the testbed ended before this host was let go")
        value = function(host, job["args"])
        json.dumps(value)
    except BaseException as error:
        return answer(error=error)
    return answer(value)


def main() -> int:
    job = json.loads(sys.stdin.readline())
    outcome = perform(job)
    out = Path(job["out"])
    part = out.with_suffix(".part")
    part.write_text(json.dumps(outcome), encoding="utf-8")
    part.replace(out)
    sys.stdout.flush()
    sys.stderr.flush()
    return 0 if outcome["error_type"] is None else 1


if __name__ == "__main__":
    # Without the interpreter's orderly end: threads of a broken process group may never return.
    os._exit(main())
