"""Both channels under way beside a feed-forward network, with ranks that are unevenly busy.

Shape legend: R ranks, D model dim.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from prophet.doctor.check import finding, sound
from prophet.doctor.launcher import INTERFACE
from prophet.gpu_check.checks import Answer, Place
from prophet.ranks.collective import Channel, Collective, Pending
from prophet.ranks.device.clocks import synchronize
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import collective_for

_ROUNDS = 20


def channels(place: Place) -> Answer:
    """Exchange on "tokens" and "weights" while this rank computes; compare what arrives, and time it."""
    collective = collective_for(None, timeout_s=place.timeout_s)
    rows, dim = (4096, 2048) if place.on_gpu else (64, 128)
    ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)).to(place.device)
    x = torch.randn(rows, dim, device=place.device)
    exchange = _Exchange(collective, rows // collective.size, dim, place.device)
    wrong = []
    for number in range(_ROUNDS):
        waiting = exchange.begin(number)
        # Each round another rank is the slowest
        for _ in range(1 + (collective.rank + number) % collective.size):
            ffn(x).sum().backward()
        wrong += exchange.wrong(waiting, number)
    if wrong:
        return Answer(checks=[finding("channels", f"other numbers arrived than were sent: {wrong[0]}", INTERFACE)])
    figures = _times(exchange, lambda: ffn(x).sum().backward(), place)
    hidden = f"{1e3 * figures['both_s']:.2f} ms both, {1e3 * figures['exchange_s']:.2f} ms the exchange alone"
    timed = f"{hidden}, {1e3 * figures['compute_s']:.2f} ms the compute alone"
    collective.close()
    return Answer(checks=[sound("channels", f"{_ROUNDS} rounds, all as sent; {timed}")], figures=figures)


class _Exchange:
    """One all-to-all on each channel, of numbers that say where they come from."""

    def __init__(self, collective: Collective, rows: int, dim: int, device: str) -> None:
        self.collective, self.rows, self.dim, self.device = collective, rows, dim, device

    def begin(self, number: int) -> dict[Channel, Pending]:
        """Launch both, weights first, as Trans goes ahead of the layer's tokens."""
        R, counts = self.collective.size, [self.rows] * self.collective.size
        waiting: dict[Channel, Pending] = {}
        names: tuple[Channel, ...] = ("weights", "tokens")
        for channel in names:
            sent = torch.cat([self._rows(channel, number, self.collective.rank, to) for to in range(R)])
            op = Operation(f"{channel} of round {number} of `prophet gpu-check`")
            waiting[channel] = self.collective.all_to_all(sent, counts, counts, op=op, channel=channel)
        return waiting

    def wrong(self, waiting: dict[Channel, Pending], number: int) -> list[str]:
        """Wait for both, tokens first; name the channels whose numbers are not those that were sent."""
        found = []
        R, rank = self.collective.size, self.collective.rank
        for channel in ("tokens", "weights"):
            want = torch.cat([self._rows(channel, number, source, rank) for source in range(R)])
            if not torch.equal(waiting[channel].wait(), want):
                found.append(f"{channel} in round {number}")
        return found

    def _rows(self, channel: str, number: int, source: int, to: int) -> Tensor:
        value = 10_000.0 * number + 100 * source + to + (0.5 if channel == "weights" else 0.0)
        return torch.full((self.rows, self.dim), value, device=self.device)


def _times(exchange: _Exchange, compute: Callable[[], None], place: Place) -> dict[str, float]:
    """Median seconds of the exchange, of compute, and of compute beside the exchange."""

    def exchanged() -> None:
        for pending in exchange.begin(0).values():
            pending.wait()

    def both() -> None:
        waiting = exchange.begin(0)
        compute()
        for pending in waiting.values():
            pending.wait()

    device = torch.device(place.device)
    found: dict[str, list[float]] = {"exchange_s": [], "compute_s": [], "both_s": []}
    for _ in range(_ROUNDS):
        for name, call in zip(found, (exchanged, compute, both), strict=True):
            synchronize(device)
            began = time.perf_counter()
            call()
            synchronize(device)
            found[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds) for name, seconds in found.items()}
