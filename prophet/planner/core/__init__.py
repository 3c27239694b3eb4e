"""The compiled core of the planner: `native` is the module that `setup.py` builds from the C++ files of this folder.

Where it was not built, every use of `native` raises `CoreError` with the reason and the command that builds it.
In a checkout a core that was built from other sources than those beside it is an error as soon as this package is
imported: it would plan, but not as the sources say.
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from typing import NoReturn

from prophet.errors import CoreError
from prophet.planner.core.sources import COMPILER, FOLDER, NOT_BUILT, digest, sources

# -v shows the compiler's messages where it fails again
_BUILD = "pip install -v -e ."
_REINSTALL = "pip install --force-reinstall --no-deps ."

__all__ = ["lacking", "native", "version"]


class Missing:
    """Stands for a core that was not built."""

    SOURCES = ""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        # Python itself looks such names up, as when it copies or inspects, and expects AttributeError
        if name.startswith("__"):
            raise AttributeError(name)
        raise CoreError(self.reason)


def _checked(built_from: str, present: str) -> None:
    if built_from != present:
        raise CoreError(
            f"the planner's compiled core in {FOLDER} was built from other sources than those beside it: run "
            f"`{_BUILD}` in the checkout"
        )


def _reason(error: ImportError) -> str:
    """Return why the core cannot be imported, and the command that mends it."""
    note = FOLDER / NOT_BUILT
    if any((FOLDER / f"_core{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        why, first = f"cannot be loaded ({error})", ""
    elif note.is_file():
        built = note.read_text(encoding="utf-8").strip()
        why, first = f"was not built (PROPHET_WITHOUT_CORE=1, and {built})", f"install {COMPILER}, and then "
    else:
        why, first = "is not there: nothing was built for this Python", ""
    # A wheel has no sources to build from
    line = f"`{_BUILD}` in the checkout" if sources() else f"`{_REINSTALL}` in the checkout that it was installed from"
    return f"the planner's compiled core {why}: {first}run {line}"


try:
    from prophet.planner.core import _core as native
except ImportError as error:
    native = Missing(_reason(error))  # type: ignore[assignment]
else:
    if _files := sources():
        _checked(native.SOURCES, digest(_files))


def lacking() -> str:
    """Return why there is no core and what to do about it, in one sentence; empty where there is one."""
    return native.reason if isinstance(native, Missing) else ""


def version() -> str:
    """Return the hash of the sources that the core was built from, equal on all ranks; "none" without a core."""
    return native.SOURCES or "none"
