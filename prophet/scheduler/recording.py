"""What a step really did: when each operation began and ended, and what was computed in between, by window."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from prophet.ranks.collective import Channel, Collective, Pending
from prophet.ranks.forwarding import ForwardingCollective, ForwardingPending
from prophet.ranks.operation import Operation
from prophet.scheduler.actions import Window
from prophet.scheduler.timeline import Recorder, Span


class _Observed(ForwardingPending):
    """A transfer; `done` learns once when its wait began and ended."""

    def __init__(self, inner: Pending, done: Callable[[float, float], None]) -> None:
        super().__init__(inner)
        self._done: Callable[[float, float], None] | None = done

    def wait(self) -> Tensor:
        began = time.perf_counter()
        result = super().wait()
        if self._done is not None:
            self._done(began, time.perf_counter())
            self._done = None
        return result


class ObservedCollective(ForwardingCollective):
    """Records spans: "tokens" while the caller waits, "weights" from launch to arrival.

    Waiting for a transfer is recorded on the stream "waits".

    Args:
        inner: What carries everything out.
        recorder: Takes the spans; None while nothing is recorded.
    """

    def __init__(self, inner: Collective, recorder: Recorder | None = None) -> None:
        super().__init__(inner)
        self.recorder = recorder

    def around(self, inner: Collective) -> Collective:
        return ObservedCollective(inner, self.recorder)

    def transfer(self, launch: Callable[[], Pending], op: Operation, channel: Channel) -> Pending:
        name, recorder, launched = str(op), self.recorder, time.perf_counter()
        pending = launch()
        # asked at launch: a transfer that began unrecorded stays so
        if recorder is None:
            return pending
        if channel == "weights":
            # transfers arrive while nobody waits, so the end of a wait says nothing of their length
            pending.watch()

        def done(began: float, ended: float) -> None:
            if channel == "tokens":
                recorder.add(name, "tokens", launched, ended)
                return
            # a callback may run after the wait has returned, or not know when the result arrived
            arrived = ended if pending.arrived_s is None else min(pending.arrived_s, ended)
            recorder.add(name, "weights", launched, max(arrived, launched))
            recorder.add(f"wait for {name}", "waits", began, ended)

        return _Observed(pending, done)

    def gather(self, call: Callable[[], Tensor], op: Operation, channel: Channel) -> Tensor:
        began = time.perf_counter()
        result = call()
        if self.recorder is not None:
            stream = "tokens" if channel == "tokens" else "waits"
            self.recorder.add(str(op), stream, began, time.perf_counter())
        return result


@dataclass(frozen=True, slots=True)
class StepMarks:
    """When a step's windows began, by name and in order, and when the step ended; seconds of `time.perf_counter`."""

    windows: tuple[tuple[float, str], ...]
    ended_s: float

    @property
    def began_s(self) -> float:
        return self.windows[0][0]


def compute_spans(spans: Iterable[Span], marks: StepMarks, rank: int) -> list[Span]:
    """Return the compute of one step, named by window: what lies between exchanges of tokens and waits.

    A window takes all compute since the last exchange of tokens before it, unless another window began there already.

    Args:
        spans: What was recorded of exchanges and waits.
        marks: When the step's windows began, and when it ended.
        rank: The rank whose spans they are.
    """
    taken = sorted(
        s for s in spans if s.stream in ("tokens", "waits") and marks.began_s <= s.start_s and s.end_s <= marks.ended_s
    )
    exchanges = [s for s in taken if s.stream == "tokens"]
    edges = _edges(exchanges, marks)
    found: list[Span] = []
    since, name = marks.began_s, edges[0][1]
    for start_s, end_s in [*((s.start_s, s.end_s) for s in taken), (marks.ended_s, marks.ended_s)]:
        # a window that begins between two exchanges cuts the compute there
        while edges and edges[0][0] < start_s:
            at, later = edges.pop(0)
            if at > since:
                found.append(Span(since, at, rank, "compute", name))
                since = at
            name = later
        if start_s > since:
            found.append(Span(since, start_s, rank, "compute", name))
        # spans of exchanges and waits may overlap, as those of several threads
        since = max(since, end_s)
    return found


def _edges(exchanges: Sequence[Span], marks: StepMarks) -> list[tuple[float, str]]:
    """Return when the compute of each window begins: the first one after an exchange has all from that exchange on."""
    edges: list[tuple[float, str]] = []
    ends = [marks.began_s, *(s.end_s for s in exchanges)]
    for at, name in marks.windows:
        # announced twice in a row it is still one window
        if edges and edges[-1][1] == name:
            continue
        after = max(end for end in ends if end <= at)
        edges.append((after if not edges or edges[-1][0] < after else at, name))
    return edges


class Recording:
    """What one rank does in the steps of an engine while it is recorded; made by `Engine.recording`.

    The engine says when steps begin and end, and when windows do. They are "start", then route(i), FEC(i), FNEC(i) for
    every block, BNEC(i) and BEC(i) backward, "end", and "update" once the gradients are complete. Nobody knows here
    when the loss is done: until `enter(Window("BNEC", last))` all that the last block computes is its FNEC.

    Args:
        rank: The rank whose spans they are.
        limit: Most spans that are kept.
    """

    def __init__(self, rank: int, *, limit: int = 100_000) -> None:
        self.recorder = Recorder(rank, limit=limit)
        self._steps: list[StepMarks] = []
        # of the step under way, if it began while recorded
        self._windows: list[tuple[float, str]] = []
        self._gradients_s = 0.0

    def begin(self) -> None:
        """Note that a step begins."""
        self._gradients_s = time.perf_counter()
        self._windows = [(self._gradients_s, "start")]

    def enter(self, window: Window | str) -> None:
        """Note that a window begins, or what has a name instead."""
        name = window if isinstance(window, str) else str(window) if window.block is not None else window.kind.lower()
        if self._windows:
            self._windows.append((time.perf_counter(), name))

    def gradients(self) -> None:
        """Note that a backward pass has ended."""
        self._gradients_s = time.perf_counter()

    def end(self) -> None:
        """Note that the step has ended; one that had begun before the recording does not count."""
        if self._windows:
            # equal where no backward pass has ended, as when the step only ran forward
            if self._gradients_s > self._windows[0][0]:
                self._windows.append((self._gradients_s, "update"))
            self._steps.append(StepMarks(tuple(sorted(self._windows)), time.perf_counter()))
            self._windows = []

    @property
    def steps(self) -> int:
        """How many whole steps were recorded."""
        return len(self._steps)

    def compute(self, step: int = -1) -> list[Span]:
        """Return what was computed in one recorded step, by window."""
        return compute_spans(self.recorder.spans(), self._steps[step], self.recorder.rank)

    def spans(self, step: int = -1) -> list[Span]:
        """Return one recorded step, by default the last: what travelled, what was waited for, and what was computed."""
        marks = self._steps[step]
        found = [s for s in self.recorder.spans() if marks.began_s <= s.start_s <= marks.ended_s]
        return sorted([*found, *self.compute(step)])
