"""Measures the emulated cluster: what links carry and what processors compute, as the planners' `Topology`.

`Observed` is what was seen of plain steps and of probes; `calibration_of` makes figures of it, and needs no cluster.

Shape legend: R ranks, L blocks, T steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from prophet.experts.bank import Bank
from prophet.machine.calibrate import shared_port
from prophet.machine.fit import Point, fit_line, least_relative, noise_of, noise_seconds_of
from prophet.machine.measure import (
    Probe,
    discard,
    measure_duplex,
    measure_link_overlap,
    measure_overlap,
    peers_by_level,
)
from prophet.ranks.collective import Collective
from prophet.ranks.messages import gather_numbers
from prophet.ranks.operation import Operation
from prophet.spec import BoolArray, FloatArray, IntArray, LayerShape, Link, Topology, Windows

PROBE_BYTES = (1 << 18, 1 << 19, 1 << 20)  # sent by each rank in all: as layers do, and more than a bucket's burst
SAME_RATE = 0.2  # rates closer than this are not told apart
COUNTS = 128  # integers that are exchanged before a block, about
# windows whose noise counts; the rest of a step is longer, and there is less of it
NOISY = ("FEC", "FNEC", "BNEC", "BEC")


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What planners and simulator are told, and what they are not: the rest of a step.

    start_s, end_s: compute before the first block, and after it backward. update_s: from when the gradients are
    complete to the next step. counts_s: one exchange of counts. counts_behind_s: what it waits longer behind a Trans.
    """

    topology: Topology
    windows: Windows
    start_s: float
    end_s: float
    update_s: float
    counts_s: float
    counts_behind_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """What was measured, as lists of numbers, equal on all ranks.

    exchanges: samples [n, R] of even all-to-alls within nodes ("intra") and between them ("inter"), by `PROBE_BYTES`.
    counts_s: samples [n, R] of an exchange of counts, alone and behind a transfer. overlap_cost, duplex_cost,
    link_overlap_cost: as in `Topology`. windows: seconds [T, R] of every window by its name. rank_load: rows [T, L, R].
    even: how many of the T steps had even routing; they come last. experts: that a rank computes in a block.
    """

    ranks_per_node: int
    exchanges: Mapping[str, list[list[list[float]]]]
    counts_s: list[list[list[float]]]
    overlap_cost: float
    duplex_cost: float
    link_overlap_cost: float
    windows: Mapping[str, list[list[float]]]
    rank_load: list[list[list[int]]]
    even: int
    experts: int


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


def probe_links(collective: Collective, ranks_per_node: int, *, repeats: int = 6) -> dict[str, list[FloatArray]]:
    """Samples [n, R] of even all-to-alls by level and size, see `peers_by_level`; collective.

    A level without peers is missing.
    """
    ranks, rank = collective.size, collective.rank
    peers = [peers_by_level(ranks, ranks_per_node, r) for r in range(ranks)]
    probe = Probe(collective, torch.device("cpu"), repeats)
    op = Operation("probe of links")
    found = {}
    for level in peers[0]:
        between = np.stack([of[level] for of in peers])
        if not between.any():
            continue
        runs = []
        for n_bytes in PROBE_BYTES:
            pairs = probe_pairs(between, n_bytes, np.ones(ranks))
            send, recv = pairs[rank].tolist(), pairs[:, rank].tolist()
            x = torch.zeros(sum(send), dtype=torch.uint8)
            runs.append(lambda x=x, s=send, r=recv: discard(collective.all_to_all(x, s, r, op=op).wait()))
        found[level] = probe.samples(runs)
    return found


def probe_counts(collective: Collective, bank: Bank, *, repeats: int = 6) -> list[FloatArray]:
    """Samples [n, R] of an exchange of counts, alone and while every rank sends one expert to the next; collective."""
    size, rank = collective.size, collective.rank
    x = torch.zeros(bank.expert_numel, dtype=bank.dtype)
    there, back = [0] * size, [0] * size
    there[(rank + 1) % size] = back[(rank - 1) % size] = len(x)

    def alone() -> float:
        before = time.perf_counter()
        gather_numbers(collective, range(COUNTS), op=Operation("probe of counts"))
        return time.perf_counter() - before

    def behind() -> float:
        work = collective.all_to_all(x, there, back, op=Operation("probe of a transfer"), channel="weights")
        time.sleep(0.01)  # so that it is under way
        took = alone()
        discard(work.wait())
        return took

    return Probe(collective, torch.device("cpu"), repeats).samples([alone, behind])


def probes(collective: Collective, bank: Bank, ranks_per_node: int, *, rows: int) -> dict[str, Any]:
    """The fields of `Observed` that do not come from steps; collective. rows: of a product beside a transfer."""
    probe = Probe(collective, torch.device("cpu"), 6)
    # of transfers as long as a busy step's: short ones drown in noise
    n_bytes = 4 * bank.shape().expert_bytes
    return {
        "ranks_per_node": ranks_per_node,
        "exchanges": {k: [x.tolist() for x in v] for k, v in probe_links(collective, ranks_per_node).items()},
        "counts_s": [x.tolist() for x in probe_counts(collective, bank)],
        "overlap_cost": measure_overlap(probe, bank, rows=rows, n_bytes=n_bytes),
        "duplex_cost": measure_duplex(probe, bank, ranks_per_node=ranks_per_node, n_bytes=PROBE_BYTES[1]),
        "link_overlap_cost": measure_link_overlap(probe, bank, n_bytes=PROBE_BYTES[1]),
    }


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
    computed; slowness [R]: as of `slowness_of`. Both count a third of it. The least mean relative
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


