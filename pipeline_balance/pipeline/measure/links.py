"""How long messages between stages, and means of gradients over replicas, take while a pipeline trains.

Nothing is sent for it: every rank notes when it sends a message of the step, when it asks for one, and when it has it.
Before a decision neighbours tell each other when they sent. A message is on its way from the moment at which it was
sent and asked for, whichever is later, until it is there. So neither a late sender nor a late receiver is in its time.

Clocks of hosts differ. Each rank counts from the moment at which all have agreed on the batch, which they leave
together but for a short message's way. What is left of that error has opposite signs in the two directions of a link,
whose mean is its time.

Shape legend: S stages, L layers, P ranks, R replicas, M units (microbatches, or slices of them).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline_balance.spec import LayerCost, StageMap
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation

FloatArray = NDArray[np.float64]
KEPT = 2
"""Of how many updates messages are remembered, the last ones."""

Key = tuple[bool, int, int]
"""Whether a message is an activation and not a gradient, its boundary, and its unit: see `transfers.Message`."""


@dataclass
class _OfUpdate:
    """What was noted in an update, in seconds since its ranks met.

    Attributes:
        sent: When messages were sent.
        asked: When their receivers were ready for them.
        waited: From when to when their receivers waited.
        reduced: From when to when a layer's gradients were averaged.
    """

    sent: dict[Key, float] = field(default_factory=dict)
    asked: dict[Key, float] = field(default_factory=dict)
    waited: dict[Key, tuple[float, float]] = field(default_factory=dict)
    reduced: dict[int, tuple[float, float]] = field(default_factory=dict)


@dataclass
class Noted:
    """What this rank has noted of the last updates, by their numbers."""

    updates: dict[int, _OfUpdate] = field(default_factory=dict)
    _met_s: float = 0.0
    _now: _OfUpdate | None = None

    def meet(self, update: int, *, enabled: bool) -> None:
        """All ranks are here: what follows counts from now on.

        Args:
            update: Number of the update; its last pass counts.
            enabled: Whether anything is noted.
        """
        self._now = _OfUpdate() if enabled else None
        self.updates.pop(update, None)
        if self._now is not None:
            self.updates[update] = self._now
            for old in sorted(self.updates)[:-KEPT]:
                del self.updates[old]
        self._met_s = time.perf_counter()

    def stop(self) -> None:
        """Note nothing until the ranks meet again."""
        self._now = None

    def sent(self, key: Key) -> None:
        """This rank sends a message now."""
        if self._now is not None:
            self._now.sent[key] = time.perf_counter() - self._met_s

    def asked(self, key: Key) -> None:
        """This rank is ready for a message from now on."""
        if self._now is not None:
            self._now.asked[key] = time.perf_counter() - self._met_s

    def took(self, key: Key, began_s: float) -> None:
        """A message is there that this rank has waited for since `began_s` of its clock."""
        if self._now is not None:
            self._now.waited[key] = began_s - self._met_s, time.perf_counter() - self._met_s

    def reduced(self, layer: int, began_s: float) -> None:
        """A layer's gradients are averaged, which began at `began_s` of this rank's clock."""
        now = self._now
        if now is not None:
            first, _ = now.reduced.get(layer, (began_s - self._met_s, 0.0))
            now.reduced[layer] = first, time.perf_counter() - self._met_s

    def reset(self) -> None:
        """Forget all, as of other stages."""
        self.updates.clear()
        self._now = None

    def copy(self) -> Noted:
        """What has been noted so far, to be read in another thread."""
        kept = {
            n: _OfUpdate(dict(one.sent), dict(one.asked), dict(one.waited), dict(one.reduced))
            for n, one in self.updates.items()
        }
        return Noted(kept)


@dataclass(frozen=True)
class LinkTimes:
    """What has been measured between ranks; equal on all of them.

    Attributes:
        transfer_s: Seconds of a message between any two pipeline ranks, [P, P], in either direction; NaN where no
            message was measured. The slowest replica's.
        all_reduce_s: Seconds of averaging every layer's gradients over the replicas, [L]; 0 without replicas.
    """

    transfer_s: FloatArray
    all_reduce_s: tuple[float, ...]

    def added_to(self, costs: Sequence[LayerCost]) -> list[LayerCost]:
        """Return the layers' costs [L] with what their means over replicas take."""
        return [replace(cost, all_reduce_s=s) for cost, s in zip(costs, self.all_reduce_s, strict=True)]


def gather_links(
    noted: Noted,
    stage_map: StageMap,
    units: int,
    collective: Collective,
    *,
    rows: Sequence[Sequence[int]],
) -> LinkTimes:
    """Work out what messages and means take from what all ranks have noted; collective.

    Args:
        noted: This rank's.
        stage_map: The map in force.
        units: M.
        collective: Over all ranks.
        rows: [R][P] the ranks of every replica.
    """
    mine = next((row.index(collective.rank) for row in rows if collective.rank in row), len(rows[0]))
    told = _told(noted, stage_map, units, collective, rows, mine)
    table = torch.full((stage_map.layers, 2 + 2 * KEPT), math.nan, dtype=torch.float64)
    for (boundary, forward), sent in told.items():
        found = link_samples(noted, sent, boundary, forward=forward)
        if found:
            # both directions of a boundary stand at the layer above it
            table[stage_map.boundaries[boundary], int(forward)] = typical(found)
    for update, one in noted.updates.items():
        # the same place on all ranks
        at = 2 + 2 * (update % KEPT)
        for layer, span in one.reduced.items():
            table[layer, at : at + 2] = torch.tensor(span, dtype=torch.float64)
    every = collective.all_gather(table, op=Operation("gathering the times of links")).numpy()
    by_replica = [_first(every[list(row)]) for row in rows]
    return LinkTimes(_between_ranks(by_replica, stage_map, len(rows[0])), _all_reduces(by_replica))


