"""Timelines of single steps of a run on two processes, read by the rules of the format and not by our own reader.

The rules are those of the Trace Event Format: complete events need a name, a process, a thread, a time and a length; on
one thread they are nested or apart; metadata events name processes and threads.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import prophet
from prophet.cli import BAD_INPUT, OK, main
from prophet.monitor.timelines import joined
from prophet.scheduler.recording import Recording
from tests.helpers.launch import on_processes
from tests.helpers.support import FixedPlanner, TinyModel, everywhere, next_id_loss
from tests.helpers.timelines import events_by_track

Recorded = list[tuple[str, str, float]]  # name, stream and microseconds of a span


def monitored(folder: str, own_folders: bool) -> dict[int, Recorded]:
    """Five steps on this rank; by step what it recorded."""
    model = TinyModel(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = prophet.EngineConfig(slots_per_rank=8, planner=FixedPlanner(everywhere(8, 2)))
    engine = prophet.attach(model, optimizer, config=config)
    found: dict[int, Recording | None] = {}
    # before the monitor, which lets go of what it has recorded
    engine.on_step.append(lambda report: found.update({report.step: engine.runtime.recording}))
    run = Path(folder, str(engine.collective.rank)) if own_folders else Path(folder)
    with prophet.monitor(engine, run, timeline=[0, 2, 3, 9], tensorboard=False, wandb=False) as live:
        ids = torch.arange(48).view(4, 12) % 7
        for step in range(5):
            optimizer.zero_grad()
            loss = next_id_loss(model(ids), ids, 1 / 48)
            loss.backward()
            live.log(loss=loss if step else 2.5)
            optimizer.step()
    assert engine.runtime.recording is None
    engine.close()
    return {
        step: [(s.name, s.stream, 1e6 * s.seconds) for s in recording.spans()]
        for step, recording in found.items()
        if recording is not None
    }


def check(file: Path, by_rank: list[Recorded]) -> None:
    """A file holds these spans of every rank, and no rank leaves a conversation before another one has joined it."""
    tracks = events_by_track(json.loads(file.read_text(encoding="utf-8")))
    assert {process for process, _ in tracks} == {f"rank {rank}" for rank in range(len(by_rank))}
    times: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for rank, recorded in enumerate(by_rank):
        mine = [
            (stream, e) for (process, stream), events in tracks.items() if process == f"rank {rank}" for e in events
        ]
        assert Counter((e["name"], stream) for stream, e in mine) == Counter((n, stream) for n, stream, _ in recorded)
        assert sum(e["dur"] for _, e in mine) == pytest.approx(sum(us for *_, us in recorded), abs=1e-2 * len(mine))
        assert {"compute", "tokens"} <= {stream for stream, _ in mine}
        for _, e in sorted(((s, e) for s, e in mine if s == "tokens"), key=lambda both: both[1]["ts"]):
            times.setdefault(e["name"], {}).setdefault(f"rank {rank}", []).append((e["ts"], e["ts"] + e["dur"]))
    together = [list(zip(*both.values(), strict=True)) for name, both in times.items() if "counts" in name]
    assert together
    for (a_began, a_ended), (b_began, b_ended) in (pair for pairs in together for pair in pairs):
        assert max(a_began, b_began) < min(a_ended, b_ended) + 500.0, "the ranks' clocks are apart"


def test_a_run_of_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stale = tmp_path / "timeline" / "step-2"
    stale.mkdir(parents=True)
    for rank in range(2):
        (stale / f"rank-{rank}.json").write_text("of an earlier start")
    recorded = on_processes(2, monitored, str(tmp_path), False)
    folder = tmp_path / "timeline"
    for by_step in recorded:
        assert sorted(by_step) == [0, 2, 3], "other steps are not recorded"
    for step in (0, 2, 3):
        check(folder / f"step-{step}.json", [by_step[step] for by_step in recorded])
    assert any(stream == "weights" for _, stream, _ in recorded[0][2])
    assert not list(folder.rglob("*.part"))

    assert main(["report", str(tmp_path), "--out", str(tmp_path / "pages" / "x.html")]) == OK
    page = (tmp_path / "pages" / "x.html").read_text(encoding="utf-8")
    for step in (0, 2, 3):
        link = f"../timeline/step-{step}.json"
        assert f'<a href="{link}">step {step}</a>' in page
        assert (tmp_path / "pages" / link).resolve().is_file()
    assert ">loss<" in page
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in lines[1:]]
    assert losses[0] == 2.5
    assert all(isinstance(loss, float) and loss > 0 for loss in losses)
    assert len(losses) == 5


def test_ranks_without_a_common_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = on_processes(2, monitored, str(tmp_path), True)
    for rank in range(2):
        assert not list((tmp_path / str(rank) / "timeline").glob("*.json"))
    shutil.copytree(tmp_path / "1" / "timeline", tmp_path / "0" / "timeline", dirs_exist_ok=True)
    found = joined(tmp_path / "0")
    assert sorted(found) == [0, 2, 3]
    for step, file in found.items():
        check(file, [by_step[step] for by_step in recorded])
    found[2].unlink()
    for damaged in ("{}", "[]", '{"otherData": {"began_s": "x"}, "traceEvents": []}', '{"otherData": 1}'):
        (tmp_path / "0" / "timeline" / "step-2" / "rank-1.json").write_text(damaged)
        assert main(["report", str(tmp_path / "0")]) == BAD_INPUT
        assert "rank-1.json: expected a rank's timeline" in capsys.readouterr().err
        assert not found[2].exists()


def test_a_disk_that_fails_is_a_warning(tmp_path: Path) -> None:
    model = TinyModel(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = prophet.attach(model, optimizer)

    def one_step() -> None:
        with prophet.monitor(engine, tmp_path, timeline=[0], tensorboard=False):
            (tmp_path / "timeline" / "step-0").write_text("a file where the folder belongs")
            ids = torch.arange(48).view(4, 12) % 7
            next_id_loss(model(ids), ids, 1 / 48).backward()
            optimizer.step()

    with pytest.warns(UserWarning, match=r"the timeline of step 0 was not written: .*(File|Not)"):
        one_step()
    engine.close()


def test_steps_that_cannot_be(tmp_path: Path) -> None:
    engine: Any = object.__new__(prophet.Engine)
    with pytest.raises(ValueError, match="timeline must be at least 0, got -1"):
        prophet.monitor(engine, tmp_path, timeline=[3, -1])
    assert not list(tmp_path.iterdir())
