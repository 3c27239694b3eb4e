"""The compiled core of the planner: `native` is the module that `setup.py` builds from the C++ files of this folder.

Where it was not built, whatever is asked of `native` raises `CoreError` with the command that builds it. In a checkout
a core that was built from other sources than those beside it is an error as soon as this package is imported: it
would plan, but not as the sources say.
"""

from __future__ import annotations

from typing import NoReturn

from prophet.errors import CoreError
from prophet.planner.core.sources import FOLDER, digest, sources

BUILD = "pip install -v -e ."

__all__ = ["BUILD", "lacking", "native", "version"]


class Missing:
    """Stands for a core that was not built."""

    SOURCES = ""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # asked by Python, which takes AttributeError for an answer
            raise AttributeError(name)
        raise CoreError(self.reason)


def _checked(built_from: str, present: str) -> None:
    if built_from != present:
        raise CoreError(
            f"the planner's compiled core in {FOLDER} was built from other sources than those beside it: run "
            f"`{BUILD}` in the checkout"
        )


try:
    from prophet.planner.core import _core as native
except ImportError as error:
    native = Missing(  # type: ignore[assignment]
        f"the planner's compiled core is not there ({error}): `{BUILD}` builds it, and shows what a C++ compiler says"
    )
else:
    if _files := sources():
        _checked(native.SOURCES, digest(_files))


def lacking() -> str:
    """Why there is no core and what to do about it, in one sentence; empty where there is one."""
    return native.reason if isinstance(native, Missing) else ""


def version() -> str:
    """The hash of the sources that the core was built from, which has to be the same on all ranks; "none" without."""
    return native.SOURCES or "none"
