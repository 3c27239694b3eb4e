"""`python -m benchmarks.kernels --json OUT`: check, then time, then print a table."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.common import Row, environment, write_json
from benchmarks.kernels import ffn, layer, moves
from benchmarks.kernels.timing import Timer
from benchmarks.kernels.workload import CPU_SHAPES, GPU_SHAPES, Shape

COLUMNS = (
    "op", "shape", "tokens", "dtype", "skew", "replicas", "pass", "ours_us", "peer", "peer_us", "ratio", "tflops",
    "fraction_of_dense", "gb_per_s", "fraction_of_copy",
)  # fmt: skip


def show(row: Row) -> str:
    """One line of the table."""
    cells = []
    for name in COLUMNS:
        value = row.get(name, "")
        cells.append(f"{value:.3g}" if isinstance(value, float) and name != "ours_us" else str(value))
        if name.endswith("_us") and isinstance(value, float):
            cells[-1] = f"{value:.0f}"
    extra = row.get("wrong") or row.get("note")
    return " | ".join(cells) + (f" | {extra}" if extra else "")


def gpu_tokens(shape: Shape) -> list[int]:
    """2k to 64k tokens; the widest layers stop where their rows no longer fit beside the peers'."""
    return [2048, 16384, 65536] if shape.dim * shape.top_k <= 8192 else [2048, 16384]


def on_gpu(limit_s: float) -> Iterator[Row]:
    began = time.perf_counter()
    yield from moves.measure(GPU_SHAPES, gpu_tokens, torch.bfloat16, Timer("cuda", 15, 0.5))
    for row in ffn.measure(GPU_SHAPES, gpu_tokens, (0, 4, 16), torch.bfloat16, Timer("cuda", 11, 1.0)):
        yield row
        torch.cuda.empty_cache()
        if time.perf_counter() - began > limit_s:
            yield {"op": "grouped_ffn", "note": f"stopped after {limit_s:.0f} s; what is missing was not measured"}
            return


def on_cpu(tokens: int, quick: bool) -> Iterator[Row]:
    def few(shape: Shape) -> list[int]:
        return [tokens]

    timer = Timer("cpu", 3, 0.0) if quick else Timer("cpu", 7, 6.0)
    shapes = CPU_SHAPES[1:] if quick else CPU_SHAPES
    yield from layer.measure(CPU_SHAPES[0], tokens, replace(timer, budget_s=2 * timer.budget_s))
    yield from moves.measure(shapes, few, torch.float32, timer)
    yield from ffn.measure(shapes, few, (0, 4), torch.float32, timer)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a kernel was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows and the environment to this file")
    parser.add_argument("--cpu", action="store_true", help="the CPU table even where there is a GPU")
    parser.add_argument("--quick", action="store_true", help="CPU: few repetitions of the smaller shapes")
    parser.add_argument("--tokens", type=int, default=2048, help="CPU: tokens (default 2048)")
    parser.add_argument("--threads", type=int, help="CPU: threads (default: what torch chooses)")
    parser.add_argument("--limit-s", type=float, default=300.0, help="GPU: stop after so long (default 300)")
    parser.add_argument("--tune-s", type=float, default=90.0, help="GPU: measure tile shapes for so long (default 90)")
    parser.add_argument("--tune", action="store_true", help="GPU: measure tile shapes first, and keep the best")
    given = parser.parse_args(arguments)
    if given.tokens < 1:
        parser.error("--tokens must be positive")
    if given.threads:
        torch.set_num_threads(given.threads)
    gpu = torch.cuda.is_available() and not given.cpu
    about = {**environment(gpu=gpu), "threads": torch.get_num_threads()}
    print(about if gpu else f"no GPU: not measured. CPU table: {about}")
    if gpu and given.tune:
        from benchmarks.kernels import tune

        tune.run(GPU_SHAPES, budget_s=given.tune_s)
    print(" | ".join(COLUMNS))
    rows = []
    for row in on_gpu(given.limit_s) if gpu else on_cpu(given.tokens, given.quick):
        rows.append(row)
        print(show(row), flush=True)
        if given.json:  # every time, so that a run that is stopped leaves what it measured
            write_json(given.json, {"environment": about, "gpu": gpu, "rows": rows})
    wrong = [row for row in rows if "wrong" in row]
    if wrong:
        print(f"{len(wrong)} results were wrong and were not timed", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
