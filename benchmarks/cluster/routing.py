"""Routing that is given instead of decided: that of a recorded trace, or a perfectly even one.

A gate is given a row: how many of its rank's tokens go to every expert. Which tokens these are is drawn, so that every
token gets K different experts. The gate then scores its tokens as ever, but the experts that a token did not draw are
out of its choice. So weights, their gradients and all that follows are the real ones, in our gate as in the peers'.

Shape legend: T steps, L layers, R ranks, E experts, N tokens of a rank, K experts that a token chooses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.cluster.workload import Workload
from prophet.errors import TraceError
from prophet.spec import FloatArray, IntArray
from prophet.traces import RoutingTrace
from prophet.traces.importers import read_any
from prophet.traces.npz import AnyIntArray
from prophet.traces.regroup import scaled

OUT_OF_CHOICE = -1e9  # finite, since a score that is not counts as an error of the model
RowOf = Callable[[int, int], IntArray]  # a step and a layer to what this rank's tokens choose, [E]


# --- what is given ---


def even_row(choices: int, experts: int, rank: int) -> IntArray:
    """Every expert chosen equally often, to within one, [E]; the rest begins at another expert on every rank."""
    row = np.full(experts, choices // experts, dtype=np.int64)
    rest = choices % experts
    row[(rank * rest + np.arange(rest)) % experts] += 1
    return row


def drawn(row: IntArray, top_k: int, rng: np.random.Generator) -> IntArray:
    """[N, K] different experts for every token, each expert as often as `row` [E] says, which is at most N times."""
    tokens = int(row.sum()) // top_k
    # An expert's choices lie side by side. Cut every N, and one below the other, they fall on different tokens.
    order = rng.permutation(len(row))
    chosen_KN = np.repeat(order, row[order]).reshape(top_k, tokens)
    return chosen_KN.T[rng.permutation(tokens)]


class _Among(TorchFunctionMode):
    """While entered, linear maps, a gate's scores [N, E], leave only some experts to choose from."""

    def __init__(self, ids: IntArray, experts: int) -> None:
        super().__init__()
        others = np.ones((len(ids), experts), dtype=np.bool_)
        np.put_along_axis(others, ids, False, axis=1)
        self._others = torch.from_numpy(others)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.masked_fill(self._others, OUT_OF_CHOICE) if func is F.linear else out


@contextmanager
def given(gates: Sequence[nn.Module], row_of: RowOf, *, top_k: int, seed: Sequence[int]) -> Iterator[None]:
    """Inside, the gates choose what they are given.

    Args:
        gates: Of every layer; ours, DeepSpeed's or Tutel's.
        row_of: What is chosen; a gate's first call is that of step 0.
        top_k: K.
        seed: Of the draws, together with the step and the layer; another one on every rank.
    """
    with ExitStack() as stack:
        for layer, gate in enumerate(gates):
            scored, steps = gate.forward, itertools.count()

            def forward(
                x: Tensor,
                *args: Any,
                layer: int = layer,
                scored: Callable[..., Any] = scored,
                steps: Iterator[int] = steps,
                **kwargs: Any,
            ) -> Any:
                step = next(steps)
                row = row_of(step, layer)
                ids = drawn(row, top_k, np.random.default_rng([*seed, step, layer]))
                with _Among(ids, len(row)):
                    return scored(x, *args, **kwargs)

            gate.forward = forward
            stack.callback(delattr, gate, "forward")
        yield


# --- a recorded trace ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A recorded routing on the run's sizes.

    Attributes:
        trace: Counts [repetitions * window, L, R, E]; each repetition has a window of its own.
        file: Name of the recording.
        recorded: Its steps, layers and experts, on the run's ranks.
        layers: Which of them the blocks replay.
        first_steps: Where every repetition's window begins.
        max_mean_median: Of the windows, with every expert at home: median over steps and layers.
        max_mean_median_recorded: Of all recorded steps and layers.
    """

    trace: RoutingTrace
    file: str
    recorded: tuple[int, int, int]
    layers: tuple[int, ...]
    first_steps: tuple[int, ...]
    max_mean_median: float
    max_mean_median_recorded: float

    def as_dict(self) -> dict[str, Any]:
        """All but the counts."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "trace"}

    def __str__(self) -> str:
        layers, steps = (", ".join(map(str, x)) for x in (self.layers, self.first_steps))
        return (
            f"routing of {self.file}: layers {layers} of {self.recorded[1]}, from steps {steps} of {self.recorded[0]}; "
            f"max/mean of homes alone {self.max_mean_median:.2f} ({self.max_mean_median_recorded:.2f} in the recording)"
        )


