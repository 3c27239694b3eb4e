"""Rank 0's progress bar: loss, tokens per second and the balance of the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from prophet.demo.train import Listener, StepResult

_LINES = 5  # where the output is not a terminal: this many lines instead of a bar


@contextmanager
def progress_bar(name: str, steps: int) -> Iterator[Listener]:
    """A live bar on a terminal, a few lines elsewhere (a log, CI); it is told of every step."""
    console = Console(stderr=True)
    columns = (
        TextColumn("balancing [bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(),
    )
    tokens_per_s = 0.0

    def show(result: StepResult) -> None:
        nonlocal tokens_per_s
        rate, done = result.tokens / result.step_s, result.step + 1
        tokens_per_s = rate if done <= 2 else 0.9 * tokens_per_s + 0.1 * rate
        balance = f"busiest rank {result.report.max_mean:.2f} × mean"
        shown = f"loss {result.loss:.3f}  {tokens_per_s:,.0f} tokens/s  {balance}"
        bar.update(task, completed=done, shown=shown)
        if not console.is_terminal and (done % -(-steps // _LINES) == 0 or done == steps):
            console.print(f"balancing {name}: step {done}/{steps}  {shown}", highlight=False, soft_wrap=True)

    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=steps, shown="")
        yield show
