"""Checks arguments against their annotations where the user writes them: in a constructor, or in a call."""

from __future__ import annotations

import functools
import inspect
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from prophet.errors import ArgumentError, nearest

_Made = TypeVar("_Made", bound=Callable[..., Any])
_PLAIN = (str, int, float, complex, bool, NoneType, np.generic)
_NAMES = {bool: "True or False", int: "an integer", float: "a number", str: "a string", Path: "a path"}
_SEVERAL = {int: "integers", float: "numbers", str: "strings"}


def checked(made: _Made) -> _Made:
    """Have a function, or the constructor of a class, refuse arguments that its annotations do not allow.

    The error is an `ArgumentError`, one sentence with the argument, what was expected and what was given; for an
    unknown name, the nearest one. A field's metadata may word what is "expected" of it. NumPy's numbers count as
    numbers, a bool does not. Protocols, type variables and the arguments of functions are not checked.

    Args:
        made: A function or a class; a class is changed in place.
    """
    if not isinstance(made, type):
        return _checking(made, f"{made.__name__}(): ", made, {})  # type: ignore[return-value]
    worded = (
        {f.name: f.metadata["expected"] for f in fields(made) if "expected" in f.metadata} if is_dataclass(made) else {}
    )
    # A dataclass annotates its fields, any other class the parameters of its constructor
    annotated = made if is_dataclass(made) else made.__init__  # type: ignore[misc]
    made.__init__ = _checking(made.__init__, f"{made.__name__}.", annotated, worded)  # type: ignore[misc]
    return made


def _checking(call: Callable[..., Any], title: str, annotated: Any, worded: Mapping[str, str]) -> Callable[..., Any]:
    """Wrap `call` in a check of its arguments.

    Args:
        call: The function or constructor.
        title: Stands before an argument's name in errors.
        annotated: Has the annotations.
        worded: What is expected of an argument, where its annotation would not say it well.
    """
    signature = inspect.signature(call)
    known = [name for name in signature.parameters if name != "self"]
    # At the first call: names in annotations may not be imported yet
    hints_of = functools.cache(lambda: get_type_hints(annotated))

    @functools.wraps(call)
    def checking(*args: Any, **options: Any) -> Any:
        for name in options:
            if name not in known:
                raise ArgumentError(f"{title}{name}: there is no such argument{nearest(name, known)}")
        try:
            given = signature.bind(*args, **options).arguments
        except TypeError as error:
            raise ArgumentError(f"{title.rstrip('.: ')}: {error}") from None
        hints = hints_of()
        for name, value in given.items():
            if name in hints and not fits(value, hints[name]):
                expected = worded.get(name) or type_text(hints[name])
                more = _hint(name, value, {n: (v, hints[n]) for n, v in given.items() if n in hints})
                raise ArgumentError(f"{title}{name} must be {expected}, got {_shown(value)}{more}")
        return call(*args, **options)

    return checking


def fits(value: Any, hint: Any) -> bool:
    """Whether the annotation `hint` allows `value`."""
    kind, inside = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(fits(value, one) for one in inside)
    # With the type, since 1 == True and 1 == 1.0
    if kind is Literal:
        return any(type(value) is type(one) and value == one for one in inside)
    if kind is None or kind is NoneType:
        return value is None
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if kind is bool:
        return isinstance(value, bool | np.bool_)
    if kind is Callable:
        return callable(value)
    if kind is Any or not isinstance(kind, type) or Protocol in kind.__bases__:
        return True
    if not isinstance(value, kind):
        return False
    if inside and isinstance(value, Mapping):
        return all(fits(k, inside[0]) and fits(v, inside[1]) for k, v in value.items())
    # A string is a sequence of strings, and rarely meant as one
    if inside and isinstance(value, Sequence):
        return not isinstance(value, str | bytes) and all(fits(one, inside[0]) for one in value)
    return True


def type_text(hint: Any) -> str:
    """Word what the annotation `hint` allows; None is not mentioned beside something else."""
    kind, inside = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return _or([type_text(one) for one in inside if one is not NoneType])
    if kind is Literal:
        return _or([repr(one) for one in inside])
    if kind in _NAMES:
        return _NAMES[kind]
    if kind is PathLike:
        return _NAMES[Path]
    if kind is Callable:
        return "a function"
    if not isinstance(kind, type):
        return str(kind)
    if inside and issubclass(kind, Sequence):
        return f"a sequence of {_SEVERAL.get(inside[0]) or type_text(inside[0]).split(' ', 1)[-1]}"
    name = _name(kind)
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _or(texts: list[str]) -> str:
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _name(kind: type) -> str:
    """Return the shortest name by which a class can be imported."""
    # The module that defines a class is often private; users know the package that exports it
    path = kind.__module__.split(".")
    prefixes = (".".join(path[: i + 1]) for i in range(len(path)))
    where = next((p for p in prefixes if getattr(sys.modules.get(p), kind.__name__, None) is kind), kind.__module__)
    return kind.__name__ if where == "builtins" else f"{where}.{kind.__name__}"


def _shown(value: Any) -> str:
    """Word a value: plain ones as they are, of others the class, with the contents of Python's own containers."""
    # `reprlib` shortens: a tensor or a list of all parameters must not fill the screen
    if isinstance(value, _PLAIN):
        return reprlib.repr(value)
    held = f" {reprlib.repr(value)}" if type(value) in (list, tuple, dict, set) else ""
    return f"the class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__}{held}"


def _hint(name: str, value: Any, given: Mapping[str, tuple[Any, Any]]) -> str:
    """Suggest what may have been meant: the nearest literal, the wrapped value, or another argument.

    Args:
        name: The argument that is wrong.
        value: Its value.
        given: Values and annotations of all arguments, by name.
    """
    hint = given[name][1]
    if isinstance(value, str):
        one = [hint, *get_args(hint)]
        return nearest(value, [literal for h in one if get_origin(h) is Literal for literal in get_args(h)])
    # A wrapper often has what it wraps under the argument's name, as a scheduler has its `optimizer`
    wrapped = getattr(value, name, None)
    if wrapped is not None and fits(wrapped, hint):
        return f"; it wraps one: pass its .{name}"
    for other, (its, allowed) in given.items():
        if fits(value, allowed) and fits(its, hint) and not fits(its, allowed):
            return f"; {name} and {other} look swapped"
    return ""
