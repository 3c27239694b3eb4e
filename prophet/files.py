"""Files from outside: read within bounds, parsed without pickle, refused by their name.

Every reader raises the error class that its caller names. The message holds the file and what was expected.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any


def read_bytes(path: str | os.PathLike[str], *, most_bytes: int, expected: str, error: type[Exception]) -> bytes:
    """All bytes of a file; `error` where it cannot be read, or has more than `most_bytes`. expected: what it holds."""
    file = Path(path)
    try:
        with file.open("rb") as f:
            data = f.read(most_bytes + 1)
    except (OSError, ValueError) as why:  # a name with a null character is a ValueError
        raise error(f"{file}: expected {expected}: {getattr(why, 'strerror', None) or why}") from why
    if len(data) > most_bytes:
        raise error(f"{file}: expected at most {most_bytes} bytes")
    return data


def read_json(
    path: str | os.PathLike[str], *, most_bytes: int, expected: str, error: type[Exception], **options: Any
) -> Any:
    """The value that a JSON file holds; raises as `read_bytes`, and where it is no JSON. options: of `json.loads`."""
    data = read_bytes(path, most_bytes=most_bytes, expected=f"{expected} (JSON)", error=error)
    try:
        return json.loads(data.decode("utf-8"), **options)
    except (ValueError, RecursionError) as why:
        raise error(f"{path}: expected JSON: {why}") from why


def read_toml(
    path: str | os.PathLike[str], *, most_bytes: int, expected: str, error: type[Exception]
) -> dict[str, Any]:
    """The table that a TOML file holds; raises as `read_bytes`, and where it is no TOML."""
    data = read_bytes(path, most_bytes=most_bytes, expected=f"{expected} (TOML)", error=error)
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as why:
        raise error(f"{path}: expected TOML: {why}") from why
