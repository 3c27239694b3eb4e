"""Measures the emulated cluster: what links carry and what processors compute, as the planners' `Topology`.

Shape legend: R ranks, L blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from prophet.calibrate import Probe, discard
from prophet.comm import Collective, Operation
from prophet.lines import Point, fit_line
from prophet.spec import FloatArray, IntArray, LayerShape, Link, Topology, Windows

PROBE_BYTES = (1 << 18, 1 << 19, 1 << 20)  # sent by each rank in all: as layers do, and more than a bucket's burst
SAME_RATE = 0.15  # rates closer than this are not told apart


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What planners and simulator are told, and what they are not: the rest of a step.

    start_s, end_s: compute before the first block, and after it backward. update_s: from when the gradients are
    complete to the next step. counts_s: one exchange of counts.
    """

    topology: Topology
    windows: Windows
    start_s: float
    end_s: float
    update_s: float
    counts_s: float


def fit_link(bytes_seconds: list[tuple[float, float]]) -> Link:
    """Latency and rate from (bytes, seconds) of two sizes or more: the line of least mean relative error."""
    line = fit_line([Point(size, 1, seconds) for size, seconds in bytes_seconds])
    return Link(bytes_per_s=1.0 / max(line.unit_s, 1e-12), latency_s=line.fixed_s)


def probe_links(collective: Collective, ranks_per_node: int, *, repeats: int = 6) -> tuple[Link, Link]:
    """(within a node, between nodes) as the slowest rank sees them while all ranks exchange; collective.

    Of a size's samples the lower quartile counts: other work only ever adds time.
    """
    ranks, rank = collective.size, collective.rank
    node = np.arange(ranks) // ranks_per_node
    inside = (node == node[rank]) & (np.arange(ranks) != rank)
    probe = Probe(collective, torch.device("cpu"), repeats)
    op = Operation("probe of links")
    found = []
    for peers in (inside, node != node[rank]):
        if not peers.any():
            found.append(Link(bytes_per_s=1e12))
            continue
        sent, runs = [], []
        for n_bytes in PROBE_BYTES:
            rows = [n_bytes // int(peers.sum()) if p else 0 for p in peers]
            x = torch.zeros(sum(rows), dtype=torch.uint8)
            sent.append(float(x.numel()))
            runs.append(lambda x=x, rows=rows: discard(collective.all_to_all(x, rows, rows, op=op).wait()))
        found.append(fit_link(list(zip(sent, probe.lower(runs), strict=True))))
    intra, inter = found
    if ranks_per_node >= ranks:
        inter = intra
    return intra, inter


def equal_within(rates: tuple[float, ...], tolerance: float) -> tuple[float, ...]:
    """Rates that differ from their median by less than `tolerance` (a ratio) become the mean of those that do.

    A few steps measure a host's rate to some 10 %. A planner that took such differences for real would make replicas to
    follow them, and pay for them, where the hosts are alike.
    """
    values = np.array(rates)
    median = float(np.median(values))
    alike = np.abs(values / median - 1.0) < tolerance
    if alike.any():
        values[alike] = values[alike].mean()
    return tuple(float(v) for v in values)


def fit_experts(
    seconds: FloatArray, rows: IntArray, groups: IntArray, shape: LayerShape
) -> tuple[tuple[float, ...], float]:
    """(flops per second of every rank, seconds per expert that a rank computes).

    seconds [T, R]: forward and backward of one block's experts in T observations; rows, groups [T, R]: what was
    computed. A backward pass counts as two forward ones. Least squares; a fit that gives no positive rate falls back
    to the ratio of sums.
    """
    forward = seconds / 3.0
    observations, ranks = forward.shape
    design = np.zeros((observations * ranks, ranks + 1))
    for r in range(ranks):
        design[r * observations : (r + 1) * observations, r] = rows[:, r]
        design[r * observations : (r + 1) * observations, ranks] = groups[:, r]
    solution, *_ = np.linalg.lstsq(design, forward.T.reshape(-1), rcond=None)
    overhead = float(solution[ranks])
    per_row = solution[:ranks]
    if overhead < 0 or (per_row <= 0).any():
        overhead = 0.0
        per_row = forward.sum(axis=0) / np.maximum(rows.sum(axis=0), 1)
    per_row = np.maximum(per_row, 1e-12)
    rates = tuple(float(shape.forward_flops_per_token / s) for s in per_row)
    return equal_within(rates, SAME_RATE), overhead
