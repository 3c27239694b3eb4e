"""Schedules that train one model on one batch: ours, with and without slices, and torch's.

Shape legend: B sequences of a microbatch, M microbatches, P ranks, S stages, T tokens of a sequence.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from benchmarks.slices.live_bytes import LiveBytes, SavedBytes
from benchmarks.slices.workload import VOCABULARY, Work, gradients, no_update
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.slices.options import SliceOptions
from pipeline_balance.spec import StageMap

TIMEOUT_S = 60.0
TORCHS = {"torch-1f1b": (Schedule1F1B, 1), "torch-interleaved": (ScheduleInterleaved1F1B, 2)}
TORCHS |= {"torch-zbv": (ScheduleZBVZeroBubble, 2)}


@dataclass
class Counted:
    """Most bytes of one rank at any moment: all that layers keep, and of that chunks and their gradients.

    `boundaries`, received and not used up, are apart from those, and so is what is `sent` and may be on its way still.
    None where nobody counts them.
    """

    activations: int
    chunks: int = 0
    chunk_gradients: int = 0
    boundaries: int | None = None
    sent: int | None = None
    loss: float = 0.0  # of that step, on ranks that know it


class Contender(ABC):
    """One schedule with its copy of the model. All methods are collective."""

    def __init__(self, name: str, work: Work, options: SliceOptions) -> None:
        self.name, self.work = name, work
        self.stages_per_rank, self.slices = options.stages_per_rank, options.slices
        self.order, self.balance = options.order if options.slices > 1 else None, options.balance
        self.model, self.batch = work.model(), work.batch()

    def gradients(self) -> dict[str, Tensor]:
        return gradients(self.model)

    @abstractmethod
    def step(self) -> float:
        """Train once; the loss, on ranks that know it, else 0."""

    @abstractmethod
    def busy_s(self) -> float:
        """Seconds of this rank in forward and backward actions since the last call."""

    @abstractmethod
    def counted(self) -> Counted:
        """Bytes of one more step."""


def stage_map(work: Work, ranks: int, stages_per_rank: int) -> StageMap:
    """Equally many layers on all stages; the embedding goes with the first ones, the head with the last ones."""
    stages = ranks * stages_per_rank
    if work.layers % stages:
        raise ValueError(f"{work.layers} layers cannot be spread evenly over {stages} stages")
    each = work.layers // stages
    return StageMap(
        (0, *(1 + each * s for s in range(1, stages)), work.layers + 2), tuple(range(ranks)) * stages_per_rank
    )


class Ours(Contender):
    """`ElasticPipeline`, in slices or not."""

    def __init__(self, name: str, work: Work, options: SliceOptions, ranks: int) -> None:
        super().__init__(name, work, options)
        self.pipe = ElasticPipeline.from_transformers(
            self.model,
            stage_map(work, ranks, options.stages_per_rank),
            slices=options,
            make_optimizer=no_update,
            microbatches=work.microbatches,
            timeout_s=TIMEOUT_S,
        )

    def step(self) -> float:
        return self.pipe.step(self.batch, self.batch)

    def busy_s(self) -> float:
        times = self.pipe.meter.times()
        self.pipe.meter.reset()
        return times.compute_s * times.steps

    def counted(self) -> Counted:
        count = LiveBytes(self.pipe.model)  # type: ignore[arg-type]
        meter = self.pipe.meter
        with meter.paused():
            loss = self.step()
        count.end()
        between = meter.boundary_bytes, meter.sent_bytes
        return Counted(count.peak, count.peak_chunks, count.peak_gradients, *between, loss)


class _Part(nn.Module):
    """One stage of torch's schedules."""

    def __init__(self, model: Any, layers: range, count: SavedBytes) -> None:
        super().__init__()
        # only what is this stage's: torch divides the gradients of every stage's parameters by M
        base = model.model
        self.layers, self.angles = nn.ModuleList(base.layers[i] for i in layers), base.rotary_emb
        self.embed = base.embed_tokens if 0 in layers else None
        self.behind = nn.Sequential(base.norm, model.lm_head) if len(base.layers) - 1 in layers else None
        self.count, self.counting = count, False

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        positions = torch.arange(x.shape[1])[None]
        angles = self.angles(x, positions)
        known = [*self.parameters(), *angles]
        for layer in self.layers:
            with self.count.keeping(known) if self.counting else nullcontext():
                out = layer(x, attention_mask=None, position_ids=positions, position_embeddings=angles)
            x = out if isinstance(out, Tensor) else out[0]
            self.count.look()
        return x if self.behind is None else self.behind(x)


