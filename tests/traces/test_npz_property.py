"""Any trace survives a round trip; no bytes at all make the reader raise anything but `TraceError`."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prophet.errors import TraceError
from prophet.traces.npz import RoutingTrace, TraceWriter, read_trace, write_trace

sizes = st.integers(1, 4)


@st.composite
def traces(draw: st.DrawFn) -> RoutingTrace:
    shape = (draw(st.integers(0, 4)), draw(sizes), draw(sizes), draw(sizes))
    dtype = draw(st.sampled_from([np.uint8, np.uint16, np.int32, np.uint64, np.int64]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    counts = rng.integers(0, min(np.iinfo(dtype).max, 2**31 - 1), shape, dtype=dtype, endpoint=True)
    iteration = np.sort(rng.integers(0, 100, shape[0])).astype(np.int32)
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    )
    return RoutingTrace(counts, iteration, draw(st.dictionaries(st.text(max_size=4), json_values, max_size=3)))


@given(traces())
@settings(deadline=None, max_examples=40)
def test_round_trip(trace: RoutingTrace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.npz"
        write_trace(path, trace)
        assert read_trace(path) == trace
        with TraceWriter(
            path, layers=trace.layers, ranks=trace.ranks, experts=trace.experts, meta=trace.meta
        ) as writer:
            for t in range(trace.steps):
                writer.append(trace.counts[t], iteration=int(trace.iteration[t]))
        assert read_trace(path) == trace


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6),
    st.booleans(),
)
@settings(deadline=None, max_examples=150)
def test_damage_anywhere_is_a_trace_error_or_harmless(
    seed: int, edits: list[tuple[float, int]], compressed: bool
) -> None:
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.npz"
        save = np.savez_compressed if compressed else np.savez
        save(path, counts=rng.integers(0, 9, (3, 2, 2, 4)), iteration=np.arange(3), meta=np.asarray('{"a": 1}'))
        raw = bytearray(path.read_bytes())
        for where, value in edits:
            raw[int(where * len(raw))] = value
        path.write_bytes(raw)
        with contextlib.suppress(TraceError):
            assert read_trace(path, max_bytes=1 << 20).counts.ndim == 4
