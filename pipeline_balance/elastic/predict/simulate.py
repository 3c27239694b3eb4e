"""Seconds that a route takes: chunks in windows, simulated port by port.

Shape legend: P ranks. Each kind of link (within nodes, between them) is an open shop: a rank sends one chunk at a time
and receives one. A free sender serves the free receiver that has most left to receive, and a free receiver takes from
the free sender that has most left to send. What a rank is to send on goes first, and must have come to it before it
does. There are no global steps. Before the first chunk the slowest rank's host lists its boxes and copies what stays.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline_balance.elastic.predict.bound import Rates
from prophet.spec import IntArray
from prophet.state.route import Route
from prophet.state.table import numbered

CHUNKS = 64
"""Into how many chunks the busiest port's bytes are cut, where no size is given; more, where they are sent on."""
# What a rank sends on waits for one chunk, so chunks are smaller there
_FINER = 4
# Of one simulation; beyond, chunks are larger
_MOST_CHUNKS = 400_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """What a route takes.

    Attributes:
        seconds: Until the last chunk is there.
        host_s: Of the seconds, those before the first chunk.
        port_s: Bytes of the busiest port over its rate.
        intra_bytes, inter_bytes: Of all ranks, within nodes and between them.
        busiest_intra_bytes, busiest_inter_bytes: Of the busiest port of either kind, in one direction.
        messages: How many chunks are sent.
    """

    seconds: float
    host_s: float
    port_s: float
    intra_bytes: int
    inter_bytes: int
    busiest_intra_bytes: int
    busiest_inter_bytes: int
    messages: int


Seen = Callable[[int, int, int, float, float], None]
"""Called for every chunk: source, destination, bytes, its begin and end, in seconds from the first chunk on."""


