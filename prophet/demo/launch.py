"""Starts the demo's ranks as processes of this machine, watches them, and brings their results home."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from prophet.demo.model import ModelConfig
from prophet.demo.progress import StatusWriter, shown_progress
from prophet.demo.text import VOCABULARY, load_corpus
from prophet.demo.train import Listener, RunResult, TrainConfig, train
from prophet.errors import SpecError
from prophet.ranks.launch import run_ranks
from prophet.spec import check_experts_per_rank
from prophet.traces.npz import TraceWriter

PLANNERS = {"off": "static", "on": "prophet"}
# The first three, so that nobody can have picked those that look best
SEEDS = (0, 1, 2)
_FEWEST, _MOST = 2, 8

Results = dict[int, dict[str, RunResult]]  # by seed and name of the run


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """Where and how the demo runs.

    Attributes:
        out: Folder for what it writes.
        ranks: Expert-parallel ranks.
        train: What every seed trains; its own seed is not used.
        seeds: Seeds, all different.
        text: A file or folder to train on; None: the standard library's sources.
        limit_s: Limit in seconds on all ranks together.
        on_gpus: Whether each rank trains on the GPU of its number, over NCCL.

    Raises:
        SpecError: The experts cannot be divided among the ranks, or seeds are equal.
    """

    out: Path
    ranks: int
    train: TrainConfig = field(default_factory=TrainConfig)
    seeds: tuple[int, ...] = SEEDS
    text: Path | None = None
    limit_s: float = 1200.0
    on_gpus: bool = False

    def __post_init__(self) -> None:
        check_experts_per_rank(self.train.model.experts, self.ranks)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise SpecError(f"expected different seeds, at least one, got {self.seeds}")


def default_ranks(cores: int, *, experts: int = ModelConfig().experts) -> int:
    """A rank per core or GPU, as far as the experts can be divided among them; two at least, eight at most."""
    return max(n for n in range(_FEWEST, _MOST + 1) if n <= max(_FEWEST, cores) and experts % n == 0)


def launch(config: LaunchConfig) -> Results:
    """Train a model with each of `PLANNERS` for every seed, and return the results.

    Writes `metrics.jsonl` and `routing.npz` (the balanced run's routing, first seed) into `config.out`, and shows its
    progress on standard error.

    Raises:
        TextError: The text cannot be used.
        RankFailed: A rank has died, or the time is up; no process survives.
    """
    # What is wrong with the text is raised here, before ranks are started
    load_corpus(config.text)
    config.out.mkdir(parents=True, exist_ok=True)
    # Every seed appends to the file, so that of an earlier demo has to go
    (config.out / "metrics.jsonl").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="prophet-demo-") as scratch:
        folder = Path(scratch)
        steps = config.train.steps * len(config.seeds) * len(PLANNERS)
        with shown_progress(folder, ranks=config.ranks, steps=steps):
            run_ranks(
                _rank_body,
                (config, folder),
                ranks=config.ranks,
                folder=folder,
                limit_s=config.limit_s,
                timeout_s=config.train.timeout_s,
                what="the demo",
                traces=config.out,
                on_gpus=config.on_gpus,
            )
        # Read before the folder of the ranks' files goes
        return {seed: {n: _of_all_ranks(folder, seed, n, config.ranks) for n in PLANNERS} for seed in config.seeds}


def _file_of(folder: Path, seed: int, name: str, rank: int) -> Path:
    return folder / f"{seed}-{name}-{rank}.npz"


def _of_all_ranks(folder: Path, seed: int, name: str, ranks: int) -> RunResult:
    """Rank 0's result with the spans of all, whose clocks are one: they are processes of one machine."""
    found = [RunResult.load(_file_of(folder, seed, name, rank)) for rank in range(ranks)]
    return replace(found[0], spans=tuple(span for result in found for span in result.spans))


def _rank_body(rank: int, config: LaunchConfig, folder: Path) -> None:
    """Run one rank, in its process."""
    status = StatusWriter(folder, rank)
    device = torch.device("cuda", rank) if config.on_gpus else torch.device("cpu")
    status.begin("reading the text")
    corpus = load_corpus(config.text)
    for seed in config.seeds:

        def on_phase(doing: str, seed: int = seed) -> None:
            status.begin(f"seed {seed}: {doing}")

        with contextlib.ExitStack() as stack:
            listeners: list[Listener] = []
            if rank == 0:
                listeners = [*_listeners(config, seed, corpus.source, stack), status.step]
            own = replace(config.train, seed=seed)
            results = train(own, corpus, planners=PLANNERS, device=device, listeners=listeners, on_phase=on_phase)
        for name, result in results.items():
            result.save(_file_of(folder, seed, name, rank))
    status.begin("ending")


def _listeners(config: LaunchConfig, seed: int, source: str, stack: contextlib.ExitStack) -> Iterator[Listener]:
    """Make the listeners of rank 0: the log, and for the first seed the routing trace."""
    # Line by line, so that the file can be followed while ranks train
    metrics = stack.enter_context((config.out / "metrics.jsonl").open("a", buffering=1, encoding="utf-8"))
    yield lambda step: print(json.dumps(step.as_json()), file=metrics)
    if seed != config.seeds[0]:
        return
    model = config.train.model
    writer = TraceWriter(
        config.out / "routing.npz",
        layers=model.blocks,
        ranks=config.ranks,
        experts=model.experts,
        meta={
            "model": f"MoE-GPT demo, {model.blocks} blocks, dim {model.dim}, hidden {model.hidden}",
            "dim": model.dim,
            "hidden": model.hidden,
            "experts": model.experts,
            "top_k": model.top_k,
            "activation": "gelu",
            "bias": True,
            "dtype": "float32",
            "layers": model.blocks,
            "heads": model.heads,
            "sequence": model.length,
            "vocabulary": VOCABULARY,
            "tokens": config.train.sequences_per_rank * model.length,
            "source": f"prophet demo on the {source}",
        },
    )
    trace = stack.enter_context(writer)
    # Both runs route alike but for rounding, so one run's counts are enough
    yield lambda step: trace.append(step.report.counts, iteration=step.step) if step.run == "on" else None
