"""Measured switches: every way ends with the right state, checkpoints by sockets, rows and targets, small runs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from benchmarks.cluster import kernel_objects as kernel
from benchmarks.switch import universal, worker
from benchmarks.switch.__main__ import main
from benchmarks.switch.cases import LARGE_BYTES, Case, cases, least_port_bytes, sized
from benchmarks.switch.jobs import KINDS
from benchmarks.switch.rows import CORES, HIDDEN, SLOWED, beside_rows, case_rows, job_rows, summary, targets
from benchmarks.switch.storage import Client, Storage, json_of, metadata_of
from benchmarks.switch.universal import UNIVERSAL, reason
from benchmarks.switch.ways import DCP, GATHER, ONE_BY_ONE, OURS, USUAL, WAYS, Setting, contributions
from benchmarks.switch.worker import Here, pieces_of, truth_of, wrong
from prophet.ranks.threads import ThreadCollective, ThreadWorld
from prophet.state.layout import Layout
from tests.helpers.cluster_testbed import needs_testbed

TP_TO_PP = Case(name="x", before="tp2,dp2,zero1", after="pp2,dp2,zero1", port_bytes=30_000, dim=16)


@pytest.mark.parametrize("hosts", [4, 8])
def test_cases_are_as_large_as_they_should_be(hosts: int) -> None:
    found = cases(hosts, large_bytes=200_000, small_bytes=50_000)
    names = [c.name for c in found]
    assert len(set(names)) == len(names) == 23
    for case in found:
        plan = case.plan(hosts)
        least = least_port_bytes(plan.route)
        assert plan.route.ranks == hosts
        assert least >= case.port_bytes or case.name == "zero 0 to 1"
        assert least <= max(*plan.route.sent_bytes(), *plan.route.received_bytes())


@pytest.mark.parametrize("name", [n for n in WAYS if "DCP" not in n])
def test_a_way_ends_with_the_right_state_and_leaves_the_old_one(name: str) -> None:
    plan = TP_TO_PP.plan(4)
    truth = truth_of(plan.before.space)

    def body(collective: ThreadCollective) -> tuple[int, int]:
        before, after = plan.before.on(collective.rank), plan.after.on(collective.rank)
        setting = Setting(route=plan.route, state=pieces_of(truth, before), collective=collective)
        done = WAYS[name](setting)
        assert wrong(truth, after, done.state) == "" == wrong(truth, before, setting.state)
        assert wrong(truth, after, {**done.state, after[0]: done.state[after[0]] + 1})
        return done.phases[0]

    sent = ThreadWorld(4).run(body)
    if name == GATHER:
        total = sum(r for _, r in sent) // 3  # what a rank does not get is what it gives
        assert total * 3 == sum(s for s, _ in sent) == sum(r for _, r in sent)
        return
    assert [s for s, _ in sent] == list(plan.route.sent_bytes())
    assert [r for _, r in sent] == list(plan.route.received_bytes())


def test_what_is_gathered_is_every_changed_box_once_and_even() -> None:
    plan = TP_TO_PP.plan(4)
    rows = contributions(plan.route)
    given = [p for row in rows for p in row]
    assert len(set(given)) == len(given)
    changed = {p.name for p in given}
    held = {p for rank in range(4) for p in plan.before.on(rank) if p.name in changed}
    assert set(given) == held
    assert all(row for row in rows)


def test_a_storage_keeps_tensors_and_sends_parts_of_them() -> None:
    storage = Storage("127.0.0.1", 0, 20.0)
    client = Client("127.0.0.1", storage.server_address[1], 10.0)
    whole = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    client.put("a", whole)
    client.written()
    part, scalar = torch.empty(2, 3, dtype=torch.bfloat16), torch.empty(1, dtype=torch.bfloat16)
    client.get([("a", [1, 2], [2, 3]), ("a", [3, 5], [1, 1])], [part, scalar.view(1, 1)])
    assert torch.equal(part, whole[1:3, 2:5])
    assert float(scalar) == 23.0
    assert (client.written_bytes, client.read_bytes) == (48, 14)
    client.stop()
    storage.wait()
    client.close()


def test_a_storage_that_nobody_stops_ends() -> None:
    with pytest.raises(TimeoutError, match="nobody has stopped"):
        Storage("127.0.0.1", 0, 0.05).wait()


def _parts(seconds: dict[str, float]) -> list[dict[str, Any]]:
    way = {"phases": [[1000, 0]], "messages": 1, "peak_bytes": 7}
    ways = {name: way | {"seconds": [s, 2 * s, 3 * s]} for name, s in seconds.items()}
    plan = {"layouts_s": 0.1, "order_s": 0.2, "routes_s": 0.3}
    return [{"plan": plan, "group_s": 0.1 * r, "empty_s": [0.01] * 3, "ways": ways} for r in range(4)]


def test_rows_have_the_slowest_rank_and_targets_what_they_say() -> None:
    case = sized(TP_TO_PP, 4)
    bytes_per_s = float(least_port_bytes(case.plan(4).route))  # the bound is a second
    parts = _parts({OURS: 0.6, ONE_BY_ONE: 1.0, DCP: 2.0})
    parts[2]["ways"] = parts[2]["ways"] | {OURS: parts[2]["ways"][OURS] | {"seconds": [1.0, 1.3, 0.5]}}
    probe = {"bytes_per_s": bytes_per_s, "gather_s": 0.0, "box_s": 0.0, "copied_byte_s": 0.0, "start_s": 0.25}
    rows = case_rows(case, parts, bytes_per_s=bytes_per_s, probe=probe, restart_s=5.0)
    assert [r["peer"] for r in rows] == [ONE_BY_ONE, DCP, f"{DCP}, and restart"]
    assert [r["peer_s"] for r in rows] == pytest.approx([2.0, 4.0, 9.0])
    first = rows[0]
    assert first["bound_s"] == pytest.approx(1.0)
    assert first["ratio"] == first["blocked_s"] == pytest.approx(1.3)  # of 1.0, 1.3, 1.8
    assert (first["blocked_least_s"], first["blocked_most_s"]) == pytest.approx((1.0, 1.8))
    assert (first["plan_s"], first["group_s"], first["messages"]) == pytest.approx((0.6, 0.3, 4))
    assert first["predicted_s"] == pytest.approx(1.0 + 0.25 + 0.01, rel=0.05)
    slow = case_rows(case, parts, bytes_per_s=bytes_per_s, probe=probe | {"box_s": 0.1}, restart_s=5.0)[0]
    fast = case_rows(
        case, parts, bytes_per_s=bytes_per_s, probe=probe | {"bytes_per_s": 2 * bytes_per_s}, restart_s=5.0
    )
    assert fast[0]["possible"] == pytest.approx(4.0)
    boxes = max(len(way.sends(r)) + len(way.receives(r)) for way in [case.plan(4).route] for r in range(4))
    assert slow["host_s"] == pytest.approx(0.1 * boxes)
    assert slow["predicted_s"] == pytest.approx(first["predicted_s"] + slow["host_s"])
    found = {t["what"]: t for t in targets(rows, [], [])}
    assert found["blocked s, at most 1.25 x bound + 0.15 s"]["met"]
    assert found["one message per tensor / ours"]["value"] == pytest.approx(2.0 / 1.3)
    assert found["one message per tensor / ours"]["possible"] == pytest.approx(2.0)  # the port's own second
    assert found["predicted: bias (absolute)"]["value"] > 0
    large = [r | {"least_port_bytes": LARGE_BYTES} for r in rows]
    held = {t["what"]: t for t in targets(large, [], [])}
    assert not held["blocked / bound"]["met"]
    assert "| blocked / bound | 0 of 1 |  | 1.3 | 1.25 |" in summary(list(held.values()))


def _switch(rank: int, seconds: Sequence[float]) -> dict[str, Any]:
    fixed = {"model_bytes": 9, "wire_bytes": 80, "least_port_bytes": 40, "port_bytes": 50, "inside_s": 0.1}
    fixed |= {"hidden_s": 0.2, "messages": 3, "larger_bytes": 101}
    times = [fixed | {"blocked_s": s, "peak_bytes": 200 * rank + k} for k, s in enumerate(seconds)]
    return {"before": "pp2", "after": "pp4", "mode": "in-place", "times": times}


def test_a_switch_of_a_job_takes_what_its_slowest_rank_does() -> None:
    parts = [[{"job": "whole job", "switches": [_switch(r, s)]}] for r, s in enumerate(([1.0, 5.0, 2.0], [3.0, 1, 1]))]
    (row,) = job_rows(parts, bytes_per_s=20.0)
    assert (row["case"], row["from"], row["to"]) == ("whole job, in-place", "pp2", "pp4")
    assert (row["blocked_s"], row["blocked_least_s"], row["blocked_most_s"]) == (3.0, 2.0, 5.0)
    assert (row["bound_s"], row["ratio"], row["messages"]) == (2.0, 1.5, 6)
    assert (row["larger_bytes"], row["peak_bytes"]) == (101, 202)
    row |= {"budget_bytes": 100}
    found = {t["what"]: t for t in targets([], [row], [])}
    peak = found["in-place: peak less the budget / larger state"]
    assert (peak["value"], peak["met"]) == (pytest.approx(102 / 101), True)


def test_what_was_hidden_is_that_of_the_rank_with_least() -> None:
    fixed = {"groups_s": 1.0, "routes_s": 3.0, "called_s": 0.5, "before_s": 2.0, "overlapped": 2}
    parts = [
        [{"job": "whole job", "beside": [fixed | more | {"exposed_s": e} for e in (0.0, exposed)]}]
        for exposed, more in ((0.8, {"meanwhile_s": 2.2, "cpu_s": 0.05}), (2.0, {"meanwhile_s": 2.0, "cpu_s": 0.15}))
    ]
    (row,) = beside_rows(parts)
    assert (row["job"], row["preparations"], row["exposed_s"]) == ("whole job", 2, 1.0)
    assert row["hidden_share"] == pytest.approx(0.75)  # of four seconds each, rank 1 stood for one
    assert row["slowed_by"] == pytest.approx(0.05)  # the mean of 10 % and nothing
    assert row["cpu_s"] == pytest.approx(0.1)  # again the mean
    assert row["cpu_slows_by"] == pytest.approx(2 * 0.1 / CORES / 4)  # two ranks, beside two steps of two seconds
    found = {t["what"]: t for t in targets([], [], [row | {"slowed_by": 0.051}])}
    assert not found[HIDDEN]["met"]
    assert not found[SLOWED]["met"]


def test_errors_of_predictions_are_held_with_their_sign_and_without() -> None:
    move = {"port_bytes": 0, "peer_s": None, "least_port_bytes": 0, "bound_s": 1.0, "wire_bytes": 1, "blocked_s": 1.0}
    rows = [{"case": c, "from": "a", "to": "b", "predicted_s": p} | move for c, p in (("x", 0.8), ("y", 0.9))]
    found = {t["what"]: t["value"] for t in targets(rows, [], [])}
    assert found["predicted: mean error"] == found["predicted: bias (absolute)"] == pytest.approx(0.15)
    rows[0]["predicted_s"] = 1.1
    found = {t["what"]: t["value"] for t in targets(rows, [], [])}
    assert found["predicted: mean error"] == pytest.approx(0.1)
    assert found["predicted: bias (absolute)"] == pytest.approx(0.0, abs=1e-12)


def test_large_moves_are_held_against_files() -> None:
    row = {"case": "dp doubled", "from": "a", "to": "b", "peer": DCP, "peer_s": 1.1, "peer_bytes": 1}
    row |= {"blocked_s": 1.0, "port_bytes": 1, "least_port_bytes": 0, "bound_s": 1.0, "predicted_s": 1.0}
    for n_bytes, held in ((LARGE_BYTES, True), (LARGE_BYTES - 1, False)):
        found = {t["what"]: t["met"] for t in targets([row | {"wire_bytes": n_bytes}], [], [])}
        assert found.get("I/O of DCP / ours, 32 MB moved") == (False if held else None)


def test_what_no_mover_can_reach_is_counted() -> None:
    out = [
        {"what": "a", "value": v, "target": 1.25, "at_most": False, "met": v >= 1.25, "possible": p}
        for v, p in POSSIBLE
    ]
    assert "| a | 1 of 3 | 1 | 1 | 1.25 |" in summary(out)


POSSIBLE = ((1.3, 1.4), (1.2, 1.3), (1.0, 1.1))
DEEPSPEED = {"seconds": [3.0, 5.0, 4.0], "reason": "", "save_s": 1.0, "convert_s": 2.0, "load_s": 1.0, "peer_bytes": 9}


def test_deepspeeds_part_of_a_row_has_seconds_or_a_reason() -> None:
    case = sized(TP_TO_PP, 4)
    parts, probe = _parts({OURS: 0.6}), dict.fromkeys(("bytes_per_s",), 1e6) | dict.fromkeys(HOST, 0.0)
    for took in (DEEPSPEED, {"reason": "tp"}):
        (row,) = case_rows(case, parts, bytes_per_s=1e6, probe=probe, restart_s=5.0, universal=took)
        assert row["peer"] == UNIVERSAL
        if took["reason"]:
            assert (row["peer_s"], row["reason"]) == (None, "tp")
        else:
            assert (row["peer_s"], row["peer_least_s"], row["peer_most_s"], row["convert_s"]) == (4.0, 3.0, 5.0, 2.0)
        assert targets([row], [], [])  # the rest of the row is held to its targets


HOST = ("box_s", "copied_byte_s", "start_s")


def test_deepspeeds_conversion_covers_copies_with_zero_1_and_says_what_else_it_lacks() -> None:
    reasons = {(c.before, c.after): reason(c) for c in cases(4, large_bytes=200_000, small_bytes=50_000)}
    assert [pair for pair, why in reasons.items() if not why] == [
        ("dp2,zero1", "dp4,zero1"),
        ("dp4,zero1", "dp2,zero1"),
    ]
    for (before, after), why in reasons.items():
        assert why.startswith("tp") == ("tp" in before + after and "ep" not in before + after), why
        assert why.startswith("experts") == ("ep" in before + after), why


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_deepspeeds_universal_checkpoint_is_saved_converted_and_loaded(tmp_path: Path) -> None:
    chosen = [sized(Case(name="dp", before="dp2,zero1", after="dp4,zero1", port_bytes=50_000), 4), sized(TP_TO_PP, 4)]
    covered, other = universal.measured(chosen, 2, tmp_path / "made")
    assert other == {"reason": reason(TP_TO_PP)}
    assert len(covered["seconds"]) == 2
    assert covered["convert_s"] > 0
    held = sum(math.prod(p.shape) for p in chosen[0].model().parameters)
    assert covered["saved_bytes"] > 14 * held  # bf16 weights, float32 master weights and two moments
    assert covered["converted_bytes"] > 12 * held
    assert 12 * held / 4 < covered["read_bytes"] <= covered["converted_bytes"]
    assert list((tmp_path / "made").iterdir()) == []


def test_what_dcp_saved_is_read_as_json() -> None:
    chunk = ChunkStorageMetadata(offsets=torch.Size([2, 0]), sizes=torch.Size([2, 3]))
    kept = TensorStorageMetadata(
        properties=TensorProperties(dtype=torch.bfloat16), size=torch.Size([4, 3]), chunks=[chunk]
    )
    words = json_of(Metadata(state_dict_metadata={"a": kept}))
    assert json.loads(words) == {"a": {"dtype": "bfloat16", "shape": [4, 3], "chunks": [[[2, 0], [2, 3]]]}}
    found = metadata_of(words).state_dict_metadata["a"]
    assert (found.size, found.chunks, found.properties.dtype) == (kept.size, kept.chunks, torch.bfloat16)


def test_the_host_is_measured_by_moves_of_boxes_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {64: 1.0, 512: 1.0 + 2 * 448 * 0.001 + 448 * 0.01, 1: 0.25}
    still = {64: 0.125, 512: 0.125 + 448 * 0.01, 1: 0.125}

    def moved_s(here: Here, before: Layout, after: Layout) -> float:
        if before is after:
            return still[len(before.space.tensors) // 2]
        return seconds[len(before.space.tensors) // 2]

    monkeypatch.setattr(worker, "_moved_s", moved_s)
    here = Here(collective=ThreadWorld(2).collective(0), client=None, folder=None, timeout_s=1.0, say=print)
    found = worker.host_probe(here)
    assert found["box_s"] == pytest.approx(0.001)
    assert found["copied_byte_s"] == pytest.approx(0.125 / worker.PROBE_BYTES)
    assert found["start_s"] == pytest.approx(1.0 - 0.125 - 2 * 64 * 0.001)


@pytest.mark.slow
def test_over_loopback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["--smoke", "--loopback", "--cases", "Table 1: 32B", "--no-jobs", "--json", str(out)]
    assert main(arguments) == 0
    found = json.loads(out.read_text())["measured"]
    assert "loopback" in found["links"]
    assert {r["peer"] for r in found["rows"]} == {*USUAL} - {OURS} | {f"{DCP}, and restart", UNIVERSAL}
    assert all(r["peer_s"] > 0 and r["blocked_s"] > 0 for r in found["rows"] if r["peer"] != UNIVERSAL)
    assert found["probe"]["box_s"] > 0
    assert "| target | met |" in capsys.readouterr().out


@needs_testbed
@pytest.mark.slow
def test_on_hosts_with_a_job(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["--smoke", "--cases", "pp", "--ways", "packed", "--json", str(out)]) == 0
    found = json.loads(out.read_text())["measured"]
    assert found["links"] == "200 Mbit/s, emulated"
    assert len(found["rows"]) == 2
    assert [r["to"] for r in found["jobs"][:2]] == ["pp4", "pp2"]
    moved = {(r["case"], r["to"]) for r in found["jobs"]}
    assert {("whole job, in-place", "pp4"), ("whole job, tp", "tp4"), ("whole job, ep", "dp4,ep4,zero1")} <= moved
    assert {("whole job, sharded", f"dp4,zero{z}") for z in (2, 3)} <= moved
    for row in found["jobs"]:
        assert row["least_port_bytes"] <= row["port_bytes"] <= row["wire_bytes"], row
    assert [r["job"] for r in found["beside"]] == [k.name for k in KINDS[4]]
    assert all(0 < r["hidden_share"] <= 1 for r in found["beside"])
    page = tmp_path / "page.md"
    assert main(["--page", str(page), str(out)]) == 0
    assert "| whole job, tp, tp2 to tp4 |" in page.read_text()
    assert not [n for n in kernel.namespaces("mp") if n.startswith(f"mp{os.getpid()}-")]
