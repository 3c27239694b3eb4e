"""A model's own forward around its layers, without the layers and without the weights that live elsewhere.

A `Skeleton` copies the modules around a list of layers, never the layers: parameters, buffers and options are shared
with the model, so the copy costs a few dictionaries, is made anew for every run, and the model itself is not touched.
In the copy, layers are functions of the caller, and parameters are `StandIn`s where the caller has no use for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeline_balance.pipeline.model.vocabulary import whole_shape
from prophet.errors import SpecError

LayerCall = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
"""Takes the place of layer i: gets i, the arguments and the keyword arguments of the call."""

_ASKS_FOR_SHAPE = {
    *("size", "dim", "numel", "nelement", "stride", "is_floating_point", "is_complex", "is_contiguous"),
    *("element_size", "get_device", "ndimension", "__len__", "__hash__", "__repr__"),
}
_ATTRIBUTES_WITH_VALUES = {"data", "real", "imag", "T", "mT", "H", "mH"}
BUILD_EMPTY = "build the model under pipeline_balance.init_empty_weights(), which leaves buffers their values"
_BEFORE, _AFTER = "_forward_pre_hooks", "_forward_hooks"
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


class Readable:
    """Whether stand-ins may be read now, and the names of those that were."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self.read: set[str] = set()


class StandIn(Tensor):
    """Zeros (or any one number) without memory, in the shape, type and place of a tensor that this rank does not hold.

    Shape, type and place can always be asked for. Anything else raises `SpecError` unless `readable` allows it.

    Attributes:
        called: The name of the tensor that it stands for.
        readable: Whether it may be read now; notes that it was.
    """

    called: str
    readable: Readable

    @staticmethod
    def like(tensor: Tensor, device: torch.device, name: str, readable: Readable, fill: float = 0.0) -> StandIn:
        """Make a stand-in for a tensor, a leaf that requires grad where its type allows it.

        Args:
            tensor: What it stands for, on any device or `meta`.
            device: Where it seems to lie.
            name: What errors call it.
            readable: Whether it may be read, now and later.
            fill: The number that all its elements are.
        """
        # one element, expanded: as large as an embedding in shape, and a few bytes in memory
        one = torch.full((), fill, dtype=tensor.dtype, device=device)
        # of the unsplit model: inputs count its words
        whole = one.expand(whole_shape(tensor))
        made: StandIn = Tensor._make_subclass(StandIn, whole, tensor.is_floating_point())
        made.called, made.readable = name, readable
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _asks_for_shape(func):
            for found in tree_leaves((args, kwargs)):
                if isinstance(found, StandIn):
                    found.readable.read.add(found.called)
                    if not found.readable.allowed:
                        raise SpecError(f"the model reads {found.called} where this part of it is not to be had")
        # results are plain tensors: what was computed from stand-ins is no stand-in
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _asks_for_shape(func: Any) -> bool:
    """Whether a function of tensors, or an attribute's getter, needs no values."""
    if getattr(func, "__name__", "") == "__get__":
        # getters written in Python have no name and may do anything, so they count as `data`, which reads
        return getattr(func.__self__, "__name__", "data") not in _ATTRIBUTES_WITH_VALUES
    return getattr(func, "__name__", "") in _ASKS_FOR_SHAPE


class Stop(Exception):
    """Ends a skeleton's forward from inside a layer's place."""


