"""Scheduled operations as printable values.

An action is written `TRANS(2,1)@FEC(1)`: chunk 1 of block 2's Trans is launched at the start of block 1's FEC.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast, get_args

TransferKind = Literal["TRANS", "AGG"]
WindowKind = Literal["START", "FEC", "FNEC", "BNEC", "BEC", "END"]

_PATTERN = re.compile(r"^(TRANS|AGG)\((\d+),(\d+)\)@(START|FEC|FNEC|BNEC|BEC|END)(?:\((\d+)\))?$")


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """A stretch of compute.

    START is before the first block, END after the first block's backward pass; the others belong to a block.
    """

    kind: WindowKind
    block: int | None = None

    def __post_init__(self) -> None:
        if (self.block is None) != (self.kind in ("START", "END")):
            raise ValueError(f"window {self.kind} takes {'no' if self.block is not None else 'a'} block")

    def __str__(self) -> str:
        return self.kind if self.block is None else f"{self.kind}({self.block})"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """Launch chunk `chunk` of block `block`'s Trans or Agg at the start of `window`."""

    kind: TransferKind
    block: int
    chunk: int
    window: Window

    def __str__(self) -> str:
        return f"{self.kind}({self.block},{self.chunk})@{self.window}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what `str` wrote."""
        match = _PATTERN.match(text.strip())
        if match is None:
            kinds = "|".join(get_args(WindowKind))
            raise ValueError(f"not an action: {text!r}; expected like 'TRANS(2,1)@FEC(1)' with a window of {kinds}")
        kind, block, chunk, window, at = match.groups()
        return cls(
            cast(TransferKind, kind),
            int(block),
            int(chunk),
            Window(cast(WindowKind, window), None if at is None else int(at)),
        )
