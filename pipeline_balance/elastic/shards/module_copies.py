"""Modules made anew from those that the user built, with other parameters and the same everything else.

torch shards a module once. So the modules that `build` made stay as they are, with their parameters on `meta` while a
sharded copy is in force. A copy has the attributes, buffers and hooks of its original: the same objects, not others.
Layers of experts are not sharded: a copy of the model has the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from prophet.engine.regroup import inside_layers
from prophet.errors import SpecError

# read off a module, since versions of torch differ in their kinds of hooks
_HOOKS = {k: type(v) for k, v in vars(nn.Module()).items() if k.endswith(("_hooks", "_with_kwargs", "_always_called"))}
# of these kinds, what runs first is around what runs later
_BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
# what a copy has apart from its original; all else is an attribute
_OWN = {"_parameters", "_modules", "_buffers", *_HOOKS}
# what torch and `sharded` leave on modules that they shard
_SHARDING = ("torch.distributed.", "pipeline_balance.elastic.shards.sharded")
# attributes that `fully_shard` and `distribute_module` set
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params", "_distribute_module_applied")
_STATE = "__composable_api_state_key"
# These refer to nothing
_PLAIN = {type(None), bool, int, float, str}
_TORCHS = set(vars(nn.Module())) - _OWN


_Hooks = dict[int, dict[str, dict[Any, Any]]]
"""Hooks by the copy's id and their kind."""


class Found(NamedTuple):
    """A module that the user built, as it was found.

    Attributes:
        module: The module itself.
        kind: Its class, as its author wrote it.
        parameters, modules: What is registered in it.
        attributes: All else that it has.
    """

    module: nn.Module
    kind: type[nn.Module]
    parameters: dict[str, nn.Parameter | None]
    modules: dict[str, nn.Module | None]
    attributes: dict[str, Any]

    def lasting(self) -> Found:
        """With attributes that refer to nothing: a loss that a module has kept would hold its graph until later."""
        kept = {n: v for n, v in self.attributes.items() if type(v) in _PLAIN or n in _TORCHS}
        return self._replace(attributes=kept)


def found_in(root: nn.Module, now: Copy | None) -> list[Found]:
    """The modules of `root`, a tree that the user built, as they are now; a `Copy` of them may be made in any thread.

    `now` is the copy that is in force, if one is.
    """
    every = [module for _, module in sharded_of(root)]
    return [Found(m, plain_type(m), dict(m._parameters), dict(m._modules), attributes_of(m, now)) for m in every]


