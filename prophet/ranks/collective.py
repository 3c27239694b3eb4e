"""The interface through which ranks communicate; see `prophet.ranks.process_group`.

Shape legend: R ranks.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from prophet.ranks.messages import Frames, gather_numbers
from prophet.ranks.operation import Operation

Channel = Literal["tokens", "weights"]
# One count per rank
Rows = Sequence[int]
# Each with the rank that it is sent to, or comes from
Messages = Sequence[tuple[int, Tensor]]

DEFAULT_TIMEOUT_S = 120.0


class Decision(NamedTuple):
    """What ranks have decided. With a reason against it and nobody unready, ranks have lost each other.

    Attributes:
        against: The reason against it, as text; empty if all agree.
        unready: The ranks that were not ready.
    """

    against: str = ""
    unready: tuple[int, ...] = ()


class Pending(ABC):
    """A collective under way.

    Attributes:
        arrived_s: When the result arrived, by `time.perf_counter`; None where that is not known (see `watch`).
    """

    arrived_s: float | None = None

    def watch(self) -> None:  # noqa: B027 (not every collective can tell)
        """Note in `arrived_s` when the result arrives. Costs a callback; for timelines, on backends of the host."""

    @abstractmethod
    def wait(self) -> Tensor:
        """Return the result, waiting for it at most the collective's time limit; may be called again.

        Raises:
            CollectiveError: When the collective has failed; its kinds are `CollectiveTimeout` and `PeerLost`.
        """

    @abstractmethod
    def ended(self) -> bool:
        """Whether `wait` would return, or raise, at once. Ranks may see different answers at the same place."""


class Coming(Pending):
    """A collective under way, known by three functions of its backend.

    Args:
        finish: Waits for the result and returns it.
        has_ended: Returns whether `finish` would return, or raise, at once.
        notify: Arranges for its argument to be called when the result arrives.
    """

    def __init__(
        self,
        finish: Callable[[], Tensor],
        has_ended: Callable[[], bool],
        notify: Callable[[Callable[[], None]], None] = lambda call: None,
    ) -> None:
        self._finish, self._has_ended, self._notify = finish, has_ended, notify
        self._result: Tensor | None = None

    def watch(self) -> None:
        def arrived() -> None:
            self.arrived_s = time.perf_counter()

        self._notify(arrived)

    def ended(self) -> bool:
        return self._result is not None or self._has_ended()

    def wait(self) -> Tensor:
        if self._result is None:
            self._result = self._finish()
            # Inputs and gradients hang on these closures: free them now, not when the layer lets go of this object
            del self._finish, self._has_ended, self._notify
        return self._result


class Done(Pending):
    """A collective that had nothing to wait for."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def ended(self) -> bool:
        return True

    def wait(self) -> Tensor:
        return self._result


