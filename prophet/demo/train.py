"""One rank's training loop with `prophet.attach`, as a user would write it, for several equal models side by side.

They differ in their planner alone, train on the same tokens, and take turns of a few steps. So each turn of one has a
turn of every other beside it that begins in an equal state, a few seconds apart on a machine that has not changed.

Shape legend: T steps, L layers, R ranks, E experts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prophet.demo.model import ModelConfig, MoEGPT
from prophet.demo.text import Corpus, held_out_rows, rank_batch
from prophet.engine.attach import attach
from prophet.engine.config import EngineConfig
from prophet.engine.step_report import StepReport
from prophet.machine.presets import CLUSTERS
from prophet.planner.base import Planner
from prophet.ranks.collective import DEFAULT_TIMEOUT_S, Collective
from prophet.ranks.device.clocks import synchronize
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import collective_for
from prophet.scheduler.recording import Recording
from prophet.scheduler.timeline import Span
from prophet.spec import FloatArray, IntArray, Topology

_CPU = torch.device("cpu")
ACTIVITIES = ("gate", "counts", "a2a", "expert", "exposed_trans", "exposed_agg", "plan", "split")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """What is trained, and for how long.

    Attributes:
        model: Sizes of the model.
        steps: Steps of each model.
        turn: Steps of one model before another one's.
        sequences_per_rank: Sequences of a rank in one step.
        held_out_sequences_per_rank: Rows of held-out text.
        learning_rate: Step size of the optimizer.
        seed: Seed of initial values and data.
        slots_per_rank: Replicas that a rank may hold per layer.
        timeout_s: Limit in seconds on every wait for another rank.

    Raises:
        ValueError: A number is out of range.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    steps: int = 40
    turn: int = 4
    sequences_per_rank: int = 32
    held_out_sequences_per_rank: int = 32
    learning_rate: float = 1e-3
    seed: int = 0
    slots_per_rank: int = 2
    timeout_s: float = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        for name in ("steps", "turn", "sequences_per_rank", "held_out_sequences_per_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"TrainConfig.{name} must be at least 1, got {getattr(self, name)}")
        if not self.learning_rate > 0 or not self.timeout_s > 0:
            raise ValueError("TrainConfig.learning_rate and timeout_s must be positive")
        if self.seed < 0:
            raise ValueError(f"TrainConfig.seed must not be negative, got {self.seed}")


def sizes_for_gpus(config: TrainConfig) -> TrainConfig:
    """The same with a model and batches that keep a GPU busy for longer than a launch takes."""
    model = replace(config.model, dim=1024, heads=16, hidden=4096)
    return replace(config, model=model, sequences_per_rank=128)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class RunResult:
    """Measurements of one run. Equal on all ranks, but for `step_s` and `spans`, which are this rank's.

    Attributes:
        name: Name of the run.
        tokens_per_step: Tokens of all ranks in a step.
        loss: Mean over ranks, [T].
        step_s: Seconds of every step by this rank's clock, [T].
        rank_load: Rows that every rank computed, [T, L, R].
        copies: Replicas that every rank held, [T, L, R].
        counts: Tokens by rank and expert, [T, L, R, E].
        seconds: Seconds of each activity, by the host's clock or a GPU's: mean over ranks of the median over steps.
        held_out_loss: Loss on held-out text after the last step.
        spans: What happened on this rank in the last step.
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
        """Write the result to an npz archive without pickle."""
        values = {k: getattr(self, k) for k in ("name", "tokens_per_step", "seconds", "held_out_loss")}
        values["spans"] = [astuple(span) for span in self.spans]
        arrays = {k: getattr(self, k) for k in ("loss", "step_s", "rank_load", "copies", "counts")}
        # What is no array goes in as a JSON string, since numpy would pickle it
        np.savez(path, words=np.asarray(json.dumps(values)), **arrays)

    @classmethod
    def load(cls, path: Path) -> RunResult:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as z:
            values = json.loads(str(z["words"]))
            values["spans"] = tuple(Span(*span) for span in values["spans"])
            return cls(**values, **{k: z[k] for k in z.files if k != "words"})


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step as it ends, for a progress bar or a log.

    Attributes:
        run: Name of the run.
        seed: Its seed.
        step: Number of the step, from 0.
        loss: Mean over ranks.
        step_s: Seconds by this rank's clock.
        tokens: Tokens of all ranks.
        report: What the engine reports of the step.
    """

    run: str
    seed: int
    step: int
    loss: float
    step_s: float
    tokens: int
    report: StepReport

    def as_json(self) -> dict[str, Any]:
        """The step as one line of the run's file."""
        own = {name: getattr(self, name) for name in ("run", "seed", "step", "loss", "step_s")}
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
    planners: Mapping[str, str | Planner],
    group: Any = None,
    device: torch.device = _CPU,
    listeners: Iterable[Listener] = (),
    on_phase: Callable[[str], None] = lambda doing: None,
) -> dict[str, RunResult]:
    """Train a model with each of several planners, in turns; collective over `group`.

    Runs differ in nothing but the planner: the data and the initial parameters follow from the seed.

    Args:
        config: What is trained, and for how long.
        corpus: The text.
        planners: A planner for every run, by name of the run.
        group: The ranks, as `prophet.MoE` takes them; None: all.
        device: Where this rank trains.
        listeners: Called with every step as it ends.
        on_phase: Called with what begins now, in a few words.

    Returns:
        The results by name of the run.
    """
    ranks = collective_for(group, timeout_s=config.timeout_s)
    listeners = list(listeners)
    with ExitStack() as stack:
        on_phase(f"building {len(planners)} equal models")
        runs = [stack.enter_context(closing(_Run(config, n, p, ranks, device))) for n, p in planners.items()]
        on_phase("training")
        for turn, start in enumerate(range(0, config.steps, config.turn)):
            # The order within a round rotates, and begins elsewhere for the next seed, so that no run always goes first
            first = (config.seed + turn) % len(runs)
            for run in runs[first:] + runs[:first]:
                for step in range(start, min(start + config.turn, config.steps)):
                    result = run.step(corpus, step)
                    for listener in listeners:
                        listener(result)
        on_phase("measuring the loss on held-out text")
        return {run.name: run.result(corpus) for run in runs}


