"""Routing logs of other tools: what is read, and what is refused with the file, the line and the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prophet.errors import TraceError
from prophet.traces import importers
from prophet.traces.importers import read_any, read_csv, read_megatron
from prophet.traces.npz import RoutingTrace, write_trace


def record(step: int, layer: int, rank: int, chosen: list[list[int]], **more: Any) -> dict[str, Any]:
    """A line as Megatron-LM's router tracer writes it."""
    return {
        "step": step,
        "stage": "pre_dispatch",
        "block": "decoder",
        "layer": layer,
        "rank": rank,
        "num_tokens": len(chosen),
        "topk": len(chosen[0]) if chosen else 0,
        "top_indices": chosen,
        **more,
    }


def jsonl(file: Path, records: list[Any]) -> Path:
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    return file


def test_a_folder_with_a_file_per_rank(tmp_path: Path) -> None:
    for rank in range(2):
        rows = [record(step, layer, rank, [[0, 1 + rank], [0, layer]]) for step in range(3) for layer in (1, 3)]
        jsonl(tmp_path / f"router_trace_rank{rank}.jsonl", rows)
    (tmp_path / "other.jsonl").write_text("not a trace")
    trace = read_any(tmp_path)
    assert trace.counts.shape == (3, 2, 2, 4)
    assert trace.iteration.tolist() == [0, 1, 2]
    assert trace.load(0, 0).tolist() == [[2, 2, 0, 0], [2, 1, 1, 0]]  # layer 1
    assert trace.load(2, 1).tolist() == [[2, 1, 0, 1], [2, 0, 1, 1]]  # layer 3
    assert trace.meta["top_k"] == 2


def test_records_of_one_step_are_its_microbatches(tmp_path: Path) -> None:
    rows = [record(7, 0, rank, [[expert]]) for expert in (0, 3) for rank in (0, 1)]
    trace = read_any(jsonl(tmp_path / "t.jsonl", rows))
    assert trace.iteration.tolist() == [7, 7]
    assert trace.counts[:, 0, 0].tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]


def test_multi_token_prediction_comes_after_the_decoder(tmp_path: Path) -> None:
    rows = [
        record(0, 0, 0, [[3]], block="mtp", mtp_idx=0),
        record(0, 0, 0, [[1]]),
        record(0, 9, 0, [[2]]),
    ]
    trace = read_any(jsonl(tmp_path / "t.jsonl", rows))
    assert trace.counts[0, :, 0].argmax(axis=1).tolist() == [1, 2, 3]


def test_counts_and_other_names_are_taken_too(tmp_path: Path) -> None:
    rows = [
        {"iteration": 4, "layer_number": 2, "ep_rank": 0, "tokens_per_expert": [5, 0, 7, 0]},
        {"iteration": 4, "layer_number": 2, "ep_rank": 1, "topk_indices": [[1, 2]]},
    ]
    trace = read_any(jsonl(tmp_path / "t.jsonl", rows))
    assert trace.load(0, 0).tolist() == [[5, 0, 7, 0], [0, 1, 1, 0]]


def test_the_number_of_experts_can_be_said(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "t.jsonl", [record(0, 0, r, [[2]]) for r in range(2)])
    assert read_any(file).experts == 4  # the highest is 2; a multiple of the ranks
    assert read_any(file, experts=64).experts == 64
    with pytest.raises(TraceError, match=r"t.jsonl: expected experts below 2, got expert 2"):
        read_any(file, experts=2)


def test_csv_in_any_order_with_other_columns(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("Layer, step,rank,note,expert,count\n5,10,0,x,3,7\n5,10,0,x,3,1\n\n5,20,1,x,0,2\n6,10,0,x,1,4\n")
    trace = read_any(file)
    assert trace.counts.shape == (2, 2, 2, 4)
    assert trace.iteration.tolist() == [10, 20]
    assert trace.counts.sum() == 14
    assert trace.counts[0, 0, 0, 3] == 8
    assert trace.counts[1, 0, 1, 0] == 2
    assert trace.counts[0, 1, 0, 1] == 4


def test_a_trace_is_read_as_one(tmp_path: Path) -> None:
    trace = RoutingTrace(np.ones((2, 1, 2, 4), int), np.arange(2, dtype=np.int32))
    write_trace(tmp_path / "t.npz", trace)
    assert read_any(tmp_path / "t.npz") == trace


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(0, 1 << 30))
@settings(deadline=None, max_examples=20)
def test_a_trace_written_as_either_log_is_read_back(steps: int, layers: int, ranks: int, m: int, seed: int) -> None:
    import tempfile

    counts = np.random.default_rng(seed).integers(0, 9, (steps, layers, ranks, m * ranks))
    with tempfile.TemporaryDirectory() as folder:
        lines, rows = ["step,layer,rank,expert,count"], []
        for t, layer, r in np.ndindex(*counts.shape[:3]):
            lines += [f"{t},{layer},{r},{e},{n}" for e, n in enumerate(counts[t, layer, r])]
            chosen = [[e] for e, n in enumerate(counts[t, layer, r]) for _ in range(n)]
            rows.append(record(t, layer, r, chosen))
        Path(folder, "t.csv").write_text("\n".join(lines))
        for read, file in (
            (read_csv, Path(folder, "t.csv")),
            (read_megatron, jsonl(Path(folder, "t.jsonl"), rows)),
        ):
            np.testing.assert_array_equal(read(file, experts=counts.shape[3]).counts, counts)


