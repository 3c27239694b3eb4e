"""The sources of the compiled core. `setup.py` runs this file, so it imports nothing but the standard library."""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent
NOT_BUILT = "not_built.txt"
"""A file beside the core, written where PROPHET_WITHOUT_CORE=1 has installed without it: why it was not built."""
COMPILER = (
    "a C++17 compiler and Python's headers (Debian, Ubuntu: apt install g++ python3-dev; Fedora: dnf install gcc-c++ "
    "python3-devel)"
)
"""The packages that building the core needs, for error messages."""


def sources() -> list[Path]:
    """List the C++ files beside this one, in the order of their names; none in an installed wheel."""
    return sorted(FOLDER.glob("*.cpp")) + sorted(FOLDER.glob("*.h"))


def digest(files: list[Path]) -> str:
    """Hash `files` and their names to 32 hexadecimal digits, which are compiled into the core."""
    # Names and lengths are hashed too, so that no text can move from one file to the next unnoticed
    hashed = hashlib.blake2b(digest_size=16)
    for file in files:
        text = file.read_bytes()
        hashed.update(f"{file.name} {len(text)}\n".encode() + text)
    return hashed.hexdigest()