class _Run:
    """One model, its optimizer and the engine that balances it."""

    def __init__(
        self, config: TrainConfig, name: str, planner: str | Planner, ranks: Collective, device: torch.device
    ) -> None:
        self.config, self.name, self.device = config, name, device
        # Every run and rank draws the same initial values, so that only the planner differs
        torch.manual_seed(config.seed)
        self.model = MoEGPT(config.model, group=ranks).to(device)
        # Adam divides each gradient by its own size: with the usual eps of 1e-8, parameters that get next to no
        # gradient turn the rounding of a re-ordered sum into full steps, and two equal runs drift apart for no good
        # reason.
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0
        )
        topology = _topology(ranks.size, device)
        balancing = EngineConfig(planner=planner, slots_per_rank=config.slots_per_rank, topology=topology)
        self.engine = attach(self.model, self.optimizer, config=balancing)
        self.steps: list[StepResult] = []
        self.recording: Recording | None = None

    def step(self, corpus: Corpus, step: int) -> StepResult:
        """One optimizer step; the last one is recorded."""
        # A device's time is the host's once the device has done all that it was given, at both ends
        synchronize(self.device)
        began = time.perf_counter()
        with ExitStack() as stack:
            if step == self.config.steps - 1:
                # Recording has a cost, and the last step is the one whose timeline is drawn
                self.recording = stack.enter_context(self.engine.recording())
            loss = self._update(corpus, step)
        if self.engine.last_step is None:
            raise RuntimeError("the engine reported no step: the optimizer's hooks did not run")
        synchronize(self.device)
        step_s = time.perf_counter() - began
        result = StepResult(self.name, self.config.seed, step, loss, step_s, self._tokens(), self.engine.last_step)
        self.steps.append(result)
        return result

    def _update(self, corpus: Corpus, step: int) -> float:
        """Do one optimizer step and return the loss averaged over the ranks."""
        config, ranks = self.config, self.engine.collective
        rows = rank_batch(
            corpus.train,
            seed=config.seed,
            step=step,
            sequences=config.sequences_per_rank * ranks.size,
            length=config.model.length,
            rank=ranks.rank,
            ranks=ranks.size,
        )
        self.optimizer.zero_grad()
        loss = self.model.loss(torch.from_numpy(rows).to(self.device))
        loss.backward()
        # The mean over ranks rides along with the gradients, in one collective
        shown = loss.detach().clone()
        # Experts' gradients are complete when `backward` returns; all other parameters are replicated, as with DDP
        own = [p for p in self.model.parameters() if not getattr(p, "prophet_expert", False)]
        shared = [p.grad for p in own if p.grad is not None]
        ranks.all_reduce_mean_([*shared, shown], op=Operation("mean of gradients"))
        self.optimizer.step()
        return float(shown)

    def _tokens(self) -> int:
        config = self.config
        return config.sequences_per_rank * config.model.length * self.engine.collective.size

    def result(self, corpus: Corpus) -> RunResult:
        """What was measured, once all steps are done; collective."""
        steps, ranks = self.steps, self.engine.collective
        return RunResult(
            name=self.name,
            tokens_per_step=self._tokens(),
            loss=np.array([r.loss for r in steps]),
            step_s=np.array([r.step_s for r in steps]),
            rank_load=np.stack([r.report.rank_load for r in steps]),
            copies=np.stack([r.report.copies for r in steps]),
            counts=np.stack([r.report.counts for r in steps]),
            seconds=_mean_seconds([r.report.seconds for r in steps], ranks),
            held_out_loss=_held_out_loss(self.config, corpus, self.model, ranks, self.device),
            spans=() if self.recording is None else tuple(self.recording.spans()),
        )

    def close(self) -> None:
        """Detach the engine, which ends balancing."""
        self.engine.close()


def _topology(ranks: int, device: torch.device) -> Topology:
    """A preset instead of a measurement at the start, so that every demo plans alike."""
    if device.type == "cpu":
        return CLUSTERS["gloo-loopback"].topology(ranks)
    # One machine's GPUs in float32, slower than most: where a replica pays here it pays on faster links, too
    return replace(CLUSTERS["hpwnv"], ranks_per_node=None).topology(ranks)


@torch.no_grad()
def _held_out_loss(
    config: TrainConfig, corpus: Corpus, model: MoEGPT, ranks: Collective, device: torch.device
) -> float:
    """Loss on text of files that training never sees, mean over the ranks' equal shares."""
    sequences = config.held_out_sequences_per_rank * ranks.size
    rows = held_out_rows(corpus.held_out, sequences=sequences, length=config.model.length)
    # Every rank has as many rows, so the mean over ranks is that over all rows
    mine = torch.from_numpy(rows[ranks.rank :: ranks.size]).to(device)
    model.eval()
    total = torch.zeros((), device=device)
    for piece in mine.split(32):
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
