"""What ranks tell each other beside the counts of a layer, so that agreeing on it costs no message of its own.

Two things travel this way. The lengths of the windows, which each rank measures for itself: their mean over ranks cuts
the transfers, and has to be the same everywhere. And the digests of placements: those in force are compared with the
first layer's counts, which is in time for all layers whose Trans starts later; the first layer's own next placement,
whose Trans starts before any counts, with the last layer's counts of the step before, where it is known by then.

Shape legend: R ranks, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from prophet.scheduler.actions import Window, WindowKind
from prophet.scheduler.schedules import Schedule
from prophet.spec import FloatArray, IntArray, PlanContext, odd_ones_out

KINDS: tuple[WindowKind, ...] = ("FEC", "FNEC", "BNEC", "BEC")
_ENDS: tuple[WindowKind, ...] = ("START", "END")  # they hide the first block's transfers
UNKNOWN = -1  # a placement that is still being planned
_KEEP = 3  # of four parts: how much of the lengths so far a new measurement leaves


class Notes:
    """One rank's notes of L layers.

    confirmed: whether every rank is known to have planned what this one has for the first layer's next step, so that no
    comparison is needed before its Trans.
    """

    def __init__(self, schedule: Schedule, layers: int) -> None:
        self._layers = layers
        first = {a.block for a in schedule if a.kind == "TRANS" and a.window == Window("START")}
        self._can_confirm = layers > 1 and first <= {0}
        # the first block's row holds the step's two ends, too
        self._windows = [[Window(kind, layer) for kind in KINDS] for layer in range(layers)]
        self._windows[0] += [Window(kind) for kind in _ENDS]
        self._own_us = np.zeros((layers, len(KINDS) + len(_ENDS)), dtype=np.int64)
        self._agreed_us = np.zeros_like(self._own_us)
        self.confirmed = False

    def write(self, layer: int, digests: Sequence[int], upcoming: int) -> list[int]:
        """What this rank tells with a layer's counts. digests: of the placements in force; upcoming: of the first
        layer's next one, or UNKNOWN."""
        row: list[int] = self._own_us[layer, : len(self._windows[layer])].tolist()
        if layer == 0:
            row += list(digests)
        if layer == self._layers - 1:
            row.append(upcoming)
        return row

    def read(self, layer: int, table: IntArray) -> tuple[int, list[int]] | None:
        """Take in all ranks' notes, [R, n]. Returns a layer whose placements differ, and the ranks that do."""
        width = len(self._windows[layer])
        lengths = table[:, :width].sum(axis=0) // table.shape[0]
        known = self._agreed_us[layer, :width]
        self._agreed_us[layer, :width] = (_KEEP * known + lengths) // (_KEEP + 1) if known.any() else lengths
        rest = table[:, width:]
        if layer == self._layers - 1:
            upcoming = rest[:, -1]
            self.confirmed = self._can_confirm and upcoming[0] != UNKNOWN and bool((upcoming == upcoming[0]).all())
        if layer == 0:
            for at in range(self._layers):
                differ = odd_ones_out(rest[:, at])
                if differ:
                    return at, differ
        return None

    def measured(self, seconds: Mapping[Window, float]) -> None:
        """This rank's windows of the step that has ended."""
        for layer, windows in enumerate(self._windows):
            self._own_us[layer, : len(windows)] = [round(1e6 * seconds.get(w, 0.0)) for w in windows]

    def weights(self) -> dict[Window, int]:
        """Microseconds by window as all ranks know them; empty before the first measurement."""
        if not self._agreed_us.any():
            return {}
        return {
            window: int(us)
            for windows, row in zip(self._windows, self._agreed_us, strict=True)
            for window, us in zip(windows, row.tolist(), strict=False)
        }


def predicted_weights(contexts: Sequence[PlanContext], rank_load_LR: IntArray) -> dict[Window, int]:
    """Microseconds by window from the performance model, for devices whose windows the host cannot time.

    rank_load_LR: [L, R] rows that every rank computed in the last step. The same integers on every rank.
    """
    weights: dict[Window, int] = {}
    for layer, (context, load) in enumerate(zip(contexts, rank_load_LR, strict=True)):
        rate: FloatArray = np.asarray(context.topology.flops_per_s) / context.shape.forward_flops_per_token
        experts_s = float((load / rate).mean())
        windows = context.windows
        for kind, seconds in zip(KINDS, (experts_s, windows.fnec_s, windows.bnec_s, 2.0 * experts_s), strict=True):
            weights[Window(kind, layer)] = round(1e6 * seconds)
    # what comes before the first block is like what comes before any other: its own attention
    weights |= {Window("START"): weights[Window("FNEC", 0)], Window("END"): weights[Window("BNEC", 0)]}
    return weights
