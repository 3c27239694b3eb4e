"""A block's own forward, run twice, so that its experts are computed together wherever it calls them.

The first pass only notes the rows that each expert is called with, and answers zeros. Then all noted rows are computed
at once, by experts on any rank. The second pass starts from the same random state and buffers, and hands the answers
out. Router, noise, capacity, losses and whatever else the block does are its own code, and nothing of it is inferred.

Gradients reach the rows through the *first* pass: an answer depends on the rows that were dispatched, and those were
noted there. The rows of the second pass are equal and lead nowhere. So the first pass keeps its graph as far as rows
hang on it, and runs without gradients only where the whole block does. Everything else of that graph is free at once.

Shape legend: N noted rows, E experts, D model dim, O output dim of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_leaves, tree_map_only

from prophet.errors import ReplayError
from prophet.layer.dispatch import check_plain_autograd
from prophet.trials import RandomState


def same(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors of one shape are equal; NaN equals NaN."""
    return (a == b) | (a.isnan() & b.isnan())


class Note(NamedTuple):
    """One call of an expert: its number, and the rows [..., D] that it was given."""

    expert: int
    rows: Tensor


Behaviour = Callable[[int, Tensor], Tensor]  # an expert's number and its rows [..., D]; its answer [..., O]


class Tape:
    """Decides what the stand-ins of one list of experts do when they are called.

    Args:
        label: How messages call the list.
        dim: D.
    """

    def __init__(self, label: str, dim: int) -> None:
        self.label, self.dim = label, dim
        self._behaviour: Behaviour | None = None

    @contextmanager
    def playing(self, behaviour: Behaviour) -> Iterator[None]:
        """Let stand-ins behave like this inside the `with` block; they cannot be called outside."""
        before, self._behaviour = self._behaviour, behaviour
        try:
            yield
        finally:
            self._behaviour = before

    @property
    def runs(self) -> bool:
        """Whether stand-ins may be called."""
        return self._behaviour is not None

    def call(self, expert: int, args: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
        """Answer for an expert.

        Args:
            expert: Its number.
            args: Positional arguments of the call.
            named: Keyword arguments of the call.

        Raises:
            ReplayError: Unless they are one tensor [..., D], and a `playing` block is open.
        """
        given = [*args, *named.values()]
        if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].ndim < 1 or given[0].shape[-1] != self.dim:
            got = ", ".join(str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in given)
            raise ReplayError(
                f"{self.label}: expert {expert} was called with ({got}); expected one tensor of rows [..., {self.dim}]"
            )
        if self._behaviour is None:
            raise ReplayError(
                f"{self.label}: expert {expert} was called outside of its block's forward; only there do all ranks "
                f"compute together"
            )
        return self._behaviour(expert, given[0])


class StandIn(nn.Module):
    """Stands in a block's list where an expert was. Its attributes are that expert's.

    Args:
        tape: Decides what a call does.
        number: The expert's.
        expert: The original; its parameters may have no values.
    """

    def __init__(self, tape: Tape, number: int, expert: nn.Module) -> None:
        super().__init__()
        # past nn.Module: the expert must not be registered a second time
        self.__dict__.update(_tape=tape, _number=number, _expert=expert)

    def forward(self, *args: Any, **named: Any) -> Tensor:
        y: Tensor = self._tape.call(self._number, args, named)
        return y

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # A copy asks for attributes before it has any
            if "_expert" not in self.__dict__:
                raise
            return getattr(self.__dict__["_expert"], name)


def with_stand_ins(experts: nn.ModuleList, tape: Tape) -> nn.ModuleList:
    """A list like `experts`, of the same class and with the same attributes, that holds stand-ins."""
    # Without `__init__`: the class may be the user's, with arguments that nothing keeps.
    twin = experts.__new__(type(experts))
    twin.__dict__.update({k: v.copy() if isinstance(v, dict) else v for k, v in vars(experts).items()})
    twin._modules = {str(e): StandIn(tape, e, expert) for e, expert in enumerate(experts)}
    return twin


