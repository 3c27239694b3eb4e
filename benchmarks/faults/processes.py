"""The processes of one case: started from a server that has imported what they need, and none left behind.

`prophet.ranks.launch.run_ranks` ends all ranks when one fails. Here it is measured what the others do then.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.faults.program import GRACE_S, RANKS, Said, run, whole

_END_S = 60.0  # for ranks to start, and to end after the limit


def body(rank: int, name: str, folder: str, limit_s: float) -> None:
    """One rank's process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    sys.stderr = (Path(folder) / f"stderr-{rank}.txt").open("w", encoding="utf-8")
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=_END_S))
    try:
        run(name, folder, limit_s)
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None


def outcome(name: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """What became of the ranks, by rank, and of the checkpoint."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.faults.preload"])
    ranks = [context.Process(target=body, args=(r, name, str(folder), limit_s), daemon=True) for r in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(limit_s + 2 * GRACE_S + _END_S)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    said = [Said.read(folder, rank) for rank in range(RANKS)]
    rows = [None if s is None else asdict(s) for s in said]
    return {"fault": name, "exit codes": codes, "said": rows, "whole": whole(folder)}
