"""Modules in a row, run in slices: layers of one's own that call `attend`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils._pytree import TreeSpec

from pipeline_balance.pipeline.model.layers import LossFn, Microbatch, ModuleChain, labels_of
from pipeline_balance.slices.alone import Trial, check_limits
from pipeline_balance.slices.kernel import Heads, tracing
from pipeline_balance.slices.options import SliceOptions
from pipeline_balance.slices.parts import Sliced, SlicePart
from pipeline_balance.slices.store import Unit
from prophet.errors import SpecError


class SlicedChain(Sliced, ModuleChain):
    """A `ModuleChain` whose layers get one slice of every sequence at a time and call `attend` for what came before.

    Inputs are [B, T, ...] and labels [B, T], already shifted where they need to be. A layer that looks at positions is
    given them as an input. One slice is the microbatch.

    Args:
        layers: The modules.
        loss_fn: A mean over labels of any part of the sequences.
        slicing: How sequences are cut.
        **options: Those of `ModuleChain`. Without `counted`, all losses but cross entropy count every token.
    """

    def __init__(
        self, layers: nn.Module | Sequence[nn.Module], loss_fn: LossFn, slicing: SliceOptions, **options: Any
    ) -> None:
        Sliced.__init__(self, slicing)
        self.slicing = slicing
        if slicing.slices > 1 and options.get("counted") is None:
            # a slice's share of the loss is by tokens: rows are the same in every slice
            options["counted"] = labels_of(loss_fn, tokens=True)
        ModuleChain.__init__(self, layers, loss_fn, **options)
        self._trial = Trial(self)
        self.look()

    def look(self) -> None:
        super().look()
        if self.slices > 1:
            check_limits(self.units)

    def attentions(self, unit: int) -> tuple[Heads, ...]:
        return () if self._is_split(unit) else self._attentions[unit, self._mode()]

    def windows(self) -> Sequence[int | None]:
        mode = self._mode()
        return [one.window for unit in range(len(self.units)) for one in self._attentions.get((unit, mode), ())]

    def _output_of(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec]:
        with tracing() as found:
            output = super()._output_of(unit, args, kwargs)
        self._attentions[unit, self._mode()] = tuple(found)
        return output

    def sliced(self, microbatch: Microbatch) -> list[Microbatch]:
        if self.slices == 1:
            # layers call `attend` with one slice, too: it asks for a unit
            unit = Unit(microbatch.number, 0, 1)
            return [SlicePart(microbatch.number, microbatch.inputs, microbatch.labels, whole=microbatch, unit=unit)]
        if microbatch.labels is None:
            raise SpecError("slices need labels of every token, [rows, tokens]")
        parts = self.parts(microbatch, microbatch.inputs, microbatch.labels)
        # asks for shapes, with which attentions are known
        self.activations(parts[0])
        if self._uneven:
            # and their windows, by which slices of equal cost are cut
            parts = self.parts(microbatch, microbatch.inputs, microbatch.labels)
        self._check_exchange(microbatch.labels.shape[1])
        self.check_shared(microbatch.labels.shape[1])
        self._trial.run(range(len(self.units)), parts)
        return self.share_of(parts)
