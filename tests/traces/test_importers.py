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
from prophet.traces import importers, table
from prophet.traces.importers import read_any
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
        for file in (Path(folder, "t.csv"), jsonl(Path(folder, "t.jsonl"), rows)):
            np.testing.assert_array_equal(read_any(file, experts=counts.shape[3]).counts, counts)


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
    monkeypatch.setattr(table, "MAX_TRACE_BYTES", 1 << 20)
    with pytest.raises(TraceError, match="expected counts of at most 1048576 bytes"):
        read_any(file)
    (tmp_path / "t.jsonl").write_text(json.dumps(record(0, 0, 0, [[1_000_000]])) + "\n")
    with pytest.raises(TraceError, match="expected counts of at most 1048576 bytes"):
        read_any(tmp_path / "t.jsonl")
    counted = [{"step": t, "layer": 0, "rank": 0, "tokens_per_expert": [1] * 200} for t in range(4)]
    monkeypatch.setattr(importers, "MAX_TRACE_BYTES", 1 << 12)
    jsonl(tmp_path / "t.jsonl", counted)
    with pytest.raises(TraceError, match=r"expected records of at most 4096 bytes$"):  # before it is put together
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


# ------------------------------------------------------------------------------------ tables as programs write them

ROWS = [
    (s, a, r, e, 5 + (s * 7 + a * 3 + r + e) % 11)
    for s in range(3)
    for a in range(2)
    for r in range(2)
    for e in range(4)
]
TEXT = "step,layer,rank,expert,count\r\n" + "".join(",".join(map(str, row)) + "\r\n" for row in ROWS)
WRITTEN = {
    "Excel, CSV UTF-8": b"\xef\xbb\xbf" + TEXT.encode(),
    "Excel, German": b"\xef\xbb\xbf" + TEXT.replace(",", ";").encode(),
    "Excel, sep=": b"sep=;\r\n" + TEXT.replace(",", ";").encode(),
    "Excel, Unicode text": TEXT.replace(",", "\t").encode("utf-16"),
    "UTF-16, big end first": b"\xfe\xff" + TEXT.replace(",", "\t").encode("utf-16-be"),
    "Excel, rows of empty cells at the end": TEXT.encode() + b",,,,\r\n" * 3,
    "pandas, a cell is missing": TEXT.replace("\r\n", ".0\n").replace("count.0", "count").encode(),
    "pandas, decimal commas": TEXT.replace(",", ";").replace("\r\n", ",0\n").replace("count,0", "count").encode(),
    "pandas, an index": "".join(f"{i - 1 if i else ''},{row}" for i, row in enumerate(TEXT.splitlines(True))).encode(),
    "R": ('"' + TEXT.replace(",", '","').replace("\r\n", '"\n"')).removesuffix('"').encode(),
    "a database, bars": TEXT.replace(",", " | ").encode(),
    "no zeros, an empty cell": TEXT.encode() + b"2,1,1,3,\r\n",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_table_is_read_however_a_program_writes_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "plain.csv").write_text(TEXT)
    (tmp_path / "t.csv").write_bytes(WRITTEN[name])
    np.testing.assert_array_equal(read_any(tmp_path / "t.csv").counts, read_any(tmp_path / "plain.csv").counts)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (TEXT.encode() + b"total,,,,480\r\n", r"line 50: step: expected a number from 0 to \d+, got 'total'"),
        (b"sep=;\nstep;layer;rank;expert;count\n0;0;0;0;2,5\n", r"line 3: count: expected a number .*, got '2,5'"),
        (b"step;layer;rank;expert\n", r"line 1: count: expected a header .*, got 'step;layer;rank;expert'"),
        (b"Step No,layer,rank,expert,count\n0,0,0,0,1\n", "line 1: step: expected a header .*, got 'step no,layer"),
        (b"time,layer_id,expert_id,count\n0,0,0,1\n", "line 1: step: expected a header"),
        (b"2,1,0,3\n1,0,1,0\n", "line 1: step: expected a header .*, got '2,1,0,3'"),
        (TEXT.encode("utf-16-le"), "line 1: step: expected a header"),
        (TEXT.replace("step", "größe").encode("latin-1"), "line 1: expected text in UTF-8, or UTF-16 with its mark"),
        (b"step,layer,rank,expert,count\n0,0,0,,1\n", "line 2: expert: expected a number from 0 to"),
    ],
)
def test_a_table_that_cannot_be_read_says_which_cell(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "t.csv").write_bytes(data)
    with pytest.raises(TraceError, match=f"t.csv: {message}"):
        read_any(tmp_path / "t.csv")