class Collective(ABC):
    """A group of ranks that communicate. All ranks issue the same operations on a channel in the same order.

    Args:
        rank: This rank's number in the group.
        size: R, the number of ranks.
        timeout_s: Seconds that one wait may take.

    Attributes:
        frames: The state that messages of integers share on this rank; see `prophet.ranks.messages`.
    """

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        # `not >` and not `<=`: NaN is refused as well
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s!r}")
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.frames = Frames()

    @abstractmethod
    def all_to_all(
        self, x: Tensor, send_rows: Rows, recv_rows: Rows, *, op: Operation, channel: Channel = "tokens"
    ) -> Pending:
        """Send `send_rows[d]` consecutive rows of `x` to each rank d; the result has `recv_rows[s]` rows from each s.

        Args:
            x: Rows for all ranks, by rank; not to be written to before the result was waited for.
            send_rows: Row counts by destination; they add up to the rows of `x`.
            recv_rows: Row counts by source; they add up to the rows of the result.
            op: Names the exchange in errors and timelines.
            channel: All-to-alls of different channels never wait for one another.
        """

    @abstractmethod
    def all_gather(self, x: Tensor, *, op: Operation, channel: Channel = "tokens") -> Tensor:
        """Gather equal-shaped `x` from all ranks; blocks.

        Args:
            x: This rank's tensor, of one shape and dtype on all ranks.
            op: Names the exchange in errors and timelines.
            channel: Operations of different channels never wait for one another.

        Returns:
            All ranks' tensors by rank, [R, *x.shape].
        """

    def gather_at_once(self, x: Tensor, *, op: Operation) -> Tensor:
        """Gather `x` as `all_gather` does; a short one among few ranks goes from each rank to all others at once."""
        return self.all_gather(x, op=op)

    def gather_messages(self, x: Tensor, *, op: Operation) -> Tensor:
        """Gather messages as `all_gather` does, where ranks may be in different operations; all have one length."""
        return self.all_gather(x, op=op)

    def on_host(self, x: Tensor, *, op: Operation, limited: bool = True) -> Tensor:
        """Return a tensor on the host; waits for a device at most the time limit.

        Args:
            x: The tensor.
            op: What it is of, for errors.
            limited: False where the device may have long work before it, such as a whole step of a pipeline: then the
                limits of what that work waits for have to end it.

        Raises:
            CollectiveError: The device has not come to it: another rank has not.
        """
        return x.cpu()

    @abstractmethod
    def exchange(self, sends: Messages, recvs: Messages, *, op: Operation, channel: Channel = "weights") -> Pending:
        """Point-to-point: send contiguous tensors to peers while filling tensors from peers, in place.

        Between two ranks messages match in the order in which they are listed. Only the ranks involved take part.

        Args:
            sends: Tensors to send, each with its destination.
            recvs: Tensors to fill, each with its source.
            op: Names the exchange in errors and timelines.
            channel: Operations of different channels never wait for one another.
        """

    def roll_call(self, op: Operation) -> None:  # noqa: B027 (threads of one process cannot miss each other for long)
        """Return once all ranks have called this, and raise soon where some do not; see `process_group.roll_call`."""

    def meet(self, op: Operation, *, failed: bool = False) -> list[int]:
        """Wait until all ranks have called this.

        The time limit stands still while a rank that is missing is at work; see `process_group.at_work`.

        Args:
            op: Names the meeting in errors; the same on all ranks.
            failed: Whether this rank has failed at what they meet after.

        Returns:
            The ranks that have failed.

        Raises:
            PeerLost: Soon, where a rank that is missing has ended.
        """
        table = gather_numbers(self, [int(failed)], op=op)
        return [rank for rank, (number,) in enumerate(table.tolist()) if number]

    def decide(self, op: Operation, name: str, *, ready: bool) -> Decision:
        """Decide together: yes where every rank is `ready`; collective.

        A rank that does not come within the time limit, or has ended, counts as not ready. A rank that learns that all
        are ready proposes yes, one that does not learn it proposes no, and the first proposal holds: see `settle`. So
        ranks that have lost each other still decide alike.

        Args:
            op: Names the exchange in errors and timelines.
            name: The name of this decision, and of no other one.
            ready: Whether this rank can go ahead.
        """
        try:
            votes = self.gather_at_once(torch.tensor([int(ready)]), op=op).reshape(-1).tolist()
        except Exception as error:
            # Other ranks may have all votes and go ahead: only the store can tell which it is
            return self._settled(name, "no", Decision(against=str(error) or type(error).__name__))
        unready = tuple(rank for rank, vote in enumerate(votes) if not vote)
        # No rank can have seen all votes in favour, so none proposes yes, and the store need not be asked
        if unready:
            return Decision(against=f"ranks {list(unready)} were not ready", unready=unready)
        return self._settled(name, "yes", Decision(against="another rank has not heard that all were ready"))

    def _settled(self, name: str, word: str, against: Decision) -> Decision:
        return Decision() if self.settle(name, word) == "yes" else against

    def settle(self, name: str, word: str) -> str:
        """Return the word of the first rank that gave one for `name`.

        Processes compare and set it in their group's store. Raises `CollectiveError` where that does not answer.
        """
        return word

    def all_reduce_mean_(self, tensors: Sequence[Tensor], *, op: Operation | None = None) -> None:
        """Replace each tensor by its mean over the ranks, adding in rank order so that runs repeat bitwise.

        One message takes all of them, and R + 2 times their memory: for the gradients of large models, see
        `prophet.ranks.gradient_means`.
        """
        if self.size == 1 or not tensors:
            return
        # One message for all tensors
        flat = torch.cat([t.reshape(-1) for t in tensors])
        gathered = self.all_gather(flat, op=op or Operation("mean over ranks"))
        # One by one: a reduction by the backend adds in an order that its ring decides, and runs would differ
        total = gathered[0].clone()
        for r in range(1, self.size):
            total += gathered[r]
        total /= self.size
        for t, piece in zip(tensors, total.split([t.numel() for t in tensors]), strict=True):
            t.copy_(piece.view_as(t))

    def with_timeout(self, timeout_s: float) -> Collective:
        """Return a collective over the same ranks with another time limit; itself where the limit is the same."""
        # Communicators cost memory and sockets: the same limit needs no further ones
        if timeout_s == self.timeout_s:
            return self
        return self._renewed(timeout_s)

    @abstractmethod
    def _renewed(self, timeout_s: float) -> Collective: ...

    def close(self) -> None:  # noqa: B027 (most collectives own nothing)
        """Release communicators. The collective cannot be used afterwards."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copied model communicates over the same ranks


def check_rows(x: Tensor, send_rows: Rows, recv_rows: Rows, size: int) -> None:
    """Check the row counts of an all-to-all.

    Args:
        x: The rows that are sent.
        send_rows: Row counts by destination.
        recv_rows: Row counts by source.
        size: The number of ranks.

    Raises:
        ValueError: Unless there is one row count per rank, and `x` has the rows that are sent.
    """
    if len(send_rows) != size or len(recv_rows) != size:
        raise ValueError(f"expected one row count per rank ({size}), got {len(send_rows)} and {len(recv_rows)}")
    if sum(send_rows) != x.shape[0]:
        raise ValueError(f"send_rows add up to {sum(send_rows)}, but there are {x.shape[0]} rows")
