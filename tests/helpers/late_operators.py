"""Operators of the pretended device that are launched now and run later, as on an accelerator.

A result is there at once, with its shape; until the operator has run it holds NaN, or another value that stands out.
An operator that needs values on the host waits for all work of its stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from tests.helpers.pretend_device import OnDevice, Watch, only_shapes, unwrap

# Results that depend on no tensor of the device, or change shapes in place: they run at once
_AT_ONCE = ("empty", "new_empty", "resize_", "set_")
_STANDS_OUT = {torch.uint8: 0xA5, torch.int8: -0x5B, torch.int16: -0x5A5B, torch.int32: -0x5A5A5A5B}


class Stream(Protocol):
    """The stream that is current in the calling thread."""

    def launch(self, name: str, run: Callable[[], None], *, operators: int = 0) -> Any: ...

    def timed_event(self, waits: list[str]) -> Any: ...

    def synchronize(self) -> None: ...

    def synchronize_all(self) -> None: ...

    def beside(self) -> Any: ...


def poison(x: Tensor) -> Tensor:
    """Fill `x` with values that nobody computes by accident; returns it."""
    if x.is_floating_point() or x.is_complex():
        return x.fill_(torch.nan)
    return x.fill_(True if x.dtype is torch.bool else _STANDS_OUT.get(x.dtype, -0x5A5A5A5A5A5A5A5B))


class Late(Watch):
    """Launches operators into `stream`. waits: where the host had to wait, as for `Watch`."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream
        self._needs_values = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and not only_shapes() and _any_on_device((*args, *(kwargs or {}).values())):
            # Operators made of others, as `reshape`, may be a view or a copy: what they are made of tells
            with self:
                found = func.decompose(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        return super().__torch_dispatch__(func, types, args, kwargs)

    def new_stream(self) -> Any:
        return self.stream.beside()

    def current_stream(self) -> Any:
        return self.stream

    def timed_event(self) -> Any:
        return self.stream.timed_event(self.waits)

    def synchronize(self) -> None:
        self.stream.synchronize_all()

    def wait(self, func: Any) -> None:
        super().wait(func)
        self._needs_values = True

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        returned = func._schema.returns
        written = [r.alias_info is not None and r.alias_info.is_write for r in returned]
        is_view = any(r.alias_info is not None and not w for r, w in zip(returned, written, strict=True))
        if self._needs_values:
            self._needs_values = False
            self.stream.synchronize()
        elif (
            not is_view
            and _any_on_device((*args, *kwargs.values()))
            and not func._schema.name.split("::")[1].startswith(_AT_ONCE)
        ):
            return self._launch(func, args, kwargs, written)
        return super().run(func, args, kwargs)

    def storage(self, host: Tensor) -> LateStorage:
        return LateStorage(host, self.stream)

    def _launch(self, func: Any, args: Any, kwargs: Any, written: list[bool]) -> Any:
        out = _each(_future, _shapes(func, args, kwargs))
        # What the host may write to once the call has returned is copied now; a copy's target is written to
        is_copy = func is torch.ops.aten.copy_.default
        late_args = (*_each(unwrap if is_copy else _kept, args[:1]), *_each(_kept, args[1:]))
        late_kwargs = _each(_kept, kwargs)

        def run() -> None:
            found = func(*late_args, **late_kwargs)
            if len(written) == 1:
                _fill(out, found, written[0])
            else:
                for o, f, w in zip(out or (), found or (), written, strict=True):
                    _fill(o, f, w)

        self.stream.launch(str(func), run, operators=1)
        return out


class LateStorage:
    """A storage whose memory is given back, and taken anew, where the stream is then."""

    _empty: ClassVar[dict[int, torch.UntypedStorage]] = {}

    def __init__(self, host: Tensor, stream: Stream) -> None:
        self._storage, self._stream = host.untyped_storage(), stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def size(self) -> int:
        return 0 if self._storage._cdata in self._empty else self._storage.size()

    def resize_(self, size: int) -> None:
        storage = self._storage
        if size:
            self._empty.pop(storage._cdata, None)
        else:
            # Kept, so that no other one gets its address
            self._empty[storage._cdata] = storage
        self._stream.launch("memory is another's", lambda: storage.fill_(0xFF))


_known: dict[Any, Any] = {}


def _shapes(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator returns, with tensors on `meta`: asked of torch once for equal arguments, as it takes long."""
    key = (func, _key(args), _key(kwargs))
    if key not in _known:
        on_meta = {"device": "meta"} if kwargs.get("device") is not None else {}
        _known[key] = func(*_each(_shape, args), **{**_each(_shape, kwargs), **on_meta})
    return _known[key]


def _key(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return tuple(map(_key, x))
    if isinstance(x, dict):
        return tuple((k, _key(y)) for k, y in x.items())
    # 1, 1.0 and True are equal, and make results of other types
    return (x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else (type(x), x)


def _each(call: Callable[[Any], Any], x: Any) -> Any:
    if isinstance(x, list | tuple):
        # Results of some operators are named tuples, which are made of single values
        return [_each(call, y) for y in x] if isinstance(x, list) else tuple([_each(call, y) for y in x])
    return {k: _each(call, y) for k, y in x.items()} if isinstance(x, dict) else call(x)


def _any_on_device(values: Iterable[Any]) -> bool:
    return any(isinstance(x, OnDevice) or (isinstance(x, list | tuple) and _any_on_device(x)) for x in values)


def _kept(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) and not isinstance(x, OnDevice) else unwrap(x)


def _shape(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _future(x: Any) -> Any:
    return poison(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)) if isinstance(x, Tensor) else x


def _fill(out: Any, found: Any, is_written: bool) -> None:
    if isinstance(out, Tensor) and not is_written:
        out.copy_(found)
    elif isinstance(out, list | tuple):
        for o, f in zip(out, found, strict=True):
            _fill(o, f, is_written)
