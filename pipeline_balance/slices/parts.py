"""What models have in common that run in slices: parts of microbatches, and the chunks of the layers' attention.

Shape legend: B sequences of a microbatch, T tokens of a sequence, N slices.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.model.layers import Activations, Microbatch, SharesTokens, TrainingPass
from pipeline_balance.schedules.actions import Action
from pipeline_balance.schedules.sliced import slice_starts
from pipeline_balance.slices.kernel import Heads
from pipeline_balance.slices.options import SliceOptions
from pipeline_balance.slices.saved.offload import Offloader
from pipeline_balance.slices.sharing.context import Context, Ranges, check_lengths, ranges_of, taken
from pipeline_balance.slices.sharing.exchange import Exchanger
from pipeline_balance.slices.sharing.exchanging import Exchanging
from pipeline_balance.slices.store import ChunkStore, Unit, active
from prophet.errors import SpecError
from prophet.ranks.collective import Collective


@dataclass(frozen=True, eq=False)
class SlicePart(Microbatch):
    """One slice of a microbatch.

    Attributes:
        whole: The microbatch; inputs and labels here are those of the tokens `start` to `stop`.
        unit: Which slice of which microbatch it is, to attention.
        start, stop: Tokens of the sequence.
        ranges: Those of them that this rank has, where several share them; else empty.
    """

    whole: Microbatch | None = None
    unit: Unit | None = None
    start: int = 0
    stop: int = 0
    ranges: Ranges = ()

    @property
    def tokens(self) -> int:
        """How many tokens this rank has."""
        return sum(b - a for a, b in self.of_sequence)

    @property
    def of_sequence(self) -> Ranges:
        """Which tokens of the sequence these are."""
        return self.ranges or ((self.start, self.stop),)


class Sliced(SharesTokens):
    """The chunks of this rank's layers; goes before a `PipelineModel` among its bases.

    Args:
        slicing: How sequences are cut.
    """

    def __init__(self, slicing: SliceOptions) -> None:
        self.follow(slicing)
        # of the training pass that runs
        self._exchanger: Exchanger | None = None
        self._context_parallel = slicing.context_parallel
        self.store = ChunkStore()
        # by unit or kind of layer, and all else that types depend on
        self._attentions: dict[object, tuple[Heads, ...]] = {}

    def follow(self, slicing: SliceOptions) -> None:
        """Cut sequences by these options from now on.

        Args:
            slicing: How sequences are cut.
        """
        self.slices = slicing.slices
        self._uneven, self._given = slicing.balance == "uneven", slicing.crossover_tokens
        self.exchanging = Exchanging(slicing) if slicing.exchanges else None
        self.offloader = Offloader(slicing) if slicing.offloads else None

    @contextmanager
    def working(self, microbatch: Microbatch) -> Iterator[None]:
        """Within this context attention is that of this slice."""
        part = part_of(microbatch)
        assert part.unit is not None
        with active(self.store, part.unit), self.offloader.working() if self.offloader else nullcontext():
            yield

    def run(self, unit: int, activations: Activations, microbatch: Microbatch) -> Activations:
        out: Activations = super().run(unit, activations, microbatch)  # type: ignore[misc]
        # what it saves may go to the host
        if self.offloader is not None and self.offloader.taking:
            self.offloader.hold(unit, activations, out, self.shared(unit, part_of(microbatch)))
        return out

    def shared(self, unit: int, part: SlicePart) -> Iterable[Any]:
        """What a unit reads that is kept for the whole microbatch."""
        return [*part.inputs.values(), part.labels]

    # --- ranks that share tokens --------------------------------------------------------------------------------

    def share_tokens(self, group: Collective) -> None:
        self.store.context = Context(group)

    def check_shared(self, tokens: int, windows: Sequence[int] = ()) -> None:
        """Raise `SpecError` where ranks cannot share the tokens of every slice.

        Args:
            tokens: Of a sequence.
            windows: Layers with one that hides tokens of the batch, as far as `attentions` does not say so.
        """
        if self._context_parallel == 1:
            return
        check_lengths(self.starts(tokens), self._context_parallel)
        if hiding := self._hiding(tokens, windows):
            raise SpecError(
                f"context_parallel: layer {min(hiding)} has a sliding window, and the tokens that a rank has of a "
                "slice are not side by side. Windows need few bytes of earlier slices: train without"
            )

    def share_of(self, parts: Sequence[Microbatch]) -> list[Microbatch]:
        """What this rank has of every slice: all of it, or its share."""
        context = self.store.context
        return [*parts] if context is None else _shares([part_of(part) for part in parts], context)

    def _hiding(self, tokens: int, windows: Sequence[int]) -> list[int]:
        """Layers with a window that hides tokens of a sequence."""
        units: tuple[nn.Module, ...] = self.units  # type: ignore[attr-defined]
        every = [(unit, one) for unit in range(len(units)) for one in self.attentions(unit)]
        return [*windows, *(unit for unit, one in every if one.window is not None and one.window < tokens)]

    # --- exchange ----------------------------------------------------------------------------------------------

    @abstractmethod
    def attentions(self, unit: int) -> tuple[Heads, ...]:
        """The attentions that a unit calls, in order, once its shapes are known."""

    def begin_pass(self, given: TrainingPass) -> None:
        """Plan what a training pass offloads, and its exchange, the same on all ranks with a stage."""
        if self.offloader is not None:
            self.offloader.begin(given, self.store, self.root)  # type: ignore[attr-defined]
        if self.exchanging is None or len(given.ranks) < 2:
            return
        parts = [part_of(part) for part in given.parts]
        units = [part.unit for part in parts if part.unit is not None]
        rows = [next(iter(part.inputs.values())).shape[0] for part in parts]
        heads = [[one for unit in mine for one in self.attentions(unit)] for mine in given.stages]
        self._exchanger = self.exchanging.begin(self.store, given, heads, units, rows, self.device)  # type: ignore[attr-defined]

    @contextmanager
    def acting(self, action: Action) -> Iterator[None]:
        """Within this context saved tensors move, and attention is exchanged, as this action of the pass needs it."""
        moving = self.offloader.acting(action) if self.offloader else nullcontext()
        with moving, self._exchanger.acting(action) if self._exchanger else nullcontext():
            yield

    def _check_exchange(self, tokens: int, windows: Sequence[int] = ()) -> None:
        """Raise `SpecError`, on all ranks, where a batch cannot be trained with exchange.

        Args:
            tokens: Of a sequence.
            windows: Layers with one that hides tokens of the batch, as far as `attentions` does not say so.
        """
        # evaluation exchanges nothing
        if self.exchanging is None or not torch.is_grad_enabled():
            return
        units: tuple[nn.Module, ...] = self.units  # type: ignore[attr-defined]
        first = next((unit for unit in range(len(units)) if self.attentions(unit)), None)
        if first is None:
            return
        attentions = [(unit, one) for unit in range(len(units)) for one in self.attentions(unit)]
        if hiding := self._hiding(tokens, windows):
            raise SpecError(
                f'balance="exchange" plans for attention to all earlier tokens: layer {min(hiding)} has a sliding '
                'window, with which late slices have hardly more to do. Train with balance="none"'
            )
        capped = [unit for unit, one in attentions if one.soft_cap is not None]
        if capped:
            raise SpecError(
                f'balance="exchange" knows the cost of plain attention: layer {capped[0]} has a soft cap of scores. '
                'Train with balance="none"'
            )
        before = any(p.requires_grad for unit in units[:first] for p in unit.parameters())
        # a backward that one rank leaves out would have others wait for it
        if not before and not all(p.requires_grad for p in units[first].parameters()):
            raise SpecError(
                f'balance="exchange" needs a backward pass of every attention: layer {first} has frozen parameters, '
                "and nothing in front of it trains"
            )
        self.exchanging.reserve(self.device)  # type: ignore[attr-defined]

    def end_pass(self) -> None:
        """Drop all chunks, and what is on the host: nothing outlives a pass."""
        self._exchanger = None
        if self.offloader is not None:
            self.offloader.end()
        self.store.clear()

    def rest(self) -> None:
        """Let go of the chunks' memory."""
        context, self.store = self.store.context, ChunkStore()
        self.store.context = context
        if self.exchanging is not None:
            self.exchanging.rest()

    def starts(self, tokens: int) -> tuple[int, ...]:
        """First tokens of the slices, and T, [N + 1]; see `slice_starts`."""
        if not self._uneven:
            return slice_starts(tokens, self.slices)
        crossover = self._given if self._given is not None else self.crossover_tokens()
        return slice_starts(tokens, self.slices, crossover, self.windows())

    @abstractmethod
    def windows(self) -> Sequence[int | None]:
        """How many tokens a token sees in every attention, as far as they are known; None: all before it."""

    def crossover_tokens(self) -> int:
        """The context length at which attention costs the layers as much as the rest of them."""
        raise SpecError(
            'balance="uneven" needs crossover_tokens for layers of one\'s own: '
            "the context length at which attention costs as much as the rest of a layer"
        )

    def parts(
        self, whole: Microbatch, inputs: Mapping[str, Tensor], labels: Tensor, documents: Tensor | None = None
    ) -> list[Microbatch]:
        """Slices of a microbatch, along the second dimension of its tensors.

        Args:
            whole: The microbatch.
            inputs: Its tensors, [B, T, ...].
            labels: [B, T].
            documents: Which tokens may attend to each other [B, T]; None: all.

        Returns:
            N parts, in order.

        Raises:
            SpecError: For a tensor whose second dimension is not T.
        """
        _check_whole([labels, *inputs.values()])
        # on the host: which blocks have a mask depends on them
        documents = documents.cpu() if documents is not None else None
        tokens = labels.shape[1] if labels.dim() > 1 else 0
        starts = self.starts(tokens)
        odd = {n: list(t.shape) for n, t in inputs.items() if t.dim() < 2 or t.shape[1] != tokens}
        if odd:
            raise SpecError(
                f"with slices, all inputs must be [rows, {tokens} tokens, ...] as the labels are, got {odd}"
            )
        found: list[Microbatch] = []
        for number, (start, stop) in enumerate(pairwise(starts)):
            found.append(
                SlicePart(
                    number=whole.number,
                    # views: slices share the microbatch's memory
                    inputs={name: t[:, start:stop] for name, t in inputs.items()},
                    labels=labels[:, start:stop],
                    slice=number,
                    # costs are measured per slice, and compared per microbatch
                    share=(stop - start) / tokens,
                    whole=whole,
                    unit=Unit(whole.number, number, len(starts) - 1, documents, starts),
                    start=start,
                    stop=stop,
                )
            )
        return found


