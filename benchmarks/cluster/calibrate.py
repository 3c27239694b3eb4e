"""Measures the emulated cluster: what links carry and what processors compute, as the planners' `Topology`.

Shape legend: R ranks, L blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from prophet.machine.fit import Point, fit_line, least_relative
from prophet.machine.measure import Probe, discard
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from prophet.spec import BoolArray, FloatArray, IntArray, LayerShape, Link, Topology, Windows

PROBE_BYTES = (1 << 18, 1 << 19, 1 << 20)  # sent by each rank in all: as layers do, and more than a bucket's burst
POPULAR = 3.0  # how many times as much as another rank a popular one is sent
SAME_RATE = 0.2  # rates closer than this are not told apart


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


def probe_pairs(between: BoolArray, n_bytes: int, wanted: FloatArray) -> IntArray:
    """Bytes from every rank to every other, [R, R]: from all where `between` [R, R] allows it, to each in proportion to
    `wanted` [R], and `n_bytes` to the one that gets most.
    """
    weight = between * wanted
    pairs: IntArray = (weight * (n_bytes / weight.sum(axis=0).max())).astype(np.int64)
    return pairs


def probe_links(collective: Collective, ranks_per_node: int, *, repeats: int = 6) -> tuple[Link, Link]:
    """(within a node, between nodes) as the slowest rank sees them while all ranks exchange; collective.

    Of a size's samples the lower quartile counts: other work only ever adds time. Even exchanges count as much as those
    in which a rank is popular: where data flows both ways, what acknowledges it takes its part of the link.
    """
    ranks, rank = collective.size, collective.rank
    node = np.arange(ranks) // ranks_per_node
    inside = (node[:, None] == node) & ~np.eye(ranks, dtype=np.bool_)
    even = np.ones(ranks)
    popular = np.where(np.arange(ranks) % ranks_per_node == 0, POPULAR, 1.0)  # every node's first rank
    probe = Probe(collective, torch.device("cpu"), repeats)
    op = Operation("probe of links")
    found = []
    for between in (inside, node[:, None] != node):
        if not between.any():
            found.append(Link(bytes_per_s=1e12))
            continue
        runs = []
        for n_bytes in PROBE_BYTES:
            for wanted in (even, popular):
                pairs = probe_pairs(between, n_bytes, wanted)
                send, recv = pairs[rank].tolist(), pairs[:, rank].tolist()
                x = torch.zeros(sum(send), dtype=torch.uint8)
                runs.append(lambda x=x, s=send, r=recv: discard(collective.all_to_all(x, s, r, op=op).wait()))
        seconds = np.array(probe.lower(runs)).reshape(-1, 2).mean(axis=1)
        found.append(fit_link(list(zip(PROBE_BYTES, seconds.tolist(), strict=True))))
    intra, inter = found
    if ranks_per_node >= ranks:
        inter = intra
    return intra, inter


def slowness_of(seconds: FloatArray) -> FloatArray:
    """How many times longer than the median rank every rank takes for the same work, [R].

    seconds [T, R]: T observations. What differs by less than `SAME_RATE` counts as the same: a few steps measure a rank
    to some 10 %, and a planner that took such differences for real would pay for replicas to follow them.
    """
    typical = np.median(seconds, axis=0)
    ratio = typical / np.median(typical)
    return np.where(np.abs(ratio - 1.0) < SAME_RATE, 1.0, ratio)


def fit_experts(
    seconds: FloatArray, rows: IntArray, groups: IntArray, shape: LayerShape, slowness: FloatArray
) -> tuple[tuple[float, ...], float]:
    """(flops per second of every rank, seconds per expert that a rank of slowness 1 computes).

    seconds [T, R]: forward and backward of one block's experts in T observations; rows, groups [T, R]: what was
    computed; slowness [R]: as of `slowness_of`. A backward pass counts as two forward ones. The least mean relative
    error over all ranks; where seconds fall with the rows, the ratio of sums and nothing per expert. ValueError where
    an observation took no time, which nothing that was computed does.
    """
    if not (seconds > 0).all():
        raise ValueError(f"expected positive seconds of every rank in every observation, got {seconds.min():g}")
    forward = (seconds / 3.0 / slowness).ravel()
    design = np.stack([rows.ravel(), groups.ravel()], axis=1).astype(np.float64)
    if groups.any():
        row_s, group_s = least_relative(design, forward).tolist()
    else:
        row_s, group_s = least_relative(design[:, :1], forward).item(), 0.0
    if row_s <= 0 or group_s < 0:
        row_s, group_s = float(forward.sum() / max(rows.sum(), 1)), 0.0
    return tuple(float(shape.forward_flops_per_token / (row_s * s)) for s in slowness), group_s
