"""Routing traces: what is written is read back, and hostile files are refused before they can do harm."""

from __future__ import annotations

import io
import json
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prophet.errors import TraceError
from prophet.traces.npz import RoutingTrace, TraceWriter, read_trace, write_trace

REAL_TRACE = Path(__file__).parents[2] / ".." / "shared" / "traces" / "smartmoe-gpt-32e-dev.npz"


def npy(array: np.ndarray, *, allow_pickle: bool = False) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=allow_pickle)
    return out.getvalue()


def header(descr: str, shape: str, *, length: int | None = None) -> bytes:
    """An npy header, which need not be true."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) if length is None else length) + text


def archive(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in members.items():
            z.writestr(f"{name}.npy", data)
    return path


def good_counts() -> np.ndarray:
    return np.arange(3 * 2 * 2 * 4, dtype=np.uint16).reshape(3, 2, 2, 4)


def good(**replaced: bytes) -> dict[str, bytes]:
    members = {
        "counts": npy(good_counts()),
        "iteration": npy(np.array([0, 0, 1], dtype=np.int32)),
        "meta": npy(np.asarray(json.dumps({"model": "m"}))),
    }
    return members | replaced


def test_round_trip(tmp_path: Path) -> None:
    trace = RoutingTrace(good_counts(), np.array([4, 4, 5], np.int32), {"model": "m", "top_k": 2})
    write_trace(tmp_path / "new" / "t.npz", trace)
    back = read_trace(tmp_path / "new" / "t.npz")
    assert back == trace
    assert back.counts.dtype == np.uint16
    assert (back.steps, back.layers, back.ranks, back.experts) == (3, 2, 2, 4)
    assert back.meta["top_k"] == 2
    assert back.load(1, 0).dtype == np.int64
    assert back.load(1, 0).tolist() == good_counts()[1, 0].tolist()
    assert list(back.iteration_slices()) == [slice(0, 2), slice(2, 3)]
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["t.npz"]


def test_what_numpy_writes_is_read(tmp_path: Path) -> None:
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "t.npz", counts=np.asfortranarray(good_counts().astype(">i8")), iteration=np.arange(3))
        trace = read_trace(tmp_path / "t.npz")
        assert np.array_equal(trace.counts, good_counts())
        assert trace.counts.dtype == np.int64  # native byte order
        assert trace.meta == {}


def test_what_we_write_numpy_reads_without_pickle(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.npz", RoutingTrace(good_counts(), np.arange(3, dtype=np.int32), {"a": "ü"}))
    with np.load(tmp_path / "t.npz", allow_pickle=False) as z:
        assert np.array_equal(z["counts"], good_counts())
        assert z["iteration"].dtype == np.int32
        assert json.loads(str(z["meta"])) == {"a": "ü"}


def test_a_trace_is_read_only() -> None:
    trace = RoutingTrace(good_counts(), np.arange(3, dtype=np.int32))
    with pytest.raises(ValueError, match="read-only"):
        trace.counts[0, 0, 0, 0] = 1


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (
            {"counts": npy(np.array([{"a": 1}], dtype=object), allow_pickle=True)},
            r"counts: .*pickled objects",
        ),
        ({"meta": npy(np.array({"a": 1}, dtype=object), allow_pickle=True)}, r"meta: .*pickled objects"),
        ({"counts": npy(np.full((3, 2, 2, 4), np.nan))}, r"counts: expected integers .*float64"),
        ({"counts": npy(np.zeros((3, 2, 2, 4), np.float32))}, r"counts: expected integers"),
        ({"counts": npy(np.zeros((3, 2, 2, 4), bool))}, r"counts: expected integers"),
        ({"counts": npy(np.zeros((3, 2, 8), np.uint16))}, r"counts: expected shape \[steps, layers, ranks"),
        ({"counts": npy(np.zeros((3, 0, 2, 8), np.uint16))}, r"counts: expected at least one layer"),
        ({"counts": npy(-np.ones((3, 2, 2, 4), np.int64))}, r"counts: expected no negative numbers, got -1"),
        ({"counts": npy(np.full((3, 2, 2, 4), 1 << 40))}, r"counts: expected numbers up to"),
        ({"counts": npy(good_counts())[:-7]}, r"counts: expected 96 bytes .* declares 89"),
        ({"counts": npy(good_counts()) + b"xx"}, r"counts: expected 96 bytes .* declares 98"),
        ({"counts": b"not an array"}, r"counts: .*magic"),
        ({"counts": b""}, r"counts: "),
        ({"counts": header("'<u2'", "(3, 2, 2, 4)", length=60000) + b"\0" * 96}, r"counts: "),
        ({"counts": header("'<u2'", "(-3, 2, 2, 4)") + b"\0" * 96}, r"counts: "),
        ({"counts": header("'<u2'", "(True, 2, 2, 4)") + b"\0" * 32}, r"counts: "),
        ({"counts": header("'<u2'", "(9999999999999, 9999999999999, 2, 4)")}, r"counts: expected at most"),
        ({"counts": header("[('a', '<u2')]", "(3,)") + b"\0" * 6}, r"counts: expected integers"),
        ({"counts": header("__import__('os')", "(3,)")}, r"counts: "),
        ({"counts": b"\x93NUMPY\x07\x00" + b"\0" * 200}, r"counts: npy format version"),
        ({"iteration": npy(np.array([0.0, 1.0, 2.0]))}, r"iteration: expected int32 \[steps\], got float64"),
        ({"iteration": npy(np.arange(4, dtype=np.int32))}, r"iteration: expected"),
        ({"iteration": npy(np.array([0, 2, 1], np.int32))}, r"iteration: expected numbers that never fall"),
        ({"iteration": npy(np.array([-1, 2, 3], np.int32))}, r"iteration: expected numbers from 0"),
        ({"meta": npy(np.asarray("not json"))}, r"meta: "),
        ({"meta": npy(np.asarray("[1]"))}, r"meta: expected a JSON object, got list"),
        ({"meta": npy(np.asarray('{"a": NaN}'))}, r"meta: expected JSON without NaN"),
        ({"meta": npy(np.asarray('{"a": ' + "[" * 100_000))}, r"meta: "),
        ({"meta": npy(np.asarray(["{}", "{}"]))}, r"meta: expected one JSON string"),
        ({"meta": npy(np.asarray(b"\xff\xfe"))}, r"meta: "),
        ({"meta": npy(np.asarray(3.0))}, r"meta: expected one JSON string"),
    ],
)
def test_bad_field_is_refused_by_name(tmp_path: Path, replaced: dict[str, bytes], message: str) -> None:
    path = archive(tmp_path / "bad.npz", **good(**replaced))
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["counts", "iteration"])
def test_missing_field(tmp_path: Path, name: str) -> None:
    members = good()
    del members[name]
    with pytest.raises(TraceError, match=f"{name}: .* no such array"):
        read_trace(archive(tmp_path / "t.npz", **members))


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    """An object array whose unpickling would leave a mark leaves none."""
    mark = tmp_path / "mark"

    class Evil:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return (Path.touch, (mark,))

    evil = npy(np.array([Evil()], dtype=object), allow_pickle=True)
    for field in ("counts", "iteration", "meta"):
        with pytest.raises(TraceError, match="pickled objects"):
            read_trace(archive(tmp_path / "t.npz", **good(**{field: evil})))
    assert not mark.exists()


def test_a_zip_bomb_costs_no_memory(tmp_path: Path) -> None:
    """256 MiB of zeros deflate to a quarter of a megabyte: refused from the declared size alone."""
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        with z.open("counts.npy", "w") as out:
            out.write(header("'<u8'", "(512, 16, 64, 64)"))
            for _ in range(256):
                out.write(bytes(1 << 20))
        z.writestr("iteration.npy", npy(np.zeros(512, np.int32)))
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match="counts: expected at most 16777216 bytes, the archive declares"):
            read_trace(path, max_bytes=16 << 20)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_member_that_lies_about_its_size(tmp_path: Path) -> None:
    """The directory declares 96 bytes of data, the stream holds 64 MiB: reading stops at 96."""
    big = header("'<u2'", "(3, 2, 2, 4)") + bytes(64 << 20)
    path = archive(tmp_path / "liar.npz", **good(counts=big))
    raw = path.read_bytes()
    claim = struct.pack("<I", len(header("'<u2'", "(3, 2, 2, 4)")) + 96)
    patched = raw.replace(struct.pack("<I", len(big)), claim)
    assert patched != raw
    path.write_bytes(patched)
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match="counts: "):
            read_trace(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_damaged_files(tmp_path: Path) -> None:
    path = archive(tmp_path / "t.npz", **good())
    raw = path.read_bytes()
    for cut in (0, 1, 10, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:cut])
        with pytest.raises(TraceError, match=r"t\.npz"):
            read_trace(path)
    with zipfile.ZipFile(io.BytesIO(raw)) as z:
        info = z.getinfo("counts.npy")
    at = info.header_offset + 30 + len("counts.npy") + 8
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x55]) + raw[at + 1 :])
    with pytest.raises(TraceError, match="counts: "):
        read_trace(path)


def test_stored_data_with_a_flipped_bit_fails_its_checksum(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", counts=good_counts(), iteration=np.arange(3, dtype=np.int32))
    raw = (tmp_path / "t.npz").read_bytes()
    at = raw.index(good_counts().tobytes()) + 5
    (tmp_path / "t.npz").write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    with pytest.raises(TraceError, match=r"counts: .*CRC"):
        read_trace(tmp_path / "t.npz")


def test_not_a_trace_at_all(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        read_trace(tmp_path / "absent.npz")
    with pytest.raises(TraceError, match="not a regular file"):
        read_trace(tmp_path)
    (tmp_path / "text.npz").write_text("counts")
    with pytest.raises(TraceError, match="expected an npz archive"):
        read_trace(tmp_path / "text.npz")
    (tmp_path / "big.npz").write_bytes(bytes(100))
    with pytest.raises(TraceError, match="expected at most 50 bytes, the file has 100"):
        read_trace(tmp_path / "big.npz", max_bytes=50)


def test_too_many_or_repeated_members(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="expected at most 64 arrays"):
        read_trace(archive(tmp_path / "many.npz", **{f"a{i}": b"" for i in range(65)}))
    with zipfile.ZipFile(tmp_path / "twice.npz", "w") as z:
        z.writestr("counts.npy", npy(good_counts()))
        with pytest.warns(UserWarning, match="Duplicate"):
            z.writestr("counts.npy", npy(good_counts()))
    with pytest.raises(TraceError, match="of different names"):
        read_trace(tmp_path / "twice.npz")


def test_writer_streams_steps(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    with TraceWriter(path, layers=2, ranks=2, experts=4, meta={"source": "test"}) as writer:
        for t in range(3):
            writer.append(good_counts()[t], iteration=10 * t)
        assert writer.steps == 3
        assert not path.exists()  # whole or not at all
    trace = read_trace(path)
    assert np.array_equal(trace.counts, good_counts())
    assert trace.counts.dtype == np.uint16
    assert trace.iteration.tolist() == [0, 10, 20]
    assert trace.meta == {"source": "test"}
    assert [p.name for p in tmp_path.iterdir()] == ["t.npz"]


def test_writer_widens_when_counts_need_it(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.npz", layers=1, ranks=1, experts=2) as writer:
        writer.append([[[1, 2]]])
        writer.append([[[70_000, 2]]])
    trace = read_trace(tmp_path / "t.npz")
    assert trace.counts.dtype == np.uint32
    assert trace.counts[1, 0, 0].tolist() == [70_000, 2]
    assert trace.iteration.tolist() == [0, 1]


def test_writer_memory_does_not_grow_with_steps(tmp_path: Path) -> None:
    step = np.ones((4, 8, 64), np.int64)
    with TraceWriter(tmp_path / "t.npz", layers=4, ranks=8, experts=64) as writer:
        writer.append(step)
        tracemalloc.start()
        try:
            for _ in range(500):
                writer.append(step)
            assert tracemalloc.get_traced_memory()[0] < 100_000  # 500 steps are 4 MB
        finally:
            tracemalloc.stop()


def test_writer_keeps_the_steps_of_a_run_that_failed(tmp_path: Path) -> None:
    def run() -> None:
        with TraceWriter(tmp_path / "t.npz", layers=1, ranks=1, experts=1) as writer:
            writer.append([[[5]]])
            raise RuntimeError("the run failed")

    with pytest.raises(RuntimeError, match="the run failed"):
        run()
    assert read_trace(tmp_path / "t.npz").steps == 1


def test_writer_refuses_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="meta: expected what JSON can hold"):
        TraceWriter(tmp_path / "t.npz", layers=1, ranks=1, experts=1, meta={"a": object()})
    with pytest.raises(TraceError, match="meta: expected what JSON can hold"):
        TraceWriter(tmp_path / "t.npz", layers=1, ranks=1, experts=1, meta={"a": float("nan")})
    with pytest.raises(TraceError, match="at least one layer"):
        TraceWriter(tmp_path / "t.npz", layers=0, ranks=1, experts=1)
    with TraceWriter(tmp_path / "t.npz", layers=1, ranks=1, experts=2) as writer:
        with pytest.raises(TraceError, match=r"\[1, 1, 2\] for one step, got \[1, 2\]"):
            writer.append([[1, 2]])
        with pytest.raises(TraceError, match="no negative"):
            writer.append([[[-1, 2]]])
        with pytest.raises(TraceError, match="integers"):
            writer.append([[[0.5, 2]]])
        writer.append([[[1, 2]]], iteration=7)
        with pytest.raises(TraceError, match="iteration: expected a number from 7"):
            writer.append([[[1, 2]]], iteration=6)
    with pytest.raises(TraceError, match="the writer is closed"):
        writer.append([[[1, 2]]])
    writer.close()
    assert read_trace(tmp_path / "t.npz").steps == 1


def test_an_empty_trace_is_defined(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "t.npz", layers=1, ranks=2, experts=2).close()
    trace = read_trace(tmp_path / "t.npz")
    assert trace.steps == 0
    assert list(trace.iteration_slices()) == []


@pytest.mark.skipif(not REAL_TRACE.exists(), reason="the shared routing traces are not beside this checkout")
def test_a_published_trace_reads() -> None:
    trace = read_trace(REAL_TRACE)
    assert trace.counts.shape == (1200, 16, 16, 32)
    assert int(trace.load(0, 0).sum()) == 16 * 2048 * 2
    assert {s.stop - s.start for s in trace.iteration_slices()} == {4}


def test_a_wrong_checksum_of_deflated_data_is_seen(tmp_path: Path) -> None:
    """Data longer than one read, intact but for the checksum that the archive states."""
    counts = np.random.default_rng(0).integers(0, 9999, (40, 2, 8, 16), dtype=np.uint16)
    path = archive(tmp_path / "t.npz", counts=npy(counts), iteration=npy(np.arange(40, dtype=np.int32)))
    with zipfile.ZipFile(path) as z:
        crc = struct.pack("<I", z.getinfo("counts.npy").CRC)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(crc, bytes([crc[0] ^ 1]) + crc[1:]))
    with pytest.raises(TraceError, match=r"counts: .*CRC"):
        read_trace(path)
