"""Numbers that are equal on ranks that share a network, or that can see each other's processes."""

from __future__ import annotations

import hashlib
import os
import socket
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

# By their world, so that a new process group of other processes asks anew
known_places: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
"""The places of all processes, known once a group of all of them has asked: all of them know it, or none."""


def place() -> int:
    """A number that processes on one host share: they have the same host name and network."""
    return _number(socket.gethostname(), _namespace("net"))


def machine() -> int:
    """A number that processes share where they can look up each other by process number (PID)."""
    # Host names repeat; the random number that Linux draws at every start does not
    start = ""
    with suppress(OSError):
        start = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return _number(start or socket.gethostname(), _namespace("pid"))


def _namespace(kind: str) -> str:
    """Identify this process's namespace of that kind, which containers do not share; "" where there are none."""
    with suppress(OSError):
        return str(os.stat(f"/proc/self/ns/{kind}").st_ino)
    return ""


def _number(*names: str) -> int:
    # Seven bytes, so that the number fits into a signed 64-bit integer, which is what ranks exchange
    return int.from_bytes(hashlib.blake2b(" ".join(names).encode(), digest_size=7).digest(), "little")
