"""Every kind of file from outside, damaged in thousands of ways: it is read, or refused by name, and never run."""

from __future__ import annotations

import copy
import io
import json
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prophet_deepspeed.section import ConfigError, read_config
from rich.console import Console

from pipeline_balance.pipeline.move.files import read_checkpoint
from prophet.errors import BenchmarkFileError, MonitorError, SpecError, TopologyError, TraceError
from prophet.machine.benchmark_files import ExpertKind, calibrate_from
from prophet.machine.topology import read_fits, read_topology, write_topology
from prophet.monitor.read import Steps, Tail, read_steps
from prophet.monitor.summary import make_report
from prophet.monitor.view import frame
from prophet.spec import Topology
from prophet.traces.extrapolate import read_error_bar
from prophet.traces.importers import read_any
from prophet.traces.npz import RoutingTrace, read_trace, write_trace
from tests.helpers.fuzzing import VALUES, Format, but, feed, replaced

Wrong = Callable[[random.Random], tuple[bytes, tuple[str, ...]]]


def is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e300


NO_WHOLE, NO_NUMBER = but(is_whole), but(lambda v: type(v) in (int, float) and abs(v) < 1e300)
NO_POSITIVE, NO_LIST, NO_TEXT = but(is_positive), but(list), but(str)


def of_json(document: Any, fields: list[tuple[tuple[Any, ...], Any]], *, lines: bool = False) -> Wrong:
    """Wrong files of JSON: one document, or lines of which the last is wrong in one field."""

    def wrong(rng: random.Random) -> tuple[bytes, tuple[str, ...]]:
        found, name = replaced(rng, document[-1] if lines else document, fields)
        if not lines:
            return json.dumps(found).encode(), (str(name),)
        return "\n".join([*map(json.dumps, document[:-1]), json.dumps(found), ""]).encode(), (str(name),)

    return wrong


# --- routing traces -------------------------------------------------------------------------------------------


def npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def promise(shape: tuple[int, ...]) -> bytes:
    """An archive whose counts have a header of that shape, and 64 bytes of data."""
    header, stream = io.BytesIO(), io.BytesIO(npz(iteration=np.arange(3)))
    np.lib.format.write_array_header_1_0(header, {"descr": "<u2", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr("counts.npy", header.getvalue() + bytes(64))
    return stream.getvalue()


def traces(folder: Path) -> Format:
    counts = np.arange(3 * 2 * 2 * 4, dtype=np.uint16).reshape(3, 2, 2, 4)
    steps = np.arange(3, dtype=np.int32)
    write_trace(folder / "t.npz", RoutingTrace(counts, steps, {"top_k": 2, "dim": 8, "text": "ü" * 20}))
    valid = (folder / "t.npz").read_bytes()
    stored = io.BytesIO()
    np.savez(stored, counts=counts, iteration=steps, meta=np.asarray('{"a": 1}'))

    def wrong(rng: random.Random) -> tuple[bytes, tuple[str, ...]]:
        changes: tuple[dict[str, Any], ...] = (
            {"counts": counts.astype(float)},
            {"counts": counts[0]},
            {"counts": counts[:, :, :, :0]},
            {"counts": -counts.astype(int)},
            {"counts": counts.astype(np.int64) << 40},
            {"counts": counts.astype(object)},
            {"counts": np.array(["x"])},
            {"iteration": steps[:2]},
            {"iteration": steps[::-1]},
            {"iteration": steps - 1},
            {"iteration": steps.astype(float)},
            {"iteration": steps.astype(np.int64) << 40},
            {"meta": np.asarray("[" * rng.choice((3, 100_000)))},
            {"meta": np.asarray(rng.choice(("[]", "NaN", '{"a": NaN}', "3", '{"a": ' + "9" * 5000 + "}", "\udc00")))},
            {"meta": np.asarray(["{}", "{}"])},
            {"meta": np.asarray(3)},
            {"meta": np.asarray({"a": 1}, dtype=object)},
            {"meta": np.asarray("{" + '"a": 1,' * 300_000)},
        )
        if rng.random() < 0.1:  # a header that promises more than there is
            shape = rng.choice(((1 << 40, 2, 2, 4), (3, 2, 2, 1 << 33), (1 << 62, 8, 8, 8), (3, 1 << 50, 0, 4)))
            return promise(shape), ("counts",)
        change = rng.choice(changes)
        return npz(**{"counts": counts, "iteration": steps, "meta": np.asarray("{}"), **change}), tuple(change)

    return Format(
        name="npz", file="t.npz", valid=(valid, stored.getvalue()), read=read_trace, error=TraceError, wrong=wrong
    )


def csv(folder: Path) -> Format:
    rows: list[list[Any]]
    rows = [[t, layer, r, e, 10 * e + r] for t in range(2) for layer in range(2) for r in range(2) for e in range(4)]
    header = ["step", "layer", "rank", "expert", "count"]

    def text(table: list[list[Any]]) -> bytes:
        return "\n".join(",".join(map(str, row)) for row in [header, *table]).encode()

    def wrong(rng: random.Random) -> tuple[bytes, tuple[str, ...]]:
        table, column = copy.deepcopy(rows), rng.randrange(5)
        odd = ("x", "-1", "1.5", "1.0.0", "nan", "9" * 30, "9" * 5000, "1e3", "1_0", "٣", "0x1", "1.٠")
        table[rng.randrange(len(rows))][column] = rng.choice(odd if header[column] == "count" else ("", *odd))
        return text(table), (header[column],)

    spaced = b'count, EXPERT ,rank,layer,step,note\r\n1,0,0,0,0,"a, b"\r\n2,1,0,0,1,\r\n\r\n'
    marked = b"\xef\xbb\xbfsep=;\r\n" + text(rows).replace(b",", b";").replace(b"\n", b",0\r\n").replace(b"t,0", b"t")
    wide = text(rows).decode().replace(",", "\t").encode("utf-16")
    valid = (text(rows), spaced, marked, wide)
    return Format(name="csv", file="t.csv", valid=valid, read=read_any, error=TraceError, wrong=wrong)


def sglang_folder(folder: Path) -> Format:
    """One table of a folder is damaged, whose files' names say rank and time."""
    rows = b"layer_id,expert_id,count\n" + b"".join(b"%d,%d,%d\n" % (a, e, 3 * e) for a in (3, 4) for e in range(4))
    (folder / "dump").mkdir()
    (folder / "dump" / "expert_distribution_rank0_timestamp17.25.csv").write_bytes(rows)

    def read(file: Path) -> object:
        return _of_folder(read_any, file)

    return Format(
        name="SGLang folder", file="dump/expert_distribution_rank1_timestamp17.5.csv", valid=(rows,), read=read,
        error=TraceError,
    )  # fmt: skip


def _of_folder(read: Callable[[Path], object], file: Path) -> object:
    try:
        return read(file.parent)
    except TraceError as error:
        raise TraceError(str(error).replace(f"{file.parent}: ", f"{file}: ")) from None


def safetensors(arrays: dict[str, Any], **about: Any) -> bytes:
    """Arrays as safetensors has them; about: what the header says of the last, where it is wrong."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in arrays.items():
        raw = np.asarray(values, dtype="<i4").tobytes()
        header[name] = {"dtype": "I32", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    header[next(reversed(arrays))].update(about)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensorrt(folder: Path) -> Format:
    del folder
    arrays = {f"{step}_{layer}": [step, 0, layer, 9] for step in (50, 51) for layer in (3, 4)}
    odd: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("dtype", but(lambda v: v in ("I32", "I64"))),
        ("shape", (*but(lambda v: v == [4]), [5], [0], [-4], [4, 1], [1 << 62], [1 << 70])),
        ("data_offsets", (*but(), [0, 1 << 62], [-16, 0], [16, 0], [48, 65], [0.0, 16.0])),
    )

    def wrong(rng: random.Random) -> tuple[bytes, tuple[str, ...]]:
        name, values = rng.choice(odd)
        return safetensors(arrays, **{name: rng.choice(values)}), (name,)

    valid = (safetensors(arrays), safetensors({"7_0": [1, 2]}))
    return Format(
        name="safetensors", file="rank0.safetensors", valid=valid, read=read_any, error=TraceError, wrong=wrong
    )


def totals(folder: Path) -> Format:
    del folder
    counts = [[[3 * e + a for e in range(4)] for a in range(2)] for _ in range(3)]
    fields = [(("logical_count", 2, 1, 3), but(is_whole)), (("logical_count",), VALUES)]

    def wrong(rng: random.Random) -> tuple[bytes, tuple[str, ...]]:
        return base(rng)[0], ("logical_count",)

    base = of_json({"logical_count": counts, "rank": 0}, fields)
    valid = tuple(json.dumps(v).encode() for v in ({"logical_count": counts}, counts, counts[0]))
    return Format(
        name="totals", file="t.json", valid=valid, read=lambda file: read_any(file, ranks=2), error=TraceError,
        wrong=wrong,
    )  # fmt: skip


def megatron_record(step: int, layer: int, rank: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "layer": layer, "rank": rank, "block": "decoder", "mtp_idx": 0, **more}


def megatron(folder: Path) -> Format:
    del folder
    chosen = [
        megatron_record(t, a, r, top_indices=[[0, 1], [2, 3]]) for t in range(2) for a in range(2) for r in range(2)
    ]
    counted = [{"iteration": t, "layer_number": 1, "ep_rank": 0, "tokens_per_expert": [3, 0, 1]} for t in range(3)]
    fields = [
        *(((name,), but(is_whole, lambda v: v == "1")) for name in ("step", "layer", "rank")),
        (
            ("top_indices",),
            [v for v in VALUES if v != []] + [[[0], [1, 2]], [[-1]], [[1 << 21]], [["a" * 9000] + ["b"] * 9000]],
        ),
    ]
    fields[-1] = (fields[-1][0], tuple(v for v in fields[-1][1] if v != [[]]))
    valid = tuple("\n".join(map(json.dumps, found)).encode() for found in (chosen, counted))
    wrong = of_json(chosen, fields, lines=True)
    return Format(name="megatron", file="t.jsonl", valid=valid, read=read_any, error=TraceError, wrong=wrong)


def megatron_folder(folder: Path) -> Format:
    """One file of a folder is damaged; the message names it or, where the files do not fit together, the folder."""
    whole = [megatron_record(t, a, 0, top_indices=[[0, 1], [2, 3]]) for t in range(2) for a in range(2)]
    (folder / "trace").mkdir()
    (folder / "trace" / "router_trace_rank0.jsonl").write_text("\n".join(map(json.dumps, whole)))

    def read(file: Path) -> object:
        return _of_folder(read_any, file)

    valid = ("\n".join(json.dumps({**r, "rank": 1}) for r in whole).encode(),)
    return Format(
        name="megatron folder", file="trace/router_trace_rank1.jsonl", valid=valid, read=read, error=TraceError
    )


# --- machines -------------------------------------------------------------------------------------------------


def _topology_text(folder: Path) -> str:
    fits = {"trans": {"fixed_s": 1e-4, "unit_s": 2e-9}, "expert_forward": {"fixed_s": 1e-4, "unit_s": 1e-6, "dim": 8}}
    write_topology(folder / "t.toml", Topology.uniform(4, name="here"), fits=fits)
    return (folder / "t.toml").read_text()


_NOT_NUMBERS = (
    '"x"',
    "true",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "[]",
    "{}",
    "1979-05-27",
    "0x" + "f" * 5000,
    '[1, "a"]',
    "''",
)


def topology(folder: Path) -> Format:
    text = _topology_text(folder)
    names = ("ranks", "ranks_per_node", "bytes_per_s", "latency_s", "flops_per_s", "free_bytes", "trans_rate", "name")

    def wrong(rng: random.Random) -> tuple[bytes, tuple[str, ...]]:
        name = rng.choice(names)
        odd = [v for v in _NOT_NUMBERS if not (name == "name" and v[0] in "\"'")]
        changed = re.sub(rf"(?m)^{name} = .*$", lambda _: f"{name} = {rng.choice(odd)}", text, count=1)
        return changed.encode(), (name,)

    def read(file: Path) -> object:
        read_fits(file)
        return read_topology(file)

    valid = (text.encode(), b"x" * 0 + text.replace("[4", "[ 4").encode())
    return Format(name="topology", file="t.toml", valid=valid, read=read, error=TopologyError, wrong=wrong)


def benchmarks(folder: Path) -> Format:
    del folder

    def expert(tokens: int, operation: str) -> dict[str, Any]:
        return {
            "operation": operation, "ranks": 1, "tokens": tokens, "experts": 1, "dim": 8, "hidden": 16,
            "activation": "gelu", "dtype": "float32", "seconds": 1e-6 * tokens, "median_s": 1e-6 * tokens,
            "seconds_by_rank": [1e-6 * tokens],
        }  # fmt: skip

    rows = [expert(t, f"expert_{o}") for t in (64, 256, 1024) for o in ("forward", "backward")]
    document = {"benchmark": "expert_compute", "environment": {"device": "cpu", "repeats": 3}, "rows": rows}
    fields = [
        (("benchmark",), VALUES),
        (("rows",), but(list)),
        *((("rows", 2, name), but(is_whole)) for name in ("ranks", "tokens", "experts", "dim", "hidden")),
        *((("rows", 2, name), but(is_positive)) for name in ("seconds", "median_s")),
        *((("rows", 2, name), VALUES) for name in ("operation", "activation", "dtype")),
        (("rows", 2, "seconds_by_rank"), but(lambda v: v == [1])),
    ]
    return Format(
        name="benchmark", file="b.json", valid=(json.dumps(document).encode(),),
        read=lambda file: calibrate_from([file], kind=ExpertKind()), error=BenchmarkFileError,
        wrong=of_json(document, fields),
    )  # fmt: skip


def error_bars(folder: Path) -> Format:
    del folder
    rows = [{"policy": "prophet", "simulated_error": 0.1 * i, "hosts": 4} for i in range(3)]
    document = {"rows": [*rows, {"policy": "static", "simulated_error": None, "hosts": 4}]}
    fields = [(("rows",), but(list)), (("rows", 1, "hosts"), NO_NUMBER)]
    fields += [(("rows", 1, "simulated_error"), tuple(v for v in NO_NUMBER if v is not None))]
    return Format(
        name="error bar", file="e.json", valid=(json.dumps(document).encode(),), read=read_error_bar, error=SpecError,
        wrong=of_json(document, fields),
    )  # fmt: skip


# --- runs -----------------------------------------------------------------------------------------------------

START = {"format": 1, "start": {"layers": 2, "ranks": 2, "experts": [4, 4], "planner": "prophet", "notes": {"a": "b"}}}
STEP = {
    "step": 3, "time_s": 1e9, "step_s": 0.1, "max_mean": [1.5, 1.0], "max_mean_static": [1.6, 1.0], "copies": [1, 0],
    "dropped": [0, 0], "rows": [80, 40], "hottest": [[[0, 2.0], [1, 1.0]], []], "gain_measured": 1.2, "exposed_s": 0.01,
    "seconds": {"expert": 0.1}, "gain_predicted": [1.0, 1.1], "experts": [[60, 4, 8, 8], [10, 10, 10, 10]],
    "rank_load": [[40, 40], [20, 20]], "rank_load_static": [[64, 16], [20, 20]], "skipped": 1,
}  # fmt: skip


def run_log(folder: Path) -> Format:
    del folder
    lines = [START, {**STEP, "step": 1}, {**STEP, "step": 2}]

    def read(file: Path) -> object:
        tail = Tail(file)
        tail.poll()
        found = read_steps(file)
        if found.left_out.count:
            raise MonitorError(f"{file}: {found.left_out}")
        return found, tail

    per_layer = ("max_mean", "max_mean_static", "copies", "dropped", "rows", "hottest")
    fields = [
        *(((name,), VALUES) for name in (*per_layer, "experts", "rank_load", "rank_load_static")),
        (("step",), but(is_whole, lambda v: v == 1 << 31)),
        (("seconds",), (None, 3, [1], {"a": "b"}, {"a": None})),
        *(((name,), but(lambda v: type(v) in (int, float) and 0 <= v < 1e10)) for name in ("time_s", "exposed_s")),
        *((("max_mean", 1), NO_NUMBER) for _ in range(3)),
    ]
    absent_is_right = ("experts", "rank_load", "rank_load_static")
    document = [*lines, STEP]
    base = of_json(document, fields, lines=True)

    def wrong(rng: random.Random) -> tuple[bytes, tuple[str, ...]]:
        while True:
            content, (name,) = base(rng)
            if name in absent_is_right and name not in json.loads(content.splitlines()[-1]):
                continue
            return content, (name if name != "1" else "max_mean",)

    valid = ("\n".join([*map(json.dumps, document), ""]).encode(),)
    return Format(name="run log", file="steps.jsonl", valid=valid, read=read, error=MonitorError, wrong=wrong)


def shown(found: Any) -> None:
    """What was read can be shown: as a frame of `prophet watch`, and as the page's numbers."""
    steps, tail = found
    assert isinstance(steps, Steps)
    if tail.rows:
        Console(file=io.StringIO(), width=120).print(frame(tail, now_s=1e9))
    try:
        make_report(steps, name="run")
    except MonitorError as error:
        assert "no step of this run has the loads" in str(error)  # noqa: PT017 - the only reason there may be


# --- checkpoints and configurations ---------------------------------------------------------------------------


def pipeline_description(folder: Path) -> Format:
    del folder
    tensors = [[f"{i}/weight", [3, 4], "float32", "parameter", i] for i in range(4)]
    document = {
        "step": 7, "boundaries": [0, 2, 4], "ranks": [0, 1], "tensors": tensors,
        "scalars": {"0/weight@step:float32": 7.0, "x": None, "y": True}, "frozen": ["0/weight"],
        "options": [[{"options": {"lr": 0.1}, "parameters": ["0/weight"]}]], "progress": {"updates": 7},
        "also": {"scheduler": {"last_epoch": 7}}, "optimizers": ["AdamW"], "run": {"position": 96},
        "files": "tensors-0123456789ab",
    }  # fmt: skip
    fields = [
        (("step",), but(is_whole, lambda v: v == 1 << 31)),
        *(((name,), VALUES) for name in ("boundaries", "ranks")),
        (("tensors",), but(lambda v: v == [])),
        *((("tensors", 1, i), but(lambda v: type(v) is int and v >= 0, str)) for i in (0, 2, 3, 4)),
        (("tensors", 1, 1), but(lambda v: v in ([], [1]))),
        (("scalars",), (None, 3, [1], "x", {"a": "b"}, {"a": [1]}, {"a": 10**400})),
        (("frozen",), but(lambda v: v == [])),
        (("options",), (None, 3, "x", {}, [3], [[3]], [[{}]], [[{"options": {}, "parameters": "x"}]])),
        (("optimizers",), but(lambda v: v == [])),
        (("files",), VALUES),
        *(((name,), but(lambda v: isinstance(v, dict))) for name in ("progress", "also", "run")),
    ]
    base = of_json(document, fields)

    def wrong(rng: random.Random) -> tuple[bytes, tuple[str, ...]]:
        content, (name,) = base(rng)
        return content, ("tensors" if name.isdigit() else name,)

    return Format(
        name="pipeline description", file="training.json", valid=(json.dumps(document).encode(),),
        read=lambda file: read_checkpoint(file.parent), error=SpecError, wrong=wrong,
    )  # fmt: skip


def deepspeed_config(folder: Path) -> Format:
    topology_file = folder / "machine.toml"
    write_topology(topology_file, Topology.uniform(2))
    section = {"ep_size": 2, "planner": "prophet", "slots_per_rank": 3, "topology": str(topology_file)}
    document = {
        "train_batch_size": 8, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "prophet": {**section, "verify": False, "timeout_s": 5.0},
    }  # fmt: skip
    fields = [
        (("prophet",), but(lambda v: v == {})),
        (("prophet", "ep_size"), (0, *but(lambda v: v is None or (type(v) is int and v > 0)))),
        (("prophet", "slots_per_rank"), but(lambda v: type(v) is int and v >= 0)),
        *((("prophet", name), VALUES) for name in ("planner", "schedule", "replan", "replica_memory")),
        (("prophet", "effort"), but(lambda v: type(v) in (int, float) and 0 <= v <= 1)),
        (("prophet", "verify"), but(bool)),
        (("prophet", "topology"), but(lambda v: v is None)),
        (("prophet", "timeout_s"), but(lambda v: v is None or (type(v) in (int, float) and v > 0))),
    ]
    base = of_json(document, fields)

    def wrong(rng: random.Random) -> tuple[bytes, tuple[str, ...]]:
        while True:
            content, (name,) = base(rng)
            found = json.loads(content)
            if "prophet" in found and (name == "prophet" or name in found["prophet"]):  # what is absent is a default
                return content, (f"prophet.{name}" if name != "prophet" else name,)

    def read(file: Path) -> object:
        try:
            return read_config(file)
        except ConfigError as error:  # within the file the key is named
            raise ConfigError(f"{file}: {error}") from None

    return Format(
        name="DeepSpeed config", file="ds.json", valid=(json.dumps(document).encode(),), read=read, error=ConfigError,
        wrong=wrong,
    )  # fmt: skip


FORMATS: dict[str, tuple[Callable[[Path], Format], int]] = {
    "npz": (traces, 3000),
    "csv": (csv, 2500),
    "megatron": (megatron, 2500),
    "megatron folder": (megatron_folder, 1500),
    "SGLang folder": (sglang_folder, 500),
    "safetensors": (tensorrt, 800),
    "totals": (totals, 800),
    "topology": (topology, 2500),
    "benchmark": (benchmarks, 1500),
    "error bar": (error_bars, 1500),
    "run log": (run_log, 3000),
    "pipeline description": (pipeline_description, 1500),
    "DeepSpeed config": (deepspeed_config, 1500),
}


# words that readers look for
_NAMES = [
    "benchmark", "rows", "simulated_error", "hosts", "name", "args",
    "step", "boundaries", "ranks", "tensors", "scalars", "frozen", "prophet", "ep_size", "effort", "zero_optimization",
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_read_or_refused_by_name(name: str, tmp_path: Path) -> None:
    make, files = FORMATS[name]
    files //= 2
    fed = feed(make(tmp_path), tmp_path, files=files, seed=1, check=shown if name == "run log" else None)
    assert fed.files == files
    print(f"{name}: {fed}")


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(VALUES[:10]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES) | st.text(max_size=3), inner),
    max_leaves=12,
)


@pytest.mark.parametrize("name", ["totals", "benchmark", "error bar", "pipeline description", "DeepSpeed config"])
def test_any_json_is_read_or_refused_by_name(name: str, tmp_path: Path) -> None:
    kind = FORMATS[name][0](tmp_path)
    file = tmp_path / kind.file

    @given(_values)
    @settings(database=None, derandomize=True, deadline=None, max_examples=200)
    def check(value: Any) -> None:
        file.write_text(json.dumps(value))
        said = ""
        try:
            kind.read(file)
        except kind.error as error:
            said = str(error)
        assert not said or file.name in said

    check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 10))
@pytest.mark.parametrize("name", FORMATS)
def test_more_damaged_files(name: str, seed: int, tmp_path: Path) -> None:
    make, files = FORMATS[name]
    feed(make(tmp_path), tmp_path, files=files, seed=seed, check=shown if name == "run log" else None)


def test_there_are_enough_files() -> None:
    assert sum(files for _, files in FORMATS.values()) >= 20_000