def sharded_of(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of `root` that a copy has others for, by name: all but layers of experts and what is in them."""
    shared = inside_layers(root)
    return ((name, module) for name, module in root.named_modules() if id(module) not in shared)


class Copy:
    """A copy of a tree of modules that was `found`; `update` then gives it buffers, and attributes as they are.

    Whoever shards the copy adds hooks, and hands them over by `take_hooks`: those of `inner` run within the user's,
    those of `outer` around them.

    Args:
        found: The modules, the root first.
        slot: Makes what stands for a parameter, once for a tied one.
    """

    def __init__(self, found: Sequence[Found], slot: Callable[[nn.Parameter], nn.Parameter]) -> None:
        self._found = [one.lasting() for one in found]
        # __new__ without __init__: nothing may be drawn or allocated again
        self._pairs = {id(one.module): (one.module, one.kind.__new__(one.kind)) for one in found}
        self._whole: dict[int, nn.Parameter] = {}
        self.root = self.of(found[0].module)
        self.ids = {id(copy) for _, copy in self._pairs.values()}
        for one in found:
            for p in one.parameters.values():
                if p is not None and id(p) not in self._whole:
                    self._whole[id(p)] = slot(p)
            self.of(one.module).__dict__.update(
                one.attributes,
                **{kind: make() for kind, make in _HOOKS.items()},
                _buffers={},
                _parameters={n: None if p is None else self._whole[id(p)] for n, p in one.parameters.items()},
                _modules={n: None if child is None else self.of(child) for n, child in one.modules.items()},
            )
        # what is new beyond this was set by sharding, or by the user later
        self._given = {id(copy): set(vars(copy)) for _, copy in self._pairs.values()}
        self._gained: dict[int, set[str]] = {}
        self.inner: _Hooks = {}
        self.outer: _Hooks = {}

    def stands(self) -> bool:
        """Whether what was found is still so: classes of modules, what is registered, shapes of parameters."""
        now = [module for _, module in sharded_of(self._found[0].module)]
        return len(now) == len(self._found) and all(
            module is one.module
            and plain_type(module) is one.kind
            and _same(module._modules, one.modules)
            and _same(module._parameters, one.parameters)
            and all(p is None or _alike(p, self._whole[id(p)]) for p in one.parameters.values())
            for module, one in zip(now, self._found, strict=True)
        )

    def update(self, now: Copy | None) -> None:
        """Take in attributes and buffers as they are, from the copy in force if there is one. `make` takes in hooks."""
        for original, copy in self._pairs.values():
            own, kept = copy.__dict__, attributes_of(original, now)
            # an attribute that the user has deleted since
            for name in self._given[id(copy)] - _OWN - set(kept):
                own.pop(name, None)
            # the same dictionary: a buffer that is replaced in one is replaced in both
            own.update(kept, _buffers=original._buffers)

    def of(self, module: nn.Module) -> nn.Module:
        """The copy of an original; of a module that is the same in the copy, itself."""
        return self._pairs[id(module)][1] if id(module) in self._pairs else module

    def pairs(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Every original module with its copy."""
        yield from self._pairs.values()

    def slots(self) -> Iterator[tuple[nn.Parameter, nn.Module, str]]:
        """Every original parameter, with the copy that has its twin and the twin's name there."""
        for original, copy in self._pairs.values():
            for name, parameter in original._parameters.items():
                if parameter is not None:
                    yield parameter, copy, name

    def twins(self) -> dict[int, nn.Parameter]:
        """What stands for every parameter of a copied module, by the id of the original."""
        found: dict[int, nn.Parameter] = {}
        for original, copy, name in self.slots():
            twin = copy._parameters[name]
            assert twin is not None
            found[id(original)] = twin
        return found

    def put(self, made: Mapping[int, nn.Parameter]) -> None:
        """Have these stand for parameters, by the id of the original; each in all its places."""
        for original, copy, name in self.slots():
            copy._parameters[name] = made[id(original)]

    def take_hooks(self) -> _Hooks:
        """The hooks that were added to copies since the last call; they are put back by `make`."""
        found: _Hooks = {}
        for _, copy in self._pairs.values():
            found[id(copy)] = {kind: dict(hooks) for kind in _HOOKS if (hooks := copy.__dict__[kind])}
            for kind in found[id(copy)]:
                copy.__dict__[kind].clear()
        return found

    def make(self) -> None:
        """Put all hooks in place: the copy is in force. Cannot fail."""
        for original, copy in self._pairs.values():
            inner, outer = self.inner.get(id(copy), {}), self.outer.get(id(copy), {})
            torchs = _hooks_of_sharding(original)
            for kind in _HOOKS:
                # The user's handles refer to this dictionary, so it stays and its contents change
                shared = copy.__dict__[kind] = original.__dict__[kind]
                if not (shared or inner.get(kind) or outer.get(kind)):
                    continue
                users = {key: hook for key, hook in shared.items() if key not in torchs}
                first, last = (outer, inner) if kind in _BEFORE else (inner, outer)
                # hooks run in the order of the dictionary, so all go in anew
                shared.clear()
                for hooks in (first.get(kind, {}), users, last.get(kind, {})):
                    shared.update(hooks)

    def _take_out(self, original: nn.Module, copy: nn.Module) -> None:
        """Take the hooks of sharding off a module, and leave the user's."""
        for added in (self.inner, self.outer):
            for kind, hooks in added.get(id(copy), {}).items():
                for key in hooks:
                    original.__dict__[kind].pop(key, None)
        # FSDP2 adds some when it first runs; they would keep its shards and its process group
        for key in _hooks_of_sharding(original):
            for kind in _HOOKS:
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
        """Within this context the originals have the user's hooks alone, and may run."""
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
        """Note which attributes copies have gained by now: they belong to sharding, not to the user."""
        self._gained = {id(c): set(vars(c)) - self._given[id(c)] for _, c in self._pairs.values()}

    def attributes(self, original: nn.Module) -> dict[str, Any]:
        """What the copy of a module has as attributes, without those of sharding."""
        copy = self.of(original)
        gained = self._gained[id(copy)]
        return {name: value for name, value in vars(copy).items() if name not in _OWN and name not in gained}


def _same(now: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    """Whether these have the same objects under the same names, in the same order."""
    return list(now) == list(then) and all(a is b for a, b in zip(now.values(), then.values(), strict=True))


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


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
    # `fully_shard` replaces `__class__` by a class made on the fly
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith(_SHARDING[0]))


def _hooks_of_sharding(module: nn.Module) -> set[Any]:
    """The keys of the hooks that sharding has put on a module."""
    kinds = [hooks for kind in _HOOKS if (hooks := module.__dict__[kind])]
    # a hook is known by the module that defines it
    every = ((key, hook) for hooks in kinds for key, hook in hooks.items() if callable(hook))
    return {key for key, hook in every if str(getattr(hook, "__module__", "")).startswith(_SHARDING)}


def without_memory(parameter: nn.Parameter) -> nn.Parameter:
    """A whole parameter of this shape on `meta`, which does not train."""
    return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), requires_grad=False)


