"""What the commands' arguments share."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence


class UsageError(ValueError):
    """The arguments or the input cannot be used; one line says why."""


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return value


def not_negative(text: str) -> int:
    """A whole number of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {text}")
    return value


def suggestion(name: str, known: Sequence[str]) -> str:
    """ ", did you mean X?" where one of `known` is close to `name`, else nothing."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
