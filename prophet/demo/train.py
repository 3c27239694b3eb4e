"""One rank's training loop with `prophet.attach`, as a user would write it, plus the bookkeeping of the demo.

Shape legend: T steps, L layers, R ranks, E experts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prophet.demo.model import ModelConfig, MoEGPT
from prophet.demo.text import Corpus, held_out_rows, rank_batch
from prophet.engine.attach import attach
from prophet.engine.config import EngineConfig
from prophet.engine.engine import Engine
from prophet.engine.report import StepReport
from prophet.machine.presets import CLUSTERS
from prophet.planner.base import Planner
from prophet.ranks.collective import DEFAULT_TIMEOUT_S, Collective, Operation
from prophet.ranks.process_group import collective_for
from prophet.scheduler.recording import Recording
from prophet.scheduler.timeline import Span
from prophet.spec import FloatArray, IntArray

ACTIVITIES = ("gate", "counts", "a2a", "expert", "exposed_trans", "exposed_agg", "plan", "split")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """What is trained, and for how long.

    sequences: of the global batch, shared by all ranks. held_out_sequences: rows of held-out text, shared likewise.
    timeout_s: limit on every wait for another rank.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    steps: int = 150
    sequences: int = 16
    held_out_sequences: int = 64
    learning_rate: float = 1e-3
    seed: int = 0
    slots_per_rank: int = 2
    timeout_s: float = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        for name in ("steps", "sequences", "held_out_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"TrainConfig.{name} must be at least 1, got {getattr(self, name)}")
        if not self.learning_rate > 0 or not self.timeout_s > 0:
            raise ValueError("TrainConfig.learning_rate and timeout_s must be positive")
        if self.seed < 0:
            raise ValueError(f"TrainConfig.seed must not be negative, got {self.seed}")


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class RunResult:
    """What one run measured. Equal on all ranks, but for `step_s`, which is this rank's clock.

    loss, step_s: [T], the loss is the mean over ranks. rank_load, copies: [T, L, R]. counts: [T, L, R, E].
    seconds: mean over ranks of the median over steps of each activity's host seconds. held_out_loss: after the last
    step. spans: what happened in the last step, by `train` on this rank.
    """

    name: str
    tokens_per_step: int
    loss: FloatArray
    step_s: FloatArray
    rank_load: IntArray
    copies: IntArray
    counts: IntArray
    seconds: dict[str, float]
    held_out_loss: float
    spans: tuple[Span, ...] = ()

    def save(self, path: Path) -> None:
        """Write it to an npz archive without pickle."""
        words = {k: getattr(self, k) for k in ("name", "tokens_per_step", "seconds", "held_out_loss")}
        words["spans"] = [astuple(span) for span in self.spans]
        arrays = {k: getattr(self, k) for k in ("loss", "step_s", "rank_load", "copies", "counts")}
        np.savez(path, words=np.asarray(json.dumps(words)), **arrays)

    @classmethod
    def load(cls, path: Path) -> RunResult:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as z:
            words = json.loads(str(z["words"]))
            words["spans"] = tuple(Span(*values) for values in words["spans"])
            return cls(**words, **{k: z[k] for k in z.files if k != "words"})


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step as it ends, for a progress bar or a log. `loss` is the mean over ranks, `step_s` this rank's clock."""

    run: str
    step: int
    loss: float
    step_s: float
    tokens: int
    report: StepReport

    def as_json(self) -> dict[str, Any]:
        """The step as one line of the run's file."""
        own = {name: getattr(self, name) for name in ("run", "step", "loss", "step_s")}
        return own | {
            "tokens_per_s": self.tokens / self.step_s,
            "max_mean": self.report.max_mean,
            "max_mean_static": self.report.max_mean_static,
            "copies_per_rank": float(self.report.copies.mean()),
            "rank_load": self.report.rank_load.tolist(),
            "seconds": self.report.seconds,
        }


Listener = Callable[[StepResult], None]


def train(
    config: TrainConfig,
    corpus: Corpus,
    *,
    name: str,
    planner: str | Planner,
    group: Any = None,
    listeners: Iterable[Listener] = (),
) -> RunResult:
    """Train from `config.seed` with `planner`, a name or an object; collective over `group`.

    Everything that differs between runs is `planner`: the data and the initial parameters follow from the seed.
    """
    torch.manual_seed(config.seed)
    tokens = config.sequences * config.model.length
    ranks = collective_for(group, timeout_s=config.timeout_s)
    model = MoEGPT(config.model, group=ranks)
    # Adam divides each gradient by its own size: with the usual eps of 1e-8, parameters that get next to no gradient
    # turn the rounding of a re-ordered sum into full steps, and two equal runs drift apart for no good reason.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0
    )
    topology = CLUSTERS["gloo-loopback"].topology(ranks.size)
    balancing = EngineConfig(planner=planner, slots_per_rank=config.slots_per_rank, topology=topology)
    engine = attach(model, optimizer, config=balancing)
    try:
        steps: list[StepResult] = []
        recording: Recording | None = None
        listeners = list(listeners)
        for step in range(config.steps):
            began = time.perf_counter()
            with ExitStack() as stack:
                recording = stack.enter_context(engine.recording()) if step == config.steps - 1 else None
                loss = _step(config, corpus, model, optimizer, engine, step)
            if engine.last_step is None:
                raise RuntimeError("the engine reported no step: the optimizer's hooks did not run")
            step_s = time.perf_counter() - began
            result = StepResult(name, step, loss, step_s, tokens, engine.last_step)
            for listener in listeners:
                listener(result)
            steps.append(result)
        held_out = _held_out_loss(config, corpus, model, engine.collective)
        seconds = _mean_seconds([r.report.seconds for r in steps], engine.collective)
    finally:
        engine.close()
    return RunResult(
        name=name,
        tokens_per_step=tokens,
        loss=np.array([r.loss for r in steps]),
        step_s=np.array([r.step_s for r in steps]),
        rank_load=np.stack([r.report.rank_load for r in steps]),
        copies=np.stack([r.report.copies for r in steps]),
        counts=np.stack([r.report.counts for r in steps]),
        seconds=seconds,
        held_out_loss=held_out,
        spans=() if recording is None else tuple(recording.spans()),
    )


