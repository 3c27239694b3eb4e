"""Fits the performance model to the machine that a process group runs on, and checks a fit against new measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from prophet.experts.feed_forward import FeedForwardBank
from prophet.machine.fit import Fit, Line, fit_line, rate_of
from prophet.machine.measure import (
    Measured,
    Probe,
    Ranges,
    measure_all,
    measure_duplex,
    measure_link_overlap,
    measure_overlap,
)
from prophet.ranks.collective import Collective
from prophet.spec import Activation, LayerShape, Link, Topology, last_of_alike

# Seconds per unit where a probe takes no measurable time
_LEAST = 1e-15
# Ranks share a port where one is so many times as fast while the others of its node are silent; less is noise
_SHARES = 1.25
_EXPERTS = ("expert_forward", "expert_backward")


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted topology, how well each operation's line describes it, and how well the planners' model does.

    Attributes:
        topology: What was fitted.
        fits: Each operation's line, with the points that it has not seen.
        model: The same held-out points against what the performance model makes of `topology`: one latency for
            all-to-all, Trans and Agg, and one ratio of the backward pass to the forward one.
    """

    topology: Topology
    fits: tuple[Fit, ...]
    model: tuple[Fit, ...] = field(default=())


def calibrate(
    collective: Collective,
    *,
    dim: int = 256,
    hidden: int = 512,
    activation: Activation = "gelu",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ranks_per_node: int | None = None,
    free_bytes: int = 1 << 30,
    ranges: Ranges | None = None,
    repeats: int = 15,
    held_out: bool = True,
    name: str = "calibrated",
) -> Calibration:
    """Measure and fit; collective over all ranks, and equal on all of them.

    Args:
        collective: The ranks to measure on.
        dim: D of the expert to be timed.
        hidden: Its inner width.
        activation: Its activation.
        dtype: Of its elements.
        device: Where it is timed.
        ranks_per_node: None for one node.
        free_bytes: Bytes that replicas may take on every rank, for the topology.
        ranges: Sizes to measure; None takes the defaults of `Ranges`.
        repeats: Samples per size.
        held_out: Measure sizes between the fitted ones, too, and compare them with the fit.
        name: Of the topology.
    """
    shape, place = shape_of(dim, hidden, activation, dtype), torch.device(device)

    def bank_of(experts: int) -> FeedForwardBank:
        return FeedForwardBank(dim, hidden, experts, activation=activation).to(place, dtype)

    per_node = ranks_per_node or collective.size
    measured = measure_all(
        collective,
        bank_of,
        ranges or Ranges(),
        device=place,
        ranks_per_node=per_node,
        repeats=repeats,
        parts=(lambda fitted, between: (fitted, between)) if held_out else (lambda fitted, _: (fitted, [])),
    )
    bank = bank_of(1)
    chosen, probe = ranges or Ranges(), Probe(collective, place, repeats)
    # The longest transfer, as short ones drown in noise
    n_bytes = chosen.halves[1] * bank.expert_numel // 2 * bank.dtype.itemsize
    overlap_cost = measure_overlap(probe, bank, rows=chosen.tokens[1], n_bytes=n_bytes)
    return calibration_of(
        measured,
        shape,
        collective.size,
        ranks_per_node=per_node,
        free_bytes=free_bytes,
        overlap_cost=overlap_cost,
        duplex_cost=measure_duplex(probe, bank, ranks_per_node=per_node, n_bytes=n_bytes),
        link_overlap_cost=measure_link_overlap(probe, bank, n_bytes=n_bytes),
        name=name,
    )


def calibration_of(
    measured: Mapping[str, Measured],
    shape: LayerShape,
    ranks: int,
    *,
    ranks_per_node: int,
    free_bytes: int,
    overlap_cost: float = 0.0,
    duplex_cost: float = 0.0,
    link_overlap_cost: float = 1.0,
    name: str,
) -> Calibration:
    """Fit what was measured.

    Args:
        measured: By operation. `a2a_intra` or `a2a_inter`, `a2a_alone`, `trans` and `agg` may be missing.
        shape: The expert that was timed.
        ranks: R.
        ranks_per_node: Of the topology.
        free_bytes: Bytes that replicas may take on every rank.
        overlap_cost, duplex_cost, link_overlap_cost: As in `Topology`.
        name: Of the topology.
    """
    # Least relative errors, so that small sizes count as much as large ones
    fits = {o: Fit(o, m.unit, fit_line(m.fitted), m.fitted, m.held_out) for o, m in measured.items()}
    lines = {
        level: Link(bytes_per_s=1.0 / max(fit.line.unit_s, _LEAST), latency_s=fit.line.fixed_s)
        for level in ("intra", "inter", "alone")
        if (fit := fits.get(f"a2a_{level}"))
    }
    shares = "inter" in lines and shared_port(lines["inter"], lines.get("alone"), ranks_per_node)[1] is not None
    # Ranks behind one port are done in any order, which is no noise: the port takes as long as ever
    levels = ("a2a_intra",) if shares else ("a2a_intra", "a2a_inter")
    noise_s = max((measured[o].noise_s for o in levels if o in measured), default=0.0)
    # The line is that of the last rank, the link that of the mean one
    later_s = noise_s * last_of_alike(ranks)
    links = {level: replace(line, latency_s=max(line.latency_s - later_s, 0.0)) for level, line in lines.items()}
    # A rank alone has no link; the model then gets one that costs next to nothing.
    intra = links.get("intra") or links.get("inter") or Link(bytes_per_s=1e12)
    # Of both passes together the model counts a third, for planners take a backward pass for twice the forward one.
    forward, backward = fits["expert_forward"].line, fits["expert_backward"].line
    per_token = max((forward.unit_s + backward.unit_s) / 3.0, _LEAST)
    ratios = [b.seconds / f.seconds for f, b in zip(*(fits[o].fitted for o in _EXPERTS), strict=True)]
    # [points, R]
    relative = measured["expert_forward"].by_rank + measured["expert_backward"].by_rank
    # By rank, relative to the slowest; the median over points, as other work disturbs some of them.
    slowness = np.median(relative / relative.max(axis=1, keepdims=True), axis=0)
    # Replicas go anywhere, so Trans and Agg are compared with the slower link.
    slower = links.get("inter") or intra
    trans_rate, agg_rate = (rate_of(fits[o].fitted, slower) if o in fits else 1.0 for o in ("trans", "agg"))
    inter, port = shared_port(links.get("inter", intra), links.get("alone"), min(ranks_per_node, ranks))
    topology = Topology(
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        intra=intra,
        inter=inter,
        port_bytes_per_s=port,
        # The line is that of the slowest rank; faster ranks get more FLOP/s in proportion.
        flops_per_s=tuple(float(shape.forward_flops_per_token / (per_token * s / slowness.max())) for s in slowness),
        free_bytes=(free_bytes,) * ranks,
        expert_overhead_s=(forward.count_s + backward.count_s) / 3.0,
        call_overhead_s=(forward.fixed_s + backward.fixed_s) / 3.0,
        trans_rate=trans_rate,
        agg_rate=agg_rate,
        overlap_cost=overlap_cost,
        backward_ratio=float(np.median(ratios)) if ratios else 2.0,
        compute_noise=float(np.mean([measured[o].noise for o in _EXPERTS])),
        exchange_noise_s=noise_s,
        duplex_cost=duplex_cost,
        link_overlap_cost=link_overlap_cost,
        name=name,
    )
    return Calibration(topology, tuple(fits.values()), compare(fits.values(), model_lines(topology, shape)))


