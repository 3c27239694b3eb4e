"""The one place that imports numba: how the planner's hot loops are compiled.

Kernels are cached on disk, so that only the first run on a machine compiles them, and they release the
interpreter lock, so that planning on a background thread does not hold up the one that launches device
work. Entry kernels, those called from Python, have fixed signatures: they are compiled when their module
is imported and never again, whatever arrays they are given.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import numba
from numba import types
from numba.core.caching import FunctionCache
from numba.core.options import DefaultOptions

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Arguments are declared read-only: numba takes writable arrays for them, too.
INTS = types.Array(types.int64, 1, "C", readonly=True)
INTS_2D = types.Array(types.int64, 2, "C", readonly=True)
FLOATS = types.Array(types.float64, 1, "C", readonly=True)
BOOLS_2D = types.Array(types.boolean, 2, "C", readonly=True)
OUT_INTS_3D = types.Array(types.int64, 3, "C")
INT, FLOAT, BOOL = types.int64, types.float64, types.boolean


KERNELS = (
    "arcs.py", "flow.py", "timing.py", "descent.py", "shortest.py", "moves.py", "polish.py", "export.py",
    "candidates.py", "outlets.py", "growth.py", "gradual.py", "search.py", "compiled.py",
)  # fmt: skip


def _fingerprint() -> str:
    """Changes with any kernel's source."""
    folder = Path(__file__).parent
    return hashlib.blake2b(b"".join((folder / k).read_bytes() for k in KERNELS), digest_size=16).hexdigest()


_SOURCES = _fingerprint()


class _Turn:
    """One process compiles at a time for a cache: the ranks of a first run would all compile the same.

    Taken when something has to be compiled, given back when the kernel that was asked for is on disk. A lock on a file
    of the cache's folder, so it ends with its process; after waiting for `limit_s` altogether, or where files cannot be
    locked, we go on without.
    """

    def __init__(self, limit_s: float = 600.0) -> None:
        self._left_s = limit_s
        self._held: IO[bytes] | None = None
        self._told = False

    def take(self, folder: Path) -> bool:
        """Wait for our turn; whether it is a new one, so that what is needed may be there by now."""
        if self._held is not None or fcntl is None:
            return False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / "prophet-compiling.lock").open("wb")
        except OSError:
            return False
        began = time.monotonic()
        while time.monotonic() - began < self._left_s:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not self._told:
                    self._told = True
                    print("prophet: another process compiles the planner, waiting for it", file=sys.stderr)
                time.sleep(0.05)
            except OSError:
                break
        self._left_s -= time.monotonic() - began
        self._held = file
        return True

    def give_back(self) -> None:
        """Let the others go on; nothing where we have no turn."""
        if self._held is not None:
            with suppress(OSError):  # a child that was forked meanwhile has the file open, too
                fcntl.flock(self._held, fcntl.LOCK_UN)
            self._held.close()
            self._held = None


_turn = _Turn()


class _Cache(FunctionCache):
    """Numba's disk cache, keyed by all kernels: its own key does not see a change in a function that is called."""

    told = False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was compiled before, by us or while we waited for another process, or None; then says, once, that what
        follows takes a while."""
        found = super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        if found is None and _turn.take(Path(self.cache_path)):
            found = super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        if found is None and not _Cache.told:
            _Cache.told = True
            print("prophet: compiling the planner, once on this machine: one to three minutes", file=sys.stderr)
        return found

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        key: tuple[Any, ...] = super()._index_key(sig, codegen)  # type: ignore[no-untyped-call]
        return (*key, _SOURCES)


def _dispatcher(function: Callable[..., Any], **options: Any) -> Any:
    # No kernel divides by zero, so divisions need no check that raises.
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy", **options)(function)
    dispatcher._cache = _Cache(function)  # type: ignore[no-untyped-call]
    return dispatcher


def compiled(function: _Function) -> _Function:
    """Compile `function` with numba when a kernel first calls it."""
    return cast(_Function, _dispatcher(function, no_cfunc_wrapper=True, no_cpython_wrapper=True))


# An option that numba keeps to itself; where a release does not know it, references are counted as elsewhere.
_UNCOUNTED = {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}


def bare(function: _Function) -> _Function:
    """`compiled` for functions that make no arrays: references to those they are given are not counted, which took
    longer than the sums of small problems. They copy no slices either, as that may take room for a copy.
    """
    return cast(_Function, _dispatcher(function, no_cfunc_wrapper=True, no_cpython_wrapper=True, **_UNCOUNTED))


def entry(*arguments: Any) -> Callable[[_Function], _Function]:
    """Compile a function for `arguments` (the types above) at once, and for no others."""

    def decorate(function: _Function) -> _Function:
        dispatcher = _dispatcher(function)
        try:
            dispatcher.compile(tuple(arguments))
        finally:
            _turn.give_back()
        dispatcher.disable_compile()
        return cast(_Function, dispatcher)

    return decorate
