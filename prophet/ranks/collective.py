"""The contract of what ranks talk through; see `prophet.ranks.process_group`.

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
Rows = Sequence[int]  # one count per rank
Messages = Sequence[tuple[int, Tensor]]  # each with the rank it goes to, or comes from

DEFAULT_TIMEOUT_S = 120.0


class Decision(NamedTuple):
    """What ranks have decided: in words what stands `against` it, nothing if all agree; who has said to be `unready`.

    Where something stands against it and nobody was unready, ranks have lost each other.
    """

    against: str = ""
    unready: tuple[int, ...] = ()


class Pending(ABC):
    """A collective under way.

    arrived_s: when the result had arrived, by `time.perf_counter`; None where that is not known (see `watch`).
    """

    arrived_s: float | None = None

    def watch(self) -> None:  # noqa: B027 (not every collective can tell)
        """Note in `arrived_s` when the result arrives. Costs a callback; for timelines, on backends of the host."""

    @abstractmethod
    def wait(self) -> Tensor:
        """Return the result, waiting for it at most the collective's time limit; may be called again."""

    @abstractmethod
    def ended(self) -> bool:
        """Whether `wait` would return, or raise, at once. Ranks may see different answers at the same place."""


class Coming(Pending):
    """A collective under way, known by what its backend can say.

    finish: waits for the result and returns it. has_ended: whether that would return, or raise, at once. notify: has
    what it is given called when the result arrives. Once that was waited for, all are dropped: they keep inputs alive.
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

    frames: what its messages of integers have in common, see `prophet.ranks.messages`.
    """

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
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

        `x` must not be written to before the result was waited for.
        """

    @abstractmethod
    def all_gather(self, x: Tensor, *, op: Operation, channel: Channel = "tokens") -> Tensor:
        """Gather equal-shaped `x` from all ranks, [R, *x.shape]; blocks."""

    def gather_at_once(self, x: Tensor, *, op: Operation) -> Tensor:
        """`all_gather` of what ranks agree on: where it is short and they are few, each sends it to all others."""
        return self.all_gather(x, op=op)

    def gather_messages(self, x: Tensor, *, op: Operation) -> Tensor:
        """`all_gather` of a message that may meet those of other operations; all have one length."""
        return self.all_gather(x, op=op)

    @abstractmethod
    def exchange(self, sends: Messages, recvs: Messages, *, op: Operation, channel: Channel = "weights") -> Pending:
        """Point-to-point: send contiguous tensors to peers while filling tensors from peers, in place.

        Between two ranks messages match in the order in which they are listed. Only the ranks involved take part.
        """

    def roll_call(self, op: Operation) -> None:  # noqa: B027 (threads of one process cannot miss each other for long)
        """Return once all ranks have called this, and raise soon where some do not; see `process_group.roll_call`."""

    def meet(self, op: Operation, *, failed: bool = False) -> list[int]:
        """Return once all ranks have called this: those that say they have `failed`.

        The time limit stands still while a rank that is missing is at work; see `process_group.at_work`. Raises
        `PeerLost` soon where one that is missing has ended.
        """
        said = gather_numbers(self, [int(failed)], op=op, device=torch.device("cpu"))
        return [rank for rank, (number,) in enumerate(said.tolist()) if number]

    def decide(self, op: Operation, name: str, *, ready: bool, device: torch.device) -> Decision:
        """One decision of all ranks, which all of them call for: yes where every rank is `ready`.

        A rank that does not come within the time limit, or has ended, was not. Those that hear from all ranks that they
        are ready say yes, those that do not hear it say no, and the first word holds: see `settle`. So ranks that have
        lost each other still decide alike. name: of this decision, and of no other one. device: where ranks exchange
        tensors.
        """
        try:
            told = self.gather_at_once(torch.tensor([int(ready)], device=device), op=op).reshape(-1).tolist()
        except Exception as error:
            return self._settled(name, "no", Decision(against=str(error) or type(error).__name__))
        unready = tuple(rank for rank, said in enumerate(told) if not said)
        if unready:  # then no rank can say yes
            return Decision(against=f"ranks {list(unready)} were not ready", unready=unready)
        return self._settled(name, "yes", Decision(against="another rank has not heard that all were ready"))

    def _settled(self, name: str, word: str, against: Decision) -> Decision:
        return Decision() if self.settle(name, word) == "yes" else against

    def settle(self, name: str, word: str) -> str:
        """The word of the first rank that gave one for `name`. Processes compare and set it in their group's store."""
        return word

    def all_reduce_mean_(self, tensors: Sequence[Tensor], *, op: Operation | None = None) -> None:
        """Replace each tensor by its mean over the ranks, adding in rank order so that runs repeat bitwise."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([t.reshape(-1) for t in tensors])
        gathered = self.all_gather(flat, op=op or Operation("mean over ranks"))
        total = gathered[0].clone()
        for r in range(1, self.size):
            total += gathered[r]
        total /= self.size
        for t, piece in zip(tensors, total.split([t.numel() for t in tensors]), strict=True):
            t.copy_(piece.view_as(t))

    def with_timeout(self, timeout_s: float) -> Collective:
        """A collective over the same ranks with another time limit; itself where the limit is the same already."""
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
    """Raise ValueError unless there is one row count per rank, and `x` has the rows that are sent."""
    if len(send_rows) != size or len(recv_rows) != size:
        raise ValueError(f"expected one row count per rank ({size}), got {len(send_rows)} and {len(recv_rows)}")
    if sum(send_rows) != x.shape[0]:
        raise ValueError(f"send_rows add up to {sum(send_rows)}, but there are {x.shape[0]} rows")
