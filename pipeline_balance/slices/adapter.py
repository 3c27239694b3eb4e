"""Any transformers model in slices: its own layers, and attention over chunks.

The model's forward runs with recording functions in place of its layers at full length, so that positions, rotary
angles and documents are those of whole sequences. A slice's are parts of them. The same forward at a slice's length
shows the shapes, and with them the dimensions in which the two differ.

Shape legend: B rows of a microbatch, T tokens of a row, N slices, E experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from pipeline_balance.pipeline.model.adapter import IGNORED_LABEL, Recorded, shifted
from pipeline_balance.pipeline.model.expert_layers import collective_of
from pipeline_balance.pipeline.model.layers import Activations, Microbatch
from pipeline_balance.pipeline.model.router_losses import loss_of_sums
from pipeline_balance.pipeline.model.skeleton import Readable, copy_of
from pipeline_balance.slices.alone import Trial, check_limits
from pipeline_balance.slices.interface import WITHOUT_MASKS, Seen, Window, attending, configs_of, seeing
from pipeline_balance.slices.kernel import Heads, tracing
from pipeline_balance.slices.options import SliceOptions
from pipeline_balance.slices.parts import Sliced, SlicePart, part_of
from pipeline_balance.slices.saved.recompute import Recomputing
from pipeline_balance.slices.sharing.context import taken
from pipeline_balance.slices.store import ChunkStore
from prophet.errors import SpecError

# Names under which configurations have the number of experts
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
# Made-up weights that are drawn, for any number of them; a prime, so that rows of matrices begin at different ones
_DRAWN = 65537


class SlicedTransformers(Sliced, Recomputing):
    """A `TransformersModel` whose microbatches pass the stages slice by slice.

    Layers are the model's own. They must mix tokens by transformers' attention functions alone. Labels are shifted
    before they are cut, so the model's loss function must take `shift_labels`.

    Args:
        model: The model.
        slicing: How sequences are cut, and what layers compute again.
        **options: Those of `TransformersModel`.
    """

    def __init__(self, model: nn.Module, slicing: SliceOptions, **options: Any) -> None:
        Sliced.__init__(self, slicing)
        self._trial = Trial(self)
        # By kind of layer: numbers that attention meets per earlier token
        self._width: dict[int, int] = {}
        # by layer, of the latest batch: see `windows`
        self._windows: tuple[int | None, ...] = ()
        self.slicing = slicing
        # a PEFT model wraps the one that has the loss
        self._owner: Any = model if (base := getattr(model, "get_base_model", None)) is None else base()
        self._configs = configs_of(model)
        _check_loss(self._owner)
        _check_positions(self._configs)
        # its trials of a loss ask for masks, too
        with attending(self._configs), seeing():
            Recomputing.__init__(self, model, recompute=slicing.recompute, **options)

    def look(self) -> None:
        self._configs = configs_of(self.root)
        check_limits([self.root])
        with attending(self._configs), seeing():
            super().look()
        if self.router_loss is not None and not isinstance(self._coefficient(), int | float):
            raise SpecError(f"{type(self._owner).__name__} has a router loss without a router_aux_loss_coef")
        if self.router_loss is not None and self._context_parallel > 1:
            raise SpecError(
                f"context_parallel: the router loss of {type(self._owner).__name__} is of whole microbatches, whose "
                "tokens several ranks share: set output_router_logits=False"
            )

    def over(
        self,
        of: Callable[[nn.Module], nn.Module],
        units: tuple[nn.Module, ...],
        apart: Callable[[], AbstractContextManager[None]],
    ) -> Self:
        made = super().over(of, units, apart)
        made._owner, made.store, made._attentions = of(self._owner), ChunkStore(), {}
        # ranks that have parts of a unit would have to run it together
        made._trial = Trial(made, made._made_up)
        return made

    def _made_up(self, unit: int) -> SlicedTransformers:
        """This model with the whole of a unit, in made-up numbers."""
        mine, copies = {id(p) for p in self.units[unit].parameters()}, dict[int, nn.Module]()

        def drawn(name: str, parameter: Tensor) -> Tensor:
            if id(parameter) not in mine:
                return parameter
            # on the host, whose generator a trial puts back; of a size at which outputs are about as large as inputs
            size = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
            some = (torch.randn(min(parameter.numel(), _DRAWN)) * size).to(self.device, parameter.dtype)
            # drawing all of them would take longer than all else
            times = -(-parameter.numel() // max(len(some), 1))
            return some.repeat(times)[: parameter.numel()].view(parameter.shape)

        with self._apart():
            copy_of(self.root, drawn, {}, hooks=lambda kind: lambda: True, done=copies)
        made = super().over(lambda module: copies[id(module)], self.units, nullcontext)
        made.root.eval()
        return made

    @contextmanager
    def working(self, microbatch: Microbatch) -> Iterator[None]:
        with attending(self._configs, WITHOUT_MASKS), super().working(microbatch):
            yield

    def shared(self, unit: int, part: SlicePart) -> Iterable[Any]:
        # rotary angles and the like are computed once for all slices
        calls = self.recorded(part).calls[unit - 1 : unit] if unit else ()
        return [*super().shared(unit, part), *(leaf for call in calls for leaf in call.leaves)]

    def attentions(self, unit: int) -> tuple[Heads, ...]:
        # the units in front of the layers and behind them attend to nothing
        return self._attentions[self._kinds[unit - 1], self._mode()] if 0 < unit <= len(self.layers) else ()

    def crossover_tokens(self) -> int:
        """The tokens before one where attention to all of them costs the layers as much as all else, by count.

        A token meets every parameter once, those of experts where it goes, and every key and value once. Both cost two
        operations for each number, and twice that backward.
        """
        met = sum(_met(layer, getattr(self._owner, "config", None)) for layer in self.layers)
        return round(met / sum(self._width[kind] for kind in self._kinds))

    def windows(self) -> Sequence[int | None]:
        return self._windows

    # --- parts of microbatches ---------------------------------------------------------------------------------

    def sliced(self, microbatch: Microbatch) -> list[Microbatch]:
        labels = microbatch.labels
        assert labels is not None, "cut has asked for labels"
        if labels.dim() != 2:
            raise SpecError(f"slices need labels of every token, [rows, tokens], got {list(labels.shape)}")
        tokens = labels.shape[1]
        self.starts(tokens)
        inputs = dict(microbatch.inputs)
        if "position_ids" in self._accepts and "position_ids" not in inputs:
            # a model that makes them itself would begin at 0 in every slice
            inputs["position_ids"] = torch.arange(tokens, device=labels.device)[None]
        recorded, seen = self._whole(microbatch)
        self._windows = tuple(window_of(call.leaves) for call in recorded.calls)
        # label t belongs to the output at t - 1
        moved = shifted(labels)
        mask = inputs.get("attention_mask")
        # attention over slices reads no padding mask: causality keeps padding on the right from being seen
        if mask is not None and mask.dim() == 2 and bool(((mask == 0) & (moved != IGNORED_LABEL)).any()):
            raise SpecError("labels count behind padding, where attention_mask is 0: set them to -100")
        parts = self.parts(microbatch, inputs, moved, seen.documents)
        windows = [i for i, window in enumerate(self._windows) if window is not None]
        self._check_exchange(tokens, windows)
        self.check_shared(tokens, windows)
        # all but the last unit, whose outputs are losses
        self._trial.run(range(len(self.layers) + 1), parts)
        return self.share_of(parts)

    def counted(self, microbatch: Microbatch) -> int:
        if isinstance(microbatch, SlicePart):
            assert microbatch.labels is not None
            return int((microbatch.labels != IGNORED_LABEL).sum())
        return super().counted(microbatch)

    def words(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        if isinstance(microbatch, SlicePart):
            assert microbatch.labels is not None
            return next(iter(microbatch.inputs.values())), microbatch.labels
        return super().words(microbatch)

    # --- what layers are called with ---------------------------------------------------------------------------

    def _whole(self, microbatch: Microbatch) -> tuple[Recorded, Seen]:
        """What layers are called with at full length, and the documents."""
        # once per microbatch, for all of its slices
        if "whole" not in microbatch.kept:
            with attending(self._configs), seeing() as seen:
                recorded = self._record(self.kwargs_of(microbatch), Readable(allowed=True))
            microbatch.kept["whole"] = recorded, seen
        found: tuple[Recorded, Seen] = microbatch.kept["whole"]
        return found

    def recorded(self, microbatch: Microbatch) -> Recorded:
        if not isinstance(microbatch, SlicePart):
            return self._whole(microbatch)[0]
        part = microbatch
        # a part is asked for by each layer in turn, so the latest one is kept
        if self._latest is None or self._latest[0] is not part or self._latest[1] != self._mode():
            assert part.whole is not None
            mine, theirs = self._alone(part), self._whole(part.whole)[0]
            # most layers are called with the same tensors: each is cut once
            cut: dict[tuple[int, int], Any] = {}

            def part_of_leaf(a: Any, b: Any, layer: int) -> Any:
                key = id(a), id(b)
                if key not in cut:
                    cut[key] = _part(a, b, part, layer)
                return cut[key]

            calls = [
                replace(own, leaves=[part_of_leaf(a, b, i) for a, b in zip(own.leaves, full.leaves, strict=True)])
                for i, (own, full) in enumerate(zip(mine.calls, theirs.calls, strict=True))
            ]
            recorded = replace(mine, calls=calls)
            self._latest = part, self._mode(), recorded
        return self._latest[2]

    def _alone(self, part: SlicePart) -> Recorded:
        """What layers are called with for a slice alone; only shapes are read, which slices of one length share."""
        assert part.whole is not None
        kept, key = part.whole.kept, f"slices of {part.tokens} tokens"
        if key not in kept:
            with attending(self._configs), seeing():
                kept[key] = self._record(self.kwargs_of(part), Readable(allowed=True))
        found: Recorded = kept[key]
        return found

    def _output_of(self, layer: int, leaves: list[Any], structure: TreeSpec) -> tuple[list[Any], TreeSpec]:
        # grows where shapes were traced just now, so that attention was called
        known = len(self._outputs)
        with seeing() as seen, tracing() as attentions:
            found = super()._output_of(layer, leaves, structure)
        if attentions:
            # layers of one kind may differ in their windows, which come with the arguments
            self._attentions[self._kinds[layer], self._mode()] = tuple(replace(one, window=None) for one in attentions)
        if seen.calls:
            self._width[self._kinds[layer]] = seen.width
        if len(self._outputs) > known and not seen.calls:
            raise SpecError(
                f"layer {layer} ({type(self.layers[layer]).__name__}) does not call transformers' attention functions: "
                "a layer that carries a state from token to token in another way cannot run in slices"
            )
        return found

    # --- the loss ----------------------------------------------------------------------------------------------

    def loss(self, activations: Activations, microbatch: Microbatch) -> Tensor:
        return activations[0]

    def _run_behind(self, activations: Activations, microbatch: Microbatch) -> Activations:
        """The sum of a slice's losses; the router's part of the microbatch comes with its last slice."""
        part, count = part_of(microbatch), self.counted(microbatch)
        if self.vocabulary is not None:
            return super()._run_behind(activations, part)
        sums, flowing = self._without_sums(len(self.layers), activations)
        if sums is None or self.router_loss is None:
            with self._shifted(int(count > 0)):
                (mean,) = super()._run_behind(activations, part)
            return (mean * count,)
        experts = self.router_loss.experts
        probe = torch.zeros_like(sums)
        # The router's part is zero here, its gradient is not
        probe[0] = probe[-1] = 1.0
        probe.requires_grad_(torch.is_grad_enabled())
        with self._shifted(int(count > 0)):
            (mean,) = super()._run_behind((*flowing, probe), part)
        coefficient = float(self._coefficient())
        if count and mean.requires_grad:
            (slope,) = torch.autograd.grad(mean, probe, retain_graph=True)
            # the slope at the probe is the weight that the model gives the router loss
            if abs(float(slope[experts]) - coefficient * experts) > 1e-5 * abs(coefficient * experts):
                raise SpecError("the model weighs its router loss otherwise than its router_aux_loss_coef says")
        assert part.whole is not None
        routers = part.whole.kept.setdefault("routers", _Routers())
        # the loss is no sum over slices: its gradient is known after the last one
        part_loss: Tensor = _OfAllSlices.apply(sums, routers)  # type: ignore[no-untyped-call]
        routers.add(sums)
        # `mean * count` elsewhere sums over labels, so the router's part is weighed by all labels, too
        if part.unit is not None and part.slice == part.unit.slices - 1:
            part_loss = part_loss + routers.close(coefficient * super().counted(part.whole))
        return (mean * count + part_loss,)

    def _coefficient(self) -> Any:
        return getattr(self._owner, "router_aux_loss_coef", None)

    @contextmanager
    def _shifted(self, times: int) -> Iterator[None]:
        """Within this context the model's own loss takes labels that are shifted already.

        Args:
            times: How often the model must ask for it; another number is a `SpecError`.
        """
        theirs, asked = self._owner.loss_function, 0
        own = self._owner.__dict__.get("_loss_function")

        def ours(logits: Tensor, labels: Tensor, vocab_size: int, **others: Any) -> Tensor:
            nonlocal asked
            asked += 1
            found: Tensor = theirs(logits, labels, vocab_size, shift_labels=labels.contiguous(), **others)
            return found

        self._owner.loss_function = ours
        try:
            yield
        finally:
            # nothing was set on the object before, so nothing may stay there
            if own is None:
                del self._owner._loss_function
            else:
                self._owner.loss_function = own
        if asked != times:
            raise SpecError(f"the model asks its loss_function {asked} times in a forward, expected {times}")


@dataclass
class _Routers:
    """The routers' sums of a microbatch's slices [2 E + 1], and the gradient of the loss by them once all are there."""

    total: Tensor | None = None
    gradient: Tensor | None = None

    def add(self, sums: Tensor) -> None:
        mine = sums.detach()
        self.total = mine.clone() if self.total is None else self.total + mine

    def close(self, factor: float) -> Tensor:
        """The router's part of the loss; its gradient is read by every slice's backward."""
        assert self.total is not None
        with torch.enable_grad():
            # of detached sums: every slice's backward takes this gradient further
            total = self.total.requires_grad_()
            found = loss_of_sums(total) * factor
            (self.gradient,) = torch.autograd.grad(found, total)
        return found.detach()


class _OfAllSlices(torch.autograd.Function):
    """Zero, whose gradient by a slice's sums is that of the loss by all slices' sums, known only later."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, routers: _Routers) -> Tensor:
        ctx.routers = routers
        return sums.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gradient = ctx.routers.gradient
        if gradient is None:
            raise SpecError("a slice goes backward before the last slice of its microbatch has gone forward")
        return gradient * grads[0], None


