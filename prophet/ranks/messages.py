"""Integers that all ranks exchange, in messages that are safe even where ranks are in different operations.

A backend that receives more than was announced may end the process, and one that receives as much reports nothing.
So the next message of a communicator has one length, whatever it is about, and begins with where its rank is: a rank
that has skipped or repeated something is named, on all ranks, before anything acts on the numbers.

Ranks foresee that length alike, since they go by messages that all of them have seen and agreed on. Most messages are
layers' counts, and what follows one layer's counts in one kind of pass is mostly another's, the same in every step. So
the next message is as long as the counts that last followed there. Other messages travel in that length, too.

A message that is longer than foreseen is announced by one that is not. A layer's counts are then foreseen the next
time. A single long message, such as the comparison of experts, makes no other one longer.

A wait may be interrupted (Ctrl-C), on one rank alone. The others have this rank's message, and go by it. So before its
next message that rank reads the one that it has not waited for: what all have sent is the same for all.

Shape legend: R ranks, N numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prophet.errors import OutOfStep
from prophet.ranks.operation import Operation

IntArray = npt.NDArray[np.int64]

# An operation's name travels in so many numbers of eight bytes
_NAME_NUMBERS = 6
# The first numbers of a message: where its rank is
HEAD = 4 + _NAME_NUMBERS
# Numbers of the first message, head and padding included: two kilobytes
_FIRST_WIDTH = 256
# No message is shorter: whatever `share` sends has room in any
_LEAST_WIDTH = 32
# Lengths are multiples of it: passes that differ a little have one length
_STEP = 8
# So many lengths are remembered of what followed a layer, the longest counts: another message costs more than padding
_REMEMBERED = 8
# What a forward pass is for; messages carry the index
PASSES = ("", "training", "recomputed", "evaluation")


class Head(NamedTuple):
    """Where a rank is when it sends a message, as integers.

    Attributes:
        numbers: How many numbers follow the head.
        place: The layer; -1 for none.
        forward: The forward pass that the rank has reached.
        kind: What that pass is for, an index of `PASSES`.
        name: The operation's name, encoded.
    """

    numbers: int
    place: int
    forward: int
    kind: int
    name: tuple[int, ...]

    @classmethod
    def of(cls, row: Sequence[int]) -> Head:
        """Read the head of a message."""
        numbers, place, forward, kind, *name = (int(n) for n in row[:HEAD])
        return cls(numbers, place, forward, kind, tuple(name))

    def __str__(self) -> str:
        text = np.array(self.name, dtype=np.int64).tobytes().rstrip(b"\0").decode(errors="replace")
        forward = _pass_text(self.forward, self.kind)
        if text == COUNTS:
            return f"MoE layer {self.place} of {forward}"
        where = text if self.place < 0 else f"{text} of layer {self.place}"
        return f"{where}, after {forward}" if self.forward else where


# The operation that every layer begins a pass with; errors name it by its layer and pass alone
COUNTS = "exchange of counts"


def _pass_text(forward: int, kind: int) -> str:
    return f"forward pass {forward}" + (f" ({PASSES[kind]})" if 0 < kind < len(PASSES) else "")


@cache
def _encoded_name(name: str) -> tuple[int, ...]:
    text = name.encode()[: 8 * _NAME_NUMBERS].ljust(8 * _NAME_NUMBERS, b"\0")
    return tuple(np.frombuffer(text, dtype=np.int64).tolist())


class Frames:
    """What the messages of one communicator have in common on this rank.

    Attributes:
        width: Numbers of the next message.
        forward: The forward pass that the communicator's layers have reached.
        kind: What that pass is for, an index of `PASSES`.
        begun: How many messages this rank has begun.
        unread: Waits for the message that was launched last, and returns it; set by the collective that launches it.
        agreed: Called once that message is known to begin alike on all ranks.
        announced: Numbers of the next message alone, where it was announced; 0 where it was not.
    """

    def __init__(self) -> None:
        self.width = _FIRST_WIDTH
        self.unread: Callable[[], Tensor] | None = None
        self.agreed: Callable[[], None] | None = None
        self.announced = 0
        self.forward = self.kind = self.begun = 0
        self._layers = 0
        # By layer and kind of pass: the lengths of the counts that followed theirs
        self._followed: dict[tuple[int, int], tuple[int, ...]] = {}
        self._last: tuple[int, int] | None = None
        self._first = 0
        self._padding: dict[tuple[int, torch.device], Tensor] = {}

    def __str__(self) -> str:
        return _pass_text(self.forward, self.kind)

    def next_layer(self) -> int:
        """Number a layer that nobody has numbered, by the order in which the communicator's layers first ran."""
        self._layers += 1
        return self._layers - 1

    def head(self, op: Operation, numbers: int, place: int | None = None) -> list[int]:
        """Build the head of a message.

        Args:
            op: The operation that the message belongs to.
            numbers: How many numbers follow the head.
            place: Taken in place of the operation's layer; None takes the layer, -1 for none.

        Returns:
            Numbers that follow, place, forward pass, kind of pass, and the encoded name.
        """
        where = place if place is not None else -1 if op.layer is None else op.layer
        return [numbers, where, self.forward, self.kind, *_encoded_name(op.name)]

    def begin(self, agreed: Callable[[], None] | None) -> None:
        """Begin a message, which nothing is known of yet; `agreed` as above."""
        # Counted before the wait: this is how others see that this rank has gone on to a further message
        self.begun += 1
        self.unread, self.agreed = None, agreed

    @property
    def launched(self) -> bool:
        """Whether the message that was begun last is on its way to the others."""
        return self.unread is not None

    def announce(self, numbers: int) -> None:
        """Have the next message, and no other, be long enough for `numbers` after its head."""
        self.announced = width_of(numbers)

    def foresee(self, place: int, kind: int, numbers: int) -> None:
        """Foresee the length of the next message, once all ranks have exchanged a layer's counts.

        It follows from what all ranks have in common, so they come to the same one without a message.

        Args:
            place: The layer.
            kind: Of the pass.
            numbers: How many numbers followed the head.
        """
        width, here = width_of(numbers), (place, kind)
        if self._last is not None:
            before = self._followed.get(self._last, ())
            self._followed[self._last] = (*before, width)[-_REMEMBERED:]
        self._last = here
        # The first counts of all stand for those that nobody has seen: their layer has most to say
        self._first = self._first or width
        self.width = max(self._followed.get(here, (self._first,)))

    def padding(self, numbers: int, device: torch.device) -> Tensor:
        """Zeros [numbers] that fill a message up, made once."""
        key = (numbers, device)
        if key not in self._padding:
            # Kept for later passes: an inference tensor could not be saved for a backward pass
            with torch.inference_mode(False):
                self._padding[key] = torch.zeros(numbers, dtype=torch.int64, device=device)
        return self._padding[key]