def _step(
    config: TrainConfig, corpus: Corpus, model: MoEGPT, optimizer: torch.optim.Optimizer, engine: Engine, step: int
) -> float:
    """One optimizer step; returns the loss averaged over the ranks."""
    ranks = engine.collective
    rows = rank_batch(
        corpus.train,
        seed=config.seed,
        step=step,
        sequences=config.sequences,
        length=config.model.length,
        rank=ranks.rank,
        ranks=ranks.size,
    )
    optimizer.zero_grad()
    loss = model.loss(torch.from_numpy(rows))
    loss.backward()
    shown = loss.detach().clone()
    shared = [p.grad for p in model.parameters() if p.grad is not None and not getattr(p, "prophet_expert", False)]
    ranks.all_reduce_mean_([*shared, shown], op=Operation("mean of gradients"))
    optimizer.step()
    return float(shown)


@torch.no_grad()
def _held_out_loss(config: TrainConfig, corpus: Corpus, model: MoEGPT, ranks: Collective) -> float:
    """Loss on text of files that training never sees, mean over the ranks' equal shares."""
    rows = held_out_rows(corpus.held_out, sequences=config.held_out_sequences, length=config.model.length)
    mine = torch.from_numpy(rows[ranks.rank :: ranks.size])
    model.eval()
    total = torch.zeros(())
    for piece in mine.split(16):
        total += model.loss(piece) * (len(piece) / len(mine))
    model.train()
    ranks.all_reduce_mean_([total], op=Operation("mean of held-out losses"))
    return float(total)


def _mean_seconds(steps: list[dict[str, float]], ranks: Collective) -> dict[str, float]:
    """Median over steps of every activity's seconds, then the mean over ranks."""
    medians = [float(np.median([s.get(name, 0.0) for s in steps])) for name in ACTIVITIES]
    mean = torch.tensor(medians, dtype=torch.float64)
    ranks.all_reduce_mean_([mean], op=Operation("mean of timings"))
    return dict(zip(ACTIVITIES, mean.tolist(), strict=True))
