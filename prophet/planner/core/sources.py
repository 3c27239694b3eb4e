"""What the compiled core is made of. `setup.py` runs this file, so that it imports nothing but the standard library."""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent
NOT_BUILT = "not_built.txt"
"""Beside the core's place, where PROPHET_WITHOUT_CORE=1 has installed without it: why it could not be built."""
COMPILER = (
    "a C++17 compiler and Python's headers (Debian, Ubuntu: apt install g++ python3-dev; Fedora: dnf install gcc-c++ "
    "python3-devel)"
)
"""What building the core needs."""


def sources() -> list[Path]:
    """The C++ files beside this one, in the order of their names; none in an installed wheel."""
    return sorted(FOLDER.glob("*.cpp")) + sorted(FOLDER.glob("*.h"))


def digest(files: list[Path]) -> str:
    """The hash of `files` and their names, 32 hexadecimal digits; it is compiled into the core."""
    hashed = hashlib.blake2b(digest_size=16)
    for file in files:
        text = file.read_bytes()
        hashed.update(f"{file.name} {len(text)}\n".encode() + text)
    return hashed.hexdigest()
