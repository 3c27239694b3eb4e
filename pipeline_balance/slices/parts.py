"""What models have in common that run in slices: parts of microbatches, and the chunks of the layers' attention.

Shape legend: B sequences of a microbatch, T tokens of a sequence, N slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from pipeline_balance.pipeline.model import Microbatch
from pipeline_balance.slices.store import ChunkStore, Unit, active
from prophet.errors import SpecError


@dataclass(frozen=True, eq=False)
class SlicePart(Microbatch):
    """Slice number `slice` of `whole`; inputs and labels are those of its tokens, `start` to `stop`."""

    whole: Microbatch | None = None
    unit: Unit | None = None
    start: int = 0
    stop: int = 0


class Sliced:
    """The chunks of this rank's layers; goes before a `PipelineModel` among its bases."""

    def __init__(self, slices: int) -> None:
        self.slices = slices
        self.store = ChunkStore()

    @contextmanager
    def working(self, microbatch: Microbatch) -> Iterator[None]:
        """Attention inside is that of this slice."""
        part = part_of(microbatch)
        assert part.unit is not None
        with active(self.store, part.unit):
            yield

    def end_pass(self) -> None:
        """No chunk outlives a pass."""
        self.store.clear()

    def starts(self, tokens: int) -> tuple[int, ...]:
        """[N + 1] first tokens of the slices, and T. Raises `SpecError` where the slices do not divide T."""
        each = tokens // self.slices
        if tokens % self.slices or not tokens:
            near = [each * self.slices, (each + 1) * self.slices]
            raise SpecError(
                f"sequences of {tokens} tokens cannot be cut into {self.slices} equal slices: "
                f"pad or cut them to {' or '.join(str(n) for n in near if n)} tokens"
            )
        return tuple(range(0, tokens + 1, each))

    def parts(
        self, whole: Microbatch, inputs: Mapping[str, Tensor], labels: Tensor, documents: Tensor | None = None
    ) -> list[Microbatch]:
        """Slices of tensors whose second dimension is the sequence's. Raises `SpecError` where one has another."""
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
                    inputs={name: t[:, start:stop] for name, t in inputs.items()},
                    labels=labels[:, start:stop],
                    slice=number,
                    whole=whole,
                    unit=Unit(whole.number, number, self.slices, documents, starts),
                    start=start,
                    stop=stop,
                )
            )
        return found


def part_of(microbatch: Microbatch) -> SlicePart:
    """The microbatch, which must be a slice."""
    if not isinstance(microbatch, SlicePart):
        raise SpecError("a model in slices runs parts of microbatches, as `sliced` makes them")
    return microbatch
