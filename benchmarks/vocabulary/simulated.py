"""Steps on paper, with the layers' and the head's products counted.

Shape legend: P ranks, M microbatches, L layers, H hidden size, V words.
"""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np

from benchmarks.common import Row
from pipeline_balance.schedules.named import schedule_for
from pipeline_balance.schedules.simulate import Durations, simulate
from pipeline_balance.schedules.vocabulary import schedule_with_head, sharing


def rows(*, ranks: int, microbatches: int, layers: int, hidden: int, words: int, one_block: bool) -> Row:
    """The best map of whole layers beside the best one with a split vocabulary, in a layer's forwards.

    Args:
        ranks: P.
        microbatches: M.
        layers: L.
        hidden: H; a layer has 12 H * H parameters.
        words: V.
        one_block: Whether a rank's logits fit into one block, so that none are computed twice.
    """
    head = words / (12.0 * hidden)
    # sums need one product; gradients two, and the logits once more where they are gone
    vocabulary_s = (head / ranks, head * (2.0 if one_block else 3.0) / ranks)
    whole = [
        simulate(schedule_for("flexible", range(ranks), microbatches), _of(cuts, layers, head)).makespan_s
        for cuts in _maps(layers + 1, ranks)
    ]
    schedule = sharing(schedule_with_head("flexible", range(ranks), microbatches, split_backward=False))
    split = [simulate(schedule, _of(cuts, layers, 0.0, vocabulary_s)).makespan_s for cuts in _maps(layers, ranks)]
    return {
        "case": "simulated",
        "p": ranks,
        "m": microbatches,
        "layers": layers,
        "hidden": hidden,
        "words": words,
        "head_share": head / (head + layers),
        "one_block": one_block,
        "whole": min(whole),
        "split": min(split),
        "ratio": min(split) / min(whole),
    }


def _maps(units: int, ranks: int) -> list[tuple[int, ...]]:
    """Every way to cut units into as many stages as there are ranks."""
    return [(0, *cuts, units) for cuts in combinations(range(1, units), ranks - 1)]


def _of(cuts: tuple[int, ...], layers: int, head: float, vocabulary_s: tuple[float, float] = (0.0, 0.0)) -> Durations:
    forward = np.array([sum(1.0 if u < layers else head for u in range(a, b)) for a, b in pairwise(cuts)])
    return Durations(forward_s=forward, input_s=forward, weight_s=forward, vocabulary_s=vocabulary_s)