def simulate(route: Route, rates: Rates, chunk_bytes: int | None = None, seen: Seen | None = None) -> Simulated:
    """Run the route's bytes over the ports.

    Args:
        route: What is sent by whom, and in which order it is sent on.
        rates: Of ports and hosts.
        chunk_bytes: Size of a chunk; None: the busiest port's bytes over `CHUNKS`.
        seen: Called for every chunk.
    """
    rows, ranks = route.rows, route.ranks
    far = (route.nodes[route.source] != route.nodes[rows.destination]).astype(np.int64)
    # ports: rank r within its node, P + r out of it
    sent = np.bincount(far * ranks + route.source, rows.n_bytes, 2 * ranks)
    received = np.bincount(far * ranks + rows.destination, rows.n_bytes, 2 * ranks)
    chunks = CHUNKS * (_FINER if (route.feed >= 0).any() else 1)
    n_bytes, busiest, links = [], [], []
    for kind, rate, latency_s in (
        (0, rates.intra_bytes_per_s, rates.intra_latency_s),
        (1, rates.inter_bytes_per_s, rates.inter_latency_s),
    ):
        mine = slice(kind * ranks, (kind + 1) * ranks)
        n_bytes.append(int(sent[mine].sum()))
        busiest.append(int(max(sent[mine].max(), received[mine].max())))
        # at least 1 byte: a kind of link without traffic has a chunk size too
        chunk = chunk_bytes or max(-(-busiest[kind] // chunks), -(-n_bytes[kind] // _MOST_CHUNKS), 1)
        links.append(_Link(chunk, rate, latency_s))
    seconds, messages = _OpenShop(_streams(route, far), links, ranks, seen).run()
    before_s = host_s(route, rates)
    return Simulated(
        seconds=before_s + seconds,
        host_s=before_s,
        port_s=max(busiest[0] / rates.intra_bytes_per_s, busiest[1] / rates.inter_bytes_per_s),
        intra_bytes=n_bytes[0],
        inter_bytes=n_bytes[1],
        busiest_intra_bytes=busiest[0],
        busiest_inter_bytes=busiest[1],
        messages=messages,
    )


def host_s(route: Route, rates: Rates) -> float:
    """Seconds that the slowest rank's host takes: for boxes that it sends and receives, and bytes that it copies."""
    rows, ranks = route.rows, route.ranks
    # boxes of every row
    each = rows.last - rows.first
    boxes = np.bincount(route.source, each, ranks) + np.bincount(rows.destination, each, ranks)
    # what is neither received nor handed over unchanged is cut out of an old piece
    copied = route.after.table.rank_bytes() - _unchanged_bytes(route) - np.array(route.received_bytes())
    return float((boxes * rates.box_s + copied * rates.copied_byte_s).max())


def _unchanged_bytes(route: Route) -> IntArray:
    """Bytes of pieces that are handed over as they are, by rank, [P]."""
    before, after = route.before.table, route.after.table
    low, high = (np.concatenate([getattr(t, end) for t in (before, after)]) for end in ("low", "high"))
    # equal boxes of a tensor get equal numbers in both layouts
    box, _ = numbered(np.concatenate([before.tensor, after.tensor]), *low.T, *high.T)
    many = len(before.tensor)
    old = np.repeat(box[:many], np.diff(before.start)) * route.ranks + before.holder
    entry = np.repeat(np.arange(len(after.tensor)), np.diff(after.start))
    same = np.isin(box[many:][entry] * route.ranks + after.holder, old)
    n_bytes = (after.volume * route.space.item_bytes[after.tensor])[entry]
    return np.bincount(after.holder, n_bytes * same, route.ranks).astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Link:
    """A kind of link: how it is cut into chunks, and how fast it is."""

    chunk_bytes: int
    bytes_per_s: float
    latency_s: float


@dataclass(slots=True)
class _Stream:
    """Bytes from one port to another. A port is a rank's, and the number of ranks more for the one out of its node.

    Attributes:
        source, target: Ports.
        total: Bytes in all.
        feed: Bytes that its source has to get first, if it sends on what others send it. As large a part of the stream
            can go as has come of them.
        feeds: Likewise, what its bytes are for.
        sent: Bytes that have left so far.
    """

    source: int
    target: int
    total: int
    feed: _Feed | None
    feeds: _Feed | None
    sent: int = 0

    def ready(self, n_bytes: int) -> bool:
        """Whether so many more bytes can go."""
        # (sent + n) / total <= there / feed.total, in integers
        return self.feed is None or (self.sent + n_bytes) * self.feed.total <= self.total * self.feed.there


@dataclass(slots=True)
class _Feed:
    """Bytes that a rank is to send on.

    Attributes:
        total: How many they are.
        there: How many have come.
        waiting: The ports that wait for them.
    """

    total: int = 0
    there: int = 0
    waiting: set[int] = field(default_factory=set)


def _streams(route: Route, far: IntArray) -> list[_Stream]:
    """The route's bytes by ports, by how often they were sent before, and by whether they are sent on."""
    rows, ranks, hop = route.rows, route.ranks, route.hop
    sent_on = np.zeros(len(rows), np.int64)
    # feed[i] is the row that brings what row i sends on
    sent_on[route.feed[route.feed >= 0]] = 1
    # one stream for all rows that differ in nothing that the simulation knows
    of, first = numbered(far, route.source, rows.destination, hop, sent_on)
    total = np.bincount(of, rows.n_bytes, len(first)).astype(np.int64)
    feeds: dict[tuple[int, int], _Feed] = defaultdict(_Feed)
    found = []
    for k, n_bytes in zip(first.tolist(), total.tolist(), strict=True):
        port, source, target = int(far[k]) * ranks, int(route.source[k]), int(rows.destination[k])
        feed = feeds[source, int(hop[k])] if hop[k] else None
        goes_on = feeds[target, int(hop[k]) + 1] if sent_on[k] else None
        if feed is not None:
            feed.waiting.add(port + source)
        if goes_on is not None:
            goes_on.total += n_bytes
        found.append(_Stream(port + source, port + target, n_bytes, feed, goes_on))
    return found


class _OpenShop:
    """Ports that take one chunk at a time at each end; greedy, in the order of events."""

    def __init__(self, streams: list[_Stream], links: Sequence[_Link], ranks: int, seen: Seen | None) -> None:
        self.links, self.ranks, self.seen = links, ranks, seen
        self.leaving: dict[int, list[_Stream]] = defaultdict(list)
        self.coming: dict[int, list[_Stream]] = defaultdict(list)
        self.to_send: dict[int, int] = defaultdict(int)
        self.to_receive: dict[int, int] = defaultdict(int)
        for stream in streams:
            self.leaving[stream.source].append(stream)
            self.coming[stream.target].append(stream)
            self.to_send[stream.source] += stream.total
            self.to_receive[stream.target] += stream.total
        self.free_out, self.free_in = set(self.leaving), set(self.coming)
        self.running: list[tuple[float, int, int, _Stream]] = []
        self.now, self.messages = 0.0, 0

    def run(self) -> tuple[float, int]:
        """Seconds until all is there, and the number of chunks."""
        # the busiest sender chooses first; ties by number, so that every run is the same
        for port in sorted(self.leaving, key=lambda p: (-self.to_send[p], p)):
            self._serve(port)
        while self.running:
            self.now, _, size, stream = heapq.heappop(self.running)
            self.free_out.add(stream.source)
            self.free_in.add(stream.target)
            if stream.feeds is not None:
                stream.feeds.there += size
            self._serve(stream.source)
            self._take(stream.target)
            # senders that stood still because these bytes were missing
            for port in sorted(stream.feeds.waiting & self.free_out) if stream.feeds is not None else ():
                self._serve(port)
        return self.now, self.messages

    def _size(self, stream: _Stream) -> int:
        return min(self.links[stream.source >= self.ranks].chunk_bytes, stream.total - stream.sent)

    def _serve(self, port: int) -> None:
        """A free sender serves the free receiver that has most left to receive."""
        if port in self.free_out:
            able = [s for s in self.leaving[port] if s.target in self.free_in and s.ready(self._size(s))]
            if able:
                # what is sent on goes first: others wait for it
                self._start(max(able, key=lambda s: (s.feeds is not None, self.to_receive[s.target], -s.target)))

    def _take(self, port: int) -> None:
        """A free receiver takes from the free sender that has most left to send."""
        if port in self.free_in:
            able = [s for s in self.coming[port] if s.source in self.free_out and s.ready(self._size(s))]
            if able:
                self._start(max(able, key=lambda s: (s.feeds is not None, self.to_send[s.source], -s.source)))

    def _start(self, stream: _Stream) -> None:
        size, link = self._size(stream), self.links[stream.source >= self.ranks]
        stream.sent += size
        self.to_send[stream.source] -= size
        self.to_receive[stream.target] -= size
        if stream.sent == stream.total:
            self.leaving[stream.source].remove(stream)
            self.coming[stream.target].remove(stream)
        self.free_out.discard(stream.source)
        self.free_in.discard(stream.target)
        self.messages += 1
        end = self.now + link.latency_s + size / link.bytes_per_s
        # the number of the message breaks ties: streams cannot be compared
        heapq.heappush(self.running, (end, self.messages, size, stream))
        if self.seen is not None:
            self.seen(stream.source % self.ranks, stream.target % self.ranks, size, self.now, end)
