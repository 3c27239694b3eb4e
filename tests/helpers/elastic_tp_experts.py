"""Small transformers models with experts for jobs with tp, and the same training in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import prophet
from pipeline_balance import add_loss, elastic
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from tests.helpers.elastic_jobs import check_held, same
from tests.helpers.sliced_models import adam, batch_of, model_of

MICROBATCHES, ROWS, MAX_NORM = 4, 8, 0.5
TOKENS = 15  # of a row: tp ranks have parts of unequal size
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "num_key_value_heads": 4}


def plain(family: str = "mixtral", **options: Any) -> Any:
    """transformers' own model, with its own experts."""
    return model_of(family, **{"output_router_logits": False, **SIZES, **options})


def converted(family: str = "mixtral", **options: Any) -> Any:
    model = plain(family, **options)
    prophet.convert(model, group=elastic.one_rank())
    return model


class Mixture(nn.Module):
    """A layer of experts with a gate and losses of its own kind, which count with the model's."""

    def __init__(self, dim: int, **options: Any) -> None:
        super().__init__()
        gate = prophet.GateConfig(aux_loss="switch", aux_loss_weight=0.1, z_loss_weight=0.01, capacity_factor=1.5)
        kind = options or {"hidden": 12, "activation": "swiglu"}
        self.moe = prophet.MoE(dim, num_experts=4, top_k=2, gate=gate, group=elastic.one_rank(), impl="naive", **kind)

    def forward(self, x: Tensor) -> Tensor:
        with prophet.collect_losses(self.moe) as losses:
            y: Tensor = self.moe(x)
        return add_loss(y, losses.total().to(y))


def own(**options: Any) -> Any:
    """A Llama whose layers have such experts in place of their dense part."""
    model = model_of("llama", **SIZES)
    torch.manual_seed(1)
    for layer in model.model.layers:
        layer.mlp = Mixture(model.config.hidden_size, **options).double()
    return model


def own_modules() -> Any:
    """The same with experts that are modules."""
    return own(expert=lambda: nn.Linear(32, 32))


def batches(steps: int) -> list[Any]:
    return [batch_of(rows=ROWS, tokens=TOKENS, seed=step) for step in range(steps)]


def start(build: Callable[[], Any], layout: str, steps: int, **options: Any) -> Job:
    given: dict[str, Any] = {"microbatches": MICROBATCHES, "timeout_s": 60.0, "data": batches(steps)}
    return Job(build, options.pop("optimizer", adam), Parallelism.parse(layout), **{**given, **options})


def stepped(job: Job, **options: Any) -> list[float]:
    """The loss of a step, and the norm of its gradients."""
    loss = job.step(max_norm=MAX_NORM, **options)
    assert job.grad_norm is not None
    return [loss, job.grad_norm]


def tour(job: Job, layouts: Sequence[str], mode: Any = "safe", **step: Any) -> tuple[list[float], list[bool]]:
    """A step in the layout in force and in each of these: `stepped` of each, and whether switches have kept all."""
    losses, kept = stepped(job, **step), []
    for layout in layouts:
        before = job.state_dict()
        job.switch(Parallelism.parse(layout), mode=mode)
        kept.append(same(before, job.state_dict()))
        check_held(job)
        losses += stepped(job, **step)
    return losses, kept


def alone(model: Any, steps: int) -> list[float]:
    """The model's own loop: loss and norm of every step."""
    optimizer, losses = adam(list(model.named_parameters())), []
    for inputs, labels in batches(steps):
        optimizer.zero_grad()
        loss = model(**inputs, labels=labels, use_cache=False).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        losses += [float(loss.detach()), float(norm)]
    return losses
