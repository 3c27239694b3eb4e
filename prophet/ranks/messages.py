"""Integers that all ranks tell each other, in messages which any two ranks may safely meet in.

A backend that receives more than was announced may end the process, and one that receives as much says nothing of it.
So all messages of a communicator have one length, whatever they are about, and begin with where their rank is: a rank
that has skipped or repeated something is named, on all ranks, before anything acts on what was said.

A message that is longer than that is announced by one that is not. Once all ranks have heard it, they know the new
length, and keep it: the layer with the most to say costs a second message in its first pass, and never again.

Shape legend: R ranks, N numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prophet.errors import OutOfStep

if TYPE_CHECKING:
    from prophet.ranks.collective import Collective
    from prophet.ranks.operation import Operation

IntArray = npt.NDArray[np.int64]

_NAME_WORDS = 6  # of eight bytes each
HEAD = 4 + _NAME_WORDS  # numbers in which a message says where its rank is
_LEAST_WIDTH = 256  # numbers, head and padding included: two kilobytes
_MOST_WIDTH = 1 << 16  # what is longer is announced every time
PASSES = ("", "training", "recomputed", "evaluation")


class Head(NamedTuple):
    """Where a rank is when it tells something, as integers."""

    numbers: int
    place: int
    forward: int
    kind: int
    name: tuple[int, ...]

    @classmethod
    def of(cls, row: Sequence[int]) -> Head:
        numbers, place, forward, kind, *name = (int(n) for n in row[:HEAD])
        return cls(numbers, place, forward, kind, tuple(name))

    def __str__(self) -> str:
        text = np.array(self.name, dtype=np.int64).tobytes().rstrip(b"\0").decode(errors="replace")
        forward = _pass_text(self.forward, self.kind)
        if text == COUNTS:
            return f"MoE layer {self.place} of {forward}"
        where = text if self.place < 0 else f"{text} of layer {self.place}"
        return f"{where}, after {forward}" if self.forward else where


COUNTS = "exchange of counts"


def _pass_text(forward: int, kind: int) -> str:
    return f"forward pass {forward}" + (f" ({PASSES[kind]})" if 0 < kind < len(PASSES) else "")


@cache
def _encoded_name(name: str) -> tuple[int, ...]:
    text = name.encode()[: 8 * _NAME_WORDS].ljust(8 * _NAME_WORDS, b"\0")
    return tuple(np.frombuffer(text, dtype=np.int64).tolist())


class Frames:
    """What the messages of one communicator have in common on this rank.

    forward, kind: the forward pass that its layers have reached, and what it is for, an index of `PASSES`. told: how
    many messages this rank has begun.
    """

    def __init__(self) -> None:
        self.width = _LEAST_WIDTH
        self.forward = self.kind = self.begun = 0
        self._layers = 0
        self._padding: dict[tuple[int, torch.device], Tensor] = {}

    def __str__(self) -> str:
        return _pass_text(self.forward, self.kind)

    def next_layer(self) -> int:
        """A number for a layer that nobody has numbered: which of the communicator's layers it was to run first."""
        self._layers += 1
        return self._layers - 1

    def head(self, op: Operation, numbers: int, place: int | None = None) -> list[int]:
        where = place if place is not None else -1 if op.layer is None else op.layer
        return [numbers, where, self.forward, self.kind, *_encoded_name(op.name)]

    def padding(self, numbers: int, device: torch.device) -> Tensor:
        key = (numbers, device)
        if key not in self._padding:
            with torch.inference_mode(False):
                self._padding[key] = torch.zeros(numbers, dtype=torch.int64, device=device)
        return self._padding[key]


def gather_numbers(
    collective: Collective,
    numbers: Sequence[int],
    tensors: Sequence[Tensor] = (),
    *,
    op: Operation,
    device: torch.device,
    place: int | None = None,
) -> IntArray:
    """All ranks' numbers, [R, N], on the host: `numbers`, then the elements of the int64 `tensors`; collective.

    device: where ranks exchange tensors, and where `tensors` are. place: stands for the operation's layer where that
    has no number. Raises `OutOfStep` on all ranks unless they all tell the same, as many numbers in the same pass.
    """
    extent = len(numbers) + sum(t.numel() for t in tensors)
    frames = collective.frames
    head = frames.head(op, extent, place)
    width = frames.width
    if HEAD + extent > width:
        width = 1 << (HEAD + extent - 1).bit_length()
        if collective.size > 1:
            _gather(collective, _frame(frames, head, (), frames.width, device), op)
        if width <= _MOST_WIDTH:
            frames.width = width
    table = _gather(collective, _frame(frames, [*head, *numbers], tensors, width, device), op)
    return table[:, HEAD : HEAD + extent]


def share(collective: Collective, x: Tensor, *, op: Operation) -> Tensor:
    """All ranks' `x`, a few float64 [N]: [R, N] on its device, and on no device does the host wait; collective.

    Raises `OutOfStep` as `gather_numbers` does. On a device that computes behind the host's back it cannot: what a rank
    has said in another operation counts as NaN there, and the next message of `gather_numbers` raises.
    """
    if collective.size == 1:
        return x.unsqueeze(0)
    frames = collective.frames
    head = frames.head(op, x.numel())
    frame = _frame(frames, head, (x.view(torch.int64),), frames.width, x.device)
    frames.begun += 1
    table = collective.gather_messages(frame, op=op)
    found = table[:, HEAD : HEAD + x.numel()].contiguous().view(torch.float64)
    if table.device.type == "cpu":
        _check(table.numpy(), collective.rank)
        return found
    same = (table[:, :HEAD] == frame[:HEAD]).all(dim=1, keepdim=True)
    return found.where(same, torch.nan)


def _frame(
    frames: Frames, numbers: Sequence[int], tensors: Sequence[Tensor], width: int, device: torch.device
) -> Tensor:
    first = torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)
    left = width - len(numbers) - sum(t.numel() for t in tensors)
    return torch.cat([first, *tensors, frames.padding(left, device)])


def _gather(collective: Collective, frame: Tensor, op: Operation) -> IntArray:
    collective.frames.begun += 1
    table: IntArray = collective.gather_messages(frame, op=op).cpu().numpy()
    _check(table, collective.rank)
    return table


def _check(table: IntArray, rank: int) -> None:
    """Raise `OutOfStep` unless all rows [R, width] begin alike."""
    heads = table[:, :HEAD]
    if (heads == heads[rank]).all():
        return
    by_head: dict[Head, list[int]] = {}
    for r, row in enumerate(heads):
        by_head.setdefault(Head.of(row), []).append(r)
    groups = sorted(by_head.items(), key=lambda item: (-len(item[1]), item[1]))
    raise OutOfStep(f"rank {rank}: {_explained(groups)}")


def _explained(groups: Sequence[tuple[Head, list[int]]]) -> str:
    heads = [head for head, _ in groups]
    odd = sorted(r for _, ranks in groups[1:] for r in ranks)
    if len(groups[0][1]) == len(groups[1][1]):
        odd = sorted([*odd, *groups[0][1]])
    if len({head._replace(numbers=0) for head in heads}) > 1:
        places = "; ".join(f"rank(s) {ranks} at {head}" for head, ranks in groups)
        return f"the ranks are out of step: {places}. Did rank(s) {odd} skip or repeat a step, a pass or a layer?"
    lengths = ", ".join(f"{head.numbers} from rank(s) {ranks}" for head, ranks in groups)
    return f"{heads[0]}: messages of different lengths, {lengths}; all ranks must run the same model"
