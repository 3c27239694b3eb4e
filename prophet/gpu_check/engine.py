"""A small balanced model against the same model on one rank, and what its ranks hear when one of them is lost.

Shape legend: N tokens of a rank, R ranks, D model dim, E experts, m experts per rank.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from prophet.doctor.check import Check, finding, sound
from prophet.engine.attach import attach
from prophet.engine.config import EngineConfig
from prophet.engine.engine import Engine
from prophet.errors import CollectiveError
from prophet.experts.gate import GateConfig
from prophet.gpu_check.checks import Answer, Place
from prophet.layer.moe import MoE, moe_layers
from prophet.ranks.collective import Collective
from prophet.ranks.launch import leave
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import collective_for
from prophet.ranks.threads import ThreadWorld
from prophet.spec import Topology

_N, _D, _HIDDEN, _PER_RANK, _STEPS = 96, 32, 64, 4, 4
# Ranks that one GPU plays, as threads of one process
_IMAGINED = 2
# Of the largest value: sums in another order, in float32, over some updates
_TOLERANCE = 2e-4
# For the limit to be noticed, and for the others' news of it
_SLACK_S = 15.0


def engine(place: Place) -> Answer:
    """Train some steps with replicas in force, and compare losses and gradients with one rank's."""
    if place.ranks > 1:
        collective = collective_for(None, timeout_s=place.timeout_s)
        found = _compared(collective, place.device, _state(collective.size))
        collective.close()
    else:
        state = _state(_IMAGINED)
        world = ThreadWorld(_IMAGINED, timeout_s=place.timeout_s)
        found = of_all(world.run(lambda collective: _compared(collective, place.device, state)))
    ranks = f"{place.ranks} ranks" if place.ranks > 1 else f"{_IMAGINED} ranks imagined on one device"
    return Answer(checks=[judged(found["errors"], found["copies"], ranks)], figures=found)


def worse(one: float, other: float) -> float:
    """Return the larger error; one that is not a number is the largest."""
    return one if math.isnan(one) else max(other, one)


