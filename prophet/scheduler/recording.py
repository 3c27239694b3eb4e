"""What a step really did: a collective that notes when its operations begin and end, and what that says of compute.

Shape legend: L blocks, R ranks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from prophet.ranks.collective import (
    Channel,
    Collective,
    Operation,
    Pending,
)
from prophet.scheduler.timeline import Recorder, Span

_TOKEN_OP = re.compile(r"^(exchange of counts|dispatch|combine|combine backward|dispatch backward) of layer (\d+)$")


class _Observed(Pending):
    def __init__(self, inner: Pending, done: Callable[[float, float], None]) -> None:
        self._inner = inner
        self._done: Callable[[float, float], None] | None = done

    def ended(self) -> bool:
        return self._inner.ended()

    def wait(self) -> Tensor:
        began = time.perf_counter()
        result = self._inner.wait()
        if self._done is not None:
            self._done(began, time.perf_counter())
            self._done = None
        return result


class ObservedCollective(Collective):
    """Passes everything on and records spans: "tokens" while the caller waits, "weights" from launch to arrival.

    Waiting for a transfer is recorded on the stream "waits".
    """

    def __init__(self, inner: Collective, recorder: Recorder) -> None:
        super().__init__(inner.rank, inner.size, inner.timeout_s)
        self.inner = inner
        self.recorder = recorder

    def _renewed(self, timeout_s: float) -> Collective:
        return ObservedCollective(self.inner.with_timeout(timeout_s), self.recorder)

    def _watch(self, pending: Pending, op: Operation, channel: Channel, launched: float) -> Pending:
        name = str(op)
        if channel == "weights":
            pending.watch()

        def done(began: float, ended: float) -> None:
            if channel == "tokens":
                self.recorder.add(name, "tokens", launched, ended)
                return
            arrived = ended if pending.arrived_s is None else min(pending.arrived_s, ended)
            self.recorder.add(name, "weights", launched, max(arrived, launched))
            self.recorder.add(f"wait for {name}", "waits", began, ended)

        return _Observed(pending, done)

    def all_to_all(
        self,
        x: Tensor,
        send_rows: Sequence[int],
        recv_rows: Sequence[int],
        *,
        op: Operation,
        channel: Channel = "tokens",
    ) -> Pending:
        launched = time.perf_counter()
        return self._watch(
            self.inner.all_to_all(x, send_rows, recv_rows, op=op, channel=channel), op, channel, launched
        )

    def all_gather(self, x: Tensor, *, op: Operation, channel: Channel = "tokens") -> Tensor:
        began = time.perf_counter()
        result = self.inner.all_gather(x, op=op, channel=channel)
        self.recorder.add(str(op), "tokens" if channel == "tokens" else "waits", began, time.perf_counter())
        return result

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        *,
        op: Operation,
        channel: Channel = "weights",
    ) -> Pending:
        launched = time.perf_counter()
        return self._watch(self.inner.exchange(sends, recvs, op=op, channel=channel), op, channel, launched)


@dataclass(frozen=True, slots=True)
class StepMarks:
    """When a step began, when its backward pass began and ended, and when it ended; seconds of `time.perf_counter`.

    backward_s may be None where nobody noted it.
    """

    began_s: float
    backward_s: float | None
    gradients_s: float
    ended_s: float


def compute_spans(spans: Iterable[Span], marks: StepMarks, rank: int, blocks: int) -> list[Span]:
    """The compute of one step, named by window: what lies between the all-to-alls and the waits.

    These are "start", then route(i), FEC(i), FNEC(i) for every block, BNEC(i) and BEC(i) backward, "end", and "update"
    once the gradients are complete. Where nobody noted the beginning of the backward pass, all that the last block
    computes between its experts is its FNEC.
    """
    taken = sorted(
        s for s in spans if s.stream in ("tokens", "waits") and marks.began_s <= s.start_s and s.end_s <= marks.ended_s
    )
    edges = [(marks.gradients_s, "update")]
    if marks.backward_s is not None:
        edges.insert(0, (marks.backward_s, f"BNEC({blocks - 1})"))
    found: list[Span] = []
    label, since = "start", marks.began_s

    def close(until: float) -> None:
        """End the stretch of compute at `until`, cut where the backward pass began or ended."""
        nonlocal label, since
        for at, name in edges:
            if since < at <= until:
                found.append(Span(since, at, rank, "compute", label))
                label, since = name, at
        if until > since:
            found.append(Span(since, until, rank, "compute", label))

    for s in taken:
        close(s.start_s)
        since = max(since, s.end_s)
        match = _TOKEN_OP.match(s.name)
        if match is not None:
            label = _after(match.group(1), int(match.group(2)))
    close(marks.ended_s)
    return found


def _after(operation: str, block: int) -> str:
    """What a rank computes once a token operation is over."""
    if operation == "exchange of counts":
        return f"route({block})"
    if operation == "dispatch":
        return f"FEC({block})"
    if operation == "combine":
        return f"FNEC({block})"
    if operation == "combine backward":
        return f"BEC({block})"
    return f"BNEC({block - 1})" if block else "end"


def seconds_by_window(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds of compute by window's name."""
    total: dict[str, float] = {}
    for s in spans:
        total[s.name] = total.get(s.name, 0.0) + s.seconds
    return total


class Recording:
    """What one rank does in the steps of an engine while it is recorded; made by `Engine.recording`."""

    def __init__(self, rank: int, blocks: int, *, limit: int = 100_000) -> None:
        self.recorder = Recorder(rank, limit=limit)
        self._blocks = blocks
        self._marks: list[StepMarks] = []
        self._began_s = self._gradients_s = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._began_s = self._gradients_s = time.perf_counter()

    def gradients(self) -> None:
        """A backward pass has ended."""
        self._gradients_s = time.perf_counter()

    def end(self) -> None:
        """The step has ended; one that had begun before the recording does not count."""
        if self._began_s:
            self._marks.append(StepMarks(self._began_s, None, self._gradients_s, time.perf_counter()))
            self._began_s = 0.0

    @property
    def steps(self) -> int:
        """How many whole steps were recorded."""
        return len(self._marks)

    def spans(self, step: int = -1) -> list[Span]:
        """One recorded step, by default the last: what travelled, what was waited for, and what was computed."""
        marks = self._marks[step]
        found = [s for s in self.recorder.spans() if marks.began_s <= s.start_s <= marks.ended_s]
        return sorted([*found, *compute_spans(found, marks, self.recorder.rank, self._blocks)])