def _shares(parts: Sequence[SlicePart], context: Context) -> list[Microbatch]:
    """The tokens that this rank has of each of a microbatch's slices."""
    whole = parts[0].unit
    assert whole is not None
    starts = tuple(start // context.size for start in whole.starts)
    # by rank: which tokens it has of every slice, and their documents
    ranges = [[ranges_of(a, b, rank, context.size) for a, b in pairwise(whole.starts)] for rank in range(context.size)]
    documents = None if whole.documents is None else taken(whole.documents, 1, tuple(chain(*ranges[context.rank])))
    found: list[Microbatch] = []
    for number, part in enumerate(parts):
        unit = Unit(whole.microbatch, number, whole.slices, documents, starts)
        if whole.documents is not None:
            asking = tuple(chain(*(ranges[rank][number] for rank in (context.rank, *context.others))))
            unit = replace(unit, asking=taken(whole.documents, 1, asking))
        mine = ranges[context.rank][number]
        here = tuple((a - part.start, b - part.start) for a, b in mine)
        inputs = {name: taken(t, 1, here) for name, t in part.inputs.items()}
        labels = None if part.labels is None else taken(part.labels, 1, here)
        found.append(replace(part, inputs=inputs, labels=labels, unit=unit, ranges=mine))
    return found


def _check_whole(tensors: Sequence[Tensor]) -> None:
    """Raise `SpecError` where this rank has a part of every sequence and others have the rest."""
    # torch's context parallelism replaces this function, or hands out `DTensor`s
    patched = getattr(nn.functional.scaled_dot_product_attention, "__module__", None) or ""
    if "context_parallel" in patched or any(hasattr(t, "device_mesh") for t in tensors):
        raise SpecError(
            "slices need whole sequences on every rank of a stage, and torch's context parallelism spreads them over "
            "ranks: let SliceOptions(context_parallel=...) do that"
        )


def part_of(microbatch: Microbatch) -> SlicePart:
    """The microbatch, which must be a slice."""
    if not isinstance(microbatch, SlicePart):
        raise SpecError("a model in slices runs parts of microbatches, as `sliced` makes them")
    return microbatch