@given(st.data())
@settings(deadline=None, max_examples=25)
def test_any_table_is_read_back_from_any_dialect(data: st.DataObject) -> None:
    import tempfile

    shape = tuple(data.draw(st.integers(1, most)) for most in (3, 3, 3, 4))
    counts = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 2000, shape)
    delimiter, decimal = data.draw(st.sampled_from([(",", "."), (";", "."), (";", ","), ("\t", ","), ("|", ".")]))
    names = data.draw(st.permutations(["step", "layer", "rank", "expert", "count", "", "note"]))
    fraction = data.draw(st.sampled_from(["", f"{decimal}0", f"{decimal}000"]))
    quote = data.draw(st.sampled_from(["", '"']))
    lines = [delimiter.join(quote + name + quote for name in names)]
    for place in np.ndindex(*shape):
        cells = dict(zip(["step", "layer", "rank", "expert"], map(str, place), strict=True))
        cells |= {"count": f"{counts[place]}{fraction}", "": str(len(lines)), "note": "x"}
        lines.append(delimiter.join(quote + cells[name] + quote for name in names))
    text = data.draw(st.sampled_from(["\n", "\r\n"])).join(lines)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "t.csv")
        file.write_bytes(text.encode(data.draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]))))
        np.testing.assert_array_equal(read_any(file, experts=12).counts[..., : shape[3]], counts)


# ----------------------------------------------------------------------------------------------- folders of groups


def stages(folder: Path, *, ranks: int = 2, pipeline: int = 2, data: int = 1) -> None:
    """A file per rank of Megatron-LM's order: pipeline stages outside, expert-parallel ranks inside."""
    rng = np.random.default_rng(0)
    for rank in range(pipeline * data * ranks):
        stage = rank // (data * ranks)
        rows = [
            record(step, layer, rank, rng.integers(0, 4, (8, 1)).tolist())
            for step in range(3)
            for layer in (2 * stage, 2 * stage + 1)
        ]
        jsonl(folder / f"router_trace_rank{rank}.jsonl", rows)


def test_the_ranks_of_pipeline_stages_are_numbered_in_each_stage(tmp_path: Path) -> None:
    stages(tmp_path)
    trace = read_any(tmp_path)
    assert trace.counts.shape == (3, 4, 2, 4)
    (tmp_path / "last").mkdir()
    for rank in (2, 3):
        name = f"router_trace_rank{rank}.jsonl"
        (tmp_path / "last" / name).write_text((tmp_path / name).read_text())
    np.testing.assert_array_equal(trace.counts[:, 2:], read_any(tmp_path / "last").counts)


def test_a_table_of_all_stages_is_read_alike(tmp_path: Path) -> None:
    stages(tmp_path)
    trace = read_any(tmp_path)
    rows = [
        f"{t},{layer},{r + 2 * (layer // 2)},{e},{trace.counts[t, layer, r, e]}"
        for t, layer, r, e in np.ndindex(*trace.counts.shape)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["step,layer,rank,expert,count", *rows]))
    np.testing.assert_array_equal(read_any(tmp_path / "t.csv").counts, trace.counts)


def test_groups_that_hold_the_same_layers_are_told_apart_by_their_size(tmp_path: Path) -> None:
    stages(tmp_path, ranks=2, pipeline=1, data=2)
    assert read_any(tmp_path).counts.shape == (3, 2, 4, 4)
    trace = read_any(tmp_path, ranks=2)
    assert trace.counts.shape == (3, 4, 2, 4)
    assert trace.meta["groups"] == 2
    np.testing.assert_array_equal(trace.counts[:, :2], read_any(tmp_path).counts[:, :, :2])
    np.testing.assert_array_equal(trace.counts[:, 2:], read_any(tmp_path).counts[:, :, 2:])
    with pytest.raises(TraceError, match="ranks: expected a multiple of 3, its layers have 4 ranks"):
        read_any(tmp_path, ranks=3, experts=6)