def shared_port(inter: Link, alone: Link | None, ranks: int) -> tuple[Link, float | None]:
    """Return the link of a rank that crosses alone, and the bytes per second of its node's port; None where none shows.

    Args:
        inter: The link between nodes, as each rank has it while all exchange.
        alone: The same of one rank while the others of its node are silent; None if that was not measured.
        ranks: Of a node.
    """
    if alone is None or alone.bytes_per_s <= _SHARES * inter.bytes_per_s:
        return inter, None
    # The latency stays that of exchanges among all
    return replace(inter, bytes_per_s=alone.bytes_per_s), ranks * inter.bytes_per_s


def check(
    collective: Collective,
    lines: Mapping[str, Line],
    *,
    dim: int = 256,
    hidden: int = 512,
    activation: Activation = "gelu",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ranks_per_node: int | None = None,
    ranges: Ranges | None = None,
    repeats: int = 15,
) -> tuple[Fit, ...]:
    """Measure the held-out sizes only, and compare them with known lines; collective. Nothing is fitted.

    Args:
        collective: The ranks to measure on.
        lines: By operation; operations without one are left out.
        dim: D of the expert to be timed.
        hidden: Its inner width.
        activation: Its activation.
        dtype: Of its elements.
        device: Where it is timed.
        ranks_per_node: None for one node.
        ranges: Sizes to measure; None takes the defaults of `Ranges`.
        repeats: Samples per size.
    """
    measured = measure_all(
        collective,
        lambda n: FeedForwardBank(dim, hidden, n, activation=activation).to(torch.device(device), dtype),
        ranges or Ranges(),
        device=torch.device(device),
        ranks_per_node=ranks_per_node or collective.size,
        repeats=repeats,
        parts=lambda _, between: ([], between),
    )
    return tuple(Fit(o, m.unit, lines[o], (), m.held_out) for o, m in measured.items() if o in lines)


def compare(fits: Iterable[Fit], lines: Mapping[str, Line]) -> tuple[Fit, ...]:
    """Put the held-out points of `fits` against other lines."""
    return tuple(
        Fit(f.operation, f.unit, lines[f.operation], (), f.held_out)
        for f in fits
        if f.operation in lines and f.held_out
    )


def model_lines(topology: Topology, shape: LayerShape) -> dict[str, Line]:
    """Lines of the performance model for `topology`, by operation: the slowest rank's compute, the slower link."""
    per_token, ratio = shape.forward_flops_per_token / min(topology.flops_per_s), topology.backward_ratio
    third = (topology.call_overhead_s, per_token, topology.expert_overhead_s)
    forward, backward = (Line(*(x * way * 3.0 / (1.0 + ratio) for x in third)) for way in (1.0, ratio))
    links = (topology.intra, topology.even_inter, topology.inter)
    # As measured: when the last rank is done
    later_s = topology.exchange_noise_s * last_of_alike(topology.ranks)
    intra, inter, alone = (Line(link.latency_s + later_s, 1.0 / link.bytes_per_s) for link in links)
    slower = inter if topology.nodes > 1 else intra
    return {
        "a2a_intra": intra,
        "a2a_inter": inter,
        "a2a_alone": alone,
        "expert_forward": forward,
        "expert_backward": backward,
        "trans": Line(slower.fixed_s - later_s, slower.unit_s / topology.trans_rate),
        "agg": Line(slower.fixed_s - later_s, slower.unit_s / topology.agg_rate),
    }


def shape_of(dim: int, hidden: int, activation: Activation, dtype: torch.dtype) -> LayerShape:
    """The sizes of the expert that is timed.

    Args:
        dim: D.
        hidden: Inner width.
        activation: Between its layers.
        dtype: Of parameters, gradients and tokens.
    """
    size = dtype.itemsize
    return LayerShape.feed_forward(
        dim=dim, hidden=hidden, activation=activation, param_bytes=size, grad_bytes=size, token_element_bytes=size
    )
