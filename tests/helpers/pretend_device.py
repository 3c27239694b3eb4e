"""A device that is none: its tensors lie in host memory, but behave as those of an accelerator do.

They cannot be mixed with the host's, and every operator that would make the host wait for an accelerator is noted with
the line that called it: a value read, a blocking copy in either direction, a result whose shape depends on values.
What happens inside Prophet's operators is seen too; kernels run in Triton's interpreter (TRITON_INTERPRET=1).

Ranks that are threads work: the backward pass of a rank runs on the rank's own thread.
"""

from __future__ import annotations

import inspect
import linecache
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from prophet.ranks.device import clocks, side_stream
from tests.helpers.releases import TORCH

NAME = "pretended"
# torch 2.11 has it, and the process crashes in these tests
SUPPORTED = hasattr(backend_registration, "_setup_privateuseone_for_python_backend") and TORCH >= (2, 12)
# Once it is known, torch takes the device for this process's accelerator, in whatever runs there afterwards
ALONE = {"TESTS_PRETEND_A_DEVICE": "1"}
_ELSEWHERE = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
_MASKS = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten._index_put_impl_.default}
_TORCH = str(Path(torch.__file__).parent)
_watching = threading.local()
# for `torch.tensor(values, device=...)`, which no mode sees
_below = torch.library.Library("aten", "IMPL", "PrivateUse1")


class OnDevice(torch.Tensor):
    """A tensor of the pretended device; `host` is where its values are."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> OnDevice:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, host.shape, strides=host.stride(), dtype=host.dtype, device=f"{NAME}:0", storage_offset=0
        )

    def __init__(self, host: Tensor) -> None:
        self.host = host

    is_cuda = property(lambda self: True)  # type: ignore[assignment]  # so that what is meant for a GPU runs

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> Any:
        return _watching.watch.storage(self.host)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.host!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a tensor of the pretended device outside `on_pretended_device`")


def values(x: Tensor) -> Tensor:
    """The values of a tensor of the pretended device, for a test's own eyes."""
    return x.host.detach() if isinstance(x, OnDevice) else x.detach()


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(lambda t: found.append(t) if isinstance(t, Tensor) else None, tree)
    return found


class Watch(TorchDispatchMode):
    """Runs operators of the pretended device. waits: what would have made the host wait, with the line that asked.

    The device's clock counts operators: each takes a millisecond.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if only_shapes():
            return func(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        here = [t for t in inputs if isinstance(t, OnDevice)]
        target = kwargs.get("device")
        to_device = bool(here) if target is None else torch.device(target).type == NAME
        if not here and not to_device:
            return func(*args, **kwargs)
        if func.namespace == "prophet":  # its operators are looked into
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        self._check(func, args, kwargs, inputs, here, to_device)
        if target is not None:
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        out = self.run(func, args, kwargs)
        if not to_device:
            return out
        return _wrap_result(func, args, kwargs, out)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on the values of its arguments."""
        self.operators += 1
        return func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))

    def storage(self, host: Tensor) -> Any:
        """The storage of a tensor with these values."""
        return host.untyped_storage()

    def new_stream(self) -> Any:
        """A stream beside the default one; None where operators run at once."""
        return None

    def current_stream(self) -> Any:
        """The stream of the calling thread."""
        raise NotImplementedError

    def timed_event(self) -> Any:
        """What notes the device's time, in the stream of the calling thread."""
        return Reached(self.operators)

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""

    def wait(self, func: Any) -> None:
        """Note that an operator would make the host wait."""
        own = (_TORCH, __file__, inspect.getfile(type(self)))
        asked = next((f, line) for f, line in traceback.walk_stack(None) if not f.f_code.co_filename.startswith(own))
        name, line = asked[0].f_code.co_filename, asked[1]
        if not name.endswith("conftest.py"):  # its checks look at values
            self.waits.append(f"{func} at {name}:{line}: {linecache.getline(name, line).strip()}")

    def _check(
        self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], here: list[Tensor], to_device: bool
    ) -> None:
        if func in _ELSEWHERE:
            crosses = len(here) < len(inputs) if func is torch.ops.aten.copy_.default else bool(here) != to_device
            blocking = not (
                kwargs.get("non_blocking") or (func is torch.ops.aten.copy_.default and args[2:3] == (True,))
            )
            if crosses and (blocking or not to_device):
                self.wait(func)
            return
        strangers = [t for t in inputs if not isinstance(t, OnDevice) and t.ndim > 0]
        if here and strangers:
            raise RuntimeError(f"{func}: expected all tensors on one device, found some on the host and some on {NAME}")
        if func in _MASKS:
            if any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1])):
                self.wait(func)
        elif torch.Tag.data_dependent_output in func.tags or (
            torch.Tag.dynamic_output_shape in func.tags and kwargs.get("output_size") is None
        ):
            self.wait(func)