def test_a_rank_that_lacks_a_step_is_named_in_its_stage(tmp_path: Path) -> None:
    stages(tmp_path)
    file = tmp_path / "router_trace_rank3.jsonl"
    file.write_text("".join(file.read_text().splitlines(True)[:-1]))
    with pytest.raises(TraceError, match=r"there is none of step 2, layer 3, rank 3 \(microbatch 0\)"):
        read_any(tmp_path)


def test_ranks_that_routed_the_same_tokens_are_refused(tmp_path: Path) -> None:
    chosen = np.random.default_rng(0).integers(0, 8, (9, 200, 1)).tolist()
    for rank in range(2):
        jsonl(tmp_path / f"router_trace_rank{rank}.jsonl", [record(t, 0, rank, chosen[t]) for t in range(9)])
    with pytest.raises(TraceError, match=r"ranks 0 and 1 .* routed the same tokens, as tensor-parallel ranks do"):
        read_any(tmp_path)


# ----------------------------------------------------------------------------------------- what others publish


def test_sglangs_tables_have_their_rank_and_step_in_their_names(tmp_path: Path) -> None:
    for rank in range(2):
        for dump, time in enumerate(("1744347750.37", "1744347751.006")):
            rows = [f"{layer},{e},{100 * dump + 10 * rank + e}" for layer in (3, 5) for e in range(rank, 4)]
            text = "\n".join(["layer_id,expert_id,count", *rows])
            (tmp_path / f"expert_distribution_rank{rank}_timestamp{time}.csv").write_text(text)
    trace = read_any(tmp_path)
    assert trace.counts[1, 0].tolist() == [[100, 101, 102, 103], [0, 111, 112, 113]]
    assert trace.counts.shape == (2, 2, 2, 4)
    (tmp_path / "expert_distribution_rank1_timestamp1744347751.006.csv").unlink()
    with pytest.raises(TraceError, match="expected as many files of every rank, got 2 of rank 0, 1 of 1"):
        read_any(tmp_path)
    (tmp_path / "all.csv").write_text(text)
    with pytest.raises(TraceError, match=r"all.csv: rank: expected a column, or the rank in the file's name"):
        read_any(tmp_path)


