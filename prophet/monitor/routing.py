"""Beside a run's lines, the routing of its last steps: the trace that `prophet plan` reads of a run.

Shape legend: T steps, L layers, R ranks, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from prophet.engine.step_report import StepReport
from prophet.experts.feed_forward import FeedForwardBank
from prophet.traces import TraceWriter
from prophet.traces.importers import ROUTING

if TYPE_CHECKING:
    from prophet.layer.moe import MoE

MOST_STEPS = 300
# Bytes of the counts that are kept; two steps are in any case
MOST_BYTES = 64 << 20


class Routing:
    """Keeps the last steps' counts, and writes them as a trace that is whole or absent at any moment.

    The file is written anew when as many steps have come as it holds: after 1, 2, 4, 8 steps, and so on, later every
    `MOST_STEPS`. So a step is written about twice, however long the run is.

    Args:
        folder: The run's folder.
        layers: The MoE layers, all with as many experts.
        ranks: Ranks of the expert-parallel group.
    """

    name = "the routing trace"

    def __init__(self, folder: Path, layers: Sequence[MoE], ranks: int) -> None:
        self._file = folder / ROUTING
        self._layers, self._ranks, self._experts = len(layers), ranks, layers[0].num_experts
        self._sizes = _sizes(layers)
        most = MOST_BYTES // (4 * self._layers * ranks * self._experts)
        # The last steps as they followed each other. A placement is planned from the step before, and thinned out,
        # steps would have other neighbours than they had
        self._kept: deque[tuple[int, int, npt.NDArray[np.uint32]]] = deque(maxlen=min(MOST_STEPS, max(2, most)))
        self._added, self._next = 0, 1

    @staticmethod
    def serves(layers: Sequence[MoE]) -> bool:
        """Whether one trace can hold all layers: they must have as many experts."""
        return len({layer.num_experts for layer in layers}) == 1

    def add(self, report: StepReport) -> None:
        """Keep a step, and write the file when it is time."""
        self._kept.append((report.step, int(report.dropped.sum()), report.counts.astype(np.uint32)))
        self._added += 1
        if self._added == self._next:
            self.write()

    def write(self) -> None:
        """Write what is kept, unless the file has it."""
        # Just written: `_next` is set from these numbers
        if self._added + len(self._kept) == self._next or not self._kept:
            return
        meta = dict(self._sizes)
        if top_k := meta.get("top_k"):
            chosen = sum(dropped + int(counts.sum()) for _, dropped, counts in self._kept)
            # Dropped choices were routed too. Each token has made `top_k` choices on its rank
            meta["tokens"] = max(1, round(chosen / (len(self._kept) * self._layers * self._ranks * top_k)))
        shape = {"layers": self._layers, "ranks": self._ranks, "experts": self._experts}
        with TraceWriter(self._file, **shape, meta=meta) as writer:
            for step, _, counts in self._kept:
                writer.append(counts, step)
        self._next = self._added + len(self._kept)


def _sizes(layers: Sequence[MoE]) -> dict[str, Any]:
    """The layers' sizes, under the names of `prophet.machine.sizes.ModelSizes`."""
    first = layers[0]
    bank = first.experts
    sizes: dict[str, Any] = {
        "source": "prophet.monitor",
        "dim": first.dim,
        "experts": first.num_experts,
        "dtype": str(bank.dtype).removeprefix("torch."),
        "layers": len(layers),
        "moe_layers": len(layers),
    }
    # Without top k, choices are counted as rows
    if first.top_k:
        sizes["top_k"] = first.top_k
    if isinstance(bank, FeedForwardBank):
        biased = bank.bias_in is not None or bank.bias_out is not None
        sizes |= {"hidden": bank.hidden, "activation": bank.activation, "bias": biased}
    return sizes