def window_of(leaves: Iterable[Any]) -> int | None:
    """The window among a layer's arguments; None: there is none, or it hides nothing."""
    return next((int(leaf) for leaf in leaves if isinstance(leaf, Window)), None)


def _part(mine: Any, whole: Any, part: SlicePart, layer: int) -> Any:
    """A layer's argument for one slice: of what it is called with at full length, where the two differ in shape."""
    if isinstance(whole, Window):
        # a slice alone may be shorter than the window
        return whole
    if not isinstance(mine, Tensor) or not isinstance(whole, Tensor):
        if (
            isinstance(mine, Tensor)
            or isinstance(whole, Tensor)
            or (type(mine) is type(whole) and not _same(mine, whole))
        ):
            raise SpecError(f"layer {layer} is called with {whole!r:.50} for whole sequences, {mine!r:.50} for a slice")
        return mine
    differ = [d for d in range(whole.dim()) if mine.dim() != whole.dim() or mine.shape[d] != whole.shape[d]]
    if not differ:
        return whole
    # one dimension, which is the sequence's
    (*more, dim) = differ
    labels = part.whole.labels if part.whole is not None else None
    wanted = (part.tokens, labels.shape[1] if labels is not None else 0)
    if more or (mine.shape[dim], whole.shape[dim]) != wanted:
        raise SpecError(
            f"layer {layer} takes a tensor of shape {list(whole.shape)} for whole sequences and {list(mine.shape)} for "
            "a slice: it cannot be cut along the sequence"
        )
    return taken(whole, dim, part.of_sequence)


