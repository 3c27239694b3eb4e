"""The compiled twin of `cost.step_cost`, in parts: exchanges, transfers, and what a load costs where it is at home.

Shape legend: R ranks, E experts.

Machine figures travel as one float array, indexed by the constants below.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prophet.planner.compiled import bare, compiled
from prophet.planner.flow import expert_totals
from prophet.spec import FloatArray, IntArray

TOKEN_BYTES, INTRA_BYTES_PER_S, INTRA_LATENCY_S, INTER_BYTES_PER_S, INTER_LATENCY_S = 0, 1, 2, 3, 4
PARAM_BYTES, GRAD_BYTES, FNEC_S, BNEC_S, OVERHEAD_S, OVERLAP_COST = 5, 6, 7, 8, 9, 10
NO_EXPERTS = 11  # 1 where no experts compute in the windows
FIGURES = 12


class Problem(NamedTuple):
    """What stays fixed during one search; `home_*` is what `home_traffic` returns."""

    load_RE: IntArray
    total_E: IntArray
    home_E: IntArray
    node_R: IntArray
    speed_R: FloatArray
    seconds_per_token_R: FloatArray
    figures: FloatArray
    home_load: IntArray
    home_groups: IntArray
    home_moved: IntArray


@compiled
def home_traffic(
    load_RE: IntArray, total_E: IntArray, home_E: IntArray, node_R: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """What holds when all tokens go home: rank loads [R], expert groups [R], tokens moved [4, R].

    The rows of the last are: sent within nodes, received within nodes, sent between nodes, received between
    nodes.
    """
    ranks, experts = load_RE.shape
    rank_load = np.zeros(ranks, np.int64)
    groups = np.zeros(ranks, np.int64)
    moved = np.zeros((4, ranks), np.int64)
    for e in range(experts):
        rank_load[home_E[e]] += total_E[e]
        if total_E[e] > 0:
            groups[home_E[e]] += 1
    nodes = node_R[ranks - 1] + 1
    for r in range(ranks):
        local = 0
        near = 0
        every = 0
        for e in range(experts):
            n = load_RE[r, e]
            d = home_E[e]
            every += n
            if d == r:
                local += n
            elif nodes > 1 and node_R[d] == node_R[r]:
                near += n
                moved[1, d] += n
        moved[3, r] = local
        moved[0, r] = every - local if nodes == 1 else near
        moved[2, r] = 0 if nodes == 1 else every - local - near
    for d in range(ranks):
        remote = rank_load[d] - moved[3, d]
        if nodes == 1:
            moved[1, d] = remote
        moved[3, d] = remote - moved[1, d]
    return rank_load, groups, moved


@bare
def negative(load_RE: IntArray) -> bool:
    """Whether any count is negative."""
    low = np.int64(0)
    for r in range(load_RE.shape[0]):
        for e in range(load_RE.shape[1]):
            low = min(low, load_RE[r, e])
    return bool(low < 0)


@bare
def level_seconds(units: float, n_bytes: float, bytes_per_s: float, latency_s: float) -> float:
    """Seconds to move `units` pieces of `n_bytes` over a link; nothing to move takes no time."""
    if units <= 0:
        return 0.0
    return latency_s + units * n_bytes / bytes_per_s


@bare
def exchange_seconds(intra_units: float, inter_units: float, n_bytes: float, figures: FloatArray) -> float:
    """Seconds of an exchange whose busiest rank moves so many pieces over each level; levels work at once."""
    intra_s = level_seconds(intra_units, n_bytes, figures[INTRA_BYTES_PER_S], figures[INTRA_LATENCY_S])
    inter_s = level_seconds(inter_units, n_bytes, figures[INTER_BYTES_PER_S], figures[INTER_LATENCY_S])
    return max(intra_s, inter_s)


@bare
def transfer_seconds(units: FloatArray, n_bytes: float, figures: FloatArray) -> float:
    """Seconds of Trans or Agg in its cheaper form; `units` [6] are the copies that the busiest rank moves: direct,
    scatter, gather, each within and between nodes.
    """
    direct_s = exchange_seconds(units[0], units[1], n_bytes, figures)
    scatter_s = exchange_seconds(units[2], units[3], n_bytes, figures)
    return min(direct_s, scatter_s + exchange_seconds(units[4], units[5], n_bytes, figures))


@compiled
def make_problem(
    load_RE: IntArray,
    home_E: IntArray,
    node_R: IntArray,
    speed_R: FloatArray,
    seconds_per_token_R: FloatArray,
    figures: FloatArray,
) -> Problem:
    """Everything about a load that no placement changes."""
    total_E = expert_totals(load_RE)
    home_load, home_groups, home_moved = home_traffic(load_RE, total_E, home_E, node_R)
    return Problem(
        load_RE,
        total_E,
        home_E,
        node_R,
        speed_R,
        seconds_per_token_R,
        figures,
        home_load,
        home_groups,
        home_moved,
    )


@bare
def transfers(units: FloatArray, figures: FloatArray) -> tuple[float, float]:
    """Seconds of Trans and Agg for the copies `units` [6]."""
    return (
        transfer_seconds(units, figures[PARAM_BYTES], figures),
        transfer_seconds(units, figures[GRAD_BYTES], figures),
    )


@bare
def windows(forward_s: float, figures: FloatArray) -> tuple[float, float]:
    """Seconds of compute beside Trans and beside Agg, for so many of forward products."""
    beside_s = (1.0 - figures[NO_EXPERTS]) * forward_s
    return beside_s + figures[FNEC_S], 2.0 * beside_s + figures[BNEC_S]


@bare
def felt(trans_s: float, agg_s: float, forward_s: float, figures: FloatArray) -> tuple[float, float]:
    """By how much Trans and Agg lengthen a step, beside so many seconds of products: what no window covers, and what
    the covered part costs.
    """
    trans_window_s, agg_window_s = windows(forward_s, figures)
    taken = figures[OVERLAP_COST]
    return (
        max(0.0, trans_s - trans_window_s) + taken * min(trans_s, trans_window_s),
        max(0.0, agg_s - agg_window_s) + taken * min(agg_s, agg_window_s),
    )


@bare
def exposed_seconds(units: FloatArray, forward_s: float, figures: FloatArray) -> tuple[float, float]:
    """`felt` for the copies `units` [6]."""
    trans_s, agg_s = transfers(units, figures)
    return felt(trans_s, agg_s, forward_s, figures)


@bare
def hiding(trans_s: float, agg_s: float, forward_s: float, figures: FloatArray) -> float:
    """Seconds of Trans and Agg that one more second of forward products would hide."""
    seconds = 0.0
    trans_window_s, agg_window_s = windows(forward_s, figures)
    if trans_s > trans_window_s:
        seconds += 1.0
    if agg_s > agg_window_s:
        seconds += 2.0
    return float(seconds * (1.0 - figures[NO_EXPERTS]) * (1.0 - figures[OVERLAP_COST]))
