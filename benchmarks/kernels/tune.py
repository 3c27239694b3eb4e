"""Measure the Triton kernels' tile shapes for the benchmark's shapes, and keep the best on disk."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.kernels import peers
from benchmarks.kernels.ffn import both
from benchmarks.kernels.timing import Flusher, once_us
from benchmarks.kernels.workload import Shape, group_sizes, shares_of, tensors_of
from prophet.kernels import tuning
from prophet.kernels.tuning import Config, Kind


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
        units = shape.hidden * (2 if shape.activation == "swiglu" else 1)
        classes: list[tuple[Kind, int, int]] = [
            ("rows", shape.hidden, shape.dim),
            ("rows", shape.dim, shape.hidden),
            ("rows", shape.dim, units),
            ("weights", units, shape.dim),
            ("weights", shape.dim, shape.hidden),
        ]
        for kind, cols, depth in classes:
            name = tuning.key(kind, device, dtype, tuning.shape_class(per_group, cols, depth))
            if time.perf_counter() > deadline:
                return
            before = tuning.read(tuning.cache_file()).get(name)
            if before is None:
                chosen = _choose(name, tuning.candidates(kind, dtype), step, flush, deadline)
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

    chosen = tuning.best(measure_s, configs, (TritonError,))
    if chosen is not None:
        tuning.write(tuning.cache_file(), {name: chosen})
    tuning.forget()
    return chosen