def test_counts_without_a_rank_are_shared_evenly_when_asked(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("layer_id,expert_id,count\n3,0,10\n3,1,7\n3,2,0\n3,3,1\n")
    with pytest.raises(TraceError, match=r"t.csv: ranks: its counts do not say which rank .* --ep N"):
        read_any(tmp_path / "t.csv")
    trace = read_any(tmp_path / "t.csv", ranks=4)
    assert trace.counts.shape == (1, 1, 4, 4)
    assert trace.counts.sum(axis=2).tolist() == [[[10, 7, 0, 1]]]
    assert np.ptp(trace.counts, axis=2).max() == 1
    assert "shared evenly among 4 ranks" in trace.meta["source"]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_counts_over_all_ranks_in_json(tmp_path: Path, steps: int) -> None:
    counts = np.random.default_rng(0).integers(0, 90, (steps or 1, 2, 4))
    value = counts.tolist() if steps else counts[0].tolist()
    for name, document in (("a.json", value), ("b.json", {"logical_count": value, "rank": 0})):
        (tmp_path / name).write_text(json.dumps(document))
        np.testing.assert_array_equal(read_any(tmp_path / name, ranks=2).counts.sum(axis=2), counts)
    assert read_any(tmp_path / "a.json", ranks=2, experts=6).experts == 6


def test_tensorrts_statistic_is_read_as_safetensors_itself_writes_it(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    counts = np.random.default_rng(0).integers(0, 90, (3, 2, 2, 5))
    for rank in range(2):
        arrays = {
            f"{50 + t}_{3 + a}": counts[t, a, rank].astype("<i8" if t else "<i4") for t in range(3) for a in range(2)
        }
        save_file(arrays, tmp_path / f"rank{rank}.safetensors", metadata={"format": "np"})
        save_file({"50_3": np.zeros((5, 5), np.int32)}, tmp_path / f"cooccurrence_rank{rank}.safetensors")
    (tmp_path / "meta_info.json").write_text('{"num_experts": 5, "num_experts_per_token": 2}')
    trace = read_any(tmp_path)
    np.testing.assert_array_equal(trace.counts, counts)
    assert trace.iteration.tolist() == [50, 51, 52]
    (tmp_path / "rank0.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(TraceError, match=r"model.safetensors: rank: expected the rank in the file's name"):
        read_any(tmp_path / "model.safetensors")


def torch_file(**content: Any) -> bytes:
    import io

    import torch

    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


PUBLISHED = {
    "expert_distribution_recorder_1758079621.54.pt": (torch_file(rank=0, logical_count=[[[1]]]), "SGLang's .* pickle"),
    "rank0_step375_expert_counts.pt": (torch_file(counts=[[1]]), "LMDeploy's .* pickle"),
    "load.pt": (torch_file(load=1), "torch.save or pickle writes: pickles are never read"),
    "load.pkl": (b"\x80\x04\x95\x05", "torch.save or pickle"),
    "load.npy": (b"\x93NUMPY\x01\x00", r"numpy.save writes it: write numpy.savez\("),
    "imatrix.gguf": (
        b"GGUF\x03\x00\x00\x00" + bytes(16) + b"general.type\x08imatrix",
        "importance matrix of llama.cpp",
    ),
    "imatrix.dat": (b"\x03\x00\x00\x00", "make it again with --output-format gguf"),
    "train.json": (b'{"schemaVersion": 1, "deviceProperties": [], "traceEvents": []}', "profile of torch.profiler"),
    "expert_map.json": (b'{"moe_layer_count": 1, "layer_list": []}', "which device holds which expert"),
    "map.json": (b'{"physical_to_logical_map": [[0, 1]]}', "which device holds which expert"),
    "a_expert_load.json": (
        b'{"world_size": 2, "snapshots": [{"window_expert_load": [[1]], "physical_to_logical_map": [[0]]}]}',
        "vLLM's balancer dumps",
    ),
    "server.log": (b"INFO EPLB step: 9 for model x: avg_tokens=2.00, max_tokens=3\n", "no counts by expert"),
    "server.txt": (b"INFO [Expert Balancedness] forward_pass_id=3\n", "no counts by expert"),
    "events.out.tfevents.1.host": (b"\x18\x00", "event file of TensorBoard"),
    "t.csv": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "fetch it with git lfs pull"),
    "u.csv": (b"<!DOCTYPE html><html>", "a page of a web site"),
    "t.parquet": (b"PAR1\x15", "a Parquet file: write it as CSV"),
    "t.xlsx": (b"PK\x03\x04" + bytes(26) + b"[Content_Types].xml", "a workbook: save the sheet as CSV"),
    "t.csv.gz": (b"\x1f\x8b\x08", "a compressed file: unpack it first"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_not_read_says_what_it_looks_like_and_what_to_do(tmp_path: Path, name: str) -> None:
    data, message = PUBLISHED[name]
    (tmp_path / name).write_bytes(data)
    for path in (tmp_path / name, tmp_path):
        if path is tmp_path and name.endswith((".csv", ".txt")):
            continue
        with pytest.raises(TraceError, match=f"{name}: expected a routing trace or log, this looks like .*{message}"):
            read_any(path)


@pytest.mark.parametrize("name", ["expert_distribution_recorder_1.pt", "rank0_step3_expert_counts.pt"])
def test_the_line_that_the_refusal_of_a_pickle_names_writes_what_is_read(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import re
    import sys

    import torch

    counts = torch.arange(24).reshape(3, 2, 4)
    both = {"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None, "counts": counts}
    torch.save(both, tmp_path / name)
    with pytest.raises(TraceError) as said:
        read_any(tmp_path / name)
    line = re.search(r'python -c "(.*)" FILE', str(said.value))
    assert line is not None
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path / name)])
    exec(line[1], {})  # as `python -c` would
    assert read_any(tmp_path / f"{name}.json", ranks=2).counts.sum(axis=2).tolist() == counts.tolist()
