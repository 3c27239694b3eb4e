"""Which activations of a layer are computed again for its backward instead of being kept.

`selective` wraps each part of a layer that does not attend, and each norm, in a checkpoint of torch's. Each then keeps
its input only: up projection and SwiGLU are computed again, and no norm keeps a second copy.
`full` wraps the whole layer, which keeps its input. What attention gave stays in the store of chunks in any case.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import TreeSpec
from torch.utils.checkpoint import checkpoint

from pipeline_balance.pipeline.model.adapter import TransformersModel
from pipeline_balance.slices.options import Recompute
from prophet.errors import SpecError


class Recomputing(TransformersModel):
    """A `TransformersModel` whose layers keep what `recompute` says.

    Args:
        model: The model.
        recompute: "none", "selective" or "full".
        **options: Those of `TransformersModel`.
    """

    def __init__(self, model: nn.Module, *, recompute: Recompute = "none", **options: Any) -> None:
        self.recompute = recompute
        super().__init__(model, **options)

    def look(self) -> None:
        super().look()
        if self.recompute == "none":
            return
        # each of the two would compute layers again
        if any(getattr(module, "gradient_checkpointing", False) for module in self.root.modules()):
            raise SpecError(
                f'the model checkpoints its layers itself: leave out recompute="{self.recompute}", or call '
                "model.gradient_checkpointing_disable()"
            )
        if self.recompute == "selective":
            for number, layer in enumerate(self.layers):
                if all(_is_norm(part) for part in recomputed_parts(layer)):
                    raise SpecError(
                        f"layer {number} ({type(layer).__name__}) has no part beside its attention that selective "
                        'recomputing could leave out: take recompute="full"'
                    )

    def _output_of(self, layer: int, leaves: list[Any], structure: TreeSpec) -> tuple[list[Any], TreeSpec]:
        if self.recompute != "selective":
            return super()._output_of(layer, leaves, structure)
        with _changing_inputs() as changing:
            found = super()._output_of(layer, leaves, structure)
        if changing:
            # Another attempt is refused, too: shapes that are known would not be asked for again
            self._outputs.clear()
            raise SpecError(
                f"layer {layer} ({type(self.layers[layer]).__name__}) has a part that changes its input in place, "
                f'{changing[0]}: it cannot be computed again alone, take recompute="full"'
            )
        return found

    def _call_layer(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.layers[layer]
        # without a backward nothing is kept anyway
        if self.recompute == "none" or not torch.is_grad_enabled():
            return module(*args, **kwargs)
        if self.recompute == "full":
            return checkpoint(module, *args, use_reentrant=False, **kwargs)
        with _checkpointed(recomputed_parts(module)):
            return module(*args, **kwargs)


def recomputed_parts(layer: nn.Module) -> list[nn.Module]:
    """The parts of a layer that selective recomputing wraps: its children that do not attend, and norms elsewhere.

    What attends knows its layer (`layer_idx`).
    """
    outer = [child for child in layer.children() if _runs_apart(child)]
    inside = {id(module) for child in outer for module in child.modules()}
    # norms within attention, too, which would keep a second copy of their input
    return outer + [module for module in layer.modules() if _is_norm(module) and id(module) not in inside]


@contextmanager
def _changing_inputs() -> Iterator[list[str]]:
    """Within this context, kinds of recomputed parts that change a tensor that they are given are collected.

    Torch calls these hooks in all threads, and other threads may run other models.
    """
    here = threading.get_ident()
    parts: set[int] = set()
    before: dict[int, list[tuple[Tensor, int]]] = {}
    found: list[str] = []

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        if threading.get_ident() != here:
            return
        # The layer itself is entered first, before its parts
        if not before:
            parts.update(map(id, recomputed_parts(module)))
        # torch counts changes in place of every tensor
        before[id(module)] = [(t, t._version) for t in args if isinstance(t, Tensor)]

    def leave(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if (
            threading.get_ident() == here
            and id(module) in parts
            and any(t._version != version for t, version in before.pop(id(module), ()))
        ):
            found.append(type(module).__name__)

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _runs_apart(module: nn.Module) -> bool:
    """Whether a module has parameters and no attention."""
    attends = any(isinstance(getattr(part, "layer_idx", None), int) for part in module.modules())
    return not attends and next(module.parameters(), None) is not None


def _is_norm(module: nn.Module) -> bool:
    """By name: transformers' norms have no common class."""
    return type(module).__name__.endswith("Norm")


@contextmanager
def _checkpointed(parts: list[nn.Module]) -> Iterator[None]:
    """Within this context the forward of each of `parts` is checkpointed.

    Its second call, in the backward, comes after the context and without the hooks of the module.
    """
    before = [part.__dict__.get("forward") for part in parts]
    try:
        for part in parts:
            part.forward = partial(checkpoint, _as_at_first(part), use_reentrant=False)
        yield
    finally:
        for part, own in zip(parts, before, strict=True):
            # an attribute on the object would hide the class's forward for good
            if own is None:
                part.__dict__.pop("forward", None)
            else:
                part.forward = own


def _as_at_first(part: nn.Module) -> Callable[..., Any]:
    """The forward of a part, which finds what it found in place of parameters in its first call.

    Hooks may have put it there, as those of shards do.
    """
    forward, first = part.forward, dict[str, Tensor]()

    def call(*args: Any, **kwargs: Any) -> Any:
        first.update({name: t for name, t in vars(part).items() if isinstance(t, Tensor)})
        # in the second call parameters are back
        back = {name: part._parameters.pop(name) for name in first if name in part._parameters}
        vars(part).update({name: first[name] for name in back})
        try:
            return forward(*args, **kwargs)
        finally:
            for name, parameter in back.items():
                del vars(part)[name]
                part._parameters[name] = parameter

    return call
