"""A layer, and a model of eight, without and with balancing, in turns, on skewed routing.

Shape legend: N tokens of a rank, R ranks, D model dim, E experts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from prophet.doctor.check import Check, finding, sound, unseen
from prophet.engine.attach import attach
from prophet.engine.config import EngineConfig
from prophet.engine.engine import Engine
from prophet.engine.step_report import StepReport, predicted_seconds
from prophet.experts.gate import GateConfig
from prophet.gpu_check.checks import TOPOLOGY, Answer, Place
from prophet.layer.moe import MoE
from prophet.machine.topology import read_topology
from prophet.ranks.collective import Collective
from prophet.ranks.device.clocks import synchronize
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import collective_for
from prophet.spec import Topology

_WARM_UP, _ROUNDS = 3, 15
_PLANNERS = ("static", "prophet")
_LAYERS = 8
# Beyond this a step with balancing counts as longer on a GPU, in all of the middle half of the rounds
_LONGER = 1.05


@dataclass(frozen=True, slots=True)
class _Sizes:
    tokens: int
    dim: int
    hidden: int
    per_rank: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Steps without and with balancing, in this order.

    Attributes:
        seconds: Of every round on the slowest rank.
        predicted_s: Of the MoE layers of every round, by the performance model.
        max_mean: The busiest rank's rows over the mean, in the last step.
        replicas: Of all ranks in the last step with balancing.
        tokens: Of all ranks in a step.
        calibrated: Whether the performance model knows this machine.
    """

    seconds: tuple[Sequence[float], Sequence[float]]
    predicted_s: tuple[Sequence[float], Sequence[float]]
    max_mean: tuple[float, float]
    replicas: int
    tokens: int
    calibrated: bool

    @property
    def ratios(self) -> list[float]:
        """With balancing over without, by round."""
        return [after / before for before, after in zip(*self.seconds, strict=True)]

    @property
    def predicted(self) -> float:
        """The ratio that the performance model predicts: it saves its seconds in a step as long as the measured one."""
        before_s = statistics.median(self.seconds[0])
        saved_s = [before - after for before, after in zip(*self.predicted_s, strict=True)]
        return 1.0 - statistics.median(saved_s) / before_s


def layer(place: Place) -> Answer:
    """Time forward and backward passes of two equal layers in turns; one has the planner `static`, one `prophet`."""
    sizes = _Sizes(8192, 2048, 2048, 8, torch.bfloat16) if place.on_gpu else _Sizes(256, 64, 128, 4, torch.float32)
    return _compared("layer", place, sizes, layers=1)


def model(place: Place) -> Answer:
    """Do the same with models of eight layers, each behind a dense network that transfers can hide under."""
    sizes = _Sizes(8192, 2048, 2048, 8, torch.bfloat16) if place.on_gpu else _Sizes(128, 32, 64, 4, torch.float32)
    return _compared("model", place, sizes, layers=_LAYERS)


def _compared(name: str, place: Place, sizes: _Sizes, *, layers: int) -> Answer:
    collective = collective_for(None, timeout_s=place.timeout_s)
    topology, calibrated = _topology(place, collective.size)
    runs = [_Run(collective, place, sizes, planner, topology, layers) for planner in _PLANNERS]
    x = torch.randn(sizes.tokens, sizes.dim, generator=torch.Generator().manual_seed(collective.rank))
    seconds: tuple[list[float], list[float]] = ([], [])
    predicted_s: tuple[list[float], list[float]] = ([], [])
    for number in range(_WARM_UP + _ROUNDS):
        # Another one goes first each round
        for which in ((0, 1), (1, 0))[number % 2]:
            took_s = runs[which].step(x.to(place.device, sizes.dtype, copy=True))
            rows = collective.all_gather(torch.tensor([took_s], dtype=torch.float64), op=Operation("end of a sample"))
            if number >= _WARM_UP:
                # A step takes as long as on the slowest rank
                seconds[which].append(float(rows.max()))
                predicted_s[which].append(runs[which].predicted_s())
    reports = [run.report for run in runs]
    for run in runs:
        run.engine.close()
    found = Compared(
        seconds=seconds,
        predicted_s=predicted_s,
        max_mean=(reports[0].max_mean, reports[1].max_mean),
        replicas=int(reports[1].copies.sum()),
        tokens=sizes.tokens * collective.size,
        calibrated=calibrated,
    )
    collective.close()
    static_s, prophet_s = (statistics.median(of) for of in seconds)
    figures = {
        "ratios": found.ratios,
        "max_mean": list(found.max_mean),
        "replicas": found.replicas,
        "static_s": static_s,
        "prophet_s": prophet_s,
        "static_tokens_per_s": found.tokens / static_s,
        "prophet_tokens_per_s": found.tokens / prophet_s,
        "predicted_ratio": found.predicted,
        "predicted_static_s": statistics.median(predicted_s[0]),
        "predicted_prophet_s": statistics.median(predicted_s[1]),
        "topology_measured": calibrated,
    }
    return Answer(checks=judged(name, found, on_gpu=place.on_gpu), figures=figures)


