"""How long a move takes, in turns with the code of another checkout; on this machine, without emulated links.

Both codes train the same small GPT over P processes each, that live all the time and wait for their turn. In every
round each code takes a training step and then moves layers, forth in one round and back in the next. A move is over
when its slowest rank is. The processes run this file with the package of either checkout.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

CASE, RANKS, ROUNDS, WARM_UP = "freezing", 4, 20, 4
MAPS = ((0, 3, 6, 9, 12), (0, 5, 8, 10, 12))
"""Boundaries of the two stage maps, which layers change between."""


class MoverError(RuntimeError):
    """A checkout's processes did not do what they were told."""


class Mover:
    """The processes of one checkout. They move layers once per call of `move`."""

    def __init__(self, root: Path, *, timeout_s: float) -> None:
        if not (root / "pipeline_balance").is_dir():
            raise MoverError(f"{root} is no checkout of this project")
        self.root, self.timeout_s = root, timeout_s
        # a file in a private folder is the meeting point: no port has to be free
        self._scratch = tempfile.TemporaryDirectory(prefix="beside-")
        store = str(Path(self._scratch.name) / "store")
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), store, str(timeout_s)],
                cwd=root,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def move(self, number: int) -> tuple[float, int]:
        """(seconds of the slowest rank, bytes on the wire) of one move, after a training step."""
        for process in self.processes:
            _end_of(process.stdin).write(f"{number}\n")
            _end_of(process.stdin).flush()
        deadline = time.monotonic() + 2 * self.timeout_s
        answers = [self._answer(process, deadline) for process in self.processes]
        return max(a[0] for a in answers), int(sum(a[1] for a in answers))

    def _answer(self, process: subprocess.Popen[str], deadline: float) -> list[float]:
        out = _end_of(process.stdout)
        ready = select.select([out], [], [], max(0.0, deadline - time.monotonic()))[0]
        line = out.readline() if ready else ""
        if not line:
            raise MoverError(f"a process of {self.root} gave no answer, see above (exit status {process.poll()})")
        found: list[float] = json.loads(line)
        return found

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.communicate()
        self._scratch.cleanup()


def _end_of(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def compare(former: Path, *, timeout_s: float, rounds: int = ROUNDS, warm_up: int = WARM_UP) -> dict[str, Any]:
    """Rows of both codes and the present median over the former; prints them."""
    roots = {"present": Path(__file__).resolve().parents[2], "former": former.resolve()}
    movers: dict[str, Mover] = {}
    taken: dict[str, list[tuple[float, int]]] = {name: [] for name in roots}
    try:
        for name, root in roots.items():
            movers[name] = Mover(root, timeout_s=timeout_s)
        for number in range(warm_up + rounds):
            for name in list(roots)[:: 1 if number % 2 else -1]:
                found = movers[name].move(number)
                if number >= warm_up:
                    taken[name].append(found)
    finally:
        for mover in movers.values():
            mover.close()
    rows = [row_of(name, found) for name, found in taken.items()]
    for row in rows:
        print(f"{row['code']}: median of {rounds} moves {row['median_s'] * 1e3:.2f} ms, {row['wire_bytes']} bytes each")
    ratio = rows[0]["median_s"] / rows[1]["median_s"]
    print(f"present over former: {ratio:.3f}", flush=True)
    return {"case": CASE, "ranks": RANKS, "maps": [list(m) for m in MAPS], "rows": rows, "present_over_former": ratio}


def row_of(name: str, found: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """One code's row: all moves in their order, with the median."""
    seconds = [s for s, _ in found]
    return {
        "code": name,
        "median_s": statistics.median(seconds),
        "least_s": min(seconds),
        "seconds": [round(s, 6) for s in seconds],
        "wire_bytes": statistics.median_low(b for _, b in found),
    }


def _serve(rank: int, store: str, timeout_s: float) -> None:
    """One process: a step and a move for every line that comes in. It uses what both checkouts have."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from benchmarks.cluster.host import Host
    from benchmarks.pipeline.cases import cases
    from benchmarks.pipeline.pacing import Pace
    from benchmarks.pipeline.worker import Bench
    from pipeline_balance.spec import StageMap

    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=limit)
    # without a port: it is in the group already
    bench = Bench(cases(ROUNDS)[CASE], Host(rank, RANKS, "127.0.0.1", "", 0), pace=Pace(1.0), budget_bytes=64 << 20)
    pipeline = bench._pipeline()
    for line in sys.stdin:
        number = int(line)
        pipeline.step(*bench.case.batch(bench.corpus, number))
        pipeline.drop_gradients()  # as controllers do
        to = StageMap.contiguous(MAPS[(number + 1) % 2])
        dist.barrier()
        began = time.perf_counter()
        done = pipeline.rebuild(to)
        print(json.dumps([time.perf_counter() - began, done.sent_bytes]), flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
