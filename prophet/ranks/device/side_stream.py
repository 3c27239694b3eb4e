"""A separate stream for tensors that are sent beside training, by a thread or between two launches of training.

On a device a wait for a collective is one of the stream. All threads of a process share the default stream. If two
ranks' threads launch their collectives between different ones of training, each rank's stream waits for what the
other's comes to later, for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def new_stream(device: torch.device) -> Any:
    """Make a stream on `device`; None on the host, which has none."""
    return None if device.type in ("cpu", "meta") else torch.Stream(device)


def current_stream(device: torch.device) -> Any:
    """Return the stream that this thread launches into."""
    return torch.accelerator.current_stream(device)


class SideStream:
    """What is launched beside training; on the host nothing but the calls themselves.

    A tensor that the calls make belongs to this stream's memory. It may be used after `join`, and has to be let go of
    before the next `after_now`, or a call could write to it that training still reads.

    Args:
        device: Where the tensors are.

    Attributes:
        device: As given.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._stream = device, new_stream(device)

    def after_now(self, call: Callable[[], T]) -> Callable[[], T]:
        """Wrap `call`, for any thread: what it launches starts after what this thread has launched until now."""
        if self._stream is None:
            return call
        event = current_stream(self.device).record_event()

        def run() -> T:
            with self._stream:
                self._stream.wait_event(event)
                return call()

        return run

    def mark(self) -> Any:
        """Return an event of all that the calls have launched until now, for `join`; None on the host."""
        return None if self._stream is None else self._stream.record_event()

    def join(self, mark: Any = None) -> None:
        """Make what this thread launches from now on start after what the calls have launched until `mark`, or now."""
        if self._stream is not None:
            current_stream(self.device).wait_event(mark or self._stream.record_event())
