"""Checks of `prophet gpu-check`: a pipeline with replicas, and a job that changes its layout.

Each trains a small model, and compares its losses with those of one process on the same device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline_balance.elastic.data import Batches
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.pipeline.trainer import ElasticPipeline
from prophet.doctor.check import Check, finding, sound
from prophet.gpu_check.checks import Answer, Place

_DIM, _VOCABULARY, _BLOCKS, _ROWS, _MICROBATCHES, _STEPS, _SEED = 32, 64, 4, 64, 4, 3, 5
# Relative: sums in another order, in float32, over some updates
_TOLERANCE = 1e-4


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_DIM, 4 * _DIM), nn.Linear(4 * _DIM, _DIM)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


def pipeline(place: Place) -> Answer:
    """Train a pipeline of two stages, with two replicas where there are four ranks."""
    replicas = place.ranks // 2
    data = _batches()
    pipe = ElasticPipeline.from_modules(
        _model(),
        nn.functional.cross_entropy,
        make_optimizer=_optimizer,
        microbatches=_MICROBATCHES // replicas,
        replicas=replicas,
        seed=_SEED,
        device=torch.device(place.device),
        timeout_s=place.timeout_s,
    )
    losses = []
    for _ in range(_STEPS):
        inputs, labels = (part.chunk(replicas)[pipe.replica] for part in data.read(0, _ROWS))
        losses.append(pipe.step(inputs, labels))
        data.advance()
    copies = f"two stages, {replicas} replica{'s' * (replicas > 1)}"
    return _answer("pipeline", copies, losses, _plain(place, _STEPS))


def switch(place: Place) -> Answer:
    """Change the layout of a job between two steps: a pipeline, replicas with ZeRO 1, and the pipeline again."""
    layouts = (f"pp{place.ranks}", f"dp{place.ranks},zero1", f"pp{place.ranks}")
    job = Job(
        _model,
        _optimizer,
        Parallelism.parse(layouts[0]),
        data=_batches(),
        loss_fn=nn.functional.cross_entropy,
        microbatches=_MICROBATCHES,
        seed=_SEED,
        device=torch.device(place.device),
        timeout_s=place.timeout_s,
    )
    losses, seconds = [job.step() for _ in range(_STEPS)], []
    for text in layouts[1:]:
        seconds.append(job.switch(Parallelism.parse(text)).seconds)
        losses += [job.step() for _ in range(_STEPS)]
    job.close()
    took = f"{' to '.join(layouts)}, {' and '.join(f'{1e3 * s:.0f} ms' for s in seconds)}"
    answer = _answer("switch", took, losses, _plain(place, _STEPS * len(layouts)))
    answer.figures["seconds"] = seconds
    return answer


def judged(name: str, how: str, losses: Sequence[float], expected: Sequence[float]) -> Check:
    """Judge a check's losses by those of one process.

    Args:
        name: Of the check.
        how: What was trained, in words.
        losses: By step.
        expected: The same of one process.
    """
    errors = [abs(got - want) / abs(want) for got, want in zip(losses, expected, strict=True)]
    step = next((i for i, error in enumerate(errors) if not error <= _TOLERANCE), None)
    if step is not None:
        text = f"{how}: the loss of step {step} is {losses[step]:.6g}, and {expected[step]:.6g} in one process"
        return finding(name, text, "train without `pipeline_balance` here; please send the JSON below")
    return sound(name, f"{how}: {len(losses)} losses as in one process, to a relative {max(errors):.1g}")


def _answer(name: str, how: str, losses: Sequence[float], expected: Sequence[float]) -> Answer:
    figures: dict[str, Any] = {"losses": list(losses), "expected": list(expected)}
    return Answer(checks=[judged(name, how, losses, expected)], figures=figures)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [_Block() for _ in range(_BLOCKS)]
    return nn.Sequential(nn.Embedding(_VOCABULARY, _DIM), *blocks, nn.Linear(_DIM, _VOCABULARY))


def _optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def _batches() -> Batches:
    ids = torch.randint(_VOCABULARY, (4 * _ROWS,), generator=torch.Generator().manual_seed(1))
    return Batches(TensorDataset(ids, (ids * 3 + 1) % _VOCABULARY), _ROWS, seed=_SEED)


def _plain(place: Place, steps: int) -> list[float]:
    """The losses of one process on this rank's device."""
    model, data = _model().to(place.device), _batches()
    optimizer = _optimizer(list(model.named_parameters()))
    losses = []
    for _ in range(steps):
        inputs, labels = (part.to(place.device) for part in data.read(0, _ROWS))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        data.advance()
    return losses