@dataclass
class _Timed:
    """Calls of a stage's methods, and the seconds that they took."""

    seconds: float = 0.0
    inside: bool = field(default=False)

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return call(*args, **kwargs)
            self.inside, began = True, time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.inside = False
                self.seconds += time.perf_counter() - began

        return timed


class Torchs(Contender):
    """A schedule of `torch.distributed.pipelining`."""

    def __init__(self, name: str, work: Work, ranks: int) -> None:
        kind, stages_per_rank = TORCHS[name]
        super().__init__(name, work, SliceOptions(1, stages_per_rank))
        rank, total = dist.get_rank(), ranks * self.stages_per_rank
        each = work.layers // total
        second = total - 1 - rank if name == "torch-zbv" else rank + ranks
        mine = (rank, second)[: self.stages_per_rank]
        self.count, self.clock = SavedBytes(), _Timed()
        self.parts = [_Part(self.model, range(s * each, (s + 1) * each), self.count) for s in mine]
        stages = [self._stage(part, s, total) for part, s in zip(self.parts, mine, strict=True)]
        target = stages[0] if self.stages_per_rank == 1 else stages
        self.schedule = kind(target, work.microbatches, loss_fn=_loss)  # type: ignore[arg-type]
        self.feeds, self.ends = 0 in mine, total - 1 in mine

    def _stage(self, part: _Part, number: int, total: int) -> PipelineStage:
        def passed(boundary: int) -> Tensor:
            width = VOCABULARY if boundary == total else self.work.hidden
            if boundary == 0:
                return torch.empty(1, self.work.tokens, dtype=torch.long, device="meta")
            return torch.empty(1, self.work.tokens, width, device="meta", requires_grad=True)

        device = torch.device("cpu")
        stage = PipelineStage(
            part, number, total, device, input_args=(passed(number),), output_args=(passed(number + 1),)
        )
        for method in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            setattr(stage, method, self.clock.wrap(getattr(stage, method)))
        return stage

    def step(self) -> float:
        self.model.zero_grad()
        losses: list[Tensor] = []
        labels = {"target": F.pad(self.batch[:, 1:], (0, 1), value=-100), "losses": losses} if self.ends else {}
        self.schedule.step(*([self.batch] if self.feeds else []), return_outputs=False, **labels)
        return float(torch.stack(losses).detach().mean()) if losses else 0.0

    def busy_s(self) -> float:
        seconds, self.clock.seconds = self.clock.seconds, 0.0
        return seconds

    def counted(self) -> Counted:
        for part in self.parts:
            part.counting = True
        loss = self.step()
        for part in self.parts:
            part.counting = False
        return Counted(self.count.peak, loss=loss)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def contender(name: str, work: Work, ranks: int) -> Contender:
    """The schedule of this name: a name of torch's, `own-1f1b`, or `ORDER-nN`.

    `-vV` after it means several stages per rank, `-uneven` slices of equal cost, `-exchange` attention exchange.

    Raises ValueError, or what torch raises, where it cannot run this work.
    """
    if name in TORCHS:
        return Torchs(name, work, ranks)
    if name == "own-1f1b":
        return Ours(name, work, SliceOptions(1), ranks)
    order, slices, *more = name.split("-")
    stages = next((int(said[1:]) for said in more if said[0] == "v"), 1)
    balance = next((said for said in more if said in ("uneven", "exchange")), "none")
    return Ours(name, work, SliceOptions(int(slices[1:]), stages, order, balance=balance), ranks)  # type: ignore[arg-type]
