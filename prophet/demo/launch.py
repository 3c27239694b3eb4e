"""Starts the demo's ranks as processes of this machine, watches them, and brings their results home."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from prophet.demo.progress import progress_bar
from prophet.demo.text import load_corpus
from prophet.demo.train import Listener, RunResult, TrainConfig, train
from prophet.errors import SpecError
from prophet.ranks.launch import run_ranks
from prophet.spec import check_experts_per_rank
from prophet.traces.npz import TraceWriter

RUNS = (("off", "static"), ("on", "prophet"))


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """Where and how the demo runs.

    out: folder for what it writes. text: a file or folder to train on instead of the standard library's sources.
    limit_s: on the whole demo.
    """

    out: Path
    train: TrainConfig = field(default_factory=TrainConfig)
    ranks: int = 4
    text: Path | None = None
    limit_s: float = 1200.0


def launch(config: LaunchConfig) -> dict[str, RunResult]:
    """Train every one of `RUNS`, one after the other, and return its results by name.

    Writes `metrics.jsonl` and `routing.npz` (the routing of the last run) into `config.out`. Raises `RankFailed` when
    a rank dies or the time is up; no process survives. Raises `SpecError` when the experts or the sequences cannot be
    divided among the ranks.
    """
    check_experts_per_rank(config.train.model.experts, config.ranks)
    if config.train.sequences % config.ranks or config.train.held_out_sequences % config.ranks:
        raise SpecError(
            f"{config.train.sequences} training and {config.train.held_out_sequences} held-out sequences "
            f"cannot be divided among {config.ranks} ranks"
        )
    load_corpus(config.text)  # says what is wrong with the text before anything is started
    config.out.mkdir(parents=True, exist_ok=True)
    (config.out / "metrics.jsonl").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="prophet-demo-") as scratch:
        folder = Path(scratch)
        run_ranks(
            _rank_body,
            (config, folder),
            ranks=config.ranks,
            folder=folder,
            limit_s=config.limit_s,
            timeout_s=config.train.timeout_s,
            what="the demo",
            traces=config.out,
        )
        return {name: _of_all_ranks(folder, name, config.ranks) for name, _ in RUNS}


def _of_all_ranks(folder: Path, name: str, ranks: int) -> RunResult:
    """Rank 0's result with the spans of all, whose clocks are one: they are processes of one machine."""
    found = [RunResult.load(folder / f"{name}-{rank}.npz") for rank in range(ranks)]
    return replace(found[0], spans=tuple(span for result in found for span in result.spans))


def _rank_body(rank: int, config: LaunchConfig, folder: Path) -> None:
    """What every rank's process does."""
    corpus = load_corpus(config.text)
    for name, planner in RUNS:
        with contextlib.ExitStack() as stack:
            listeners = list(_listeners(config, name, corpus.source, stack)) if rank == 0 else []
            result = train(config.train, corpus, name=name, planner=planner, listeners=listeners)
        result.save(folder / f"{name}-{rank}.npz")


def _listeners(config: LaunchConfig, name: str, source: str, stack: contextlib.ExitStack) -> Iterator[Listener]:
    """Those of rank 0: the log, the progress bar, and for the last run the routing trace."""
    metrics = stack.enter_context((config.out / "metrics.jsonl").open("a", buffering=1, encoding="utf-8"))
    yield lambda step: print(json.dumps(step.as_json()), file=metrics)
    yield stack.enter_context(progress_bar(name, config.train.steps))
    if name != RUNS[-1][0]:
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
            "top_k": model.top_k,
            "tokens": config.train.sequences * model.length // config.ranks,
            "source": f"prophet demo on the {source}",
        },
    )
    trace = stack.enter_context(writer)
    yield lambda step: trace.append(step.report.counts, iteration=step.step)