class Skeleton:
    """The modules of `root` around `layers`, to be run with other layers and with stand-ins for parameters.

    Args:
        root: The unsplit model.
        layers: Its list of layers.
        device: Where ranks compute.
    """

    def __init__(self, root: nn.Module, layers: nn.Module, device: torch.device) -> None:
        self.root = root
        self.layers = layers
        self.device = device

    def check(self) -> None:
        """Raise `SpecError` for what a copy around the layers could not stand for."""
        for path, module in self._around():
            name = path.removesuffix(".") or "the model"
            if "forward" in module.__dict__:
                raise SpecError(
                    f"{name} has a forward that was set on the object, as accelerate's hooks do: the model's forward "
                    "cannot run without its layers then; give the model as it was before"
                )
            lost = next((n for n, b in module._buffers.items() if b is not None and b.is_meta), None)
            if lost is not None:
                raise SpecError(f"the buffer {path}{lost} is on meta, and every rank needs it: {BUILD_EMPTY}")

    def to_device(self) -> None:
        """Take buffers around the layers to the device where ranks compute: every rank needs them."""
        for _, module in self._around():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(self.device)

    def slots(self) -> dict[str, nn.Parameter]:
        """Parameters around the layers, by full name; a tied one appears under each of its names."""
        return {f"{path}{n}": p for path, m in self._around() for n, p in m._parameters.items() if p is not None}

    def _around(self) -> list[tuple[str, nn.Module]]:
        """Modules that are no part of a layer, each with the prefix of its names."""
        # the list itself counts as around the layers: its copy holds what takes their place
        inside = {id(m) for layer in self.layers.children() for m in layer.modules()}
        # under each of its names, as a tied module's parameters have several
        every = self.root.named_modules(remove_duplicate=False)
        return [(f"{path}." if path else "", m) for path, m in every if id(m) not in inside]

    def forward(
        self,
        inputs: Mapping[str, Any],
        call: LayerCall,
        *,
        held: frozenset[str],
        readable: Readable,
        hooks: Callable[[], bool] | None = None,
        fill: float = 0.0,
        places: Mapping[int, nn.Module] | None = None,
    ) -> Any:
        """Run the model's own forward with `call` in the place of its layers.

        Args:
            inputs: Arguments of the model's forward, by name.
            call: Takes layer i's place: gets i and the arguments of the call.
            held: Names of the parameters that are the model's own; all others are stand-ins.
            readable: What stand-ins obey.
            hooks: Whether hooks on modules around the layers run at this moment (None: never).
            fill: The number that stand-ins are made of.
            places: What stands for other modules, by their ids.

        Returns:
            The model's output; None if `call` raised `Stop`.
        """
        stand_ins: dict[str, Tensor] = {}

        def slot(name: str, parameter: Tensor) -> Tensor:
            if name in held:
                return parameter
            if name not in stand_ins:
                stand_ins[name] = StandIn.like(parameter, self.device, name, readable, fill)
            return stand_ins[name]

        own = {id(layer): _Place(layer, i, call) for i, layer in enumerate(self.layers.children())}
        copy = copy_of(self.root, slot, {**own, **(places or {})}, hooks=lambda kind: hooks)
        try:
            return copy(**inputs)
        except Stop:
            return None


def standing(module: nn.Module, call: Callable[[Any], Any]) -> nn.Module:
    """Make what stands for a module that takes one argument: `call` gets it.

    Args:
        module: The module, whose attributes are given through.
        call: Its forward there.
    """
    return _Place(module, 0, lambda number, args, kwargs: call([*args, *kwargs.values()][0]))


class _Place(nn.Module):
    """Stands where a layer stood and gives that layer's attributes through."""

    def __init__(self, layer: nn.Module, number: int, call: LayerCall) -> None:
        super().__init__()
        # past `__setattr__`, which would register the layer as a child
        self.__dict__.update(_layer=layer, _number=number, _call=call, training=layer.training)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_call"](self.__dict__["_number"], args, kwargs)


def copy_of(
    module: nn.Module,
    slot: Callable[[str, Tensor], Tensor],
    places: Mapping[int, nn.Module],
    *,
    hooks: Callable[[str], Callable[[], bool] | None],
    path: str = "",
    done: dict[int, nn.Module] | None = None,
) -> nn.Module:
    """Copy a tree of modules, sharing everything but the dictionaries that hold modules and parameters.

    Args:
        module: The root of the tree.
        slot: `slot(name, parameter)` gives what stands for a parameter.
        places: What stands for a module, by its id.
        hooks: `hooks(kind)` says when hooks of a kind run (None: never).
        path: The root's name, which names of parameters begin with.
        done: Copies made so far, by the id of the original, so that a module in two places is copied once.
    """
    done = {} if done is None else done
    if id(module) in places:
        return places[id(module)]
    if id(module) in done:
        return done[id(module)]
    # without `__init__`, which would allocate parameters
    copy = done[id(module)] = module.__class__.__new__(module.__class__)
    copy.__dict__.update(module.__dict__)
    # set by `module.compile()`: it would call the original module
    copy.__dict__["_compiled_call_impl"] = None
    copy.__dict__["_buffers"] = dict(module._buffers)
    for kind in (_BEFORE, _AFTER, *_BACKWARD):
        found, when = module.__dict__[kind], hooks(kind)
        wrapped = {} if when is None else found if kind in _BACKWARD else {k: _while(when, h) for k, h in found.items()}
        # a dictionary of the same class: torch keeps hooks in ordered dictionaries
        copy.__dict__[kind] = type(found)(wrapped)
    dot = f"{path}." if path else ""
    copy.__dict__["_parameters"] = {
        name: None if p is None else slot(f"{dot}{name}", p) for name, p in module._parameters.items()
    }
    copy.__dict__["_modules"] = {
        name: None if child is None else copy_of(child, slot, places, hooks=hooks, path=f"{dot}{name}", done=done)
        for name, child in module._modules.items()
    }
    return copy


def only_before(kind: str) -> Callable[[], bool] | None:
    """For `copy_of`: hooks that run before a forward, as pruning's do, and no others."""
    return (lambda: True) if kind == _BEFORE else None


def _while(when: Callable[[], bool], hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: hook(*args, **kwargs) if when() else None
