"""What the ending of a check's processes means: functions from values to values."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prophet.doctor.check import Check, State, finding, merged, unseen
from prophet.errors import SpecError
from prophet.gpu_check.checks import Answer, Task
from prophet.gpu_check.process import Ending


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A check's result, for the page.

    Attributes:
        name: Of the check.
        checks: Its lines, one at least.
        seconds: How long it took.
        paste: Lines for a user's script or shell.
        figures: What goes into the JSON.
        output: The end of what its processes printed, where they did not end well.
    """

    name: str
    checks: Sequence[Check]
    seconds: float = 0.0
    paste: Sequence[str] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    output: str = ""

    @property
    def state(self) -> State:
        """Its worst line's: a finding before something sound, and that before what was not checked."""
        states = {check.state for check in self.checks}
        return next(state for state in STATES if state in states)


STATES: tuple[State, ...] = ("finding", "sound", "not checked")


def verdict(task: Task, ranks: int, ending: Ending, limit_s: float) -> Verdict:
    """Judge a check by how its processes ended and what they wrote.

    Args:
        task: The check.
        ranks: How many ranks it ran on.
        ending: How they ended.
        limit_s: The seconds that it was given.
    """
    answers: list[Answer] = []
    trouble = _trouble(ending, limit_s)
    for rank, text in ending.answers.items():
        try:
            answers.append(Answer.from_json(text))
        except SpecError as error:
            trouble = trouble or f"rank {rank}: {error}"
    # A rank may be lost on purpose, and leave the answer to others
    if not trouble and len(answers) < (1 if task.ends_at_once else ranks):
        trouble = f"{ranks - len(answers)} of {ranks} ranks ended without an answer"
    checks = merged([answer.checks for answer in answers]) if len(answers) == ranks else _of_some(answers)
    if trouble:
        alone = f"`prophet gpu-check --checks {task.name}` runs it alone; please send the JSON below"
        checks = [finding(task.name, trouble, alone), *checks]
    first = answers[0] if answers else Answer(checks=[])
    return Verdict(
        name=task.name,
        checks=checks,
        seconds=ending.seconds,
        paste=first.paste,
        figures=first.figures,
        output=ending.output if trouble else "",
    )


def left_out(task: Task, why: str) -> Verdict:
    """A check that did not run, and why."""
    return Verdict(name=task.name, checks=[unseen(task.name, why)])


def too_few(task: Task, gpus: int) -> str:
    """Why a check needs more GPUs than there are."""
    return f"{'one GPU' if gpus == 1 else f'{gpus} GPUs'}, and it needs {min(task.ranks)}"


def _of_some(answers: Sequence[Answer]) -> list[Check]:
    """The first rank's lines and the others' findings; ranks are not named where some are gone."""
    found = [check for answer in answers[1:] for check in answer.checks if check.state == "finding"]
    return list(dict.fromkeys([*(answers[0].checks if answers else []), *found]))


def _trouble(ending: Ending, limit_s: float) -> str:
    """Say what went wrong with the processes; empty where nothing did."""
    printed = next((line.strip() for line in reversed(ending.output.splitlines()) if line.strip()), "")
    last = f"; it last printed: {printed[:200]}" if printed else ""
    if ending.code is None:
        return f"no end within {limit_s:.0f} s, and was ended{last}"
    if ending.failure:
        return ending.failure
    if ending.code < 0:
        return f"ended by {_signal(-ending.code)}{last}"
    return f"ended with exit code {ending.code}{last}" if ending.code else ""


def _signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name} (was memory short?)" if name == "SIGKILL" else name
