"""Routing trace files: what every layer routed at every step.

Shape legend: T steps, L layers, R ranks, E experts.

A trace is an npz archive without pickle:

- `counts`: integers [T, L, R, E]; `counts[t, l, r, e]` tokens of rank r that layer l routed to expert e at step t;
- `iteration`: int32 [T], never falling; several steps share an iteration when it has microbatches;
- `meta`: a JSON object as one string (model, top_k, tokens, source); it may be absent.

Files come from outside, so the reader trusts nothing. Every size is checked against what the file declares and against
a limit before memory is taken. Object arrays are refused before anything is decoded. What does not fit is refused with
a `TraceError` that names the file, the field and what was expected.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from prophet.errors import TraceError
from prophet.spec import IntArray

AnyIntArray = npt.NDArray[np.integer[Any]]

# Decoded bytes; a day of training of a large model fits
MAX_TRACE_BYTES = 2 << 30
MAX_META_BYTES = 1 << 20
# Per cell, so that sums over ranks and experts stay exact in int64
MAX_COUNT = (1 << 31) - 1
_MAX_MEMBERS = 64
# Any file may decode to as many bytes; a larger array to _MOST_RATIO times its file.
_FREE_BYTES = 1 << 28
_MOST_RATIO = 256
_MAX_HEADER_BYTES = 4096
_CHUNK_BYTES = 1 << 20


def _check_counts(counts: npt.NDArray[Any]) -> str | None:
    """Describe what is wrong with `counts`, or return None."""
    if counts.dtype.kind not in "iu":
        return f"counts: expected integers, got {counts.dtype}"
    if counts.ndim != 4:
        return f"counts: expected shape [steps, layers, ranks, experts], got {list(counts.shape)}"
    if min(counts.shape[1:]) < 1:
        return f"counts: expected at least one layer, rank and expert, got shape {list(counts.shape)}"
    if counts.size and int(counts.min()) < 0:
        return f"counts: expected no negative numbers, got {int(counts.min())}"
    if counts.size and int(counts.max()) > MAX_COUNT:
        return f"counts: expected numbers up to {MAX_COUNT}, got {int(counts.max())}"
    return None


def _check_iteration(iteration: npt.NDArray[Any], steps: int) -> str | None:
    """Describe what is wrong with `iteration`, or return None."""
    if iteration.dtype.kind not in "iu":
        return f"iteration: expected integers, got {iteration.dtype}"
    if iteration.shape != (steps,):
        return f"iteration: expected shape [{steps}], one entry per step, got {list(iteration.shape)}"
    if steps and (int(iteration.min()) < 0 or int(iteration.max()) > MAX_COUNT):
        return f"iteration: expected numbers from 0 to {MAX_COUNT}"
    if steps and np.any(iteration[1:] < iteration[:-1]):
        return "iteration: expected numbers that never fall from one step to the next"
    return None


@dataclass(frozen=True, eq=False, slots=True)
class RoutingTrace:
    """The routing of a training run. Arrays are read-only.

    Attributes:
        counts: Integers [T, L, R, E], kept in the width they came in, as a trace may be large.
        iteration: int32 [T].
        meta: Free-form and JSON-like.

    Raises:
        TraceError: When built from figures that do not fit.
    """

    counts: AnyIntArray
    iteration: npt.NDArray[np.int32]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = np.asarray(self.counts)
        iteration = np.asarray(self.iteration)
        problem = _check_counts(counts) or _check_iteration(iteration, counts.shape[0])
        if problem:
            raise TraceError(problem)
        # A view: making it read-only leaves the caller's own array writable.
        counts = np.ascontiguousarray(counts).view()
        counts.setflags(write=False)
        iteration = iteration.astype(np.int32)
        iteration.setflags(write=False)
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "iteration", iteration)
        object.__setattr__(self, "meta", MappingProxyType(dict(self.meta)))

    @property
    def steps(self) -> int:
        return int(self.counts.shape[0])

    @property
    def layers(self) -> int:
        return int(self.counts.shape[1])

    @property
    def ranks(self) -> int:
        return int(self.counts.shape[2])

    @property
    def experts(self) -> int:
        return int(self.counts.shape[3])

    def load(self, step: int, layer: int) -> IntArray:
        """The load of one layer at one step, [R, E] int64: what a planner takes."""
        return np.ascontiguousarray(self.counts[step, layer], dtype=np.int64)

    def iteration_slices(self) -> Iterator[slice]:
        """The steps of every iteration, in order: its microbatches."""
        if not self.steps:
            return
        starts = np.concatenate(([0], np.flatnonzero(np.diff(self.iteration)) + 1, [self.steps]))
        for first, last in itertools.pairwise(starts):
            yield slice(int(first), int(last))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutingTrace):
            return NotImplemented
        return (
            np.array_equal(self.counts, other.counts)
            and np.array_equal(self.iteration, other.iteration)
            and self.meta == other.meta
        )

    __hash__ = None  # type: ignore[assignment]


# ------------------------------------------------------------------------------------------------- reading


def _parse_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, Fortran order and dtype of an npy member; raises ValueError on anything unusual."""
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"npy format version 1.0 or 2.0 expected, got {version[0]}.{version[1]}")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream, max_header_size=_MAX_HEADER_BYTES)
    return shape, fortran, dtype


