"""Arguments are held to their annotations where the user writes them: in a constructor, or in a call."""

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
_WORDS = {bool: "True or False", int: "an integer", float: "a number", str: "a string", Path: "a path"}
_SEVERAL = {int: "integers", float: "numbers", str: "strings"}


def checked(made: _Made) -> _Made:
    """Have a function, or the constructor of a class, refuse arguments that its annotations do not allow.

    Raises `ArgumentError`: one sentence with the argument, what was expected and what was got; for a name that there is
    none of, the nearest one. A field's metadata may word what is "expected" of it. NumPy's numbers are numbers, a bool
    is none. What an annotation says of protocols, type variables and what functions take is not looked at.
    """
    if not isinstance(made, type):
        return _checking(made, f"{made.__name__}(): ", made, {})  # type: ignore[return-value]
    words = (
        {f.name: f.metadata["expected"] for f in fields(made) if "expected" in f.metadata} if is_dataclass(made) else {}
    )
    annotated = made if is_dataclass(made) else made.__init__  # type: ignore[misc]
    made.__init__ = _checking(made.__init__, f"{made.__name__}.", annotated, words)  # type: ignore[misc]
    return made


def _checking(call: Callable[..., Any], title: str, annotated: Any, words: Mapping[str, str]) -> Callable[..., Any]:
    signature = inspect.signature(call)
    known = [name for name in signature.parameters if name != "self"]
    # later: what annotations name may not be imported yet
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
                expected = words.get(name) or reasons_text(hints[name])
                more = _hint(name, value, {n: (v, hints[n]) for n, v in given.items() if n in hints})
                raise ArgumentError(f"{title}{name} must be {expected}, got {_shown(value)}{more}")
        return call(*args, **options)

    return checking


def fits(value: Any, hint: Any) -> bool:
    """Whether an annotation allows a value."""
    kind, inside = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(fits(value, one) for one in inside)
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
    if inside and isinstance(value, Sequence):
        return not isinstance(value, str | bytes) and all(fits(one, inside[0]) for one in value)
    return True


def reasons_text(hint: Any) -> str:
    """What an annotation allows; None is not mentioned beside something else."""
    kind, inside = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return _or([reasons_text(one) for one in inside if one is not NoneType])
    if kind is Literal:
        return _or([repr(one) for one in inside])
    if kind in _WORDS:
        return _WORDS[kind]
    if kind is PathLike:
        return _WORDS[Path]
    if kind is Callable:
        return "a function"
    if not isinstance(kind, type):
        return str(kind)
    if inside and issubclass(kind, Sequence):
        return f"a sequence of {_SEVERAL.get(inside[0]) or reasons_text(inside[0]).split(' ', 1)[-1]}"
    name = _name(kind)
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _or(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _name(kind: type) -> str:
    """The shortest name by which a class can be imported."""
    path = kind.__module__.split(".")
    prefixes = (".".join(path[: i + 1]) for i in range(len(path)))
    where = next((p for p in prefixes if getattr(sys.modules.get(p), kind.__name__, None) is kind), kind.__module__)
    return kind.__name__ if where == "builtins" else f"{where}.{kind.__name__}"


def _shown(value: Any) -> str:
    """A number or a word as it is; of anything else the class, and what is in it if that is Python's own."""
    if isinstance(value, _PLAIN):
        return reprlib.repr(value)
    held = f" {reprlib.repr(value)}" if type(value) in (list, tuple, dict, set) else ""
    return f"the class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__}{held}"


def _hint(name: str, value: Any, given: Mapping[str, tuple[Any, Any]]) -> str:
    """What may have been meant: the nearest word, what the value wraps, or another argument."""
    hint = given[name][1]
    if isinstance(value, str):
        one = [hint, *get_args(hint)]
        return nearest(value, [word for h in one if get_origin(h) is Literal for word in get_args(h)])
    wrapped = getattr(value, name, None)
    if wrapped is not None and fits(wrapped, hint):
        return f"; it wraps one: pass its .{name}"
    for other, (its, allowed) in given.items():
        if fits(value, allowed) and fits(its, hint) and not fits(its, allowed):
            return f"; {name} and {other} look swapped"
    return ""