def read_replay(path: Path, workload: Workload, *, ranks: int, repetitions: int, window: int) -> Replay:
    """Read a trace and fold it to the run's sizes.

    Recorded ranks are merged, or put side by side, as in `prophet plan`; counts without ranks are shared evenly.
    Neighbouring experts are merged, and the counts of a rank are scaled to its choices. Blocks replay the middle layers
    of as many equal parts of the recording; repetitions' windows are spread evenly over it.

    Args:
        path: What `prophet plan` reads.
        workload: Sizes of the run.
        ranks: R.
        repetitions: Of the run.
        window: Steps of a repetition.

    Raises:
        TraceError: The trace is none, has too few steps or layers, or has a row that top-k routing cannot have.
    """
    recorded = read_any(path, job=ranks)
    steps, layers, _, experts = recorded.counts.shape
    if experts % workload.experts:
        raise TraceError(f"{path}: expected a multiple of the run's {workload.experts} experts, got {experts}")
    if layers < workload.blocks or steps < window:
        raise TraceError(
            f"{path}: expected a layer for each of {workload.blocks} blocks and {window} steps, got {layers} layers "
            f"and {steps} steps on {ranks} ranks"
        )
    chosen = (2 * np.arange(workload.blocks) + 1) * layers // (2 * workload.blocks)
    first = [(steps - window) * (i + 1) // (repetitions + 1) for i in range(repetitions)]
    rows = np.concatenate([np.arange(i, i + window) for i in first])
    counts = recorded.counts[np.ix_(rows, chosen)].astype(np.int64)
    counts = counts.reshape(*counts.shape[:3], workload.experts, -1).sum(axis=4)
    tokens = workload.tokens_per_host()
    trace = scaled(RoutingTrace(counts, np.arange(len(rows), dtype=np.int32), recorded.meta), tokens * workload.top_k)
    _check_rows(path, trace.counts, tokens, workload, experts)
    return Replay(
        trace=trace,
        file=path.name,
        recorded=(steps, layers, experts),
        layers=tuple(chosen.tolist()),
        first_steps=tuple(first),
        max_mean_median=float(np.median(max_mean_at_home(trace.counts))),
        max_mean_median_recorded=float(np.median(max_mean_at_home(recorded.counts))),
    )


def _check_rows(path: Path, counts: AnyIntArray, tokens: int, workload: Workload, experts: int) -> None:
    """Raise `TraceError` where K different experts for each of N tokens cannot make a row."""
    silent = counts.sum(axis=3) == 0
    if silent.any():
        t, layer, rank = np.argwhere(silent)[0].tolist()
        raise TraceError(f"{path}: rank {rank} routes nothing in step {t}, layer {layer} of what would be replayed")
    if counts.max() > tokens:
        many = int((counts.max(axis=3) > tokens).sum())
        t, layer, rank, expert = np.argwhere(counts > tokens)[0].tolist()
        most = int(counts[t, layer, rank, expert])
        hint = f"; --experts {experts} merges none" if experts != workload.experts else ""
        raise TraceError(
            f"{path}: in {many} rows a token would choose an expert twice, as in step {t}, layer {layer}, where expert "
            f"{expert} has {most} choices of the {tokens} tokens of rank {rank}{hint}"
        )


def max_mean_at_home(counts: AnyIntArray) -> FloatArray:
    """Largest rank load over the mean one with every expert at home, [T, L], of counts [T, L, R, E]."""
    steps, layers, ranks, experts = counts.shape
    load = counts.sum(axis=2, dtype=np.int64).reshape(steps, layers, ranks, experts // ranks).sum(axis=3)
    found: FloatArray = load.max(axis=2) / np.maximum(load.mean(axis=2), 1e-9)
    return found
