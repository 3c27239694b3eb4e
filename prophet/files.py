"""Files from outside: read within bounds, parsed without pickle, refused by their name.

Every reader raises the error class that its caller names. The message holds the file and what was expected.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 20
# Characters of a value in a message
_SHOWN = 60
# Parsing a key takes time in proportion to the square of its parts
_LONG_KEY = re.compile(r"""(?:\.[ \t]*(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*){32}""")


def cache_folder() -> Path:
    """Return the folder of what this library remembers for a user, which need not exist."""
    return Path.home() / ".cache" / "moe-prophet"


def shown(value: object) -> str:
    """Word a value that JSON or TOML can hold for a message, in at most 60 characters."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    # Python refuses to print integers of more than some thousand digits
    if isinstance(value, int) and abs(value) >= 10**_SHOWN:
        return f"a number of {value.bit_length()} bits"
    text = repr(value[:_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def is_number(value: object) -> bool:
    """Whether `value` is a finite number that a float can hold; booleans are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def read_bytes(path: str | os.PathLike[str], *, most_bytes: int, expected: str, error: type[Exception]) -> bytes:
    """Read all bytes of a file.

    Args:
        path: The file.
        most_bytes: The size up to which it is read.
        expected: What it should hold, for errors.
        error: The class of errors to raise.

    Raises:
        Exception: `error`, where the file cannot be read, or is larger.
    """
    file = Path(path)
    chunks, size = [], 0
    try:
        with file.open("rb") as f:
            # In parts: one read takes as much memory as it asks for, whatever the file's size
            while size <= most_bytes and (chunk := f.read(min(_CHUNK_BYTES, most_bytes + 1 - size))):
                chunks.append(chunk)
                size += len(chunk)
    # A name with a null character is a ValueError
    except (OSError, ValueError) as why:
        raise error(f"{file}: expected {expected}: {getattr(why, 'strerror', None) or why}") from why
    if size > most_bytes:
        raise error(f"{file}: expected at most {most_bytes} bytes")
    return b"".join(chunks)


def read_json(
    path: str | os.PathLike[str], *, most_bytes: int, expected: str, error: type[Exception], **options: Any
) -> Any:
    """Read a JSON file.

    Args:
        path: The file.
        most_bytes: The size up to which it is read.
        expected: What it should hold, for errors.
        error: The class of errors to raise.
        **options: Passed on to `json.loads`.

    Raises:
        Exception: `error`, where the file cannot be read, is larger, or is no JSON.
    """
    data = read_bytes(path, most_bytes=most_bytes, expected=f"{expected} (JSON)", error=error)
    try:
        return json.loads(data.decode("utf-8"), **options)
    # Deeply nested brackets exceed Python's recursion limit
    except (ValueError, RecursionError) as why:
        raise error(f"{path}: expected JSON: {why}") from why


def read_toml(
    path: str | os.PathLike[str], *, most_bytes: int, expected: str, error: type[Exception]
) -> dict[str, Any]:
    """Read a TOML file.

    Args:
        path: The file.
        most_bytes: The size up to which it is read.
        expected: What it should hold, for errors.
        error: The class of errors to raise.

    Raises:
        Exception: `error`, where the file cannot be read, is larger, or is no TOML.
    """
    data = read_bytes(path, most_bytes=most_bytes, expected=f"{expected} (TOML)", error=error)
    try:
        text = data.decode("utf-8")
        if _LONG_KEY.search(text):
            raise ValueError("a key has more than 32 parts")
        return tomllib.loads(text)
    except (ValueError, RecursionError) as why:
        raise error(f"{path}: expected TOML: {why}") from why
