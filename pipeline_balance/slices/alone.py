"""Whether layers may be given one slice after the other: tried on two slices, before anything is trained.

A layer may mix tokens by attention over slices alone. One that does so in another way (a state that goes from token to
token, torch's own attention, positions that begin anew, tokens that leave early) gives other outputs for two slices in
turn than for both at once. That is what is tried here, on made-up inputs, in evaluation mode.

Shape legend: B sequences, T tokens of a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.model.expert_layers import expert_layers
from pipeline_balance.pipeline.model.layers import Activations, Microbatch, PipelineModel
from pipeline_balance.slices.parts import SlicePart, part_of
from pipeline_balance.slices.store import Chunk, ChunkStore, active
from prophet.errors import SpecError
from prophet.trials import evaluating, trying


def check_limits(units: Sequence[nn.Module]) -> None:
    """Raise `SpecError` for experts whose limits or losses are of whole microbatches, which slices would change."""
    for number, unit in enumerate(units):
        for name, module in unit.named_modules():
            # `prophet.MoE` keeps its gate's configuration there
            config = getattr(getattr(module, "gate", None), "config", None)
            wrong = [n for n in ("capacity_factor", "drop_policy") if getattr(config, n, None)]
            wrong += ["aux_loss"] if getattr(config, "aux_loss", "none") != "none" else []
            wrong += ["z_loss_weight"] if getattr(config, "z_loss_weight", 0) else []
            if wrong:
                raise SpecError(
                    f"layer {number} ({name}) has a gate with {', '.join(wrong)}, which is of whole microbatches: "
                    "slices would change it. Train without, or let slices=1"
                )


class Trial:
    """Tries the units of `model` that are here, each once.

    Args:
        model: The model.
        whole: Makes a model with the whole of a unit, where ranks have parts of it; None: `model` has it.
    """

    def __init__(self, model: PipelineModel, whole: Callable[[int], PipelineModel] | None = None) -> None:
        self.model, self._whole = model, whole if whole is not None else lambda unit: model
        self._tried: set[tuple[Any, ...]] = set()
        # By unit, the numbers that its attentions give as `layer`
        self._calls: dict[int, set[int]] = {}

    def run(self, units: Sequence[int], slices: Sequence[Microbatch]) -> None:
        """Try units on two slices, in turn and at once.

        Units that share experts with other ranks are left out, as all of them would have to run.

        Args:
            units: Numbers of units.
            slices: Of one microbatch.

        Raises:
            SpecError: Names the first of these units that slices would change.
        """
        model = self.model
        shared = {unit for unit, _, _ in expert_layers(model.units)}
        # a part that is replaced makes another layer of it
        keys = {unit: (unit, *((id(m), type(m)) for m in model.units[unit].modules())) for unit in units}
        # what is on meta lives on another rank, which tries it
        tensors = {unit: (*model.units[unit].parameters(), *model.units[unit].buffers()) for unit in units}
        here = [u for u in units if not any(t.is_meta for t in tensors[u]) and u not in shared]
        new = [u for u in here if keys[u] not in self._tried]
        if not new or len(slices) < 2:
            return
        first, second = (part_of(part) for part in slices[:2])
        both = _joined(first, second)
        # dropout would differ between the two runs, and training must not notice the trial
        with trying(), torch.no_grad(), evaluating(model.root):
            for unit in new:
                self._try(unit, both, (first, second))
                self._check_layers(unit)
        # only what has passed: a unit that was refused is tried again
        self._tried |= {keys[unit] for unit in new}

    def _try(self, unit: int, both: SlicePart, parts: tuple[SlicePart, SlicePart]) -> None:
        """Raise `SpecError` if a unit gives other outputs for `parts` in turn than for `both` at once."""
        model = self._whole(unit)
        device = next(iter(both.inputs.values())).device
        given = tuple(made_up(t, device) for t in model.activations(both)[unit])
        self._calls[unit] = set()
        at_once = _run(model, unit, given, both, _Noting(self._calls[unit]))
        # a store apart: the pipeline's chunks stay as they are
        store, at = ChunkStore(), 0
        for part in parts:
            length = part.stop - part.start
            like = model.activations(part)[unit]
            own = tuple(_cut(t, to, at, length) for t, to in zip(given, like, strict=True))
            for whole, mine in zip(at_once, _run(model, unit, own, part, store), strict=True):
                if not _alike(_cut(whole, mine, at, length), mine):
                    kind = type(model.units[unit]).__name__
                    # classes of ours mean nothing to the user
                    named = "" if kind.startswith("_") else f" ({kind})"
                    raise SpecError(
                        f"layer {unit}{named} computes other outputs for two slices in "
                        "turn than for both at once: a layer may depend on other tokens only by attention over slices, "
                        "and on positions only as inputs give them"
                    )
            at += length

    def _check_layers(self, unit: int) -> None:
        """Raise `SpecError` where another unit attends under the same `layer`: both would use the same chunks."""
        for other, numbers in self._calls.items():
            if other != unit and (twice := sorted(numbers & self._calls[unit])):
                raise SpecError(
                    f"layers {min(unit, other)} and {max(unit, other)} both call attend with layer={twice[0]}: "
                    "give each attention of the model a `layer` of its own"
                )


def _run(model: PipelineModel, unit: int, given: Activations, part: SlicePart, store: ChunkStore) -> Activations:
    model.activations(part)
    assert part.unit is not None
    with model.working(part), active(store, part.unit):
        return model.run(unit, given, part)


class _Noting(ChunkStore):
    """A store that notes which layers have chunks."""

    def __init__(self, layers: set[int]) -> None:
        super().__init__()
        self.layers = layers

    def append(self, layer: int, *given: Any, **options: Any) -> Chunk:
        self.layers.add(layer)
        return super().append(layer, *given, **options)


def _joined(first: SlicePart, second: SlicePart) -> SlicePart:
    """Two slices as one; those after them stay as they are."""
    assert first.whole is not None
    assert first.unit is not None
    # without the boundary between the two
    starts = first.unit.starts
    return replace(
        first,
        inputs={n: torch.cat([t, second.inputs[n]], dim=1) for n, t in first.inputs.items()},
        labels=None if first.labels is None or second.labels is None else torch.cat([first.labels, second.labels], 1),
        kept={},
        stop=second.stop,
        unit=replace(first.unit, slices=first.unit.slices - 1, starts=(starts[0], *starts[2:])),
    )


def made_up(like: Tensor, device: torch.device) -> Tensor:
    """Random numbers, or zeros where integers are expected: any index is valid then."""
    # drawn on the host, whose generator `trying` puts back
    drawn = torch.randn(like.shape) if like.is_floating_point() else torch.zeros(like.shape)
    return drawn.to(device, like.dtype)


def _cut(tensor: Tensor, like: Tensor, start: int, length: int) -> Tensor:
    """The part of a tensor for one slice, where that slice's is shorter in one dimension."""
    differ = [d for d, (a, b) in enumerate(zip(tensor.shape, like.shape, strict=False)) if a != b]
    return tensor.narrow(differ[0], start, length) if len(differ) == 1 else tensor


def _alike(one: Tensor, other: Tensor) -> bool:
    """Equal but for rounding; what has no tokens, as the sums of routers, is not compared."""
    if one.shape != other.shape:
        return False
    if one.dim() < 2 or not one.is_floating_point():
        return True
    # sums in another order; half precision keeps three digits or two
    coarse = 1e-3 if torch.finfo(one.dtype).eps < 1e-4 else 1e-1
    # made-up inputs may overflow where those of training do not
    largest = float(other.abs().nan_to_num(0.0, 0.0).max())
    return bool(torch.allclose(one, other, rtol=coarse, atol=coarse * largest, equal_nan=True))
