"""Writes every step of an engine to a run's folder, to TensorBoard and to Weights & Biases, on a background thread."""

from __future__ import annotations

import atexit
import logging
import math
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from prophet.engine.engine import Engine
from prophet.engine.step_report import StepReport
from prophet.monitor.routing import Routing
from prophet.monitor.rows import detail_period, predicted_gains, step_row
from prophet.monitor.sinks import JsonLines, Row, Sink, TensorBoard, WandB
from prophet.monitor.timelines import Timelines
from prophet.ranks.process_group import process_rank
from prophet.spec import checked

# Steps that may wait to be written; a report holds [L, R, E] counts, so they are not free
WAITING = 64
_CLOSE_S = 10.0
_Item = tuple[StepReport, float, float | None, float | Tensor | None]
_log = logging.getLogger(__name__)


class Monitor:
    """Takes an engine's reports and writes them on a background thread; made by `prophet.monitor`.

    Handing a report over takes microseconds and never waits: when `WAITING` steps wait already, the step is left out
    and counted in `skipped`. A sink that fails is left out from then on, with one warning; training goes on. A crash
    loses the steps that have not been written yet, in the common case at most the last one.

    Args:
        engine: The engine.
        sinks: Functions that make the sinks; none on ranks that do not write.
        routing: Keeps the routing trace; None: none is kept.
        header: The start of the run.
        detail_every: Steps between two that carry the loads of all experts and ranks.
        predict_every: Steps between two predicted gains; 0: none.
        timelines: Records single steps; None: none is recorded.
    """

    def __init__(
        self,
        engine: Engine,
        sinks: list[Callable[[], Sink]],
        *,
        routing: Routing | None,
        header: Row,
        detail_every: int,
        predict_every: int,
        timelines: Timelines | None = None,
    ) -> None:
        self.skipped = 0
        self.writing = bool(sinks)
        self._engine: weakref.ref[Engine] = weakref.ref(engine)
        self._planner, self._contexts = engine.planner, engine.contexts
        self._rank = engine.collective.rank
        self._detail_every, self._predict_every = detail_every, predict_every
        self._timelines = timelines
        self._last_s: float | None = None
        self._loss: float | Tensor | None = None
        self._written = 0
        self._queue: queue.Queue[_Item | None] = queue.Queue(WAITING)
        self._closed = not sinks
        if sinks:
            # A daemon, so that a sink that hangs does not keep the process; `close` at the interpreter's end waits for
            # it, with a limit
            self._thread = threading.Thread(
                target=self._work, args=(sinks, routing, header), name="prophet-monitor", daemon=True
            )
            self._thread.start()
            engine.on_step.append(self._on_step)
            # Scripts end without closing their monitor
            atexit.register(self.close)

    def log(self, *, loss: float | Tensor) -> None:
        """Have a loss in the line of the step that ends next: call it before `optimizer.step()`.

        A tensor is read on the monitor's thread, so that this one need not wait for its device.
        """
        self._loss = loss.detach() if isinstance(loss, Tensor) else float(loss)

    def _on_step(self, report: StepReport) -> None:
        """Hand a report over, and nothing else: the engine calls it on the training thread."""
        now = time.perf_counter()
        step_s, self._last_s = None if self._last_s is None else now - self._last_s, now
        loss, self._loss = self._loss, None
        try:
            self._queue.put_nowait((report, time.time(), step_s, loss))
        except queue.Full:
            self.skipped += 1

    def _work(self, makers: list[Callable[[], Sink]], routing: Routing | None, header: Row) -> None:
        sinks: list[Sink] = []
        # Made here, so that a slow import of TensorBoard does not hold the first step up
        for make in makers:
            self._guarded(lambda make=make: sinks.append(make()), make.__name__)  # type: ignore[misc]
        sinks = [s for s in sinks if self._guarded(lambda s=s: s.start(header), s.name)]  # type: ignore[misc]
        while (item := self._queue.get()) is not None:
            if routing and not self._guarded(lambda r=routing, item=item: r.add(item[0]), routing.name):  # type: ignore[misc]
                routing = None
            row: Row = {}
            if self._guarded(lambda row=row, item=item: row.update(self._row(*item)), "the step's line"):  # type: ignore[misc]
                sinks = [s for s in sinks if self._guarded(lambda s=s, row=row: s.step(row), s.name)]  # type: ignore[misc]
        if routing:
            self._guarded(routing.write, routing.name)
        for sink in sinks:
            self._guarded(sink.close, sink.name)

    def _guarded(self, call: Callable[[], object], what: str) -> bool:
        """Call a function, and return whether it came to its end."""
        try:
            call()
        # Monitoring must not end a training run
        except Exception as error:
            warnings.warn(f"monitoring: {what} failed and is left out from now on: {error!r}", stacklevel=2)
            return False
        return True

    def _row(self, report: StepReport, time_s: float, step_s: float | None, loss: float | Tensor | None) -> Row:
        detail = self._written % self._detail_every == 0
        row = step_row(report, time_s=time_s, step_s=step_s, detail=detail, rank=self._rank)
        if self._predict_every and self._written % self._predict_every == 0:
            row["gain_predicted"] = predicted_gains(report, self._planner, self._contexts)
        # JSON has no NaN
        if loss is not None and math.isfinite(float(loss)):
            row["loss"] = float(loss)
        if self.skipped:
            row["skipped"] = self.skipped
        self._written += 1
        return row

    def close(self) -> None:
        """Write what waits, within ten seconds, and stop; again is harmless. Called at the interpreter's end, too."""
        if self._timelines is not None:
            self._timelines.close()
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        engine = self._engine()
        if engine is not None and self._on_step in engine.on_step:
            engine.on_step.remove(self._on_step)
        try:
            # Ends the thread once all that waits is written
            self._queue.put(None, timeout=_CLOSE_S)
        except queue.Full:
            return
        self._thread.join(_CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@checked
def monitor(
    engine: Engine,
    run: str | Path,
    *,
    tensorboard: bool | None = None,
    wandb: Any = None,
    detail_every: int | None = None,
    predict_every: int = 10,
    heat_every: int = 10,
    notes: Mapping[str, object] | None = None,
    timeline: Sequence[int] = (),
) -> Monitor:
    """Write every step of `engine` from now on into a folder: for `prophet watch`, `report` and `plan`.

    Call it on every rank; process 0 writes, the others only what `timeline` asks for, and nothing is communicated.

    Args:
        engine: What `prophet.attach` returned.
        run: The run's folder; it is made.
        tensorboard: Whether to write for TensorBoard; None: where it is installed.
        wandb: A run of Weights & Biases, True for the one of this process, or False; None: the one of this process if
            there is one.
        detail_every: Steps between two that carry the loads of all experts and ranks; None: as many as keep a line near
            2048 numbers on average.
        predict_every: Steps between two predicted gains; 0: none.
        heat_every: Details between two sets of heat maps.
        notes: Text for the head of the page, by name.
        timeline: Steps, counted from 0, of which all ranks record what they do, for Perfetto; no other step has a cost.

    Returns:
        The monitor; close it to stop before the program ends.

    Raises:
        ValueError: A number is out of range, `run` is a file, or there is no run of Weights & Biases.
        ImportError: TensorBoard was asked for and is missing.
        OSError: The folder cannot be made.
    """
    for name, value, least in (
        ("detail_every", 1 if detail_every is None else detail_every, 1),
        ("predict_every", predict_every, 0),
        ("heat_every", heat_every, 1),
        ("timeline", min(timeline, default=0), 0),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if Path(run).is_file():
        raise ValueError(f"{run}: expected a folder to write the run into, got a file")
    if tensorboard and not TensorBoard.installed():
        raise ImportError("tensorboard=True, but TensorBoard is not installed: pip install '.[monitor]'")
    if wandb is True:
        wandb = WandB.active()
        if wandb is None:
            raise ValueError("wandb=True, but no run is under way in this process: call wandb.init() first")
    ranks, layers = engine.collective.size, len(engine.layers)
    experts = max(layer.num_experts for layer in engine.layers)
    header: Row = {
        "time_s": round(time.time(), 3),
        "layers": layers,
        "ranks": ranks,
        "experts": [layer.num_experts for layer in engine.layers],
        "planner": engine.planner.name,
        "topology": engine.contexts[0].topology.name,
        "notes": {str(k): str(v) for k, v in (notes or {}).items()},
    }
    sinks: list[Callable[[], Sink]] = []
    routing = None
    # Several expert-parallel groups have a rank 0 each: only that of the first process writes
    if process_rank() == 0 and engine.collective.rank == 0:
        folder = Path(run)
        _log.info("every step of %r goes to %s", engine, folder)
        # Made here, so that a folder which cannot be written to is an error at once
        lines = JsonLines(folder)
        sinks.append(lambda: lines)
        routing = Routing(folder, engine.layers, ranks) if Routing.serves(engine.layers) else None
        if TensorBoard.installed() if tensorboard is None else tensorboard:
            sinks.append(lambda: TensorBoard(folder, heat_every=heat_every))
        active = WandB.active() if wandb is None else wandb
        if active:
            sinks.append(lambda: WandB(active, heat_every=heat_every))
    return Monitor(
        engine,
        sinks,
        routing=routing,
        header=header,
        detail_every=detail_every or detail_period(layers, ranks, experts),
        predict_every=predict_every,
        timelines=Timelines(engine, Path(run), timeline) if timeline else None,
    )
