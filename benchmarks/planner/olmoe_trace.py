"""Routing as OLMoE would have trained: a trace drawn from its totals by domain.

    python -m benchmarks.planner.olmoe_trace COUNTS.json OUT.npz

The file holds, for several text domains and layers of a trained model, how often every expert was chosen. Totals know
nothing of steps, so these are assumed:

- A run has three stages with their own mixtures of the domains (`STAGES`): web text, then more code and papers, then
  instructions. From one to the next the mixture jumps; within a stage it wanders.
- Every rank reads its own shard. Its next sequence is of the last one's domain half of the time, else of one drawn from
  the mixture. This is why ranks differ.
- A sequence's experts are drawn around its domain's (Dirichlet), since texts of one domain differ. All layers see the
  same sequences.

The router itself does not change. Everything follows from the seed.

Shape legend: T steps, L layers, R ranks, E experts, D domains.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prophet.errors import TraceError
from prophet.spec import FloatArray, IntArray
from prophet.traces.npz import TraceWriter

MAX_FILE_BYTES = 1 << 20
PREFIX = "olmoe/expert_counts/"
# Share of every domain in a stage of the run, in the order of training; others have none.
STAGES: tuple[Mapping[str, float], ...] = (
    {"c4": 0.70, "wikipedia": 0.10, "book": 0.10, "github": 0.05, "arxiv": 0.05},
    {"c4": 0.40, "github": 0.30, "arxiv": 0.20, "wikipedia": 0.05, "book": 0.05},
    {"tulu": 0.50, "c4": 0.20, "wikipedia": 0.20, "github": 0.10},
)
SAME_DOMAIN = 0.5  # chance that a rank's next sequence is of the last one's domain
WANDER = 0.03  # standard deviation of a mixture's logarithm, per iteration
LIKENESS = 200.0  # concentration of a sequence's experts around its domain's
TOP_K = 8


def read_counts(path: Path) -> tuple[list[str], list[int], FloatArray]:
    """Domains [D], layers [L], and the experts' shares [D, L, E]; `TraceError` for a file that is none of these."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise TraceError(f"{path}: expected at most {MAX_FILE_BYTES} bytes")
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        own = {key.removeprefix(PREFIX): value for key, value in table.items() if key.startswith(PREFIX)}
        shares = np.array([value["counts"] for value in own.values()], dtype=np.float64)
        layers = [list(map(int, value["layers"])) for value in own.values()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TraceError(f"{path}: expected counts [layers][experts] by domain ({error!r})") from error
    if shares.ndim != 3 or any(of_one != layers[0] or len(of_one) != shares.shape[1] for of_one in layers):
        raise TraceError(f"{path}: expected the same layers and experts for every domain")
    if not np.isfinite(shares).all() or shares.min() < 0 or not (shares.sum(axis=2) > 0).all():
        raise TraceError(f"{path}: expected counts of at least 0, and some in every layer")
    return list(own), layers[0], shares / shares.sum(axis=2, keepdims=True)


def mixtures(domains: Sequence[str], iterations: int, rng: np.random.Generator) -> FloatArray:
    """The share of every domain in every iteration, [iterations, D]."""
    missing = {name for stage in STAGES for name in stage} - set(domains)
    if missing:
        raise TraceError(f"expected the domains {sorted(missing)} among the counts, got {sorted(domains)}")
    stage = np.array([[s.get(name, 0.0) for name in domains] for s in STAGES])
    wander = np.cumsum(rng.normal(0.0, WANDER, (iterations, len(domains))), axis=0)
    found = stage[np.arange(iterations) * len(STAGES) // iterations] * np.exp(wander)
    mixed: FloatArray = found / found.sum(axis=1, keepdims=True)
    return mixed


def draw_step(
    mixture: FloatArray, last_R: IntArray, shares: FloatArray, sequences: int, tokens: int, rng: np.random.Generator
) -> IntArray:
    """Choices [L, R, E] of one step; `last_R`, the domain of every rank's last sequence, is brought up to date."""
    layers, experts = shares.shape[1:]
    counts = np.zeros((layers, len(last_R), experts), dtype=np.int64)
    for r in range(len(last_R)):
        for _ in range(sequences):
            if rng.random() >= SAME_DOMAIN:
                last_R[r] = rng.choice(len(mixture), p=mixture)
            for i in range(layers):
                own = rng.dirichlet(LIKENESS * shares[last_R[r], i] + 1e-6)
                counts[i, r] += rng.multinomial(tokens * TOP_K, own)
    return counts


def write_trace(
    counts: Path, out: Path, *, seed: int, iterations: int, microbatches: int, ranks: int, sequences: int, tokens: int
) -> None:
    """Draw a run and write it to `out`. A rank's microbatch has `sequences` of `tokens` each."""
    domains, layers, shares = read_counts(counts)
    rng = np.random.default_rng(seed)
    mixture = mixtures(domains, iterations, rng)
    last_R = np.array([rng.choice(len(domains), p=mixture[0]) for _ in range(ranks)])
    meta: dict[str, Any] = {
        "model": "OLMoE, drawn from its totals by domain",
        "top_k": TOP_K,
        "seed": seed,
        "layers": layers,
        "domains": domains,
    }
    with TraceWriter(out, layers=len(layers), ranks=ranks, experts=shares.shape[2], meta=meta) as writer:
        for iteration in range(iterations):
            for _ in range(microbatches):
                step = draw_step(mixture[iteration], last_R, shares, sequences, tokens, rng)
                writer.append(step, iteration=iteration)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner.olmoe_trace", description=__doc__.split("\n")[0]
    )
    parser.add_argument("counts", type=Path, help="the totals by domain, JSON")
    parser.add_argument("out", type=Path, help="the trace to write, npz")
    for name, usual, text in (
        ("seed", 0, "of all draws"),
        ("iterations", 300, "of the run"),
        ("microbatches", 2, "of an iteration"),
        ("ranks", 16, "of the expert-parallel group"),
        ("sequences", 4, "of a rank's microbatch"),
        ("tokens", 1024, "of a sequence"),
    ):
        parser.add_argument(f"--{name}", type=int, default=usual, help=f"{text} (default {usual})")
    arguments = vars(parser.parse_args(argv))
    if min(value for name, value in arguments.items() if name not in ("counts", "out", "seed")) < 1:
        parser.error("expected at least 1 of everything")
    try:
        write_trace(arguments.pop("counts"), arguments.pop("out"), **arguments)
    except (TraceError, OSError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