class Reached:
    """An event that the device has come to, after so many operators of its stream."""

    def __init__(self, operators: int) -> None:
        self.operators = operators

    def query(self) -> bool:
        """Whether the device has come there."""
        return True

    def synchronize(self) -> None:
        """Wait for it."""

    def elapsed_time(self, later: Reached) -> float:
        """Milliseconds, as torch's events have it."""
        return float(later.operators - self.operators)


def only_shapes() -> bool:
    """Whether a mode is in force that asks for shapes: torch puts its own below this one, and it is for all devices."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def unwrap(x: Any) -> Any:
    """The values of a tensor of the device; anything else as it is."""
    return x.host if isinstance(x, OnDevice) else x


def _wrap_result(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Results as tensors of the device; those that are arguments written to stay the objects they were."""
    returned = func._schema.returns
    written = {}
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written[frozenset(argument.alias_info.before_set)] = value

    def one(value: Any, spec: Any) -> Any:
        if spec.alias_info is not None and spec.alias_info.is_write:
            return written[frozenset(spec.alias_info.before_set)]
        return tree_map(lambda t: OnDevice(t) if isinstance(t, Tensor) else t, value)

    if len(returned) == 1:
        return one(out, returned[0])
    return tuple(one(v, spec) for v, spec in zip(out, returned, strict=True)) if returned else out


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return OnDevice(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if not non_blocking and isinstance(source, OnDevice) != isinstance(target, OnDevice):
        _watching.watch.wait("copy")
    unwrap(target).copy_(unwrap(source))
    return target


class _DeviceModule:
    """What torch asks of a device's module."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    # Its random numbers are the host's
    def manual_seed_all(self, seed: int) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None: ...

    def device_count(self) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@lru_cache(maxsize=1)
def _register() -> None:
    backend_registration._setup_privateuseone_for_python_backend(NAME, _DeviceModule())
    _below.impl("empty_strided", _empty_strided)
    _below.impl("_copy_from", _copy_from)
    made, current = side_stream.new_stream, side_stream.current_stream
    side_stream.new_stream = lambda device: _watching.watch.new_stream() if device.type == NAME else made(device)
    side_stream.current_stream = lambda device: (
        _watching.watch.current_stream() if device.type == NAME else current(device)
    )
    event, wait = clocks.timed_event, clocks.wait_for_all_streams
    clocks.timed_event = lambda device: _watching.watch.timed_event() if device.type == NAME else event(device)
    clocks.wait_for_all_streams = lambda device: _watching.watch.synchronize() if device.type == NAME else wait(device)


def waits_so_far() -> list[str]:
    """Where the calling thread had to wait for its device."""
    found: list[str] = _watching.watch.waits
    return found


def skip_beside_others() -> None:
    """Skip the module that calls this, unless it has a process to itself: `tests/ranks/test_devices.py` starts one."""
    if not (SUPPORTED and ALONE.items() <= os.environ.items()):
        pytest.skip(
            "needs a torch that knows devices made in Python, and a process of its own", allow_module_level=True
        )


@contextmanager
def on_pretended_device(operators: Watch | None = None) -> Iterator[Watch]:
    """The device for the calling thread: `torch.device(NAME)` works inside, and what waits for it is in the result.

    operators: runs the operators; None for one that runs each of them at once.
    """
    _register()
    with operators or Watch() as watch, torch.autograd.set_multithreading_enabled(False):
        _watching.watch = watch
        yield watch


@contextmanager
def kernels_in_the_interpreter() -> Iterator[None]:
    """Triton's interpreter takes the pretended device's tensors, for all threads. Needs TRITON_INTERPRET=1."""
    from triton.runtime.interpreter import GridExecutor

    _register()
    run: Callable[..., Any] = GridExecutor.__call__
    guard = torch.cuda.device_of

    def unwrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, *tree_map(unwrap, args), **tree_map(unwrap, kwargs))

    GridExecutor.__call__ = unwrapped
    torch.cuda.device_of = lambda x: nullcontext()  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        GridExecutor.__call__ = run
        torch.cuda.device_of = guard  # type: ignore[misc]
