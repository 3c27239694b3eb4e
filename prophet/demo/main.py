"""`prophet demo`: train without and with balancing, show what happened, write it down."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable

from prophet.demo.launch import LaunchConfig, launch
from prophet.demo.results import (
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


def run_demo(config: LaunchConfig, console: Console, *, cores: int | None = None) -> dict[str, Any]:
    """Run the demo and return what `summary.json` holds.

    cores: physical ones that the ranks may use; None finds out. The console gets the result, its first line what
    balancing gains; progress goes to standard error. Writes `report.html`, `routing.npz`, `metrics.jsonl`, `step.json`
    (a trace of both runs' last step, first seed, for a viewer such as Perfetto) and `summary.json` into `config.out`;
    raises what `launch` raises.
    """
    check_can_draw()
    cores = usable_cores() if cores is None else cores
    told = Console(stderr=True)
    model, train = config.train.model, config.train
    source = load_corpus(config.text).source
    told.print(
        f"Training byte-level MoE language models on the {source}: {model.blocks} blocks, {model.experts} experts, "
        f"top {model.top_k}. {config.ranks} ranks; cores they may use: {cores}. Without and with balancing in turns, "
        f"{train.steps} steps each from each of {len(config.seeds)} seeds.",
        highlight=False,
    )
    outcome = outcome_of(launch(config), config, cores=cores)
    told.print("Predicting the same routing on real machines", highlight=False)
    predictions = predict(outcome.first["on"].counts, model.top_k)
    told.print("Drawing the report", highlight=False)
    summary = summarise(outcome)
    (config.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    write_trace(config.out / "step.json", {run.name: run.spans for run in outcome.first.values()})
    write_report(config.out / "report.html", make_report(outcome, config, predictions, source=source))
    for line in (headline(outcome), balance_line(outcome), loss_line(outcome)):
        console.print(line, highlight=False, soft_wrap=True)
    console.print()
    print_table(console, measured_table(outcome))
    for remark in remarks(outcome, config):
        console.print(Padding(f"• {remark}", (0, 0, 0, 2)), highlight=False)
    console.print()
    if predictions:
        print_table(console, predicted_table(predictions))
    console.print(f"Open {config.out / 'report.html'} in a browser.", highlight=False, soft_wrap=True)
    others = "routing.npz (for prophet plan), step.json (for Perfetto), metrics.jsonl, summary.json"
    console.print(f"Beside it: {others}", highlight=False, soft_wrap=True)
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
