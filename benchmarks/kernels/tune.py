"""Measure the Triton kernels' tile shapes for the benchmark's shapes, and keep the best on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.kernels import peers
from benchmarks.kernels.ffn import both
from benchmarks.kernels.timing import Flusher, once_us
from benchmarks.kernels.workload import Shape, group_sizes, shares_of, tensors_of
from prophet.kernels import tuning
from prophet.kernels.tuning import Config, Kind

CANDIDATES = 8  # at most so many tile shapes are ever timed for a class


def run(shapes: list[Shape], *, budget_s: float) -> None:
    """Time the candidates within whole forward + backward passes at 16384 tokens; stops when `budget_s` is spent.

    What was measured by then is kept, and classes that are in the file already are not measured again.
    """
    deadline = time.perf_counter() + budget_s
    device, dtype = torch.device("cuda"), torch.bfloat16
    flush = Flusher("cuda")
    for shape in shapes:
        shares = shares_of("trace", shape.experts)
        sizes = group_sizes(shares_of("uniform", shape.experts) if shares is None else shares, 16384 * shape.top_k, 0)  # type: ignore[arg-type]
        t = tensors_of(shape, sizes, "cuda", dtype, sets=1)[0]
        step = both(peers.ours(shape), t)
        per_group = sum(sizes) // len(sizes)
        classes: list[tuple[Kind, int, int]] = [
            ("rows", shape.hidden, shape.dim),
            ("rows", shape.dim, shape.hidden),
            ("rows", shape.dim, shape.units),
            ("weights", shape.units, shape.dim),
            ("weights", shape.dim, shape.hidden),
        ]
        for kind, cols, depth in classes:
            name = tuning.key(kind, device, dtype, tuning.shape_class(per_group, cols, depth))
            if time.perf_counter() > deadline:
                return
            before = tuning.read(tuning.cache_file()).get(name)
            if before is None:
                chosen = _choose(name, candidates(kind, dtype), step, flush, deadline)
                print(f"{name}: {chosen or 'none of the candidates ran'}", flush=True)
        for p in t.inputs():
            p.grad = None
        del t
        torch.cuda.empty_cache()


def _choose(
    name: str, configs: list[Config], step: Callable[[], object], flush: Flusher, deadline: float
) -> Config | None:
    """The fastest of `configs` for a class, of those that were measured before the deadline; kept on disk."""
    from triton.errors import TritonError

    def measure_s(config: Config) -> float:
        if time.perf_counter() > deadline:
            raise TimeoutError
        with tuning.trying(name, config):
            step()
            torch.cuda.synchronize()
            return sorted(once_us(step, "cuda", flush) for _ in range(3))[1] * 1e-6

    chosen = best(measure_s, configs, (TritonError,))
    if chosen is not None:
        tuning.write(tuning.cache_file(), {name: chosen})
    tuning.forget()
    return chosen


def candidates(kind: Kind, dtype: torch.dtype) -> list[Config]:
    """Tile shapes worth timing on a GPU, at most `CANDIDATES`."""
    if dtype.itemsize >= 4:
        tiles = ((64, 64, 4), (128, 64, 4), (64, 128, 4), (128, 128, 8))
        shapes = [(m, n, 32, w, s) for m, n, w in tiles for s in (2, 3)]
    elif kind == "rows":
        shapes = [
            (64, 128, 64, 4, 4),
            (64, 256, 64, 8, 3),
            (128, 128, 64, 8, 3),
            (128, 128, 64, 8, 4),
            (128, 128, 32, 8, 4),
            (128, 256, 64, 8, 3),
            (256, 128, 64, 8, 3),
            (32, 128, 64, 4, 4),
        ]
    else:  # a tile of 256 rows or columns, or one of 128 x 128 for four warps, spills kilobytes of registers here
        shapes = [
            (64, 64, 64, 4, 4),
            (64, 128, 64, 4, 4),
            (128, 64, 64, 4, 4),
            (128, 128, 32, 8, 4),
            (128, 128, 64, 8, 3),
            (128, 128, 64, 8, 4),
        ]
    found = [Config(rows=m, cols=n, depth=k, warps=w, stages=s) for m, n, k, w, s in shapes]
    return found[:CANDIDATES]


def best(
    measure_s: Callable[[Config], float], configs: Sequence[Config], refused: tuple[type[Exception], ...] = ()
) -> Config | None:
    """The fastest of `configs`; those that `measure_s` cannot run (it raises) are skipped. None if none runs.

    refused: what it raises for those, besides RuntimeError and ValueError: Triton has errors of its own. TimeoutError
    ends the search.
    """
    skipped: tuple[type[Exception], ...] = (RuntimeError, ValueError, *refused)
    timed: list[tuple[float, int]] = []
    for i, config in enumerate(configs[:CANDIDATES]):
        try:
            timed.append((measure_s(config), i))
        except TimeoutError:
            break
        except skipped:  # does not fit into shared memory or registers
            continue
    return configs[min(timed)[1]] if timed else None
