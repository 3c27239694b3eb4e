"""One layer's step without and with balancing, in turns, on skewed routing.

Shape legend: N tokens of a rank, R ranks, D model dim, E experts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prophet.doctor.check import Check, finding, sound
from prophet.engine.attach import attach
from prophet.engine.config import EngineConfig
from prophet.engine.engine import Engine
from prophet.experts.gate import GateConfig
from prophet.gpu_check.checks import TOPOLOGY, Answer, Place
from prophet.layer.moe import MoE
from prophet.machine.topology import read_topology
from prophet.ranks.clocks import synchronize
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import collective_for
from prophet.spec import Topology

_WARM_UP, _ROUNDS = 3, 15
_PLANNERS = ("static", "prophet")
# Beyond this a step with balancing counts as longer on a GPU, in all of the middle half of the rounds
_LONGER = 1.05


@dataclass(frozen=True, slots=True)
class _Sizes:
    tokens: int
    dim: int
    hidden: int
    per_rank: int
    dtype: torch.dtype


def layer(place: Place) -> Answer:
    """Time forward and backward passes of two equal layers in turns; one has the planner `static`, one `prophet`."""
    collective = collective_for(None, timeout_s=place.timeout_s)
    sizes = _Sizes(8192, 2048, 2048, 8, torch.bfloat16) if place.on_gpu else _Sizes(256, 64, 128, 4, torch.float32)
    topology, measured = _topology(place, collective.size)
    engines = [_engine(collective, place, sizes, planner, topology) for planner in _PLANNERS]
    x = torch.randn(sizes.tokens, sizes.dim, generator=torch.Generator().manual_seed(collective.rank))
    seconds: list[list[float]] = [[], []]
    for number in range(_WARM_UP + _ROUNDS):
        # Another one goes first each round
        for which in ((0, 1), (1, 0))[number % 2]:
            took_s = _step(engines[which], x.to(place.device, sizes.dtype, copy=True), place)
            rows = collective.all_gather(torch.tensor([took_s], dtype=torch.float64), op=Operation("end of a sample"))
            if number >= _WARM_UP:
                # A step takes as long as on the slowest rank
                seconds[which].append(float(rows.max()))
    reports = [engine.last_step for engine in engines]
    for one in engines:
        one.close()
    collective.close()
    ratios = [after / before for before, after in zip(*seconds, strict=True)]
    even = [0.0 if report is None else report.max_mean for report in reports]
    copies = 0 if reports[1] is None else int(reports[1].copies.sum())
    steps_s = [statistics.median(found) for found in seconds]
    figures = {"ratios": ratios, "max_mean": even, "replicas": copies, "static_s": steps_s[0], "prophet_s": steps_s[1]}
    lines = [judged(ratios, even, copies, on_gpu=place.on_gpu)]
    return Answer(checks=lines, figures={**figures, "topology_measured": measured})


def judged(ratios: Sequence[float], even: Sequence[float], copies: int, *, on_gpu: bool) -> Check:
    """Judge the times of rounds with balancing over those without.

    Args:
        ratios: By round.
        even: The busiest rank's rows over the mean, without and with.
        copies: How many replicas the last step with balancing had, on all ranks.
        on_gpu: Whether the times are those of GPUs; ranks on the CPU share cores, and their times show nothing.
    """
    low, middle, high = statistics.quantiles(ratios, n=4)
    text = f"with balancing {middle:.2f} of the time without ({low:.2f} to {high:.2f}, the middle half of rounds)"
    text += f"; busiest rank {even[1]:.2f} of the mean, {even[0]:.2f} without; {copies} replica{'s' * (copies != 1)}"
    if on_gpu and low > _LONGER:
        return finding("layer", text, "pass the calibrated topology to `EngineConfig`; please send the JSON below")
    return sound("layer", text if on_gpu else f"{text}; ranks share this CPU, so the times show nothing")


def _topology(place: Place, ranks: int) -> tuple[Topology, bool]:
    """The machine as calibrated, its ranks taken for equally fast; one that is assumed where it was not."""
    file = place.shared / TOPOLOGY
    found = read_topology(file) if file.exists() else None
    if found is None or found.ranks != ranks:
        return Topology.uniform(ranks), False
    typical = statistics.median(found.flops_per_s)
    return replace(found, flops_per_s=(typical,) * ranks), True


def _engine(collective: Collective, place: Place, sizes: _Sizes, planner: str, topology: Topology) -> Engine:
    torch.manual_seed(0)
    experts = sizes.per_rank * collective.size
    gate = GateConfig(bias_update_rate=1e-9)
    moe = MoE(sizes.dim, sizes.hidden, experts, 2, activation="swiglu", bias=False, gate=gate, group=collective)
    bias = moe.gate.bias
    if isinstance(bias, Tensor):
        # As large as a mean score: the first rank's experts are chosen far more often
        bias[: sizes.per_rank] = 1.0 / experts
    moe.to(place.device, sizes.dtype)
    return attach(moe, config=EngineConfig(planner=planner, topology=topology, timeout_s=place.timeout_s))


def _step(engine: Engine, x: Tensor, place: Place) -> float:
    """One forward and backward pass; seconds on this rank. The next step's plan is waited for, untimed."""
    moe = engine.layers[0]
    moe.zero_grad(set_to_none=True)
    x.requires_grad_()
    engine.collective.all_gather(torch.zeros(1), op=Operation("start of a sample"))
    synchronize(x.device)
    began = time.perf_counter()
    moe(x).sum().backward()
    engine.runtime.finish_gradients()
    synchronize(x.device)
    took_s = time.perf_counter() - began
    engine.finish_step()
    for balanced in engine.balanced:
        balanced.plans.latest()
    return took_s
