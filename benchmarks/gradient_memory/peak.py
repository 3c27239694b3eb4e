"""Bytes of the tensors that operators make, and the most that are alive at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prophet.ranks.collective import Channel, Collective, Pending, Rows
from prophet.ranks.forwarding import ForwardingCollective
from prophet.ranks.operation import Operation


class PeakBytes(TorchDispatchMode):
    """Counts the memory of what this thread's operators make while it is entered; views count as what they are of.

    What an operator takes within itself, and gives back before it returns, is not seen.

    Attributes:
        peak_bytes: The most at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing that is made within."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._is_paused:
            given = _storages((args, kwargs))
            self._add({key: storage for key, storage in _storages(out).items() if key not in given})
        return out

    def _add(self, made: dict[int, Any]) -> None:
        self._alive = {key: found for key, found in self._alive.items() if not found[0].expired()}
        for key, storage in made.items():
            self._alive[key] = (StorageWeakRef(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, sum(n for _, n in self._alive.values()))


def _storages(found: Any) -> dict[int, Any]:
    tensors = (x for x in tree_leaves(found) if isinstance(x, Tensor))
    return {s._cdata: s for s in (t.untyped_storage() for t in tensors)}


class Metered(ForwardingCollective):
    """Counts what a process group takes: inputs until they have been waited for, and results.

    The copies by which ranks that are threads pass messages do not count.

    Args:
        inner: The ranks.
        peak: Counts.
    """

    def __init__(self, inner: Collective, peak: PeakBytes) -> None:
        super().__init__(inner)
        self.peak = peak

    def around(self, inner: Collective) -> Collective:
        return Metered(inner, self.peak)

    def all_to_all(
        self, x: Tensor, send_rows: Rows, recv_rows: Rows, *, op: Operation, channel: Channel = "tokens"
    ) -> Pending:
        out = x.new_empty((sum(recv_rows), *x.shape[1:]))
        with self.peak.paused():
            inner = self.inner.all_to_all(x, send_rows, recv_rows, op=op, channel=channel)
        return _UnderWay(inner, x, out, self.peak)

    def all_gather(self, x: Tensor, *, op: Operation, channel: Channel = "tokens") -> Tensor:
        out = x.new_empty((self.size, *x.shape))
        with self.peak.paused():
            return out.copy_(self.inner.all_gather(x, op=op, channel=channel))


class _UnderWay(Pending):
    """A transfer into memory that is there from its beginning; it keeps its input until it has been waited for."""

    def __init__(self, inner: Pending, x: Tensor, out: Tensor, peak: PeakBytes) -> None:
        self._inner: tuple[Pending, Tensor] | None = (inner, x)
        self._out, self._peak = out, peak

    def ended(self) -> bool:
        return self._inner is None or self._inner[0].ended()

    def wait(self) -> Tensor:
        if self._inner is not None:
            with self._peak.paused():
                self._out.copy_(self._inner[0].wait())
            self._inner = None
        return self._out