# --- what a pass must find as the one before it did ---


class Buffers:
    """The values of the buffers of `modules`."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept = [
            (module, name, buffer, buffer.detach().clone(), -1 if buffer.is_inference() else buffer._version)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give every module the buffers that it had, with the values that they had."""
        for module, name, buffer, value, version in self._kept:
            # A buffer made in inference mode may not be written to, so its copy takes its place.
            module._buffers[name] = value if buffer.is_inference() else buffer
            if not buffer.is_inference() and buffer._version != version:
                # The same value again, from which noted rows were computed: for their graph nothing has changed.
                with _unsafe_preserve_version_counter(buffer):
                    buffer.copy_(value)


# --- the two passes ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """How a block runs twice.

    Attributes:
        tape: Decides what its stand-ins do.
        modules: Those of the block outside of its experts.
        blank: Makes zeros in the place of an expert's answer to rows [..., D].
        answer: Computes all notes at once; an answer [..., O] for each.
    """

    tape: Tape
    modules: Sequence[nn.Module]
    blank: Callable[[Tensor], Tensor]
    answer: Callable[[Sequence[Note], Tensor | None], Sequence[Tensor]]

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Run a forward twice, its experts computed together in between.

        Args:
            forward: The block's own.
            args: Positional arguments of the call.
            named: Keyword arguments of the call.

        Returns:
            What `forward(*args, **named)` returns.

        Raises:
            ReplayError: Where the second pass does not call the experts as the first has.
        """
        # Before the block's code meets a tensor that it cannot read
        check_plain_autograd()
        first = next((x for x in tree_leaves((args, named)) if isinstance(x, Tensor)), None)
        device = torch.device("cpu") if first is None else first.device
        before, buffers = RandomState(device), Buffers(self.modules)
        notes = self._note(forward, args, named)
        buffers.put_back()
        drew = not before.is_now()
        answers = self.answer(notes, first)
        after = RandomState(device) if drew else None
        # Only a block that has drawn needs the same numbers again.
        if drew:
            before.put_back()
        result = self._hand_out(notes, answers, lambda: forward(*args, **named))
        if after is not None:
            # What the experts have drawn is not drawn again
            after.put_back()
        return result

    def _note(self, forward: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> list[Note]:
        notes: list[Note] = []

        def note(expert: int, rows: Tensor) -> Tensor:
            notes.append(Note(expert, rows))
            return self.blank(rows)

        # some blocks write to their input (jitter): the second pass alone may do that
        args, named = tree_map_only(Tensor, torch.clone, (args, dict(named)))
        with self.tape.playing(note):
            forward(*args, **named)
        return notes

    def _hand_out(self, notes: Sequence[Note], answers: Sequence[Tensor], forward: Callable[[], Any]) -> Any:
        label = self.tape.label
        at = 0
        differ: list[Tensor] = []

        def hand_out(expert: int, rows: Tensor) -> Tensor:
            nonlocal at
            if at == len(notes) or notes[at].expert != expert or notes[at].rows.shape != rows.shape:
                raise ReplayError(f"{label}: expert {expert} was called with {list(rows.shape)} {_SECOND_PASS_DIFFERS}")
            noted = notes[at].rows.detach()
            now = rows.detach()
            differ.append(~same(now, noted).all())
            at += 1
            return answers[at - 1]

        with self.tape.playing(hand_out):
            result = forward()
        if at < len(notes):
            raise ReplayError(f"{label}: expert {notes[at].expert} was not called any more {_SECOND_PASS_DIFFERS}")
        # All comparisons in one tensor: the host waits for the device once.
        if differ and bool(torch.stack(differ).any()):
            raise ReplayError(f"{label}: an expert was called with other rows {_SECOND_PASS_DIFFERS}")
        return result


_SECOND_PASS_DIFFERS = (
    "in the block's second pass than in the first: what it gives its experts depends on their answers, on state that "
    "a pass changes, or on random numbers that are not torch's"
)