def calibration_of(seen: Observed, shape: LayerShape) -> Calibration:
    """The figures of what was seen; shape: of the layers' experts."""
    rows = np.array(seen.rank_load, dtype=np.int64)  # [T, L, R]
    steps, blocks, ranks = rows.shape
    last, even = blocks - 1, slice(steps - seen.even, None)

    def window(name: str) -> FloatArray:
        return np.array(seen.windows[name]) if name in seen.windows else np.zeros((steps, ranks))

    def by_block(kind: str) -> FloatArray:
        return np.stack([window(f"{kind}({i})") for i in range(blocks)], axis=1)  # [T, L, R]

    forward_s, backward_s = by_block("FEC"), by_block("BEC")
    slowness = slowness_of((forward_s + backward_s).sum(axis=1)[even])
    slower = slowness / slowness.min()
    flat_rows = rows.reshape(-1, ranks)
    groups = np.full_like(flat_rows, seen.experts)
    rates, overhead_s = fit_experts((forward_s + backward_s).reshape(-1, ranks), flat_rows, groups, shape, slowness)

    def typical(*names: str) -> float:
        """The median over steps, as of the fastest rank; the mean over ranks, since they differ by chance."""
        return float(sum(np.mean(np.median(window(n), axis=0) / slower) for n in names))

    fnec = [typical(f"FNEC({i})", f"route({i + 1})") for i in range(last)] or [typical("FNEC(0)")]
    bnec = [typical(f"BNEC({i})") for i in range(last)] or [typical("BNEC(0)")]
    # beside the blocks' common windows: what the last one has more, with the head and the loss
    extra_s = typical(f"FNEC({last})") - np.mean(fnec) + typical(f"BNEC({last})") - np.mean(bnec)
    links, of_last, noise_s = {}, {}, {}
    for level, by_size in seen.exchanges.items():
        samples = [np.array(x) for x in by_size]
        # the mean rank's, in the middle of the samples: how long it takes to wake the peers is part of it
        taken = [x[:, :: seen.ranks_per_node] if level == "alone" else x for x in samples]
        points = [
            (n, np.median((x.mean(axis=1), x.max(axis=1)), axis=1)) for n, x in zip(PROBE_BYTES, taken, strict=True)
        ]
        links[level], of_last[level] = (fit_link([(n, float(seconds[i])) for n, seconds in points]) for i in (0, 1))
        noise_s[level] = noise_seconds_of(np.concatenate(samples))
    # the lower quartile: counts are short, and other work only ever adds time
    alone_s, behind_s = (float(np.quantile(np.max(x, axis=1), 0.25)) for x in seen.counts_s)
    nobody = Link(bytes_per_s=1e12)
    between = links.get("inter", links.get("intra", nobody))
    per_node = min(seen.ranks_per_node, ranks)
    inter, port = shared_port(between, links.get("alone"), per_node)
    if port is not None:
        # its ranks are done in any order, and it has carried everything when the last of them is
        inter, port = shared_port(of_last["inter"], links["alone"], per_node)
    topology = Topology(
        ranks=ranks,
        ranks_per_node=seen.ranks_per_node,
        intra=links.get("intra", nobody),
        inter=inter,
        port_bytes_per_s=port,
        flops_per_s=rates,
        free_bytes=(1 << 40,) * ranks,
        expert_overhead_s=overhead_s,
        overlap_cost=seen.overlap_cost,
        backward_ratio=float(np.median(backward_s / forward_s)),
        compute_noise=noise_of(np.concatenate([by_block(kind)[even].reshape(-1, ranks) for kind in NOISY])),
        # ranks behind one port are done in any order, which is no noise: the port takes as long as ever
        exchange_noise_s=max(noise_s.get(level, 0.0) for level in ("intra", "inter" if port is None else "intra")),
        duplex_cost=seen.duplex_cost,
        link_overlap_cost=seen.link_overlap_cost,
        name="measured",
    )
    return Calibration(
        topology=topology,
        windows=Windows(fnec_s=float(np.mean(fnec)), bnec_s=float(np.mean(bnec))),
        start_s=typical("start", "route(0)"),
        end_s=max(0.0, typical("end")),
        # the last rank's, which waits for nobody where gradients are averaged
        update_s=max(0.0, float(np.median((window("update") / slower).min(axis=1)) + extra_s)),
        counts_s=alone_s,
        counts_behind_s=max(0.0, behind_s - alone_s),
    )


def gathered(collective: Collective, windows: list[dict[str, float]], blocks: int) -> dict[str, list[list[float]]]:
    """Seconds [T, R] of every window by name, of all ranks; windows: this rank's by step; collective."""
    names = ["start", "end", "update", *(f"{kind}({i})" for kind in ("route", *NOISY) for i in range(blocks))]
    mine = torch.tensor([[step.get(name, 0.0) for name in names] for step in windows], dtype=torch.float64)
    table = collective.all_gather(mine, op=Operation("figures of compute")).numpy()  # [R, T, names]
    return {name: table[:, :, i].T.tolist() for i, name in enumerate(names)}
