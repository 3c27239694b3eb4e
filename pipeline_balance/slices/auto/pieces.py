"""Pieces of a model in slices, run alone: what a unit takes and keeps on one slice, and on the slice after it.

Shape legend: L units, P ranks, T tokens of a slice. A piece is one unit on one slice of T tokens that begins a
sequence, and on the one after it, forward and backward, as a step runs them. What the second takes more is attention to
T earlier tokens. Nothing of the training state is touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.model.layers import Activations, Microbatch, PipelineModel
from pipeline_balance.slices.alone import made_up
from pipeline_balance.slices.auto.choice import AutoSlices, measured_lengths
from pipeline_balance.slices.kernel import Heads
from pipeline_balance.slices.options import Recompute, SliceOptions
from pipeline_balance.slices.parts import Sliced, SlicePart, part_of
from pipeline_balance.slices.sharing.exchanging import Timed, kernel_seconds
from pipeline_balance.slices.store import ChunkStore, active
from prophet.errors import SpecError
from prophet.trials import trying

# The smallest of so many times counts, of long slices fewer
_REPEATS = 3


class Pieces(Sliced, PipelineModel):
    """A model whose units can be run alone; goes before what runs it in slices among the bases.

    Attributes:
        asked: Which slices may be chosen.
        device: Where this rank computes.
        known: What this rank has measured of a kind of unit on pieces of some shapes, and of a kind of attention.
    """

    asked: AutoSlices
    device: torch.device
    known: dict[object, dict[str, Any]]

    @contextmanager
    def cutting(self, options: SliceOptions) -> Iterator[None]:
        """Within this context sequences are cut by other options, and pass as they are."""
        before = self.slices, self._uneven, self._given, self.exchanging, self.offloader
        Sliced.follow(self, options)
        try:
            yield
        finally:
            self.slices, self._uneven, self._given, self.exchanging, self.offloader = before

    def _ready(self, part: SlicePart) -> None:
        """Have what running a part needs besides, which all of its units share."""
        self.activations(part)

    def _arguments(self, unit: int, part: SlicePart) -> Sequence[Any]:
        """What a unit is given that others are given, too: it counts for none of them."""
        return ()

    def _kind(self, unit: int) -> object:
        """Units of one kind are measured once."""
        whole = self.units[unit]
        # parts without parameters cost something, too
        types = tuple(map(type, whole.modules()))
        return types, tuple((p.shape, p.dtype, p.requires_grad) for p in whole.parameters())

    def _window(self, unit: int, whole: Microbatch) -> int | None:
        """How many tokens a token of the batch sees in a unit; None: all before it."""
        windows = [one.window for one in self.attentions(unit)]
        seen = [window for window in windows if window is not None]
        return max(seen) if seen and len(seen) == len(windows) else None

    def _recomputing(self, how: Recompute) -> Any:
        """A context in which layers keep what `how` says; raises `SpecError` where they cannot."""
        raise SpecError(f"recompute={how!r} is for transformers models")

    def measured(
        self, batch: Sequence[Microbatch], mine: Sequence[int], ranks: int, room: int | None, timed: Timed
    ) -> dict[str, Any]:
        """Figures of this rank's units, as `SliceCosts` has them, in what JSON can hold; local.

        Args:
            batch: Microbatches.
            mine: Units of this rank.
            ranks: P.
            room: Bytes that pieces may take.
            timed: Times calls.
        """
        whole = max(batch, key=lambda one: (tokens_of(one), _rows(one)))
        lengths = measured_lengths(self.asked, ranks, [tokens_of(one) for one in batch])
        units: dict[int, dict[str, Any]] = {}
        # made for what is measured: where all is known, of whole sequences alone
        pieces = cache(lambda tokens: self._parts(whole, tokens))
        with trying(), _same_buffers(self.root):
            shapes = self.activations(pieces(lengths[-1])[0])
            boundaries = [sum(t.nbytes for t in row) for row in shapes[1:-1]]
            every = [one for unit in range(len(self.units)) for one in self.attentions(unit)]
            found: dict[str, Any] = {"heads": (1, 1), "query_bytes": 0.0, "call_s": (0.0, 0.0)}
            if every and ranks > 1 and self.asked.balance in ("auto", "exchange"):
                found |= self._exchanged(whole, every[0], lengths, timed)
            kinds: dict[object, dict[str, Any]] = {}
            for unit in mine:
                window = self._window(unit, whole)
                given = tuple((t.shape, t.dtype, t.requires_grad) for t in shapes[unit])
                key = self._kind(unit), self._mode(), window, given, *lengths  # type: ignore[attr-defined]
                if key not in self.known and key not in kinds:
                    kinds[key] = self._piece_costs(unit, whole, lengths, pieces, window, room)
                units[unit] = kinds[key] if key in kinds else self.known[key]
            # a length that had no room may have some the next time
            self.known |= {key: one for key, one in kinds.items() if len(one["lengths"]) == len(lengths)}
        return found | {
            "units": units,
            "boundary_bytes": max(boundaries, default=0) / lengths[-1],
            "wide": max((one.wide.itemsize // one.dtype.itemsize for one in every), default=1),
        }

    def _exchanged(self, whole: Microbatch, heads: Heads, lengths: Sequence[int], timed: Timed) -> dict[str, Any]:
        """What attention's kernel and its queries take; nothing where attention cannot be exchanged."""
        try:
            with self.cutting(SliceOptions(2, order="aligned", balance="exchange")):
                super().sliced(_narrowed(whole, tokens_of(whole) // 2 * 2))
        except SpecError:
            # a window, a soft cap, frozen layers
            return {}
        rows, tokens = _rows(whole), lengths[len(lengths) // 2]
        if (key := (heads, rows, tokens)) not in self.known:
            forward_s, _, backward_s, _ = kernel_seconds(timed, heads, rows, tokens)
            self.known[key] = {
                "heads": (heads.queries, heads.keys),
                "query_bytes": float(rows * heads.queries * heads.width * heads.dtype.itemsize),
                "call_s": (forward_s, backward_s),
            }
        return self.known[key]

    def _parts(self, whole: Microbatch, tokens: int) -> list[SlicePart]:
        """The first two slices of so many tokens, as a microbatch of their own; one where there is no second."""
        slices = 2 if 2 * tokens <= tokens_of(whole) else 1
        with self.cutting(SliceOptions(slices)):
            return [part_of(part) for part in super().sliced(_narrowed(whole, slices * tokens))]

    def _piece_costs(
        self,
        unit: int,
        whole: Microbatch,
        lengths: Sequence[int],
        pieces: Callable[[int], list[SlicePart]],
        window: int | None,
        room: int | None,
    ) -> dict[str, Any]:
        """What a unit costs, as `UnitCosts` has it.

        Args:
            unit: Which.
            whole: The microbatch.
            lengths: Of slices, ascending.
            pieces: The first two slices of a length.
            window: How many tokens a token sees.
            room: Bytes that pieces may take.
        """
        attentions, shortest, longest = len(self.attentions(unit)), lengths[0], lengths[-1]
        counted = self._piece(unit, pieces(shortest), count=True)
        kept, again = {"none": counted.kept_bytes / shortest}, {}
        seconds: dict[int, list[float]] = {}
        for tokens in lengths:
            parts = pieces(tokens)
            # a piece that would not fit shows nothing: no candidate with it would
            if tokens > shortest and room is not None and kept["none"] * tokens * len(parts) > room / 2:
                break
            # all lengths together are to take about as long as four whole sequences
            best = self._fastest(unit, parts, max(min(_REPEATS, longest // (2 * tokens)), 1))
            columns = min(tokens, window - 1 if window is not None else tokens)
            more = [0.0, 0.0]
            if len(parts) > 1 and columns and attentions:
                more = [max(b - a, 0.0) / columns for a, b in zip(*best, strict=True)]
            seconds[tokens] = [*best[0], *more]
        wanted = get_args(Recompute) if self.asked.recompute == "auto" else [self.asked.recompute]
        middle = lengths[(len(seconds) - 1) // 2]
        for how in [how for how in wanted if how != "none" and attentions]:
            try:
                with self._recomputing(how):
                    short = self._piece(unit, self._parts(whole, shortest)[:1], count=True)
                    taken = self._fastest(unit, self._parts(whole, middle)[:1], _REPEATS)[0][1]
            except SpecError:
                continue
            kept[how], again[how] = short.kept_bytes / shortest, max(taken - seconds[middle][1], 0.0) / middle
        return {
            "lengths": seconds,
            "kept_bytes": kept,
            "again_s": again,
            "gradient_bytes": counted.gradient_bytes / shortest,
            "chunk_bytes": counted.chunk_bytes / shortest,
            "attentions": attentions,
            "window": window,
        }

    def _fastest(self, unit: int, parts: Sequence[SlicePart], repeats: int) -> list[list[float]]:
        """By part, seconds forward and backward."""
        taken = [self._piece(unit, parts).seconds for _ in range(repeats)]
        return [[min(one[k][way] for one in taken) for way in (0, 1)] for k in range(len(parts))]

    def _piece(self, unit: int, parts: Sequence[SlicePart], *, count: bool = False) -> _Piece:
        """Run a unit on slices, forward in order and backward in reverse, as a step does."""
        last, device = unit == len(self.units) - 1, self.device
        weights = [p for p in self.units[unit].parameters() if p.requires_grad]
        # weights' gradients are added up over slices, in float32 or better
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in weights]
        store, seconds, kept, chunks, gradients = ChunkStore(), [[0.0, 0.0] for _ in parts], 0, 0, 0
        done: list[tuple[Activations, Activations]] = []
        for number, part in enumerate(parts):
            self._ready(part)
            assert part.unit is not None
            given = tuple(made_up(t, device).requires_grad_(t.requires_grad) for t in self.activations(part)[unit])
            counting = count and number == 0
            saved = _Saved([*self.units[unit].parameters(), *self._arguments(unit, part), *part.inputs.values()])
            with self.working(part), active(store, part.unit), saved.counting() if counting else nullcontext():
                began = time.perf_counter()
                out = self.run(unit, given, part)
                out = (self.loss(out, part),) if last else out
                seconds[number][0] = time.perf_counter() - began
            if counting:
                kept, chunks = saved.bytes_with(store), store.used_bytes
            done.append((given, out))
        for number, part in reversed([*enumerate(parts)]):
            given, out = done.pop()
            flowing = [t for t in out if t.requires_grad]
            wanted = [*(t for t in given if t.requires_grad), *weights]
            if not flowing or not wanted:
                continue
            grads = [torch.ones_like(t) for t in flowing]
            assert part.unit is not None
            with self.working(part), active(store, part.unit):
                began = time.perf_counter()
                found = torch.autograd.grad(flowing, wanted, grads, allow_unused=True)
                for total, grad in zip(sums, found[len(wanted) - len(weights) :], strict=True):
                    if grad is not None:
                        total.add_(grad)
                seconds[number][1] = time.perf_counter() - began
            gradients = max(gradients, store.gradient_bytes)
        return _Piece(seconds, kept, chunks, gradients)


class _Piece(NamedTuple):
    """What running a unit on some slices has shown.

    Attributes:
        seconds: By slice, forward and backward.
        kept_bytes: What the first slice keeps; 0 where it was not counted.
        chunk_bytes: Of that, its keys and values.
        gradient_bytes: What gradients of its keys and values take.
    """

    seconds: list[list[float]]
    kept_bytes: int
    chunk_bytes: int
    gradient_bytes: int


class _Saved:
    """Memory that autograd and chunks keep, every storage once, without that of `others`."""

    def __init__(self, others: Sequence[Any]) -> None:
        tensors = [t for t in others if isinstance(t, Tensor) and not t.is_meta]
        self._others = {t.untyped_storage().data_ptr() for t in tensors}
        self._bytes: dict[int, int] = {}

    def counting(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._add(tensor)
        # an output that is saved itself would hold its node
        return tensor.detach()

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._others:
            self._bytes[storage.data_ptr()] = storage.nbytes()

    def bytes_with(self, store: ChunkStore) -> int:
        """All of it, with what `store` keeps."""
        for tensor in store.outputs():
            self._add(tensor)
        return sum(self._bytes.values()) + store.used_bytes


def tokens_of(microbatch: Microbatch) -> int:
    """Of its sequences; raises `SpecError` without labels of every token."""
    labels = microbatch.labels
    if labels is None or labels.dim() < 2:
        raise SpecError("slices need labels of every token, [rows, tokens]")
    return labels.shape[1]


def _rows(microbatch: Microbatch) -> int:
    return next(iter(microbatch.inputs.values())).shape[0]


def _narrowed(whole: Microbatch, tokens: int) -> Microbatch:
    """A microbatch of the first tokens, in which all labels count."""
    assert whole.labels is not None
    length, labels = whole.labels.shape[1], whole.labels[:, :tokens]
    inputs = {n: t[:, :tokens] if t.dim() > 1 and t.shape[1] == length else t for n, t in whole.inputs.items()}
    if (mask := inputs.get("attention_mask")) is not None:
        inputs["attention_mask"] = torch.ones_like(mask)
    return Microbatch(whole.number, inputs, labels if labels.is_floating_point() else labels.clamp(min=0))


@contextmanager
def _same_buffers(module: nn.Module) -> Iterator[None]:
    """Within this context buffers may change; afterwards they are as before."""
    every = [(part._buffers, name, buffer) for part in module.modules() for name, buffer in part._buffers.items()]
    values = [None if buffer is None or buffer.is_meta else buffer.clone() for _, _, buffer in every]
    try:
        yield
    finally:
        with torch.no_grad():
            for (buffers, name, buffer), value in zip(every, values, strict=True):
                # a layer may have bound the name to another tensor
                buffers[name] = buffer
                # by comparison: an untouched one keeps torch's count of changes
                if buffer is not None and value is not None and not torch.equal(buffer, value):
                    buffer.copy_(value)