def retire(copy: Copy) -> None:
    """Have the originals fail when they are called, and hold no memory: a copy is in force for good. Cannot fail."""
    for original, _ in copy.pairs():
        # The user's handles refer to the dictionaries of the copy by now: originals get empty ones
        for kind in _HOOKS:
            original.__dict__[kind] = type(original.__dict__[kind])()
        original.__dict__["_parameters"] = {
            name: None if p is None else without_memory(p) for name, p in original._parameters.items()
        }
        original.__dict__["forward"] = gone


def gone(*args: Any, **kwargs: Any) -> None:
    """Refuse to run: this is the forward of a model that was resharded."""
    raise SpecError("this model was resharded: call the one that elastic.reshard returned")


def check_copyable(root: nn.Module, now: Copy | None) -> None:
    """Raise `SpecError` for what a copy could not stand for: modules that others hold outside their registers.

    Attributes and hooks are searched, with what functions were given; not what they find in global names.
    """
    copied = list(sharded_of(root))
    mine = {id(m) for _, m in copied} | {id(p) for _, m in copied for p in m._parameters.values() if p is not None}
    if now is not None:
        # references to the copy in force would break just as well
        mine |= now.ids | {id(twin) for twin in now.twins().values()}
    check_apart(root, mine)
    for name, module in copied:
        where = name or "the model"
        kept = attributes_of(module, now)
        # patched on the object, it is bound to the old module
        if "forward" in kept:
            raise SpecError(f"{where} has a forward that was set on the object: sharded modules would not have it")
        if kept.get("_compiled_call_impl") is not None:
            raise SpecError(f"{where} is compiled: compile it after the switch")
        torchs = _hooks_of_sharding(module)
        kinds = [(kind, found) for kind in _HOOKS if (found := module.__dict__[kind])]
        hooks = ((kind, hook) for kind, found in kinds for key, hook in found.items() if key not in torchs)
        for attribute, value in (*kept.items(), *hooks):
            if type(value) in _PLAIN:
                continue
            for held in (value, *_inside(value)):
                if id(held) in mine:
                    raise SpecError(
                        f"{where}.{attribute} refers to a module or parameter of the model outside torch's registers: "
                        "modules are made anew, and it would go on with the old one"
                    )


def check_apart(root: nn.Module, copied: set[int]) -> None:
    """Raise `SpecError` for a parameter in a layer of experts that is also in a module that is `copied`."""
    shared = inside_layers(root)
    for name, module in root.named_modules():
        for attribute, p in module._parameters.items():
            if id(module) in shared and id(p) in copied:
                raise SpecError(f"{name}.{attribute} is in a layer of experts and elsewhere, and cannot be cut in one")


def check_parameters(named: Mapping[str, nn.Parameter]) -> None:
    """Raise `SpecError` for a parameter with hooks on the tensor itself: another object takes its place."""
    for name, parameter in named.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise SpecError(f"{name} has a hook on the tensor, which its shard would not have: remove it first")


def _inside(value: Any, depth: int = 3) -> Iterator[Any]:
    """What a value refers to: elements, and what a bound method, a partial or an inner function was given.

    It goes `depth` levels down.
    """
    if isinstance(value, Tensor | nn.Module) or not depth:
        return
    found: list[Any] = []
    if isinstance(value, list | tuple | set):
        found += value
    elif isinstance(value, dict):
        found += value.values()
    elif isinstance(value, partial):
        found += [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, MethodType):
        found.append(value.__self__)
    elif isinstance(value, FunctionType):
        # an empty cell has no contents to read
        found += [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        found += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    for one in found:
        yield one
        yield from _inside(one, depth - 1)
