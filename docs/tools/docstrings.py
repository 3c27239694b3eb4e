"""An extension of griffe, for two forms of docstrings that its reader of Google's style does not take.

Examples stand anywhere, not only under `Examples:`. A line of `Args:` or `Attributes:` may describe several names.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.M)
_SKIP = re.compile(r" *# doctest: \+SKIP")
_SEVERAL = re.compile(r"^    (\w+(?:, \w+)+):((?:.*)(?:\n {5,}.*)*)", re.M)


def rendered(text: str) -> str:
    """Docstring with examples as code, and a line for every name.

    Args:
        text: The docstring, without its indentation.
    """
    # Readers have no use for the comment that keeps doctest from running a line
    text = _EXAMPLE.sub(lambda found: f"```pycon\n{_SKIP.sub('', found[0])}\n```", text)
    return _SEVERAL.sub(lambda found: "\n".join(f"    {name}:{found[2]}" for name in found[1].split(", ")), text)


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is rendered."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = rendered(obj.docstring.value)