def _read_member(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, *, kinds: str, expected: str, max_bytes: int
) -> npt.NDArray[Any]:
    """Decode one array; raises ValueError before taking memory beyond the limits or the declared size."""
    if info.flag_bits & 0x1:
        raise ValueError("expected plain data, the member is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"expected stored or deflated data, got compression method {info.compress_type}")
    if info.file_size > max_bytes + _MAX_HEADER_BYTES:
        raise ValueError(f"expected at most {max_bytes} bytes, the archive declares {info.file_size}")
    # Deflate reaches 1000 to 1, so a small file could ask for gigabytes.
    if info.file_size > max(_FREE_BYTES, _MOST_RATIO * info.compress_size):
        raise ValueError(
            f"expected at most {_MOST_RATIO} times the {info.compress_size} bytes it takes in the archive, the archive "
            f"declares {info.file_size}"
        )
    with archive.open(info) as stream:
        # The header is parsed from a separate buffer: one that declares gigabytes gets a short read instead.
        head = stream.read(_MAX_HEADER_BYTES)
        buffer = io.BytesIO(head)
        shape, fortran, dtype = _parse_header(buffer)
        if dtype.hasobject or dtype.kind not in kinds:
            raise ValueError(f"expected {expected}, got {'pickled objects' if dtype.hasobject else dtype}")
        if any(not isinstance(n, int) or n < 0 for n in shape):
            raise ValueError(f"expected a shape of non-negative sizes, got {shape!r}")
        n_bytes = math.prod(shape) * dtype.itemsize
        if n_bytes > max_bytes:
            raise ValueError(f"expected at most {max_bytes} bytes, its shape {list(shape)} asks for {n_bytes}")
        declared = info.file_size - buffer.tell()
        if n_bytes != declared:
            raise ValueError(f"expected {n_bytes} bytes for {dtype} {list(shape)}, the archive declares {declared}")
        data = bytearray(n_bytes)
        rest = head[buffer.tell() :]
        data[: len(rest)] = rest
        filled = len(rest)
        # In pieces: the archive may declare more than it holds
        while filled < n_bytes:
            chunk = stream.read(min(_CHUNK_BYTES, n_bytes - filled))
            if not chunk:
                raise ValueError(f"expected {n_bytes} bytes, the data ends after {filled}")
            data[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
    array: npt.NDArray[Any] = np.frombuffer(data, dtype=dtype)
    array = array.reshape(shape[::-1]).T if fortran else array.reshape(shape)
    # Files may come from machines of the other byte order
    return array.astype(dtype.newbyteorder("="), copy=False)


def _reject_constant(name: str) -> Any:
    raise ValueError(f"expected JSON without {name}")


def _parse_meta(array: npt.NDArray[Any]) -> dict[str, Any]:
    """Read a JSON object from a string array with one entry; raises ValueError."""
    if array.size != 1:
        raise ValueError(f"expected one JSON string, got shape {list(array.shape)}")
    value: Any = array.reshape(-1)[0].item()
    text = value.decode("utf-8") if isinstance(value, bytes) else str(value)
    try:
        # NaN and Infinity are no JSON, and others could not read what is written again.
        meta = json.loads(text, parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("expected JSON that is not nested this deeply") from None
    if not isinstance(meta, dict):
        raise ValueError(f"expected a JSON object, got {type(meta).__name__}")
    return meta


def read_trace(path: str | os.PathLike[str], *, max_bytes: int = MAX_TRACE_BYTES) -> RoutingTrace:
    """Read a routing trace; never unpickles anything.

    Args:
        path: The file.
        max_bytes: Bounds the decoded size of `counts`, and the file's size.

    Raises:
        TraceError: For a file that is missing, damaged, hostile or of another format.
    """
    file = Path(path)
    if not file.exists():
        raise TraceError(f"{file}: expected a routing trace (.npz), there is no such file")
    if not file.is_file():
        raise TraceError(f"{file}: expected a routing trace (.npz), this is not a regular file")
    if file.stat().st_size > max_bytes:
        raise TraceError(f"{file}: expected at most {max_bytes} bytes, the file has {file.stat().st_size}")
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, EOFError) as error:
        raise TraceError(f"{file}: expected an npz archive: {error!s:.300}") from None
    with archive:
        members = archive.infolist()
        names = [m.filename for m in members]
        # Of two members of one name readers may take different ones
        if len(members) > _MAX_MEMBERS or len(set(names)) != len(names):
            raise TraceError(f"{file}: expected at most {_MAX_MEMBERS} arrays of different names, got {len(members)}")

        def member(name: str, kinds: str, expected: str, limit: int) -> npt.NDArray[Any]:
            info = archive.NameToInfo.get(f"{name}.npy")
            if info is None:
                raise TraceError(f"{file}: {name}: expected {expected}, the archive has no such array")
            try:
                return _read_member(archive, info, kinds=kinds, expected=expected, max_bytes=limit)
            except (
                ValueError,
                EOFError,
                OSError,
                zipfile.BadZipFile,
                zlib.error,
                RuntimeError,
                SyntaxError,
                MemoryError,
                OverflowError,
                TypeError,
            ) as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise TraceError(f"{file}: {name}: {reason:.300}") from None

        counts = member("counts", "iu", "integers [steps, layers, ranks, experts]", max_bytes)
        problem = _check_counts(counts)
        if problem:
            raise TraceError(f"{file}: {problem}")
        iteration = member("iteration", "iu", "int32 [steps]", 8 * counts.shape[0])
        meta: dict[str, Any] = {}
        if "meta.npy" in archive.NameToInfo:
            text = member("meta", "US", "one JSON string", 4 * MAX_META_BYTES)
            try:
                meta = _parse_meta(text)
            except (ValueError, UnicodeError) as error:
                raise TraceError(f"{file}: meta: {error}") from None
    try:
        return RoutingTrace(counts, iteration, meta)
    except TraceError as error:
        raise TraceError(f"{file}: {error}") from None


# ------------------------------------------------------------------------------------------------- writing


class TraceWriter:
    """Collects a trace step by step in constant memory, and writes the archive when closed.

    Steps are spooled to an unnamed temporary file beside `path`; `path` itself appears whole or not at all.
    Leaving the `with` block closes the writer also after an exception, so that a run that failed keeps what
    it had routed.

    Args:
        path: Where the archive goes; its folder is made.
        layers, ranks, experts: The shape of one step.
        meta: A JSON object that describes the run; it may be added to, as `meta`, until the writer is closed.

    Raises:
        TraceError: When a step has another shape, or anything but non-negative integers.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        layers: int,
        ranks: int,
        experts: int,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(path)
        self.shape = (layers, ranks, experts)
        if min(self.shape) < 1:
            raise TraceError(f"{self.path}: counts: expected at least one layer, rank and expert, got {self.shape}")
        self.meta = dict(meta or {})
        # At the start: metadata that no JSON holds must not fail when the run ends.
        _encode_meta(self.path, self.meta)
        self._iteration: list[int] = []
        self._max = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._spool: IO[bytes] | None = tempfile.TemporaryFile(  # noqa: SIM115 - close() ends it
            dir=self.path.parent
        )

    @property
    def steps(self) -> int:
        """Steps appended so far."""
        return len(self._iteration)

    def append(self, counts: npt.ArrayLike, iteration: int | None = None) -> None:
        """Add one step: `counts` integers [L, R, E]; `iteration` defaults to the step's index."""
        if self._spool is None:
            raise TraceError(f"{self.path}: counts: expected no more steps, the writer is closed")
        step = np.asarray(counts)
        if step.shape != self.shape:
            raise TraceError(
                f"{self.path}: counts: expected [layers, ranks, experts] = {list(self.shape)} for one step, "
                f"got {list(step.shape)}"
            )
        problem = _check_counts(step[np.newaxis])
        if problem:
            raise TraceError(f"{self.path}: {problem}")
        number = self.steps if iteration is None else int(iteration)
        last = self._iteration[-1] if self._iteration else 0
        if not last <= number <= MAX_COUNT:
            raise TraceError(f"{self.path}: iteration: expected a number from {last} to {MAX_COUNT}, got {number}")
        self._spool.write(np.ascontiguousarray(step, dtype="<u4").tobytes())
        self._iteration.append(number)
        self._max = max(self._max, int(step.max()))

    def close(self) -> None:
        """Write the archive; further calls do nothing."""
        if self._spool is None:
            return
        spool, self._spool = self._spool, None
        with spool:
            spool.seek(0)
            # Only now is the largest count known, and most traces fit in half the bytes.
            dtype = np.dtype("<u2") if self._max <= np.iinfo(np.uint16).max else np.dtype("<u4")
            _write_archive(
                self.path,
                shape=(self.steps, *self.shape),
                dtype=dtype,
                chunks=_spooled_chunks(spool, dtype),
                iteration=np.asarray(self._iteration, dtype=np.int32),
                meta=_encode_meta(self.path, self.meta),
            )

    def discard(self) -> None:
        """Close without writing anything."""
        if self._spool is not None:
            self._spool.close()
            self._spool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_trace(path: str | os.PathLike[str], trace: RoutingTrace) -> None:
    """Write `trace` to `path`, whole or not at all; raises `TraceError` when its metadata is not JSON."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    meta = _encode_meta(file, trace.meta)
    counts = trace.counts
    chunks = (np.ascontiguousarray(counts[t]).tobytes() for t in range(trace.steps))
    _write_archive(file, shape=counts.shape, dtype=counts.dtype, chunks=chunks, iteration=trace.iteration, meta=meta)


def _encode_meta(file: Path, meta: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(dict(meta), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TraceError(f"{file}: meta: expected what JSON can hold: {error}") from None
    if len(text) > MAX_META_BYTES:
        raise TraceError(f"{file}: meta: expected at most {MAX_META_BYTES} characters, got {len(text)}")
    return text


def _spooled_chunks(spool: IO[bytes], dtype: np.dtype[Any]) -> Iterator[bytes]:
    while chunk := spool.read(_CHUNK_BYTES):
        yield np.frombuffer(chunk, dtype="<u4").astype(dtype).tobytes()


def _write_archive(
    file: Path,
    *,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    chunks: Iterator[bytes],
    iteration: npt.NDArray[np.int32],
    meta: str,
) -> None:
    """Stream the members into a temporary archive beside `file`, then put it in place."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as raw, zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:
            # force_zip64: the size is not known when the member begins
            with archive.open("counts.npy", "w", force_zip64=True) as out:
                header = {
                    "descr": np.lib.format.dtype_to_descr(dtype),
                    "fortran_order": False,
                    "shape": tuple(int(n) for n in shape),
                }
                np.lib.format.write_array_header_1_0(out, header)
                for chunk in chunks:
                    out.write(chunk)
            for name, array in (("iteration", iteration), ("meta", np.asarray(meta))):
                with archive.open(f"{name}.npy", "w") as out:
                    np.lib.format.write_array(out, array, allow_pickle=False)
        # mkstemp makes the file private; a trace is as readable as any other output.
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
