"""A program that calls every entry of the core on many cases, on 16 threads at once, and prints what came out."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from prophet.planner.core import native

FIGURES = np.array([8192, 1e10, 1e-5, 1e9, 2e-5, 1e5, 2e5, 2e5, 1e-4, 2e-4, 1e-6, 0.1, 0.0, 0.0])


def planned(seed: int) -> bytes:
    """Splits and a few plans, each from the one before, for one random group of ranks."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 20))
    experts = ranks * int(rng.integers(1, 4))
    home = rng.permutation(np.arange(experts) // (experts // ranks))
    node = np.arange(ranks) // int(rng.integers(1, ranks + 1))
    speed = rng.choice([0.25, 0.5, 1.0], ranks) if seed % 2 else np.ones(ranks)
    machine = (home, node, speed, 1e-7 / speed, FIGURES)
    holds = np.zeros((0, 0), dtype=np.bool_)
    found = hashlib.blake2b(digest_size=16)
    for _ in range(6):
        skew = rng.pareto(1.2, experts) + 0.05
        load = rng.poisson(500 * skew * rng.uniform(0.2, 1.8, (ranks, experts))).astype(np.int64)
        following = np.zeros((experts, ranks), dtype=np.bool_)
        native.plan(load, *machine, np.full(ranks, 3), holds, 10.0, 0.06, following)
        holds = following
        for effort in (0.0, 0.03, 100.0):
            tokens = np.empty((ranks, experts, ranks), dtype=np.int64)
            shared, rows, rank_load, level, cost = native.split(load, holds, *machine, effort, tokens)
            for array in (holds, shared, rows, rank_load, np.array([level, *cost]), tokens):
                found.update(array.tobytes())
    return found.digest()


def partitioned(seed: int) -> bytes:
    """The best partition of random layers."""
    rng = np.random.default_rng(seed)
    stages = int(rng.integers(1, 9))
    layers = stages + int(rng.integers(0, 40))
    units, state, active = (np.cumsum(np.r_[0, rng.integers(0, 1000, layers)]) for _ in range(3))
    capacity = np.full(stages, state[-1] // stages + 5000 * stages)
    speed, links = rng.choice([1.0, 0.5], stages), rng.choice([0.0, 300.0], stages)
    problem = (units, state, active, np.arange(stages, 0, -1), speed, capacity, links)
    least = native.minimal_bottleneck(*problem)
    boundaries = np.zeros(stages + 1, dtype=np.int64)
    native.best_boundaries(*problem, 1.1 * least, 1.0, np.zeros((stages, layers + 1)), boundaries)
    return np.array([least]).tobytes() + boundaries.tobytes()


if __name__ == "__main__":
    with ThreadPoolExecutor(16) as pool:
        parts = [*pool.map(planned, range(48)), *pool.map(partitioned, range(48))]
    print(hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest())
