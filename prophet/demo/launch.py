"""Starts the demo's ranks as processes of this machine, watches them, and brings their results home.

Every wait ends: ranks give up on each other after the training's time limit, and the launcher ends all of them when
one dies or when the whole run takes too long.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from prophet.demo.progress import ProgressBar
from prophet.demo.text import load_corpus
from prophet.demo.train import Listener, MetricsFile, RunResult, TraceFile, TrainConfig, train
from prophet.errors import SpecError
from prophet.planner import warm
from prophet.ranks.launch import run_ranks
from prophet.scheduler.timeline import Span
from prophet.spec import check_experts_per_rank
from prophet.traces.npz import TraceWriter

RUNS = (("off", "static"), ("on", "prophet"))


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """Where and how the demo runs.

    out: folder for what it writes. text: a file or folder to train on instead of the standard library's sources.
    limit_s: on the whole demo. threads: of torch on each rank.
    """

    out: Path
    train: TrainConfig = field(default_factory=TrainConfig)
    ranks: int = 4
    text: Path | None = None
    limit_s: float = 1200.0
    threads: int = 1
    runs: Sequence[tuple[str, str]] = RUNS


def launch(config: LaunchConfig) -> dict[str, RunResult]:
    """Train every run of `config.runs`, one after the other, and return its results by name.

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
    warm()  # compiles the planner once, where four ranks would each compile it
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
            threads=config.threads,
            what="the demo",
            traces=config.out,
        )
        return {
            name: replace(RunResult.load(folder / f"{name}.npz"), spans=_read_spans(folder, name, config.ranks))
            for name, _ in config.runs
        }


def _spans_file(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}-{rank}.json"


def _read_spans(folder: Path, name: str, ranks: int) -> tuple[Span, ...]:
    """The spans of all ranks, whose clocks are one: they are processes of one machine."""
    return tuple(
        Span(*values)
        for rank in range(ranks)
        for values in json.loads(_spans_file(folder, name, rank).read_text(encoding="utf-8"))
    )


def _rank_body(rank: int, config: LaunchConfig, folder: Path) -> None:
    """What every rank's process does."""
    corpus = load_corpus(config.text)
    warm()
    for name, planner in config.runs:
        with contextlib.ExitStack() as stack:
            listeners: list[Listener] = []
            if rank == 0:
                last = name == config.runs[-1][0]
                metrics = stack.enter_context((config.out / "metrics.jsonl").open("a", encoding="utf-8"))
                listeners = [MetricsFile(metrics), stack.enter_context(ProgressBar(name, config.train.steps))]
                if last:
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
                            "source": f"prophet demo on the {corpus.source}",
                        },
                    )
                    listeners.append(TraceFile(stack.enter_context(writer)))
            result = train(config.train, corpus, name=name, planner=planner, listeners=listeners)
        spans = [[s.start_s, s.end_s, s.rank, s.stream, s.name] for s in result.spans]
        _spans_file(folder, name, rank).write_text(json.dumps(spans), encoding="utf-8")
        if rank == 0:
            result.save(folder / f"{name}.npz")
