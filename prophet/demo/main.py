"""`prophet demo`: train without and with balancing, show what happened, write it down."""

from __future__ import annotations

import json
import os
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable

from prophet.demo.launch import LaunchConfig, launch
from prophet.demo.results import make_report, measured_table, predict, predicted_table, remarks, summarise
from prophet.demo.text import load_corpus
from prophet.report import Table, write_report
from prophet.scheduler.timeline import write_trace


def run_demo(config: LaunchConfig, console: Console) -> dict[str, Any]:
    """Run the demo and return what `summary.json` holds.

    Writes `report.html`, `routing.npz`, `metrics.jsonl`, `step.json` (a trace of both runs' last step, for a viewer
    such as Perfetto) and `summary.json` into `config.out`; raises what `launch` raises.
    """
    model, train = config.train.model, config.train
    source = load_corpus(config.text).source
    console.print(
        f"Training a byte-level MoE language model on the {source}: {model.blocks} blocks, {model.experts} experts, "
        f"top {model.top_k}, {config.ranks} expert-parallel ranks, {train.steps} steps; without balancing, then with.",
        highlight=False,
    )
    results = launch(config)
    summary = summarise(results)
    predictions = predict(results["on"].counts, model.top_k)
    cores = os.cpu_count()
    (config.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    write_trace(config.out / "step.json", {run.name: run.spans for run in results.values()})
    report = make_report(train, results, summary, predictions, source=source, cores=cores)
    write_report(config.out / "report.html", report)
    console.print()
    print_table(console, measured_table(results, summary))
    for remark in remarks(results, cores):
        console.print(Padding(f"• {remark}", (0, 0, 0, 2)), highlight=False)
    console.print()
    if predictions:
        print_table(console, predicted_table(predictions))
    names = ("report.html", "routing.npz", "metrics.jsonl", "step.json", "summary.json")
    console.print(f"Written to {config.out}: {', '.join(names)}", highlight=False, soft_wrap=True)
    return summary


def print_table(console: Console, table: Table) -> None:
    """Show a report's table on the console."""
    shown = RichTable(title=table.title, caption=table.caption, title_justify="left", caption_justify="left")
    for index, column in enumerate(table.columns):
        shown.add_column(column, justify="left" if index == 0 else "right")
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)
    console.print()
