"""An extension of griffe: docstrings name their arguments and fields as "name: text"; here they become lists."""

from __future__ import annotations

import re
from typing import Any

import griffe

_NAMED = re.compile(r"^(?:[a-z_][a-z_0-9]*(?:, )?)+: ", re.IGNORECASE)
_NEXT = re.compile(r"(?<=[.;]) (?=(?:[a-z_][a-z_0-9]*(?:, )?)+: )")


def paragraphs(text: str) -> str:
    """Docstring as markdown: paragraphs that begin with "name: " as lists, and examples as code."""
    blocks = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(_block(block) for block in blocks)


def _block(block: str) -> str:
    lines = block.splitlines()
    if lines[0].lstrip().startswith(">>>"):
        return "```pycon\n" + block.replace("  # doctest: +SKIP", "") + "\n```"
    if not _NAMED.match(lines[0]):
        return block
    items: list[str] = []
    for line in lines:
        if _NAMED.match(line):
            items.append(line)
        else:
            items[-1] += " " + line.strip()
    named = [part for item in items for part in _NEXT.split(item)]
    return "\n".join(f"- **{part.replace(': ', ':** ', 1)}" for part in named)


class NamedFields(griffe.Extension):
    """Rewrites every docstring before it is rendered."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = paragraphs(obj.docstring.value)
