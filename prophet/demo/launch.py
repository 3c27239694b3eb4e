"""Starts the demo's ranks as processes of this machine, watches them, and brings their results home.

Every wait ends: ranks give up on each other after the training's time limit, and the launcher ends all of them when
one dies or when the whole run takes too long.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import signal
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from prophet.comm import PeerLost
from prophet.demo.progress import ProgressBar
from prophet.demo.text import load_corpus
from prophet.demo.train import Listener, MetricsFile, RunResult, TraceFile, TrainConfig, train
from prophet.planner import warm
from prophet.spec import check_experts_per_rank
from prophet.traces import TraceWriter

RUNS = (("off", "static"), ("on", "prophet"))
_GRACE_S = 5.0  # for the other ranks to notice and to say what they saw


class DemoError(RuntimeError):
    """The demo could not run to its end; the message says which rank ended, and how."""


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

    Writes `metrics.jsonl` and `routing.npz` (the routing of the last run) into `config.out`. Raises `DemoError` when
    a rank dies or the time is up, and `SpecError` when the experts cannot be divided among the ranks; no process
    survives.
    """
    check_experts_per_rank(config.train.model.experts, config.ranks)
    if config.train.sequences % config.ranks or config.train.held_out_sequences % config.ranks:
        raise DemoError(
            f"{config.train.sequences} training and {config.train.held_out_sequences} held-out sequences "
            f"cannot be divided among {config.ranks} ranks"
        )
    load_corpus(config.text)  # says what is wrong with the text before anything is started
    warm()  # compiles the planner once, where four ranks would each compile it
    config.out.mkdir(parents=True, exist_ok=True)
    (config.out / "metrics.jsonl").unlink(missing_ok=True)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="prophet-demo-") as scratch:
        folder = Path(scratch)
        processes = [
            context.Process(target=_rank_main, args=(rank, config, folder), name=f"rank {rank}", daemon=True)
            for rank in range(config.ranks)
        ]
        try:
            for process in processes:
                process.start()
            _watch(processes, folder, config.limit_s)
        finally:
            _end(processes)
        return {name: RunResult.load(folder / f"{name}.npz") for name, _ in config.runs}


def _watch(processes: Sequence[BaseProcess], folder: Path, limit_s: float) -> None:
    """Wait until all have ended well; raise `DemoError` otherwise."""
    deadline = time.monotonic() + limit_s
    running = list(processes)
    while running:
        left = deadline - time.monotonic()
        if left <= 0:
            names = ", ".join(p.name for p in running)
            raise DemoError(f"the demo took more than {limit_s:g} s and was ended; still running: {names}")
        multiprocessing.connection.wait([p.sentinel for p in running], timeout=left)
        failed = [p for p in running if p.exitcode not in (None, 0)]
        if failed:
            limit = time.monotonic() + _GRACE_S
            for p in running:
                p.join(max(0.0, limit - time.monotonic()))
            raise DemoError(_explain(failed[0], processes, folder))
        running = [p for p in running if p.exitcode is None]


def _explain(first: BaseProcess, processes: Sequence[BaseProcess], folder: Path) -> str:
    """Say which rank ended how: the one that was not merely left alone by another is the cause."""
    said: dict[str, dict[str, str]] = {}
    for rank, process in enumerate(processes):
        with contextlib.suppress(OSError, ValueError):
            said[process.name] = json.loads((folder / f"error-{rank}.json").read_text(encoding="utf-8"))
    killed = [p for p in processes if p.exitcode is not None and p.exitcode < 0 and p.name not in said]
    causes = [name for name, words in said.items() if words["kind"] not in (PeerLost.__name__, "CollectiveTimeout")]
    if killed:
        message = f"{killed[0].name} was ended by {_signal_name(-(killed[0].exitcode or 0))}"
    elif causes:
        message = f"{causes[0]} failed: {said[causes[0]]['kind']}: {said[causes[0]]['message']}"
    else:
        message = f"{first.name} ended with exit code {first.exitcode}"
    others = [words["message"] for name, words in said.items() if name not in causes[:1]]
    return message + (f"; {others[0]}" if others else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end(processes: Sequence[BaseProcess]) -> None:
    """Leave no process behind."""
    started = [p for p in processes if p.pid is not None]
    for process in started:
        if process.is_alive():
            process.terminate()
    for process in started:
        process.join(_GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()


def _rank_main(rank: int, config: LaunchConfig, folder: Path) -> None:
    """Body of one rank's process; leaves a note where it fails."""
    try:
        _rank_body(rank, config, folder)
    except BaseException as error:
        words = {"kind": type(error).__name__, "message": str(error).strip() or repr(error)}
        (folder / f"error-{rank}.json").write_text(json.dumps(words), encoding="utf-8")
        (config.out / f"error-rank-{rank}.txt").write_text(traceback.format_exc(), encoding="utf-8")
        raise SystemExit(1) from None


def _rank_body(rank: int, config: LaunchConfig, folder: Path) -> None:
    torch.set_num_threads(config.threads)
    # A file in a private folder is the meeting point: no port has to be free.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting-point'}",
        rank=rank,
        world_size=config.ranks,
        timeout=timedelta(seconds=config.train.timeout_s),
    )
    try:
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
            if rank == 0:
                result.save(folder / f"{name}.npz")
    finally:
        dist.destroy_process_group()