def of_all(by_rank: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Put together what ranks that are threads have found: each has its own experts' gradients."""
    errors: dict[str, float] = {}
    for found in by_rank:
        for name, error in found["errors"].items():
            errors[name] = worse(error, errors.get(name, 0.0))
    return {"errors": errors, "copies": by_rank[0]["copies"]}


def judged(errors: dict[str, float], copies: int, ranks: str) -> Check:
    """Judge a run by its largest relative errors by name and its replicas.

    Args:
        errors: By what was compared.
        copies: Replicas of all steps.
        ranks: On what it ran, in words.
    """
    send = "train with `EngineConfig(planner='static')` until this is understood; please send the JSON below"
    wrong = {name: error for name, error in errors.items() if not error <= _TOLERANCE}
    if wrong:
        name = max(wrong, key=lambda n: wrong[n])
        return finding("engine", f"{ranks}: {name} differs from one rank's by {wrong[name]:.2g}, relative", send)
    if not copies:
        return finding("engine", f"{ranks}: no replica was made in {_STEPS} steps, so nothing was shown", send)
    largest = max(errors.values())
    return sound("engine", f"{ranks}, {_STEPS} steps, {copies} replicas: as on one rank, to a relative {largest:.1g}")


def lost_rank(place: Place) -> Answer:
    """Let the last rank end within a step; the others have to hear of it, with a name, within their limit."""
    collective = collective_for(None, timeout_s=place.timeout_s)
    training = _Training(collective, place.device, _state(collective.size))
    for step in range(2):
        training.step(step)
    # Nobody is to be lost before all are here
    collective.all_gather(torch.zeros(1), op=Operation("before a rank is lost"))
    if collective.rank == collective.size - 1:
        training.forward(2)
        leave()
    began, heard = time.monotonic(), ""
    try:
        for step in range(2, 5):
            training.step(step)
    except CollectiveError as error:
        heard = f"{type(error).__name__}: {' '.join(str(error).split())}"
    check = told(heard, collective.size - 1, time.monotonic() - began, place.timeout_s)
    return Answer(checks=[check], figures={"heard": heard})


def told(heard: str, lost: int, seconds: float, limit_s: float) -> Check:
    """Judge what a rank heard of a lost one.

    Args:
        heard: The error in words; empty where it went on.
        lost: The rank that was lost.
        seconds: When it heard of it.
        limit_s: Its limit for a wait.
    """
    send = "give the job a limit from outside, torchrun's `--max-restarts=0` among them; please send the JSON below"
    if not heard:
        return finding("lost-rank", "the others went on for three steps without the rank that ended", send)
    if seconds > limit_s + _SLACK_S:
        return finding("lost-rank", f"heard after {seconds:.0f} s, at a limit of {limit_s:.0f} s: {heard}", send)
    if not re.search(rf"\[[\d, ]*\b{lost}\b[\d, ]*\]", heard):
        return finding("lost-rank", f"heard after {seconds:.1f} s, but not that it was rank {lost}: {heard}", send)
    # The backend's own words follow in brackets
    return sound("lost-rank", f"heard after {seconds:.1f} s: {heard.partition(' ([')[0]}")


class _Training:
    """The model on one rank of a group, with its optimizer and its engine."""

    def __init__(self, collective: Collective, device: str, state: dict[str, Tensor]) -> None:
        self.collective, self.device = collective, device
        self.model = _model(collective)
        self.model.load_state_dict(state)
        self.model.to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        # Products so slow that every replica pays
        topology = Topology.uniform(collective.size, flops_per_s=1e9)
        config = EngineConfig(topology=topology, timeout_s=collective.timeout_s)
        self.engine: Engine = attach(self.model, self.optimizer, config=config)

    def forward(self, step: int) -> Tensor:
        """This rank's loss."""
        return _loss(self.model, *(part.to(self.device) for part in _batch(step, self.collective.rank)))

    def step(self, step: int) -> tuple[float, dict[str, Tensor], int]:
        """Do one update; the mean loss, this rank's gradients by name, and the replicas of all ranks."""
        self.optimizer.zero_grad()
        loss = self.forward(step)
        loss.backward()
        own = [p for p in self.model.parameters() if not getattr(p, "prophet_expert", False)]
        mean = loss.detach().clone()
        shared = [p.grad for p in own if p.grad is not None]
        self.collective.all_reduce_mean_([*shared, mean], op=Operation("mean of gradients"))
        grads = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.step()
        report = self.engine.last_step
        return float(mean), grads, 0 if report is None else int(report.copies.sum())


def _compared(collective: Collective, device: str, state: dict[str, Tensor]) -> dict[str, Any]:
    """Train on the group, and on this rank alone with all ranks' tokens; the errors by name, and the replicas."""
    training, truth = _Training(collective, device, state), _model(ThreadWorld(1).collective(0), of=collective.size)
    truth.load_state_dict(state)
    truth.to(device)
    optimizer = torch.optim.SGD(truth.parameters(), lr=0.1)
    errors, copies = {"loss": 0.0}, 0
    for step in range(_STEPS):
        loss, grads, made = training.step(step)
        copies += made
        batches = [_batch(step, rank) for rank in range(collective.size)]
        optimizer.zero_grad()
        exact = _loss(truth, *(torch.cat(parts).to(device) for parts in zip(*batches, strict=True)))
        exact.backward()
        errors["loss"] = worse(abs(loss / exact.item() - 1), errors["loss"])
        for name, want in _gradients(truth, collective):
            gap = (grads[name] - want).abs().max() / want.abs().max().clamp(min=1e-12)
            errors[name] = worse(float(gap), errors.get(name, 0.0))
        optimizer.step()
    training.engine.close()
    return {"errors": errors, "copies": copies}


def _gradients(model: nn.Module, collective: Collective) -> Iterator[tuple[str, Tensor]]:
    """The gradients of the model with all experts, of experts those that live on this rank."""
    first = collective.rank * _PER_RANK
    for name, p in model.named_parameters():
        if p.grad is not None:
            yield name, p.grad[first : first + _PER_RANK] if ".experts." in name else p.grad


def _model(collective: Collective, of: int | None = None) -> nn.Module:
    """Two layers of experts between dense ones; `of`: the ranks that its number of experts is for."""
    experts = _PER_RANK * (of or collective.size)
    # A rate too small to matter: it gives the gate a bias, by which experts are hot
    gate = GateConfig(bias_update_rate=1e-9)

    def layer() -> MoE:
        return MoE(_D, _HIDDEN, experts, 2, bias=False, gate=gate, group=collective)

    return nn.Sequential(nn.Linear(_D, _D), layer(), nn.Linear(_D, _D), layer(), nn.Linear(_D, _D))


def _state(ranks: int) -> dict[str, Tensor]:
    """The whole model's first values, equal in every process; experts 0 and 1 are hot."""
    torch.manual_seed(0)
    model = _model(ThreadWorld(1).collective(0), of=ranks)
    for layer in moe_layers(model):
        bias = layer.gate.bias
        if isinstance(bias, Tensor):
            bias[:2] = torch.tensor([10.0, 0.2])
    return model.state_dict()


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(_N, _D, generator=generator), torch.randn(_N, _D, generator=generator)


def _loss(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    y: Tensor = model(x)
    return (y - target).square().mean()
