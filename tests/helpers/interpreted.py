"""Makes Triton's interpreter quick: `pytest -p tests.helpers.interpreted`, with TRITON_INTERPRET=1.

It patches all of Triton's language anew whenever a kernel or a function in a kernel is called, `tl.zeros` among them,
which takes most of its time. Here each function's language is patched once, and stays so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from triton.runtime import interpreter


class _Stays:
    """What a kernel's end would undo."""

    def restore(self) -> None:
        pass


def _once(patch: Callable[[Any], object]) -> Callable[[Any], _Stays]:
    @cache
    def patched(function: Any) -> _Stays:
        patch(function)
        return _Stays()

    return patched


interpreter._patch_lang = _once(interpreter._patch_lang)
