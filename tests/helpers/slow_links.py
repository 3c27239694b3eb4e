"""Links between ranks that take longer than those of the machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from torch import Tensor

from prophet.ranks.collective import Channel, Collective, Messages, Pending
from prophet.ranks.forwarding import ForwardingCollective, ForwardingPending
from prophet.ranks.operation import Operation


class SlowLinks(ForwardingCollective):
    """Every message from a peer comes later than it does, counted from where it would have come.

    Attributes:
        late_s: Seconds by peer; may change between messages.
    """

    def __init__(self, inner: Collective, late_s: Mapping[int, float]) -> None:
        super().__init__(inner)
        self.late_s = dict(late_s)

    def around(self, inner: Collective) -> Collective:
        return SlowLinks(inner, self.late_s)

    def exchange(self, sends: Messages, recvs: Messages, *, op: Operation, channel: Channel = "weights") -> Pending:
        pending = self.inner.exchange(sends, recvs, op=op, channel=channel)
        late_s = max((self.late_s.get(peer, 0.0) for peer, _ in recvs), default=0.0)
        return _Late(pending, late_s) if late_s else pending


class _Late(ForwardingPending):
    def __init__(self, inner: Pending, late_s: float) -> None:
        super().__init__(inner)
        self._there, self._error = threading.Event(), None

        def travel() -> None:
            try:
                # also while nobody waits yet
                self.inner.wait()
                time.sleep(late_s)
            except Exception as error:
                self._error = error
            self._there.set()

        threading.Thread(target=travel, daemon=True).start()

    _error: Exception | None

    def ended(self) -> bool:
        return self._there.is_set()

    def wait(self) -> Tensor:
        self._there.wait()
        if self._error is not None:
            raise self._error
        return self.inner.wait()