def _told(
    noted: Noted, stage_map: StageMap, units: int, collective: Collective, rows: Sequence[Sequence[int]], mine: int
) -> dict[tuple[int, bool], dict[tuple[int, int], float]]:
    """When neighbours have sent what came here, by update and unit, for every boundary and direction; collective."""
    sends: list[tuple[int, torch.Tensor]] = []
    came: list[tuple[int, torch.Tensor]] = []
    of: list[tuple[int, bool]] = []
    row = next((row for row in rows if collective.rank in row), ())
    for boundary in range(1, stage_map.stages if row else 0):
        below, above = stage_map.ranks[boundary - 1], stage_map.ranks[boundary]
        if below == above or mine not in (below, above):
            continue
        # who is below the boundary sends activations, who is above it gradients
        sending = mine == below
        peer = row[above if sending else below]
        message = torch.full((KEPT, 1 + units), math.nan, dtype=torch.float64)
        for slot, (update, one) in enumerate(sorted(noted.updates.items())[-KEPT:]):
            message[slot, 0] = update
            for (forward, at, unit), when in one.sent.items():
                if (forward, at) == (sending, boundary):
                    message[slot, 1 + unit] = when
        sends.append((peer, message))
        came.append((peer, torch.empty_like(message)))
        of.append((boundary, not sending))
    if sends:
        collective.exchange(sends, came, op=Operation("telling when messages were sent")).wait()
    return {
        key: {
            (int(line[0]), unit): when for line in told.tolist() if line[0] >= 0 for unit, when in enumerate(line[1:])
        }
        for key, (_, told) in zip(of, came, strict=True)
    }


def link_samples(
    noted: Noted, sent: Mapping[tuple[int, int], float], boundary: int, *, forward: bool
) -> list[tuple[float, bool]]:
    """What messages over a boundary took, with whether that is exact: else they may have been there earlier.

    Args:
        noted: The receiver's.
        sent: When the sender has sent them, by update and unit.
        boundary: The boundary.
        forward: Whether they are activations.
    """
    found = []
    for (update, unit), when in sent.items():
        one, key = noted.updates.get(update), (forward, boundary, unit)
        if one is None or key not in one.waited or key not in one.asked or not math.isfinite(when):
            continue
        began, ended = one.waited[key]
        # below zero where clocks are further apart than that: the other direction makes up for it
        taken = ended - max(when, one.asked[key])
        # one that its receiver did not wait for was there at some time before
        found.append((taken, ended - began >= taken / 2))
    return found


def typical(samples: Sequence[tuple[float, bool]]) -> float:
    """Seconds of a message: the median of exact samples; without any, the link is as fast as the least of them."""
    exact = [taken for taken, is_exact in samples if is_exact]
    return statistics.median(exact) if exact else min(taken for taken, _ in samples)


def _first(tables: FloatArray) -> FloatArray:
    """What the ranks of a replica know together, of which each figure is one's."""
    found = np.array(tables[0])
    for table in tables[1:]:
        found = np.where(np.isnan(found), table, found)
    return found


def _between_ranks(by_replica: Sequence[FloatArray], stage_map: StageMap, ranks: int) -> FloatArray:
    transfer_s = np.full((ranks, ranks), math.nan)
    for boundary in range(1, stage_map.stages):
        a, b = stage_map.ranks[boundary - 1], stage_map.ranks[boundary]
        # a mean over the directions, see above; a replica may have measured one of them only
        both = [x[~np.isnan(x)] for x in (table[stage_map.boundaries[boundary], :2] for table in by_replica)]
        found = [max(float(x.mean()), 0.0) for x in both if x.size]
        if a != b and found:
            # several boundaries of two ranks share a link
            known = transfer_s[a, b]
            transfer_s[a, b] = transfer_s[b, a] = max(found) if math.isnan(known) else max(known, *found)
    return transfer_s


def _all_reduces(by_replica: Sequence[FloatArray]) -> tuple[float, ...]:
    layers = len(by_replica[0])
    if len(by_replica) == 1:
        return (0.0,) * layers
    spans = np.stack(by_replica)[:, :, 2:].reshape(len(by_replica), layers, KEPT, 2)
    # from the last replica that begins to the last one that is done: one that comes early waits
    taken = spans[..., 1].max(axis=0) - spans[..., 0].max(axis=0)
    return tuple(max(statistics.fmean(x), 0.0) if (x := row[~np.isnan(row)].tolist()) else 0.0 for row in taken)
