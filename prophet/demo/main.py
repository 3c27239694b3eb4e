"""`prophet demo`: train without and with balancing, show what happened, write it down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding

from prophet.demo.launch import LaunchConfig, launch
from prophet.demo.results import (
    Outcome,
    Prediction,
    balance_line,
    headline,
    loss_line,
    make_report,
    measured_table,
    outcome_of,
    predict,
    predicted_table,
    remarks,
    summarise,
)
from prophet.demo.text import load_corpus
from prophet.ranks.cores import usable_cores
from prophet.report import Table, check_can_draw, write_report
from prophet.scheduler.timeline import write_trace
from prophet.terminal import Column, FittedTable
from prophet.terminal import console as new_console


def run_demo(config: LaunchConfig, console: Console | None, *, cores: int | None = None) -> dict[str, Any]:
    """Run the demo and return what `summary.json` holds.

    Writes `report.html`, `routing.npz`, `metrics.jsonl`, `step.json` (a trace of both runs' last step, first seed, for
    a viewer such as Perfetto) and `summary.json` into `config.out`. Progress goes to standard error.

    Args:
        config: Where and how the demo runs.
        console: Gets the result, its first line what balancing gains; None: nobody.
        cores: Physical cores that the ranks may use; None: find out.

    Raises:
        TextError: The text cannot be used.
        RankFailed: A rank has died, or the time is up.
    """
    # A missing Matplotlib is named now, not after minutes of training
    check_can_draw()
    cores = usable_cores() if cores is None else cores
    # Standard error, so that --json leaves nothing but JSON on standard output
    status = new_console(stderr=True)
    model, train = config.train.model, config.train
    source = load_corpus(config.text).source
    status.print(
        f"Training byte-level MoE language models on the {source}: {model.blocks} blocks, {model.experts} experts, "
        f"top {model.top_k}. {config.ranks} ranks{', a GPU each' * config.on_gpus}; cores they may use: {cores}. "
        f"Without and with balancing in turns, {train.steps} steps each from each of {len(config.seeds)} seeds.",
        highlight=False,
    )
    # Ranks are separate processes; this one only watches them
    outcome = outcome_of(launch(config), config, cores=cores)
    status.print("Predicting the same routing on real machines", highlight=False)
    predictions = predict(outcome.first["on"].counts, model.top_k)
    status.print("Drawing the report", highlight=False)
    # The summary is written first: it is there even if drawing fails
    summary = summarise(outcome)
    (config.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    write_trace(config.out / "step.json", {run.name: run.spans for run in outcome.first.values()})
    write_report(config.out / "report.html", make_report(outcome, config, predictions, source=source))
    if console is not None:
        _show(console, outcome, config, predictions)
    return summary


def _show(console: Console, outcome: Outcome, config: LaunchConfig, predictions: Sequence[Prediction]) -> None:
    for line in (headline(outcome), balance_line(outcome), loss_line(outcome)):
        console.print(line, highlight=False, soft_wrap=True)
    console.print()
    console.print(fitted(measured_table(outcome), (0, 0, 0)))
    console.print()
    for remark in remarks(outcome, config):
        console.print(Padding(f"• {remark}", (0, 0, 0, 2)), highlight=False)
    console.print()
    if predictions:
        console.print(fitted(predicted_table(predictions), (0, 2, 1, 3, 0)))
        console.print()
    console.print(f"Open {config.out / 'report.html'} in a browser.", highlight=False, soft_wrap=True)
    others = "routing.npz (for prophet plan), step.json (for Perfetto), metrics.jsonl, summary.json"
    console.print(f"Beside it: {others}", highlight=False, soft_wrap=True)


def fitted(table: Table, ranks: Sequence[int]) -> FittedTable:
    """Make a report's table fit a terminal; the first column has text, the others figures.

    Args:
        table: The table.
        ranks: Rank of every column: where there is little room, those of a higher one go first.
    """
    columns = [
        Column(head, rank, "right" if index else "left", wrap=not index)
        for index, (head, rank) in enumerate(zip(table.columns, ranks, strict=True))
    ]
    return FittedTable(columns, table.rows, table.title, table.caption)
