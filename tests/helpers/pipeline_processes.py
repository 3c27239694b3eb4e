"""Runs a function on real gloo processes and brings back what every rank returned."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist


def _entry(fn: Callable[..., Any], rank: int, size: int, store_path: str, results: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(store_path, size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        results.put((rank, True, fn(rank, size, *args)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    # no orderly goodbye: tests kill ranks, and a rank that waits for them would hang


def run_gloo(
    fn: Callable[..., Any], size: int, *args: Any, timeout_s: float = 150.0, silent: frozenset[int] = frozenset()
) -> list[Any]:
    """Results of `fn(rank, size, *args)` by rank; raises with the first traceback if a rank fails.

    Ranks in `silent` are expected to vanish without an answer; theirs is None.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.pipelining"])
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        path = str(Path(folder) / "store")
        processes = [
            context.Process(target=_entry, args=(fn, r, size, path, results, args), daemon=True) for r in range(size)
        ]
        for process in processes:
            process.start()
        answers: dict[int, Any] = {}
        try:
            while len(answers) < size - len(silent):
                rank, good, value = results.get(timeout=timeout_s)
                if not good:
                    raise AssertionError(f"rank {rank} failed:\n{value}")
                answers[rank] = value
        except Empty:
            missing = sorted(set(range(size)) - set(answers))
            raise AssertionError(f"no answer from ranks {missing} within {timeout_s} s") from None
        finally:
            for process in processes:
                process.join(timeout=5.0)
                if process.is_alive():
                    process.kill()
                    process.join(timeout=5.0)
        return [answers.get(r) for r in range(size)]