def width_of(numbers: int) -> int:
    """Return the length of a message with so many numbers after its head."""
    return max(_LEAST_WIDTH, -(-(HEAD + numbers) // _STEP) * _STEP)


class Messenger(Protocol):
    """What a message needs of a collective; every `Collective` is one."""

    rank: int
    size: int
    frames: Frames

    def gather_messages(self, x: Tensor, *, op: Operation) -> Tensor: ...

    def on_host(self, x: Tensor, *, op: Operation) -> Tensor: ...


def gather_numbers(
    collective: Messenger,
    numbers: Sequence[int],
    tensors: Sequence[Tensor] = (),
    *,
    op: Operation,
    place: int | None = None,
) -> IntArray:
    """Gather integers of all ranks; collective.

    Args:
        collective: The ranks that take part.
        numbers: This rank's numbers.
        tensors: int64 tensors of one device, whose elements follow them. Without any, the message stays on the host.
        op: Names the exchange, in the message and in errors.
        place: Stands for the operation's layer where that has no number.

    Returns:
        All ranks' numbers, [R, N], on the host.

    Raises:
        OutOfStep: On all ranks, unless they are in the same operation of the same pass with equally many numbers.
    """
    extent = len(numbers) + sum(t.numel() for t in tensors)
    frames = collective.frames
    head = frames.head(op, extent, place)
    device = tensors[0].device if tensors else torch.device("cpu")
    _catch_up(collective, op)
    width = frames.announced or frames.width
    if HEAD + extent > width:
        # A head alone, in the length that was foreseen: a rank that is elsewhere is named before lengths differ
        announce = partial(frames.announce, extent)
        if collective.size > 1:
            _gather(collective, _frame(frames, head, (), width, device), op, announce)
        width = width_of(extent)
    foresee = partial(frames.foresee, head[1], frames.kind, extent) if op.name == COUNTS else None
    table = _gather(collective, _frame(frames, [*head, *numbers], tensors, width, device), op, foresee)
    return table[:, HEAD : HEAD + extent]


def share(collective: Messenger, x: Tensor, *, op: Operation) -> Tensor:
    """Gather a few float64 numbers of all ranks without making the host wait for an accelerator; collective.

    Args:
        collective: The ranks that take part.
        x: This rank's numbers, float64 [N].
        op: Names the exchange, in the message and in errors.

    Returns:
        All ranks' numbers, [R, N], on the device of `x`.

    Raises:
        OutOfStep: As `gather_numbers` does, for numbers on the host. On an accelerator, numbers that a rank sent in
            another operation count as NaN, and the next `gather_numbers` raises.
        ValueError: For more numbers than every message has room for.
    """
    # A longer one would have to be announced, and the host to wait for what the others say
    if HEAD + x.numel() > _LEAST_WIDTH:
        raise ValueError(f"{op}: expected at most {_LEAST_WIDTH - HEAD} numbers, got {x.numel()}")
    if collective.size == 1:
        return x.unsqueeze(0)
    frames = collective.frames
    _catch_up(collective, op)
    head = frames.head(op, x.numel())
    # The bits of the floats travel as integers, since all messages share one dtype
    frame = _frame(frames, head, (x.view(torch.int64),), frames.announced or frames.width, x.device)
    table = _launch(collective, frame, op, None)
    found = table[:, HEAD : HEAD + x.numel()].contiguous().view(torch.float64)
    if table.device.type == "cpu":
        _check(table.numpy(), collective.rank)
        return found
    # Compared on the device: to raise here, the host would have to wait for it
    same = (table[:, :HEAD] == frame[:HEAD]).all(dim=1, keepdim=True)
    return found.where(same, torch.nan)


def _frame(
    frames: Frames, numbers: Sequence[int], tensors: Sequence[Tensor], width: int, device: torch.device
) -> Tensor:
    # only from pinned memory does `non_blocking` copy without waiting
    first = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    left = width - len(numbers) - sum(t.numel() for t in tensors)
    return torch.cat([first, *tensors, frames.padding(left, device)])


def _gather(collective: Messenger, frame: Tensor, op: Operation, agreed: Callable[[], None] | None) -> IntArray:
    """Gather a message and check that all begin alike; then `agreed` is called."""
    table: IntArray = collective.on_host(_launch(collective, frame, op, agreed), op=op).numpy()
    collective.frames.agreed = None
    _check(table, collective.rank)
    if agreed is not None:
        agreed()
    return table


def _launch(collective: Messenger, frame: Tensor, op: Operation, agreed: Callable[[], None] | None) -> Tensor:
    frames = collective.frames
    frames.begin(agreed)
    try:
        found = collective.gather_messages(frame, op=op)
    except BaseException:
        # One that was never launched is still to come, in the length that was announced
        if frames.launched:
            frames.announced = 0
        raise
    frames.announced = 0
    return found


def _catch_up(collective: Messenger, op: Operation) -> None:
    """Read the last message if this rank's wait for it was interrupted, and go by it as the others do."""
    frames = collective.frames
    if frames.unread is None or frames.agreed is None:
        return
    heads = collective.on_host(frames.unread(), op=op).numpy()[:, :HEAD]
    agreed, frames.agreed = frames.agreed, None
    if (heads == heads[collective.rank]).all():
        agreed()


def _check(table: IntArray, rank: int) -> None:
    """Raise `OutOfStep` unless all rows [R, width] begin alike."""
    heads = table[:, :HEAD]
    if (heads == heads[rank]).all():
        return
    by_head: dict[Head, list[int]] = {}
    for r, row in enumerate(heads):
        by_head.setdefault(Head.of(row), []).append(r)
    # The largest group first: it is taken to be right, and the others to be astray
    groups = sorted(by_head.items(), key=lambda item: (-len(item[1]), item[1]))
    raise OutOfStep(f"rank {rank}: {_explained(groups)}")


def _explained(groups: Sequence[tuple[Head, list[int]]]) -> str:
    heads = [head for head, _ in groups]
    odd = sorted(r for _, ranks in groups[1:] for r in ranks)
    # Two groups of one size: nobody can tell which of them is astray
    if len(groups[0][1]) == len(groups[1][1]):
        odd = sorted([*odd, *groups[0][1]])
    if len({head._replace(numbers=0) for head in heads}) > 1:
        places = "; ".join(f"rank(s) {ranks} at {head}" for head, ranks in groups)
        return f"the ranks are out of step: {places}. Did rank(s) {odd} skip or repeat a step, a pass or a layer?"
    lengths = ", ".join(f"{head.numbers} from rank(s) {ranks}" for head, ranks in groups)
    return f"{heads[0]}: messages of different lengths, {lengths}; all ranks must run the same model"
