"""Collectives that pass every call on to another one, for those that record, time or disturb some of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor

from prophet.ranks.collective import Channel, Collective, Messages, Pending, Rows
from prophet.ranks.operation import Operation


class ForwardingPending(Pending):
    """A collective under way that another one stands for."""

    def __init__(self, inner: Pending) -> None:
        self.inner = inner

    def watch(self) -> None:
        self.inner.watch()

    def ended(self) -> bool:
        return self.inner.ended()

    def wait(self) -> Tensor:
        result = self.inner.wait()
        self.arrived_s = self.inner.arrived_s
        return result


class ForwardingCollective(Collective):
    """Passes every call on to `inner`. A subclass overrides `transfer` and `gather` to see those that move tensors.

    What ranks only agree by (`roll_call`, `meet`, `gather_at_once`, `settle`) goes on untouched.
    """

    def __init__(self, inner: Collective) -> None:
        super().__init__(inner.rank, inner.size, inner.timeout_s)
        # both count messages for the same peers, so they share the counts
        self.inner, self.frames = inner, inner.frames

    @abstractmethod
    def around(self, inner: Collective) -> Collective:
        """The same around another collective."""

    def transfer(self, launch: Callable[[], Pending], op: Operation, channel: Channel) -> Pending:
        """Return a transfer that has begun.

        Args:
            launch: Begins it, an all-to-all or an exchange.
            op: What it is for, as errors name it.
            channel: Whose order of operations it belongs to.
        """
        return launch()

    def gather(self, call: Callable[[], Tensor], op: Operation, channel: Channel) -> Tensor:
        """Return what was gathered from all ranks.

        Args:
            call: Waits for it.
            op: What it is for, as errors name it.
            channel: Whose order of operations it belongs to.
        """
        return call()

    def _renewed(self, timeout_s: float) -> Collective:
        return self.around(self.inner.with_timeout(timeout_s))

    def all_to_all(
        self, x: Tensor, send_rows: Rows, recv_rows: Rows, *, op: Operation, channel: Channel = "tokens"
    ) -> Pending:
        return self.transfer(
            lambda: self.inner.all_to_all(x, send_rows, recv_rows, op=op, channel=channel), op, channel
        )

    def exchange(self, sends: Messages, recvs: Messages, *, op: Operation, channel: Channel = "weights") -> Pending:
        return self.transfer(lambda: self.inner.exchange(sends, recvs, op=op, channel=channel), op, channel)

    def all_gather(self, x: Tensor, *, op: Operation, channel: Channel = "tokens") -> Tensor:
        return self.gather(lambda: self.inner.all_gather(x, op=op, channel=channel), op, channel)

    def gather_messages(self, x: Tensor, *, op: Operation) -> Tensor:
        return self.gather(lambda: self.inner.gather_messages(x, op=op), op, "tokens")

    def gather_at_once(self, x: Tensor, *, op: Operation) -> Tensor:
        return self.inner.gather_at_once(x, op=op)

    def on_host(self, x: Tensor, *, op: Operation, limited: bool = True) -> Tensor:
        return self.inner.on_host(x, op=op, limited=limited)

    def roll_call(self, op: Operation) -> None:
        self.inner.roll_call(op)

    def meet(self, op: Operation, *, failed: bool = False) -> list[int]:
        return self.inner.meet(op, failed=failed)

    def settle(self, name: str, word: str) -> str:
        return self.inner.settle(name, word)