def _met(layer: nn.Module, config: Any) -> Fraction:
    """Parameters of a layer that a token meets: of experts as many as it is routed to, wherever they are."""
    experts = next((n for name in _EXPERTS if (n := getattr(config, name, None))), 1)
    # exact: a crossover must be the same on all ranks
    share = Fraction(getattr(config, "num_experts_per_tok", None) or experts, experts)
    found = Fraction(0)
    parts = dict(layer.named_modules())
    for name, module in parts.items():
        numbers = sum(p.numel() for p in module.parameters(recurse=False))
        path = name.split(".")
        if "experts" in path:
            # ranks that share experts hold a part of them each: the count is of all
            above = [parts[".".join(path[:i])] for i in range(len(path))]
            ranks = [c.size for c in map(collective_of, above) if c is not None]
            found += numbers * share * max(ranks, default=1)
        else:
            found += numbers
    return found


def _same(one: Any, other: Any) -> bool:
    return one == other if isinstance(one, bool | int | float | str) else True


def _check_positions(configs: Sequence[Any]) -> None:
    """Raise `SpecError` for attention that counts positions by itself: it would begin at 0 in every slice."""
    # Llama 4 scales queries so; its factors are 1 in the first slices, so a trial of two of them sees nothing
    if any(getattr(config, "attn_temperature_tuning", False) for config in configs):
        raise SpecError(
            "attn_temperature_tuning counts positions within attention, from 0 in every slice: set it to False"
        )


def _check_loss(model: Any) -> None:
    """Raise `SpecError` unless labels can be shifted before they are cut."""
    name = type(model).__name__
    if getattr(model, "loss_type", None) not in (None, "ForCausalLM"):
        raise SpecError(f"{name} computes {model.loss_type}, slices need a causal language model's loss")
    theirs: Callable[..., Tensor] | None = getattr(model, "loss_function", None)
    if theirs is None or "shift_labels" not in inspect.signature(theirs).parameters:
        raise SpecError(f"{name}'s loss function must take shift_labels, as labels are shifted before they are cut")
