"""Modules made anew from those that the user built, with other parameters and the same everything else.

torch shards a module once. So the modules that `build` made stay as they are, with their parameters on `meta` while a
sharded copy is in force. A copy has the attributes, buffers and hooks of its original: the same objects, not others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from prophet.errors import SpecError

_HOOKS = tuple(k for k, v in vars(nn.Module()).items() if k.endswith(("_hooks", "_with_kwargs", "_always_called")))
_BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_OWN = {"_parameters", "_modules", "_buffers", *_HOOKS}
# what torch and `sharded` leave on modules that they shard
_SHARDING = ("torch.distributed.", "pipeline_balance.elastic.sharded")
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params", "_distribute_module_applied")
_STATE = "__composable_api_state_key"


_Hooks = dict[int, dict[str, dict[Any, Any]]]
"""Hooks by the copy's id and their kind."""


class Copy:
    """A copy of `root`, a tree of modules that the user built; `now` is the copy of it that is in force, if one is.

    `slot(parameter)` makes what stands for a parameter, once for a tied one. Whoever shards the copy adds hooks, and
    hands them over by `take_hooks`: those of `inner` run within the user's, those of `outer` around them.
    """

    def __init__(self, root: nn.Module, now: Copy | None, slot: Callable[[nn.Parameter], nn.Parameter]) -> None:
        self._now, self._slot = now, slot
        self._pairs: dict[int, tuple[nn.Module, nn.Module]] = {}
        self._parameters: dict[int, nn.Parameter] = {}
        self.root = self._copy(root)
        self.ids = {id(copy) for _, copy in self._pairs.values()}
        self._given = {id(copy): set(vars(copy)) for _, copy in self._pairs.values()}
        self.inner: _Hooks = {}
        self.outer: _Hooks = {}

    def of(self, module: nn.Module) -> nn.Module:
        """The copy of an original."""
        return self._pairs[id(module)][1]

    def pairs(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Every original module with its copy."""
        yield from self._pairs.values()

    def slots(self) -> Iterator[tuple[nn.Parameter, nn.Module, str]]:
        """Every original parameter, with the copy that has its twin and the twin's name there."""
        for original, copy in self._pairs.values():
            for name, parameter in original._parameters.items():
                if parameter is not None:
                    yield parameter, copy, name

    def _copy(self, module: nn.Module) -> nn.Module:
        if id(module) in self._pairs:
            return self._pairs[id(module)][1]
        kind = plain_type(module)
        copy = kind.__new__(kind)
        self._pairs[id(module)] = module, copy
        copy.__dict__.update(attributes_of(module, self._now))
        copy.__dict__["_buffers"] = module._buffers
        copy.__dict__.update({kind: type(module.__dict__[kind])() for kind in _HOOKS})
        copy.__dict__["_parameters"] = {
            name: None if p is None else self._parameter(p) for name, p in module._parameters.items()
        }
        copy.__dict__["_modules"] = {
            name: None if child is None else self._copy(child) for name, child in module._modules.items()
        }
        return copy

    def _parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in self._parameters:
            self._parameters[id(parameter)] = self._slot(parameter)
        return self._parameters[id(parameter)]

    def take_hooks(self) -> _Hooks:
        """The hooks that were added to copies since the last call; they are put back by `make`."""
        found = {id(c): {kind: dict(c.__dict__[kind]) for kind in _HOOKS} for _, c in self._pairs.values()}
        for _, copy in self._pairs.values():
            for kind in _HOOKS:
                copy.__dict__[kind].clear()
        return found

    def make(self) -> None:
        """Put all hooks in place: the copy is in force. Cannot fail."""
        for original, copy in self._pairs.values():
            inner, outer = self.inner.get(id(copy), {}), self.outer.get(id(copy), {})
            torchs = _hooks_of_sharding(original)
            for kind in _HOOKS:
                shared = original.__dict__[kind]  # the user's handles refer to it
                users = {key: hook for key, hook in shared.items() if key not in torchs}
                first, last = (outer, inner) if kind in _BEFORE else (inner, outer)
                shared.clear()
                for hooks in (first.get(kind, {}), users, last.get(kind, {})):
                    shared.update(hooks)
                copy.__dict__[kind] = shared

    def _take_out(self, original: nn.Module, copy: nn.Module) -> None:
        """Leave the user's hooks alone on a module."""
        for added in (self.inner, self.outer):
            for kind, hooks in added.get(id(copy), {}).items():
                for key in hooks:
                    original.__dict__[kind].pop(key, None)

    def unmake(self) -> None:
        """Give hooks and attributes back to the originals. Cannot fail."""
        for original, copy in self._pairs.values():
            self._take_out(original, copy)
            kept = self.attributes(original)
            for name in set(vars(original)) - _OWN - set(kept):
                del original.__dict__[name]
            original.__dict__.update(kept)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within, the originals have the user's hooks alone, and may run."""
        shared = [original.__dict__[kind] for original, _ in self._pairs.values() for kind in _HOOKS]
        before = [dict(hooks) for hooks in shared]
        try:
            for original, copy in self._pairs.values():
                self._take_out(original, copy)
            yield
        finally:
            for hooks, every in zip(shared, before, strict=True):
                hooks.clear()
                hooks.update(every)

    def sharded(self) -> None:
        """What copies have gained as attributes by now is of those who shard."""
        self._gained = {id(c): set(vars(c)) - self._given[id(c)] for _, c in self._pairs.values()}

    def attributes(self, original: nn.Module) -> dict[str, Any]:
        """What the copy of a module has as attributes, without those of sharding."""
        copy = self.of(original)
        gained = self._gained[id(copy)]
        return {name: value for name, value in vars(copy).items() if name not in _OWN and name not in gained}


def attributes_of(original: nn.Module, now: Copy | None) -> dict[str, Any]:
    """The attributes in force of a module that the user built: its own, or those of the copy in force."""
    if now is not None:
        return now.attributes(original)
    return {
        name: value
        for name, value in vars(original).items()
        if name not in _OWN and name not in _MARKS and not name.startswith(_STATE)
    }


def plain_type(module: nn.Module) -> type[nn.Module]:
    """The class of a module as its author wrote it: `fully_shard` puts another one in front."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith(_SHARDING[0]))


def _hooks_of_sharding(module: nn.Module) -> set[Any]:
    """The keys of the hooks that sharding has put on a module."""
    every = ((key, hook) for kind in _HOOKS for key, hook in module.__dict__[kind].items() if callable(hook))
    return {key for key, hook in every if str(getattr(hook, "__module__", "")).startswith(_SHARDING)}


def retire(copy: Copy) -> None:
    """Have the originals fail when they are called, and hold no memory: a copy is in force for good. Cannot fail."""
    for original, _ in copy.pairs():
        for kind in _HOOKS:  # the user's handles refer to those of the copy
            original.__dict__[kind] = type(original.__dict__[kind])()
        original.__dict__["_parameters"] = {
            name: None if p is None else nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), False)
            for name, p in original._parameters.items()
        }
        original.__dict__["forward"] = gone


def gone(*args: Any, **kwargs: Any) -> None:
    """The forward of a model that was resharded."""
    raise SpecError("this model was resharded: call the one that elastic.reshard returned")


def check_copyable(root: nn.Module, now: Copy | None) -> None:
    """Raise `SpecError` for what a copy could not stand for: modules that others hold outside their registers."""
    mine = {id(m) for m in root.modules()} | {id(p) for p in root.parameters()}
    for name, module in root.named_modules():
        where = name or "the model"
        kept = attributes_of(module, now)
        if "forward" in kept:
            raise SpecError(f"{where} has a forward that was set on the object: sharded modules would not have it")
        if kept.get("_compiled_call_impl") is not None:
            raise SpecError(f"{where} is compiled: compile it after the switch")
        for attribute, value in kept.items():
            for held in (value, *_inside(value)):
                if id(held) in mine or (now is not None and id(held) in now.ids):
                    raise SpecError(
                        f"{where}.{attribute} refers to a module or parameter of the model outside torch's registers: "
                        "sharded modules are made anew, and it would go on with the old one"
                    )


def check_parameters(named: Mapping[str, nn.Parameter]) -> None:
    """Raise `SpecError` for a parameter with hooks of its own: it becomes another object."""
    for name, parameter in named.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise SpecError(f"{name} has a hook on the tensor, which cannot go over to a shard: remove it first")


def _inside(value: Any) -> tuple[Any, ...]:
    if isinstance(value, list | tuple | set):
        return tuple(value)
    if isinstance(value, dict):
        return tuple(value.values())
    owner = getattr(value, "__self__", None)  # of a bound method
    return () if owner is None or isinstance(value, Tensor) else (owner,)