GOOD = record(0, 0, 0, [[0]])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: expected a JSON object"),
        ("[1]", "line 2: expected a JSON object, got list"),
        ("[" * 100_000, "line 2: expected a JSON object"),
        ({**GOOD, "step": "soon"}, "line 2: step: expected a number from 0 to"),
        ({**GOOD, "layer": -1}, "line 2: layer: expected a number from 0 to"),
        ({**GOOD, "rank": True}, "line 2: rank: expected a number from 0 to"),
        ({k: v for k, v in GOOD.items() if k != "rank"}, "line 2: rank: .* the record has no such field"),
        (
            {k: v for k, v in GOOD.items() if k != "top_indices"},
            "line 2: top_indices: expected it or tokens_per_expert",
        ),
        ({**GOOD, "top_indices": [[0], [0, 1]]}, "line 2: top_indices: expected a list of lists"),
        ({**GOOD, "top_indices": [0, 1]}, "line 2: top_indices: expected a list of lists"),
        ({**GOOD, "top_indices": [[-1]]}, "line 2: top_indices: expected a list of lists"),
        ({**GOOD, "top_indices": [[1.5]]}, "line 2: top_indices: expected a list of lists"),
        ({**GOOD, "top_indices": [[1 << 70]]}, "line 2: top_indices: expected a list of lists"),
        ({**GOOD, "top_indices": [[1 << 40]]}, "line 2: top_indices: expected a list of lists"),
        ({**GOOD, "block": 7}, "line 2: block: expected a string"),
        ({**GOOD, "layer": 1, "rank": 5}, "expected a record of every layer and rank in every step"),
    ],
)
def test_what_is_wrong_in_a_router_trace_is_named(tmp_path: Path, line: Any, message: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps(GOOD) + "\n" + (line if isinstance(line, str) else json.dumps(line)) + "\n")
    with pytest.raises(TraceError, match=rf"t.jsonl: {message}"):
        read_any(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: step: expected a header with step,layer,rank,expert,count"),
        ("step,layer,rank,expert\n", "line 1: count: expected a header"),
        ("step,layer,rank,expert,count\n", "expected at least one record"),
        ("step,layer,rank,expert,count\n0,0,0,0\n", "line 2: expected 5 fields, got 4"),
        ("step,layer,rank,expert,count\n0,0,0,0,1\n0,0,x,0,1\n", "line 3: rank: expected a number from 0 to"),
        ("step,layer,rank,expert,count\n0,0,0,0,-1\n", "line 2: count: expected a number from 0 to"),
        ("step,layer,rank,expert,count\n0,0,0,99999999999,1\n", "line 2: expert: expected a number from 0 to"),
        ("step,layer,rank,expert,count\n0,0,0,0,2147483647\n0,0,0,0,1\n", "counts: expected numbers up to"),
    ],
)
def test_what_is_wrong_in_a_csv_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(TraceError, match=rf"t.csv: {message}"):
        read_any(file)


def test_files_that_are_no_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match=r"absent.csv: expected a routing log, there is no such file"):
        read_any(tmp_path / "absent.csv")
    with pytest.raises(TraceError, match="expected a folder of 1 to"):
        read_any(tmp_path)
    (tmp_path / "b.csv").write_bytes(b"step,layer\xff\n")
    with pytest.raises(TraceError, match=r"b.csv: line 1: expected text in UTF-8"):
        read_any(tmp_path / "b.csv")
    monkeypatch.setattr(importers, "MAX_LINE_BYTES", 8)
    (tmp_path / "long.jsonl").write_text("1" * 100)
    with pytest.raises(TraceError, match=r"long.jsonl: line 1: expected at most 8 characters"):
        read_any(tmp_path / "long.jsonl")


def test_a_log_cannot_ask_for_more_memory_than_a_trace_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "t.csv"
    file.write_text("step,layer,rank,expert,count\n0,0,0,1000000,1\n")
    monkeypatch.setattr(importers, "MAX_TRACE_BYTES", 1 << 20)
    with pytest.raises(TraceError, match="expected counts of at most 1048576 bytes"):
        read_any(file)
    (tmp_path / "t.jsonl").write_text(json.dumps(record(0, 0, 0, [[1_000_000]])) + "\n")
    with pytest.raises(TraceError, match="expected counts of at most 1048576 bytes"):
        read_any(tmp_path / "t.jsonl")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(record(t, 0, 0, [[1]])) + "\n" for t in range(4)))
    monkeypatch.setattr(importers, "MAX_TRACE_BYTES", 1 << 11)
    with pytest.raises(TraceError, match=r"expected records of at most 2048 bytes$"):  # before it is put together
        read_any(tmp_path / "t.jsonl")


def test_a_log_that_is_nearly_empty_cannot_ask_for_much_memory(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("step,layer,rank,expert,count\n" + "".join(f"{i},{i},{i},{i},1\n" for i in range(100)))
    with pytest.raises(TraceError, match=r"fewer empty cells: its \[100, 100, 100, 100\] take 800000000 bytes for 100"):
        read_any(file)
    long = json.dumps(record(0, 0, 0, [[0]])).replace("[[0]]", json.dumps(["a" * 10_000] + ["b"] * 100_000))
    (tmp_path / "t.jsonl").write_text(long)
    with pytest.raises(TraceError, match="line 1: top_indices: expected a list of lists of expert indices"):
        read_any(tmp_path / "t.jsonl")  # of strings numpy would make 4 GB
