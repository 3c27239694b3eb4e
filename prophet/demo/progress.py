"""Rank 0's progress bar: loss, tokens per second and the balance of the ranks."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from prophet.demo.train import StepResult

_LINES = 5  # where the output is not a terminal: this many lines instead of a bar


class ProgressBar:
    """A live bar on a terminal, a few lines elsewhere (a log, CI)."""

    def __init__(self, name: str, steps: int, console: Console | None = None) -> None:
        self._name, self._steps = name, steps
        self._console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("balancing [bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(name, total=steps, shown="")
        self._tokens_per_s = 0.0

    def __call__(self, result: StepResult) -> None:
        rate = result.tokens / result.step_s
        self._tokens_per_s = rate if result.step < 2 else 0.9 * self._tokens_per_s + 0.1 * rate
        shown = (
            f"loss {result.loss:.3f}  {self._tokens_per_s:,.0f} tokens/s  "
            f"busiest rank {result.report.max_mean:.2f} × mean"
        )
        self._progress.update(self._task, completed=result.step + 1, shown=shown)
        every = -(-self._steps // _LINES)
        if not self._console.is_terminal and ((result.step + 1) % every == 0 or result.step + 1 == self._steps):
            self._console.print(
                f"balancing {self._name}: step {result.step + 1}/{self._steps}  {shown}",
                highlight=False,
                soft_wrap=True,
            )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
