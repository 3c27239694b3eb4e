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


def no_such(option: str, kind: str, name: str, known: Sequence[str], plural: str | None = None) -> UsageError:
    """What to raise where `name`, given with `option`, is none of the `known`; names the closest of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return UsageError(
        f"{option}: there is no {kind} {name!r}{hint} (the {plural or kind + 's'} are {', '.join(known)})"
    )
