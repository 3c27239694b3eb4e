"""Files that nobody meant to write, and what every reader must do with them.

A reader may accept a file or raise its own error, whose message names the file and, where the wrong value is known, its
field. It must do so within a time and a memory, and must never run what stands in the file.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import re
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_BYTES = 500 << 20  # of memory, over what the process has before
MOST_S = 2.0  # of processor time for one file

# what stands in for a number, a name or a few bytes
ODD = (
    b"", b"\0", b"\xff" * 8, b"NaN", b"Infinity", b"-1", b"1e999", b"9" * 400, b"9" * 5000, b"0x" + b"f" * 5000,
    b"[" * 3000, b'{"a":' * 3000, b'"', b"\\", b"\n", b"\r\n", b"\xed\xa0\x80", "\u202e".encode(),
    b"true", b"null", b"\xef\xbb\xbf",
    b"18446744073709551616", b"2147483648", b"-2147483649", b"a." * 3000,
    b'"' + b"x" * 5000 + b'"', b"..", b"/", b"%s%n",
)  # fmt: skip
# JSON values of which a field takes some kinds and no others
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2.5, -0.5, 1 << 31, 1 << 63, 10**400, -(10**400), float("nan"), float("inf"),
    "", "x", "1",    "a" * 300, "\ud800", [], [1], [[]], [None], {}, {"a": 1}, [[["x"]]],
)  # fmt: skip


class Payload:
    """Unpickled, it makes a folder: to be found where a reader runs what stands in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (str(self.folder),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One kind of file. valid: real files' content. read: takes a path; raises `error` for what it refuses.

    wrong: content with one wrong value that must be refused, and words the message must hold one of: its field.
    """

    name: str
    file: str
    valid: Sequence[bytes]
    read: Callable[[Path], object]
    error: type[Exception] | tuple[type[Exception], ...]
    wrong: Callable[[random.Random], tuple[bytes, tuple[str, ...]]] | None = None


@dataclass(slots=True)
class Fed:
    """What came of the files of one format."""

    files: int = 0
    accepted: int = 0
    slowest_s: float = 0.0


def mutated(rng: random.Random, valid: Sequence[bytes], payload: bytes) -> bytes:
    """A file of `valid` with one to four damages; now and then a payload within or in its place."""
    data = bytearray(rng.choice(valid))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 2, 8, 64, 1000)))
        match rng.randrange(10):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at:end] = rng.randbytes(end - at)
            case 2:
                del data[at:end]
            case 3:
                data[at:at] = data[at:end] * rng.choice((1, 2, 100))
            case 4:
                data[at:at] = rng.choice(ODD)
            case 5:
                del data[at:]
            case 6:
                other = rng.choice(valid)
                data[at:] = other[rng.randrange(len(other) + 1) :]
            case 7 if rng.random() < 0.3:
                data[at:end] = payload
            case _:  # a number or a word becomes something odd
                found = list(re.finditer(rb"-?\d+(?:\.\d+)?|[A-Za-z_]{2,}", data[at : at + 4096]))
                if found:
                    word = rng.choice(found)
                    data[at + word.start() : at + word.end()] = rng.choice(ODD)
    return bytes(data)


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """No more than `MOST_BYTES` of address space from here on: what asks for more gets a MemoryError."""
    status = Path("/proc/self/status")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if status.exists():
        now = int(re.search(r"VmSize:\s+(\d+) kB", status.read_text())[1]) << 10  # type: ignore[index]
        resource.setrlimit(resource.RLIMIT_AS, (now + MOST_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def feed(kind: Format, folder: Path, *, files: int, seed: int, check: Callable[[object], None] | None = None) -> Fed:
    """Give `files` damaged files of one kind to its reader, and see that it keeps its promises.

    check: is given what was read of every tenth file that was accepted.
    """
    rng = random.Random(f"{kind.name} {seed}")
    canary = folder / "payload-ran"
    payload = pickle.dumps(Payload(canary))
    file = folder / kind.file
    file.parent.mkdir(parents=True, exist_ok=True)
    fed = Fed()
    for content in kind.valid:
        file.write_bytes(content)
        kind.read(file)  # real ones are read
    with bounded_memory():
        for i in range(files):
            fields: tuple[str, ...] = ()
            if kind.wrong and i % 3 == 0:
                content, fields = kind.wrong(rng)
            elif i % 100 == 1:
                content = payload
            else:
                content = mutated(rng, kind.valid, payload)
            file.write_bytes(content)
            _one(kind, file, fields, fed, f"file {i} of seed {seed}: {content[:300]!r}", check)
    assert not canary.exists(), f"{kind.name}: a file's content was run"
    return fed


def _one(
    kind: Format, file: Path, fields: tuple[str, ...], fed: Fed, what: str, check: Callable[[object], None] | None
) -> None:
    began = time.process_time()
    found: object = None
    try:
        found = kind.read(file)
    except kind.error as error:
        text = str(error)
        assert file.name in text, f"{what}: the message does not name the file: {text}"
        assert not fields or any(f in text for f in fields), f"{what}: the message names none of {fields}: {text}"
        assert len(text) < 2000, f"{what}: the message has {len(text)} characters"
    except BaseException as error:
        raise AssertionError(f"{kind.name}: {type(error).__name__} is not one of ours: {what}") from error
    else:
        assert not fields, f"{what}: was read, although {fields} is wrong"
        fed.accepted += 1
        if check and fed.accepted % 10 == 0:
            check(found)
    took = time.process_time() - began
    assert took < MOST_S, f"{what}: took {took:.1f} s"
    fed.files += 1
    fed.slowest_s = max(fed.slowest_s, took)


def replaced(
    rng: random.Random, value: Any, fields: Sequence[tuple[tuple[Any, ...], Sequence[Any]]]
) -> tuple[Any, Any]:
    """A copy of a JSON document with one field wrong: its path, and what it must not be; and the path's last name."""
    import copy

    path, wrong = rng.choice(fields)
    document = copy.deepcopy(value)
    place = document
    for step in path[:-1]:
        place = place[step]
    if rng.random() < 0.1 and isinstance(place, dict):
        place.pop(path[-1], None)
    else:
        place[path[-1]] = rng.choice(wrong)
    return document, path[-1]


def but(*accepted: Any) -> tuple[Any, ...]:
    """The odd values without those of a kind: of types, or that a function says are right."""

    def right(value: Any) -> bool:
        return any(type(value) is a if isinstance(a, type) else a(value) for a in accepted)

    return tuple(v for v in VALUES if not right(v))
