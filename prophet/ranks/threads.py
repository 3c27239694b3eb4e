"""R ranks as threads of one process: real blocking and real time limits, without a network.

Shape legend: R ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from prophet.errors import CollectiveError, CollectiveTimeout, PeerLost
from prophet.ranks.collective import (
    DEFAULT_TIMEOUT_S,
    Channel,
    Collective,
    Coming,
    Done,
    Messages,
    Pending,
    Rows,
    check_rows,
)
from prophet.ranks.operation import Operation

T = TypeVar("T")
# Channel, number of the operation on it, source, destination
Key = tuple[Channel, int, int, int]


class ThreadWorld:
    """R ranks in one process. If one of them fails, the others are woken.

    Args:
        size: R, the number of ranks.
        timeout_s: Seconds that one wait may take.
    """

    def __init__(self, size: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if size < 1:
            raise ValueError(f"a world needs at least one rank, got {size}")
        self.size = size
        self.timeout_s = timeout_s
        self._mail: dict[Key, tuple[Operation, bool, Tensor]] = {}
        self._lock = threading.Lock()
        # A condition per key: with one for all, every message would wake every rank
        self._awaited: dict[Key, threading.Condition] = {}
        self._failure: BaseException | None = None

    def collective(self, rank: int) -> ThreadCollective:
        """Make the collective of one rank."""
        return ThreadCollective(self, rank)

    def run(self, fn: Callable[[ThreadCollective], T]) -> list[T]:
        """Call `fn(collective)` on R threads at once.

        Returns:
            The results, by rank.

        Raises:
            BaseException: The error of the first rank that failed.
        """
        results: dict[int, T] = {}

        def body(rank: int) -> None:
            try:
                results[rank] = fn(self.collective(rank))
            except BaseException as error:
                self.abort(error)

        threads = [threading.Thread(target=body, args=(r,), name=f"rank-{r}", daemon=True) for r in range(self.size)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if self._failure is not None:
            raise self._failure
        return [results[r] for r in range(self.size)]

    def abort(self, error: BaseException) -> None:
        """Wake every waiting rank: `error` happened on one of them."""
        with self._lock:
            # The first error is the cause; later ones are those of ranks that it has woken
            self._failure = self._failure or error
            for arrived in self._awaited.values():
                arrived.notify_all()

    def put(self, key: Key, op: Operation, x: Tensor, *, message: bool = False) -> None:
        """Leave a copy of `x` for the rank that `key` names.

        Args:
            key: Channel, number of the operation, source and destination.
            op: The operation that the sender is in.
            x: The tensor.
            message: Whether it contains the operation that it belongs to, as messages of integers do.
        """
        # Copied, since the sender may write to it before the receiver comes
        copy = x.detach().clone()
        with self._lock:
            self._mail[key] = (op, message, copy)
            if key in self._awaited:
                self._awaited.pop(key).notify_all()

    def has(self, keys: Sequence[Key]) -> bool:
        """Whether all of `keys` have been put, or never will be because a rank has failed."""
        with self._lock:
            return self._failure is not None or all(key in self._mail for key in keys)

    def take(self, key: Key, op: Operation, timeout_s: float, *, message: bool = False) -> Tensor:
        """Wait for the tensor under `key`.

        Args:
            key: Channel, number of the operation, source and destination.
            op: The operation that the receiver is in.
            timeout_s: Seconds to wait.
            message: Accept a message of any operation; whoever reads it compares operations.

        Raises:
            PeerLost: When another rank has failed.
            CollectiveTimeout: When the time is up.
            CollectiveError: When the sender is in another operation.
        """
        _, _, source, rank = key
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while key not in self._mail:
                if self._failure is not None:
                    raise PeerLost(rank, op, f"a peer ended ({self._failure})") from self._failure
                left = deadline - time.monotonic()
                if left <= 0:
                    raise CollectiveTimeout(rank, op, f"no answer from rank {source} within {timeout_s:g} s")
                self._awaited.setdefault(key, threading.Condition(self._lock)).wait(left)
            theirs, was_message, x = self._mail.pop(key)
        if was_message != message or (theirs != op and not message):
            raise CollectiveError(rank, op, f"rank {source} is in {theirs} instead")
        return x


class ThreadCollective(Collective):
    """One rank of a `ThreadWorld`."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(rank, world.size, world.timeout_s)
        self._world = world
        self._issued: dict[Channel, int] = {"tokens": 0, "weights": 0}
        self._exchanged: dict[tuple[Channel, int, int], int] = {}

    def _renewed(self, timeout_s: float) -> Collective:
        # In place: a second object would number its operations from the start and take old messages for new ones
        self.timeout_s = timeout_s
        return self

    def _take(self, key: Key, op: Operation, *, message: bool = False) -> Tensor:
        return self._world.take(key, op, self.timeout_s, message=message)

    def _send(self, pieces: Sequence[Tensor], op: Operation, channel: Channel, *, message: bool = False) -> list[Key]:
        """Put one piece for every rank; the keys of those for this rank."""
        self._issued[channel] += 1
        for d, piece in enumerate(pieces):
            self._world.put((channel, self._issued[channel], self.rank, d), op, piece, message=message)
        return [(channel, self._issued[channel], s, self.rank) for s in range(self.size)]

    def all_to_all(
        self, x: Tensor, send_rows: Rows, recv_rows: Rows, *, op: Operation, channel: Channel = "tokens"
    ) -> Pending:
        check_rows(x, send_rows, recv_rows, self.size)
        if self.size == 1:
            return Done(x)
        keys = self._send(x.split(list(send_rows)), op, channel)

        def collect() -> Tensor:
            pieces = [self._take(key, op) for key in keys]
            for s, piece in enumerate(pieces):
                # A process group would hang or end here: threads can name the rank
                if piece.shape[0] != recv_rows[s]:
                    reason = f"rank {s} sent {piece.shape[0]} rows, expected {recv_rows[s]}"
                    raise CollectiveError(self.rank, op, reason)
            return torch.cat(pieces)

        return Coming(collect, lambda: self._world.has(keys))

    def all_gather(self, x: Tensor, *, op: Operation, channel: Channel = "tokens") -> Tensor:
        if self.size == 1:
            return x.unsqueeze(0)
        keys = self._send([x] * self.size, op, channel)
        return torch.stack([self._take(key, op) for key in keys])

    def gather_messages(self, x: Tensor, *, op: Operation) -> Tensor:
        if self.size == 1:
            return x.unsqueeze(0)
        keys = self._send([x] * self.size, op, "tokens", message=True)
        found = torch.stack([self._take(key, op, message=True) for key in keys])
        self.frames.unread = lambda: found
        return found

    def exchange(self, sends: Messages, recvs: Messages, *, op: Operation, channel: Channel = "weights") -> Pending:
        # Numbers below zero keep point-to-point messages apart from the collectives'
        def number(source: int, target: int) -> int:
            key = (channel, source, target)
            self._exchanged[key] = self._exchanged.get(key, 0) + 1
            return -self._exchanged[key]

        for peer, x in sends:
            self._world.put((channel, number(self.rank, peer), self.rank, peer), op, x)
        expected = [(channel, number(peer, self.rank), peer, self.rank) for peer, _ in recvs]

        def collect() -> Tensor:
            for key, (_, out) in zip(expected, recvs, strict=True):
                out.copy_(self._take(key, op))
            return torch.empty(0)

        return Coming(collect, lambda: self._world.has(expected))
