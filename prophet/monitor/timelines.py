"""Timelines of single steps: every rank records what it does in them and writes it down, and nothing is communicated.

A rank writes its part into the step's folder. The rank that finds all parts there joins them into one file, since
viewers open one at a time. Where ranks do not share a folder, their parts can be copied into one, for `joined`.

Times are those of the hosts' clocks: on one host they agree to a microsecond, between hosts as NTP keeps them.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import warnings
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from prophet.engine.engine import Engine
from prophet.engine.step_report import StepReport
from prophet.errors import MonitorError
from prophet.files import is_number, read_json
from prophet.ranks.process_group import process_rank, processes
from prophet.scheduler.recording import Recording
from prophet.scheduler.timeline import to_trace, write_document

# In a run's folder
FOLDER = "timeline"
_STEP = re.compile(r"step-(\d{1,18})")
# Of one rank's part
_MOST_BYTES = 1 << 28
_CLOSE_S = 10.0
_log = logging.getLogger(__name__)


class Timelines:
    """Records the given steps of an engine, and nothing in the others.

    Args:
        engine: The engine.
        run: The run's folder.
        steps: Numbers of the steps, as in the engine's reports.

    Raises:
        OSError: The folder cannot be made.
    """

    def __init__(self, engine: Engine, run: Path, steps: Iterable[int]) -> None:
        many = processes() > 1
        self.rank = process_rank() if many else engine.collective.rank
        self.ranks = processes() if many else engine.collective.size
        self.steps = frozenset(map(int, steps))
        self.folder = run / FOLDER
        # Made now, so that a folder that cannot be made is an error at once
        self.folder.mkdir(parents=True, exist_ok=True)
        for step in self.steps:
            # What an earlier start has written must not be joined with this one's
            self._part(step).unlink(missing_ok=True)
            if self.rank == 0:
                whole(self.folder, step).unlink(missing_ok=True)
        # The engine calls this object; a strong reference back would keep both alive after training
        self._engine: weakref.ref[Engine] = weakref.ref(engine)
        self._recorded = ExitStack()
        self._recording: Recording | None = None
        self._writers: list[threading.Thread] = []
        engine.on_step.append(self._on_step)
        self._watch(engine.step)

    def _part(self, step: int) -> Path:
        return self.folder / f"step-{step}" / f"rank-{self.rank}.json"

    def _watch(self, step: int) -> None:
        """Record the coming step, if it is one of those."""
        engine = self._engine()
        if engine is not None and step in self.steps:
            self._recording = self._recorded.enter_context(engine.recording())

    def _on_step(self, report: StepReport) -> None:
        """Called by the engine on the training thread, between two steps."""
        recording, self._recording = self._recording, None
        self._recorded.close()
        if recording is not None and recording.steps:
            # On a thread, so that a slow disk holds no step up; the interpreter waits for it before it ends
            writer = threading.Thread(target=self._write, args=(recording, report.step), name="prophet-timeline")
            self._writers.append(writer)
            writer.start()
        self._watch(report.step + 1)

    def _write(self, recording: Recording, step: int) -> None:
        try:
            spans = [replace(span, rank=self.rank) for span in recording.spans()]
            part = self._part(step)
            part.parent.mkdir(parents=True, exist_ok=True)
            began_s = spans[0].start_s + _clock_s()
            write_document(part, to_trace({"": spans}) | {"otherData": {"began_s": began_s}})
            # The last rank to write joins the parts, so that ranks need not talk. Two may find all there, and write the
            # same
            if len(_parts(part.parent)) >= self.ranks:
                _log.info("the timeline of step %d is in %s", step, join(part.parent))
        except Exception as error:
            # Monitoring must not end a training run
            warnings.warn(f"monitoring: the timeline of step {step} was not written: {error!r}", stacklevel=2)

    def close(self) -> None:
        """Stop recording, and wait up to ten seconds for what is being written; again is harmless."""
        engine = self._engine()
        if engine is not None and self._on_step in engine.on_step:
            engine.on_step.remove(self._on_step)
        self._recorded.close()
        for writer in self._writers:
            writer.join(_CLOSE_S)


def whole(folder: Path, step: int) -> Path:
    """The file that holds a step of all ranks, in a run's folder of timelines."""
    return folder / f"step-{step}.json"


def join(parts: Path) -> Path:
    """Join the parts in a step's folder into one timeline beside it, and return that file.

    Raises:
        MonitorError: A part was not written by a rank.
    """
    documents = [_read(part) for part in _parts(parts)]
    zero_s = min(began_s for began_s, _ in documents)
    for began_s, events in documents:
        # Each part counts from its own begin
        later_us = round(1e6 * (began_s - zero_s), 3)
        for event in events:
            if "ts" in event:
                event["ts"] = round(event["ts"] + later_us, 3)
    every = [event for _, events in documents for event in events]
    found = parts.with_name(f"{parts.name}.json")
    write_document(found, {"traceEvents": every, "displayTimeUnit": "ms"})
    return found


def joined(run: Path) -> dict[int, Path]:
    """The timelines in a run's folder by step; those whose parts no rank has joined are joined now."""
    steps = {int(m[1]): path for path in (run / FOLDER).glob("step-*") if (m := _STEP.fullmatch(path.stem))}
    return {n: one if (one := whole(run / FOLDER, n)).is_file() else join(path) for n, path in sorted(steps.items())}


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank-*.json"))


def _read(part: Path) -> tuple[float, list[dict[str, Any]]]:
    """When a part begins, in seconds since the epoch, and its events."""
    document = read_json(part, most_bytes=_MOST_BYTES, expected="a rank's timeline", error=MonitorError)
    try:
        began_s, events = document["otherData"]["began_s"], document["traceEvents"]
        right = is_number(began_s) and all(is_number(event.get("ts", 0)) for event in events)
    except (TypeError, KeyError, AttributeError):
        right = False
    if not right:
        raise MonitorError(f"{part}: expected a rank's timeline, with its events and otherData.began_s")
    return began_s, events


def _clock_s() -> float:
    """Seconds since the epoch when `time.perf_counter` was zero."""
    # A process may be interrupted between two readings of the clocks: the try that took the least time is the best
    tries = []
    for _ in range(8):
        began_s, now_s, ended_s = time.perf_counter(), time.time(), time.perf_counter()
        tries.append((ended_s - began_s, now_s - (began_s + ended_s) / 2))
    return min(tries)[1]
