"""Which ranks share a network, and which can see each other's processes: numbers that are equal where they do."""

from __future__ import annotations

import hashlib
import os
import socket
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

known_places: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
"""The places of all processes, by their world, once a group of all of them has asked: all of them know it, or none."""


def place() -> int:
    """A number that processes on one host share: they have its name and its network in common."""
    return _number(socket.gethostname(), _namespace("net"))


def machine() -> int:
    """A number that processes share which can see each other: they have the machine's start and its processes' numbers
    in common.
    """
    start = ""
    with suppress(OSError):
        start = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return _number(start or socket.gethostname(), _namespace("pid"))


def _namespace(kind: str) -> str:
    """Containers on one machine have networks, and numbers of processes, of their own; not every system tells."""
    with suppress(OSError):
        return str(os.stat(f"/proc/self/ns/{kind}").st_ino)
    return ""


def _number(*names: str) -> int:
    return int.from_bytes(hashlib.blake2b(" ".join(names).encode(), digest_size=7).digest(), "little")
