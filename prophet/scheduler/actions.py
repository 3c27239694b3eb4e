"""Scheduled operations as printable values.

A transfer is written `TRANS(2,1)@FEC(1)`: chunk 1 of block 2's Trans is launched at the start of block 1's FEC. What is
not a transfer stands where it runs: `FEC(1)`, `A2A(1,combine)`, `WAIT_TRANS(1)`. A step is a list of them, in the order
in which a rank comes to them.

| operation | what it is |
|---|---|
| START, END | compute before the first block; after its backward pass |
| COUNTS(i) | the exchange of counts |
| PLAN(i) | the placement of the next step is planned, on the host and beside the rest |
| A2A(i,k) | an all-to-all of tokens: dispatch, combine, combine-back, dispatch-back |
| FEC(i), FNEC(i), BNEC(i), BEC(i) | compute of the block's experts, and of the rest of it |
| TRANS(i,c), AGG(i,c) | chunk c of the replicas' parameters going out, of their gradients coming home |
| FETCH(i,c) | the parameters once more, for the backward pass, where they were dropped after the forward one |
| WAIT_TRANS(i), WAIT_FETCH(i), WAIT_AGG(i), WAIT_PLAN | where a rank can go no further without |
| UPDATE | what follows once all gradients are complete, up to the next step |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast, get_args

TransferKind = Literal["TRANS", "FETCH", "AGG"]
WindowKind = Literal["START", "FEC", "FNEC", "BNEC", "BEC", "END", "UPDATE"]
OtherKind = Literal["COUNTS", "PLAN", "A2A", "WAIT_TRANS", "WAIT_FETCH", "WAIT_AGG", "WAIT_PLAN"]
ActionKind = TransferKind | WindowKind | OtherKind

TRANSFERS: tuple[TransferKind, ...] = get_args(TransferKind)
WINDOWS: tuple[WindowKind, ...] = get_args(WindowKind)
A2A_NAMES = ("dispatch", "combine", "combine-back", "dispatch-back")
# operations of the step as a whole, which belong to no block
_ALONE = ("START", "END", "UPDATE", "WAIT_PLAN")


_KINDS = "|".join((*TRANSFERS, *WINDOWS, *get_args(OtherKind)))
# KIND, then (block) or (block,chunk), then @WINDOW or @WINDOW(block): what `str` writes, and nothing else
_PATTERN = re.compile(
    rf"^({_KINDS})(?:\((\d+)(?:,(\d+|{'|'.join(A2A_NAMES)}))?\))?(?:@({'|'.join(WINDOWS)})(?:\((\d+)\))?)?$"
)


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """A stretch of compute: of a block, or before the first one, after its backward pass, after the whole one.

    Attributes:
        kind: Which of the block's windows, or START, END, UPDATE.
        block: Place of the block in the order of execution; None for the latter.
    """

    kind: WindowKind
    block: int | None = None

    def __post_init__(self) -> None:
        if (self.block is None) != (self.kind in _ALONE):
            raise ValueError(f"window {self.kind} takes {'no' if self.block is not None else 'a'} block")

    def __str__(self) -> str:
        return self.kind if self.block is None else f"{self.kind}({self.block})"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One operation of a step; a transfer alone has a window, at whose start its chunk is launched.

    Attributes:
        kind: What is done, see the table above.
        block: Place of the block in the order of execution; None for what belongs to none.
        chunk: Number of a transfer's chunk; of an A2A which of the four it is, by its place in `A2A_NAMES`.
        window: Where a transfer is launched.
    """

    kind: ActionKind
    block: int | None = None
    chunk: int | None = None
    window: Window | None = None

    def __post_init__(self) -> None:
        # in the order of the fields: block, chunk, window
        wanted = (self.kind not in _ALONE, self.kind in (*TRANSFERS, "A2A"), self.kind in TRANSFERS)
        given_fields = (("block", self.block), ("chunk", self.chunk), ("window", self.window))
        for (name, given), need in zip(given_fields, wanted, strict=True):
            if (given is not None) != need:
                raise ValueError(f"{self.kind} takes {'a' if need else 'no'} {name}")
        if self.kind == "A2A" and not 0 <= (self.chunk or 0) < len(A2A_NAMES):
            raise ValueError(f"an A2A is one of {A2A_NAMES}, got number {self.chunk}")

    @property
    def is_transfer(self) -> bool:
        """Whether it moves parameters or gradients; such actions have a window."""
        return self.window is not None

    def __str__(self) -> str:
        parts = [] if self.block is None else [str(self.block)]
        if self.chunk is not None:
            parts.append(A2A_NAMES[self.chunk] if self.kind == "A2A" else str(self.chunk))
        text = f"{self.kind}({','.join(parts)})" if parts else self.kind
        return text if self.window is None else f"{text}@{self.window}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what `str` wrote; ValueError, with an example, where it is none."""
        match = _PATTERN.match(text.strip())
        if match is None:
            raise ValueError(
                f"not an action: {text!r}; expected like 'FEC(1)', 'A2A(1,combine)' or 'TRANS(2,1)@FEC(1)', "
                f"of {_KINDS} and windows {'|'.join(WINDOWS)}"
            )
        kind, block, chunk, window, at = match.groups()
        # the pattern takes either: here it is a number for transfers and a name for all-to-alls
        if chunk is not None and chunk.isdigit() == (kind == "A2A"):
            raise ValueError(f"not an action: {text!r}; chunks are numbers, all-to-alls one of {A2A_NAMES}")
        number = None if chunk is None else int(chunk) if chunk.isdigit() else A2A_NAMES.index(chunk)
        where = None if window is None else Window(cast(WindowKind, window), None if at is None else int(at))
        return cls(cast(ActionKind, kind), None if block is None else int(block), number, where)


@dataclass(frozen=True, slots=True)
class Launch:
    """A transfer of an `Action` with its fields known to be there."""

    kind: TransferKind
    block: int
    chunk: int
    window: Window

    @classmethod
    def of(cls, action: Action) -> Launch:
        """Return the transfer that an action launches; ValueError where it is none."""
        if action.block is None or action.chunk is None or action.window is None:
            raise ValueError(f"{action} is not a transfer")
        # an action with a window is a transfer: `Action` has checked it when it was made
        return cls(cast(TransferKind, action.kind), action.block, action.chunk, action.window)
