"""`python -m benchmarks.monitoring`: microseconds per step of handing a report over and of writing it."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import numpy as np

import prophet
from prophet.engine.step_report import StepReport


class Engine(prophet.Engine):
    """What a monitor needs of an engine."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


def engine_of(layers: int, ranks: int, experts: int) -> Any:
    return Engine(
        on_step=[],
        planner=types.SimpleNamespace(name="none"),
        collective=types.SimpleNamespace(rank=0, size=ranks),
        layers=[prophet.MoE(8, 8, experts)] * layers,
        balanced=[types.SimpleNamespace(context=types.SimpleNamespace(topology=types.SimpleNamespace(name="none")))],
    )


def report_of(step: int, layers: int, ranks: int, experts: int) -> StepReport:
    rng = np.random.default_rng(step)
    counts = rng.integers(0, 1000, (layers, ranks, experts))
    load = counts.sum(axis=2)
    return StepReport(
        step=step,
        counts=counts,
        rank_load=load,
        rank_load_static=load,
        copies=np.ones((layers, ranks), dtype=np.int64),
        dropped=np.zeros(layers, dtype=np.int64),
        seconds=dict.fromkeys(("gate", "counts", "a2a", "expert", "exposed_trans", "exposed_agg", "plan"), 0.01),
        actions=(),
        planned=("searched",) * layers,
    )


def measure(*, layers: int, ranks: int, experts: int, steps: int, tensorboard: bool) -> dict[str, float]:
    """Median microseconds on the training thread, and mean processor microseconds of all other threads, per step."""
    engine = engine_of(layers, ranks, experts)
    reports = [report_of(i, layers, ranks, experts) for i in range(steps)]
    handed = []
    with tempfile.TemporaryDirectory() as folder:
        live = prophet.monitor(engine, Path(folder), tensorboard=tensorboard, wandb=False, predict_every=0)
        engine.on_step[0](reports[0])
        time.sleep(0.2 if not tensorboard else 20.0)  # imports and the first line
        cpu_s, own_s = time.process_time(), time.thread_time()
        for report in reports[1:]:
            before = time.perf_counter()
            engine.on_step[0](report)
            handed.append(time.perf_counter() - before)
            time.sleep(0.02)  # steps come one at a time
        live.close()
        cpu_s = (time.process_time() - cpu_s) - (time.thread_time() - own_s)
        size = (Path(folder) / "steps.jsonl").stat().st_size
    return {
        "training_us": 1e6 * statistics.median(handed),
        "writer_cpu_us": 1e6 * cpu_s / (steps - 1),
        "bytes_per_step": size / steps,
        "skipped": float(live.skipped),
    }


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.monitoring", description=__doc__)
    p.add_argument("--layers", type=int, default=4, help="(default: %(default)s, as the demo)")
    p.add_argument("--ranks", type=int, default=4)
    p.add_argument("--experts", type=int, default=16)
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--step-ms", type=float, help="compare with a step of this long")
    p.add_argument("--tensorboard", action="store_true")
    p.add_argument("--json", action="store_true")
    a = p.parse_args()
    if min(a.layers, a.ranks, a.experts) < 1 or a.steps < 2:
        p.error("expected at least 1 layer, rank and expert, and 2 steps")
    row = measure(layers=a.layers, ranks=a.ranks, experts=a.experts, steps=a.steps, tensorboard=a.tensorboard)
    if a.step_ms:
        row["percent_of_step"] = (row["training_us"] + row["writer_cpu_us"]) / (10.0 * a.step_ms)
    print(json.dumps(row) if a.json else "\n".join(f"{k:>16} {v:10.2f}" for k, v in row.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
