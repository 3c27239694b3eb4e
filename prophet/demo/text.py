"""Real text that every machine has: a byte-level corpus from the Python standard library's own sources.

Shape legend: B sequences of the global batch, b sequences of one rank, T sequence length.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prophet.errors import TextError
from prophet.spec import IntArray

Bytes = npt.NDArray[np.uint8]

VOCABULARY = 256
DEFAULT_MAX_BYTES = 4 << 20

# These folders are missing or differ on some machines, and the corpus must be the same everywhere
_SKIPPED_FOLDERS = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3"}
_HELD_OUT_ONE_IN = 10


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes to train on, and bytes that training never sees.

    Attributes:
        train: Bytes to train on.
        held_out: Bytes of other files.
        source: Where the text is from, for a reader.
    """

    train: Bytes
    held_out: Bytes
    source: str


def load_corpus(path: str | os.PathLike[str] | None = None, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Corpus:
    """Load text: a file or folder, or the standard library's sources.

    Files are taken in an order that depends on their names only, and one in ten is held out. A single file gives its
    last tenth instead. Files that are not text are passed over.

    Args:
        path: A file or folder; None: the standard library.
        max_bytes: The most bytes to load, about.

    Raises:
        TextError: There is no text, or too little.
    """
    if max_bytes < 1:
        raise TextError(f"max_bytes must be positive, got {max_bytes}")
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        # The text differs between versions of Python, so results name the one they are of
        source = f"Python {sysconfig.get_python_version()} standard library"
        sources = [p for p in _files_below(root, _SKIPPED_FOLDERS, (".", "config-")) if p.suffix == ".py"]
        return _from_files(root, sources, max_bytes, source)
    root = Path(path)
    if root.is_dir():
        files = [p for p in _files_below(root, {"__pycache__"}, (".",)) if p.is_file() and not p.is_symlink()]
        return _from_files(root, files, max_bytes, str(root))
    if not root.is_file():
        raise TextError(f"{root}: expected a text file or a folder of them, there is neither")
    with root.open("rb") as f:
        data = f.read(max_bytes)
    if b"\0" in data:
        raise TextError(f"{root}: expected text, this file holds zero bytes")
    cut = len(data) - len(data) // _HELD_OUT_ONE_IN
    return Corpus(_array([data[:cut]]), _array([data[cut:]]), str(root))


def _array(pieces: Iterable[bytes]) -> Bytes:
    array = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    # Views of it are handed out; none may change the text
    array.setflags(write=False)
    return array


def _files_below(root: Path, skipped: set[str], skipped_starts: tuple[str, ...]) -> list[Path]:
    """All visible files, but in folders of these names and starts of names; links to folders are not followed."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [d for d in folders if d not in skipped and not d.startswith(skipped_starts)]
        found += [Path(folder, n) for n in names if not n.startswith(".")]
    return found


def _stable_hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()


def _from_files(root: Path, files: list[Path], max_bytes: int, source: str) -> Corpus:
    """Fill both parts in the order of the names' hashes; every tenth file goes to the held-out part."""
    # A stable shuffle: by name, a cap on bytes would leave nothing but the letter "a". Python's own `hash` differs in
    # every process
    keyed = sorted((_stable_hash(p.relative_to(root).as_posix()), p) for p in files)
    train: list[bytes] = []
    held_out: list[bytes] = []
    total = used = 0
    for _, file in keyed:
        if total >= max_bytes:
            break
        try:
            with file.open("rb") as f:
                data = f.read(max_bytes - total)
        except OSError:
            # Unreadable for this user: one file less
            continue
        if not data or b"\0" in data:
            continue
        # Whole files are held out, as a part of a file is too much like its rest
        (held_out if used % _HELD_OUT_ONE_IN == _HELD_OUT_ONE_IN - 1 else train).append(data)
        total += len(data)
        used += 1
    if used < _HELD_OUT_ONE_IN:
        raise TextError(f"{root}: expected at least {_HELD_OUT_ONE_IN} text files in this folder, found {used}")
    return Corpus(_array(train), _array(held_out), source)


def rank_batch(data: Bytes, *, seed: int, step: int, sequences: int, length: int, rank: int, ranks: int) -> IntArray:
    """This rank's rows of a step's global batch; the next byte of each token is its target.

    The global batch is drawn from (seed, step) alone, and rank r takes rows r*b .. (r+1)*b-1. So the tokens of a step
    are the same whatever the number of ranks.

    Args:
        data: The text.
        seed: Seed of the run.
        step: Number of the step.
        sequences: Rows of the global batch, B.
        length: Tokens of a row, T.
        rank: This rank.
        ranks: Number of ranks.

    Returns:
        Token ids [b, T + 1].

    Raises:
        TextError: The text is shorter than a row.
        ValueError: The rows cannot be divided among the ranks.
    """
    if sequences % ranks:
        raise ValueError(f"{sequences} sequences cannot be divided among {ranks} ranks")
    _check_length(data, length)
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, data.size - length, size=sequences)
    return _rows(data, np.split(starts, ranks)[rank], length)


def held_out_rows(data: Bytes, *, sequences: int, length: int) -> IntArray:
    """Rows spread evenly over the held-out text; the same at every call.

    Args:
        data: The text.
        sequences: Number of rows.
        length: Tokens of a row, T.

    Returns:
        Token ids [`sequences`, T + 1].

    Raises:
        TextError: The text is shorter than a row.
    """
    _check_length(data, length)
    starts = np.linspace(0, data.size - length - 1, num=sequences).astype(np.int64)
    return _rows(data, starts, length)


def _rows(data: Bytes, starts: IntArray, length: int) -> IntArray:
    rows: IntArray = data[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return rows


def _check_length(data: Bytes, length: int) -> None:
    if data.size < length + 1:
        raise TextError(f"the text has {data.size} bytes, expected at least {length + 1} for one sequence")
