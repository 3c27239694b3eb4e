"""Calibrating from benchmarks' files: exact on lines, the right rows only, and a clear word about what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import a2a, common, expert_compute, trans_agg
from benchmarks.a2a import exchange
from benchmarks.expert_compute import measure as experts
from benchmarks.trans_agg import measure as transfers
from prophet.cli import BAD_INPUT, OK, main
from prophet.errors import BenchmarkFileError
from prophet.machine.benchmark_files import ExpertKind, Found, calibrate_from
from prophet.machine.topology import read_fits, read_topology
from tests.helpers.support import on_threads

ANY = ExpertKind()
PER_BYTE, FIXED = 2e-9, 1e-4
PER_TOKEN, PER_EXPERT, CALL = 1e-6, 3e-5, 5e-5


def a2a_row(size: int, **changes: Any) -> dict[str, Any]:
    seconds = FIXED + PER_BYTE * size * 3 / 4  # a quarter stays at home
    row = {"ranks": 4, "bytes": size, "dtype": "float32", "uneven": 0.0, "levels": 1}
    return {**row, "seconds": seconds, "median_s": 1.5 * seconds, **changes}  # of exchanges the median counts


def expert_row(tokens: int, count: int, *, backward: bool = False, **changes: Any) -> dict[str, Any]:
    seconds = (1 + backward) * (CALL + PER_EXPERT * count + PER_TOKEN * tokens)
    row = {"operation": f"expert_{'backward' if backward else 'forward'}", "ranks": 1, "dim": 8, "hidden": 16}
    row |= {"activation": "gelu", "dtype": "float32", "experts": count, "tokens": tokens, "seconds": seconds}
    return {**row, "median_s": seconds, "seconds_by_rank": [seconds] * int(changes.get("ranks", 1)), **changes}


def transfer_row(operation: str, size: int, **changes: Any) -> dict[str, Any]:
    row = {"operation": operation, "ranks": 4, "homes": "all", "form": "direct", "busiest_bytes": size}
    seconds = 3e-4 + 4e-9 * size
    return {**row, "seconds": seconds, "median_s": 1.5 * seconds, **changes}


def experts_rows(**changes: Any) -> list[dict[str, Any]]:
    sizes = [(t, c) for t in (64, 256, 1024, 4096) for c in (1, 4)]
    return [expert_row(t, c, backward=b, **changes) for t, c in sizes for b in (False, True)]


def files(folder: Path, **rows: list[dict[str, Any]]) -> list[Path]:
    everything = {
        "a2a": [a2a_row(s) for s in (4096, 1 << 16, 1 << 20, 1 << 22)],
        "expert_compute": experts_rows(),
        "trans_agg": [transfer_row(o, s) for o in ("trans", "agg") for s in (1 << 16, 1 << 18, 1 << 20)],
        **rows,
    }
    found = []
    for name, listed in everything.items():
        common.write_rows(folder / f"{name}.json", name, listed, repeats=7)
        found.append(folder / f"{name}.json")
    return found


def test_lines_are_found_exactly(tmp_path: Path) -> None:
    found = calibrate_from(files(tmp_path), kind=ANY, free_bytes=123, name="n")
    topology = found.calibration.topology
    assert (topology.ranks, topology.ranks_per_node, topology.name, topology.free_bytes) == (4, 4, "n", (123,) * 4)
    assert topology.intra.bytes_per_s == pytest.approx(1 / (1.5 * PER_BYTE))
    assert topology.intra.latency_s == pytest.approx(1.5 * FIXED)
    assert topology.flops_per_s == pytest.approx((2 * 2 * 8 * 16 / PER_TOKEN,) * 4)
    assert topology.expert_overhead_s == pytest.approx(PER_EXPERT)
    assert topology.call_overhead_s == pytest.approx(CALL)
    lines = {f.operation: f.line for f in found.calibration.fits}
    assert set(lines) == {"a2a_intra", "expert_forward", "expert_backward", "trans", "agg"}
    assert lines["trans"].unit_s == pytest.approx(1.5 * 4e-9)
    assert found.kind == ExpertKind(dim=8, hidden=16, activation="gelu", dtype="float32")
    assert found.repeats == 7
    assert {f.unit for f in found.calibration.fits if f.operation.startswith("expert")} == {"token"}
    assert found.calibration.fits[0].fitted[0].spread == pytest.approx(0.5)


def test_rows_of_other_cases_are_left_out(tmp_path: Path) -> None:
    slow = {"seconds": 9.0, "median_s": 9.0}
    given = files(
        tmp_path,
        a2a=[
            *(a2a_row(s) for s in (4096, 1 << 20)),
            a2a_row(1 << 21, uneven=0.5, **slow),
            a2a_row(99, levels=2, **slow),
        ],
        trans_agg=[
            *(transfer_row("trans", s) for s in (4096, 1 << 20)),
            transfer_row("trans", 1 << 18, homes="one", **slow),
            transfer_row("trans", 1 << 18, form="two-phase", **slow),
            {"operation": "agg", "wrong": "something else arrived"},
        ],
    )
    lines = {f.operation: f for f in calibrate_from(given, kind=ANY).calibration.fits}
    # by size, not by line: a fit that ignores outliers would forgive a wrong row
    assert [p.size for p in lines["a2a_intra"].fitted] == [3072, 786432]
    assert [p.size for p in lines["trans"].fitted] == [4096, 1 << 20]
    assert "agg" not in lines


def test_the_expert_that_is_meant(tmp_path: Path) -> None:
    given = files(tmp_path, expert_compute=[*experts_rows(), *experts_rows(dtype="bfloat16", dim=32)])
    with pytest.raises(
        BenchmarkFileError, match=r"hold 2 experts that fit.*8 x 16 gelu float32; 32 x 16 gelu bfloat16"
    ):
        calibrate_from(given, kind=ANY)
    assert calibrate_from(given, kind=ExpertKind(dtype="bfloat16")).kind.dim == 32
    with pytest.raises(BenchmarkFileError, match="hold 0 experts that fit"):
        calibrate_from(given, kind=ExpertKind(hidden=5))


def test_a_slow_rank_is_slow_and_several_nodes_are_told_apart(tmp_path: Path) -> None:
    rows = [{**r, "seconds_by_rank": [r["seconds"] * f for f in (0.5, 0.5, 1.0, 0.5)]} for r in experts_rows(ranks=4)]
    topology = calibrate_from(files(tmp_path, expert_compute=rows), kind=ANY, ranks_per_node=2).calibration.topology
    assert topology.relative_speed().tolist() == pytest.approx([1, 1, 0.5, 1])
    assert topology.nodes == 2
    assert topology.inter.bytes_per_s == pytest.approx(1 / (1.5 * PER_BYTE))


def test_every_other_size_is_held_out(tmp_path: Path) -> None:
    rows = [a2a_row(s) for s in (4096, 1 << 16, 1 << 20)]
    rows[1]["seconds"] *= 2
    rows[1]["median_s"] *= 2
    fit = calibrate_from(files(tmp_path, a2a=rows), kind=ANY, held_out=True).calibration.fits[0]
    assert [p.size for p in fit.fitted] == [3072, 786432]
    assert [p.size for p in fit.held_out] == [49152]
    assert fit.mean_error == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"a2a": []}, "no rows of an even all-to-all of 4 ranks: expected a file of benchmarks.a2a"),
        ({"expert_compute": []}, "no rows of expert_forward: expected a file of benchmarks.expert_compute"),
        ({"expert_compute": experts_rows(ranks=2)}, r"one number of ranks, got \[2, 4\]"),
        ({"a2a": [a2a_row(4096)]}, r"a2a.json: rows\[0\]: a2a_intra: expected at least two sizes"),
        (
            {"a2a": [a2a_row(4096, seconds=-1.0)]},
            r"a2a.json: rows\[0\].seconds: expected a number from 0 to inf, got -1",
        ),
        ({"a2a": [a2a_row(4096, seconds="x")]}, r"rows\[0\].seconds: expected a number"),
        ({"a2a": [a2a_row(4096, bytes=True)]}, r"rows\[0\].bytes: expected an integer"),
        ({"a2a": [a2a_row(4096, seconds=0)]}, r"expected a positive number"),
        ({"expert_compute": experts_rows()[:-1]}, "expected rows of the same tokens and experts for both"),
        ({"expert_compute": experts_rows(seconds_by_rank=[])}, "expected a list of 1 numbers"),
        ({"expert_compute": experts_rows(dtype="int8")}, "dtype: expected one of float32"),
        ({"trans_agg": [transfer_row("trans", 1, form="three")]}, "form: expected one of direct, two-phase"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, rows: dict[str, Any], words: str) -> None:
    with pytest.raises(BenchmarkFileError, match=words):
        calibrate_from(files(tmp_path, **rows), kind=ANY)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "expected JSON"),
        ("[]", "benchmark: expected one of a2a, expert_compute, trans_agg, got 'list'"),
        ('{"benchmark": "layer", "rows": []}', "got 'layer'"),
        ('{"benchmark": ["a2a"], "rows": []}', "benchmark: expected one of"),
        ('{"benchmark": "a2a", "rows": [1]}', "rows: expected a list of at most"),
        ("[" * 100_000, "expected JSON"),
    ],
)
def test_files_from_elsewhere(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(BenchmarkFileError, match=words) as caught:
        calibrate_from([file], kind=ANY)
    assert str(file) in str(caught.value)
    with pytest.raises(BenchmarkFileError, match="No such file"):
        calibrate_from([tmp_path / "none.json"], kind=ANY)


def test_ranks_that_are_asked_for(tmp_path: Path) -> None:
    given = files(tmp_path)
    assert calibrate_from(given, kind=ANY, ranks=4).calibration.topology.ranks == 4
    with pytest.raises(BenchmarkFileError, match="ranks: expected 8, the files are of 4"):
        calibrate_from(given, kind=ANY, ranks=8)
    with pytest.raises(BenchmarkFileError, match="divides 4 ranks, got 3"):
        calibrate_from(given, kind=ANY, ranks_per_node=3)


# --- the command, and what the benchmarks really write ---------------------------------------------------------------


def test_the_command_writes_what_was_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [text for f in files(tmp_path) for text in ("--from", str(f))]
    out = tmp_path / "new" / "folder" / "t.toml"
    made = [str(tmp_path / "new"), str(tmp_path / "new" / "folder")]
    assert main(["calibrate", *given, "--out", str(out), "--check", "--json"]) == OK
    answer = json.loads(capsys.readouterr().out)
    assert (answer["file"], answer["folders_made"]) == (str(out), made)
    assert answer["from"] == given[1::2]
    assert (answer["dim"], answer["hidden"], answer["repeats"]) == (8, 16, 7)
    assert all(row["mean_error"] is not None for row in answer["operations"])
    assert read_topology(out).intra.bytes_per_s == pytest.approx(1 / (1.5 * PER_BYTE))
    assert read_fits(out)["expert_forward"]["dim"] == 8
    assert main(["calibrate", *given, "--check"]) == OK
    assert "Read, not measured" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "new")
    for folders in (f"Folders made for it: {', '.join(made)}\n", ""):
        assert main(["calibrate", *given, "--out", str(out)]) == OK
        assert capsys.readouterr().out.endswith(f"Written: {out}\n{folders}")
    assert main(["calibrate", *given]) == BAD_INPUT
    assert "expected --out FILE" in capsys.readouterr().err
    assert main(["calibrate", *given, "--check", "--machine", str(out)]) == BAD_INPUT
    assert "expected one of them" in capsys.readouterr().err
    assert main(["calibrate", "--from", str(tmp_path), "--check"]) == BAD_INPUT
    assert str(tmp_path) in capsys.readouterr().err


def test_what_the_benchmarks_write_can_be_read(tmp_path: Path) -> None:
    def body(ranks: Any) -> dict[str, list[common.Row]]:
        sizes: dict[str, Any] = {"sizes": [1024, 8192], "dtypes": ["float32"], "uneven": [0.0, 0.5], "per_node": None}
        shape: dict[str, Any] = {"shapes": [(8, 16)], "dtypes": ["float32"], "repeats": 2, "device": "cpu"}
        return {
            "a2a": exchange.measure(ranks, **sizes, repeats=2, device="cpu"),
            "expert_compute": experts.measure(
                ranks, tokens_per_expert=[4, 16], experts=[1, 2], activation="gelu", **shape
            ),
            "trans_agg": transfers.measure(ranks, copies=[1, 2], **shape),
        }

    rows = on_threads(3, body)[0]
    found: Found = calibrate_from(files(tmp_path, **rows), kind=ANY, held_out=True)
    assert found.calibration.topology.ranks == 3
    assert len({f.operation for f in found.calibration.fits}) == 5
    assert all(m.__doc__ for m in (a2a, expert_compute, trans_agg))