def judged(name: str, found: Compared, *, on_gpu: bool) -> list[Check]:
    """Judge the times of rounds with balancing over those without: their ratio, the throughput, and the prediction.

    Args:
        name: Of the check.
        found: What was measured.
        on_gpu: Whether the times are those of GPUs; ranks on the CPU share cores, and their times show nothing.
    """
    low, middle, high = statistics.quantiles(found.ratios, n=4)
    text = f"with balancing {middle:.2f} of the time without ({low:.2f} to {high:.2f}, the middle half of rounds)"
    text += f"; busiest rank {found.max_mean[1]:.2f} of the mean, {found.max_mean[0]:.2f} without"
    text += f"; {found.replicas} replica{'s' * (found.replicas != 1)}"
    if on_gpu and low > _LONGER:
        line = finding(name, text, "pass the calibrated topology to `EngineConfig`; please send the JSON below")
    else:
        line = sound(name, text if on_gpu else f"{text}; ranks share this CPU, so the times show nothing")
    rates = [found.tokens / statistics.median(seconds) for seconds in found.seconds]
    throughput = sound("throughput", f"{rates[0]:,.0f} tokens/s without, {rates[1]:,.0f} with")
    if not found.calibrated:
        return [line, throughput, unseen("prediction", "no calibration of this machine on so many ranks")]
    off = f"{found.predicted:.2f} of the time, off by {found.predicted - middle:+.2f}"
    return [line, throughput, sound("prediction", off)]


def _topology(place: Place, ranks: int) -> tuple[Topology, bool]:
    """The machine as calibrated, its ranks taken for equally fast; one that is assumed where it was not."""
    file = place.shared / TOPOLOGY
    found = read_topology(file) if file.exists() else None
    if found is None or found.ranks != ranks:
        return Topology.uniform(ranks), False
    typical = statistics.median(found.flops_per_s)
    return replace(found, flops_per_s=(typical,) * ranks), True


class _Block(nn.Module):
    """A dense network and a layer of experts, each with a residual connection."""

    def __init__(self, dim: int, moe: MoE) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.norm, self.moe = nn.LayerNorm(dim), moe

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(nn.functional.gelu(self.up(x)))
        y: Tensor = x + self.moe(self.norm(x))
        return y


class _Run:
    """A model with an engine of one planner."""

    def __init__(
        self, collective: Collective, place: Place, sizes: _Sizes, planner: str, topology: Topology, layers: int
    ) -> None:
        torch.manual_seed(0)
        moes = [_moe(collective, sizes) for _ in range(layers)]
        self.model = moes[0] if layers == 1 else nn.Sequential(*(_Block(sizes.dim, moe) for moe in moes))
        self.model.to(place.device, sizes.dtype)
        config = EngineConfig(planner=planner, topology=topology, timeout_s=place.timeout_s)
        self.engine: Engine = attach(self.model, config=config)

    @property
    def report(self) -> StepReport:
        """The last step's."""
        if self.engine.last_step is None:
            raise RuntimeError("the engine reported no step")
        return self.engine.last_step

    def step(self, x: Tensor) -> float:
        """One forward and backward pass; seconds on this rank. The next step's plan is waited for, untimed."""
        engine = self.engine
        self.model.zero_grad(set_to_none=True)
        x.requires_grad_()
        engine.collective.all_gather(torch.zeros(1), op=Operation("start of a sample"))
        synchronize(x.device)
        began = time.perf_counter()
        self.model(x).sum().backward()
        engine.runtime.finish_gradients()
        synchronize(x.device)
        took_s = time.perf_counter() - began
        engine.finish_step()
        for balanced in engine.balanced:
            balanced.plans.latest()
        return took_s

    def predicted_s(self) -> float:
        """Seconds of the last step's MoE layers by the performance model, the same on all ranks."""
        return predicted_seconds(self.report, self.engine.planner, self.engine.contexts)


def _moe(collective: Collective, sizes: _Sizes) -> MoE:
    experts = sizes.per_rank * collective.size
    gate = GateConfig(bias_update_rate=1e-9)
    moe = MoE(sizes.dim, sizes.hidden, experts, 2, activation="swiglu", bias=False, gate=gate, group=collective)
    bias = moe.gate.bias
    if isinstance(bias, Tensor):
        # As large as a mean score: the first rank's experts are chosen far more often
        bias[: sizes.per_rank] = 1.0 / experts
    return moe
