"""What a layer returns, in shape and type, without running it on data.

Every rank needs this of all layers, before a step and without their parameters. Shapes that depend on the data cannot
be known: such a layer keeps its full size and masks what it leaves out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from operator import or_
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only

from pipeline_balance.pipeline.model.expert_layers import collective_of
from pipeline_balance.pipeline.model.skeleton import copy_of, only_before
from prophet.errors import SpecError

T = TypeVar("T")

_FROM_TORCH = "raised by a module of torch"


Shape = tuple[tuple[int, ...], torch.dtype]


def output_of(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
    *,
    hooks: Callable[[str], Callable[[], bool] | None] = only_before,
) -> tuple[list[Any], TreeSpec]:
    """Find what a module returns for these arguments, in shape and type.

    A copy of the module runs on fake tensors, under the autocast that is in force. It makes no difference where the
    module's parameters are, and nothing of it changes. A part of it that branches on values is taken to keep the shape
    and type of its first floating-point argument.

    Args:
        module: The layer.
        args: Positional arguments; tensors count by shape and type.
        kwargs: Keyword arguments, likewise.
        device: Where the layer will compute.
        hooks: Which of its hooks run, as `copy_of` takes them.

    Returns:
        The leaves of the output, with tensors on `meta`, and their structure.
    """
    with torch.no_grad(), _quiet(), FakeTensorMode(allow_non_fake_inputs=True):

        def fake(tensor: Tensor) -> Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

        copy = copy_of(module, lambda name, parameter: fake(parameter), {}, hooks=hooks)
        for part in copy.modules():
            # also tensors that are plain attributes: a fake and a real tensor do not mix
            part.__dict__["_buffers"] = {n: None if b is None else fake(b) for n, b in part._buffers.items()}
            part.__dict__.update({n: fake(t) for n, t in part.__dict__.items() if isinstance(t, Tensor)})
            part.__dict__["forward"] = _without_values(part, whole=part is copy)
        given = tree_map_only(Tensor, fake, (tuple(args), dict(kwargs)))
        leaves, structure = tree_flatten(copy(*given[0], **given[1]))
    return [on_meta(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure


@contextmanager
def _quiet() -> Iterator[None]:
    """Within, torch does not log kernels whose shapes it cannot infer: such a part is known to keep its own."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


def _without_values(part: nn.Module, *, whole: bool) -> Callable[..., Any]:
    """The forward of `part`; if it cannot run on shapes alone, its first floating-point argument stands for its result.

    That is so where values decide, and for kernels whose shapes torch cannot infer. A layer that exchanges its tokens
    with other ranks does not run, and is asked for the size of its answers. Modules of torch always can run, so what
    they raise is raised. So is what the `whole` layer raises for another reason than a want of values.
    """
    # from the class, as the object's `forward` will be `run`
    forward, torchs = type(part).forward, type(part).__module__.startswith("torch.nn.")

    def run(*args: Any, **kwargs: Any) -> Any:
        if "_orig_mod" in part._modules:
            # the wrapper of torch.compile would compile for fake tensors
            return part._modules["_orig_mod"](*args, **kwargs)  # type: ignore[misc]
        if collective_of(part) is not None and args:
            # its forward would exchange tokens with other ranks, which do not run it now
            return args[0].new_empty((*args[0].shape[:-1], getattr(part, "dim_out", args[0].shape[-1])))
        try:
            return forward(part, *args, **kwargs)
        except SpecError:
            # a stand-in that was read: its text says what is missing
            raise
        except Exception as error:
            given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor) and t.is_floating_point()]
            if torchs:
                # the note outlives this frame: parts around this one know then that shapes do not fit
                error.add_note(_FROM_TORCH)
            stays = _FROM_TORCH in getattr(error, "__notes__", ()) or whole
            if not given or (stays and not needs_data(error)):
                raise
            return torch.empty_like(given[0])

    return run


def needs_data(error: Exception) -> bool:
    """Whether a forward without data failed for want of data, and not because shapes do not fit."""
    kinds = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
    # code outside torch (numpy, kernels) fails with errors of any type, so their texts decide
    message = str(error).lower()
    return isinstance(error, kinds) or any(hint in message for hint in ("numpy()", "tolist", "data pointer", "fake"))


def on_meta(tensor: Tensor) -> Tensor:
    """The shape and type of `tensor`, contiguous, without memory."""
    # what is found while evaluating serves training, too
    with torch.inference_mode(False):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def trains(module: nn.Module) -> bool:
    """Whether any parameter of a module trains."""
    return any(p.requires_grad for p in module.parameters())


def flowing(found: Iterable[Sequence[Tensor]], training: Iterable[bool]) -> list[tuple[Tensor, ...]]:
    """Copies of what passes after every unit that require grad where a gradient comes back: if a unit up to it trains.

    Args:
        found: Shapes and types, on `meta`.
        training: Whether anything of the unit trains, one for each of `found`.
    """
    with torch.inference_mode(False):
        return [
            tuple(on_meta(t).requires_grad_(below and t.is_floating_point()) for t in activations)
            for activations, below in zip(found, accumulate(training, or_), strict=True)
        ]


class KnownShapes(Generic[T]):
    """What passes between a model's units, traced once for all batches that are alike.

    Tracing asks every unit. What requires grad changes more often than shapes do, and is worked out without asking.
    """

    def __init__(self) -> None:
        self._traced: dict[Any, tuple[Sequence[Sequence[Tensor]], T]] = {}
        self._flows: dict[Any, list[tuple[Tensor, ...]]] = {}

    def flows(
        self, key: Any, training: tuple[bool, ...], trace: Callable[[], tuple[Sequence[Sequence[Tensor]], T]]
    ) -> tuple[list[tuple[Tensor, ...]], T]:
        """What passes after every unit, as `flowing` has it, and what else tracing has found.

        Args:
            key: All that a trace depends on, such as the inputs' shapes.
            training: As `flowing` takes it.
            trace: Finds shapes and types [L + 1], on `meta`, and what else it likes.
        """
        if key not in self._traced:
            self._traced[key] = trace()
        found, more = self._traced[key]
        if (key, training) not in self._flows:
            self._flows[key, training] = flowing(found, training)
        return self._flows[key, training], more

    def clear(self) -> None:
        """Forget all: the model is another one."""
        self._traced.clear()
        self._flows.clear()


def shape_of(tensor: Tensor) -> Shape:
    """Shape and type, to be compared."""
    return tuple(tensor.shape), tensor.dtype
