"""The live view: what is written, what a crash or a failing sink does, and the commands that show it."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import re
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prophet
from prophet.cli import BAD_INPUT, OK, main
from prophet.engine.config import EngineConfig
from prophet.engine.step_report import StepReport
from prophet.errors import MonitorError
from prophet.monitor.read import Tail, read_steps
from prophet.monitor.routing import Routing
from prophet.monitor.rows import detail_period, hottest, measured_gain, ratios, step_row
from prophet.monitor.sinks import JsonLines, WandB, heat_map, images, scalars
from prophet.monitor.summary import make_report
from prophet.monitor.view import chosen_layers, course
from prophet.monitor.writer import WAITING
from prophet.ranks.threads import ThreadCollective
from prophet.report import render_report
from prophet.traces import read_trace
from tests.helpers.support import FixedPlanner, TinyModel, everywhere, next_id_loss, on_threads


def report(step: int = 0) -> StepReport:
    """Two ranks, two layers, four experts; the first layer's first expert is hot."""
    counts = np.array([[[30, 2, 4, 4], [30, 2, 4, 4]], [[5, 5, 5, 5], [5, 5, 5, 5]]])
    return StepReport(
        step=step,
        counts=counts,
        rank_load=np.array([[40, 40], [20, 20]]),
        rank_load_static=np.array([[64, 16], [20, 20]]),
        copies=np.array([[0, 1], [0, 0]]),
        dropped=np.array([3, 0]),
        seconds={"expert": 0.06, "exposed_trans": 0.01, "exposed_agg": 0.02, "gate": 0.5},
        actions=(),
    )


class StandIn(prophet.Engine):
    """What a monitor needs of an engine."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


def write(folder: Path, steps: int, **header: Any) -> None:
    lines = JsonLines(folder)
    lines.start({"layers": 2, "ranks": 2, "experts": [4, 4], "planner": "prophet", **header})
    for i in range(steps):
        lines.step(step_row(report(i), time_s=time.time(), step_s=0.1 if i else None, detail=i % 2 == 0))
    lines.close()


def train(folder: Path, steps: int, reports: list[StepReport] | None = None, **options: Any) -> None:
    """A monitored run of two ranks. reports: where those of the first go."""

    def body(ranks: ThreadCollective) -> None:
        model = TinyModel(group=ranks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        config = EngineConfig(slots_per_rank=4, planner=FixedPlanner(everywhere(8, 2)))
        engine = prophet.attach(model, optimizer, config=config)
        if reports is not None and ranks.rank == 0:
            engine.on_step.append(reports.append)
        with prophet.monitor(engine, folder, **options) as live:
            assert live.writing == (ranks.rank == 0)
            for step in range(steps):
                ids = (torch.arange(48).view(4, 12) * (step + 2)) % 7
                optimizer.zero_grad()
                next_id_loss(model(ids), ids, 1 / 48).backward()
                optimizer.step()
        live.close()
        assert live._on_step not in engine.on_step
        engine.close()

    on_threads(2, body)


# --- the routing beside the lines ---


def test_a_run_can_be_planned_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The counts are those of the reports; 48 tokens a rank, each to two of eight experts."""
    reports: list[StepReport] = []
    train(tmp_path / "run", 5, reports=reports, tensorboard=False)
    trace = read_trace(tmp_path / "run" / "routing.npz")
    assert np.array_equal(trace.counts, [r.counts for r in reports])
    assert trace.iteration.tolist() == [0, 1, 2, 3, 4]
    layer, bank = TinyModel().moe(0), TinyModel().moe(0).experts
    assert dict(trace.meta) == {
        "source": "prophet.monitor",
        "dim": layer.dim,
        "hidden": bank.w_out.shape[2],
        "experts": 8,
        "top_k": 2,
        "activation": "gelu",
        "bias": True,
        "dtype": "float32",
        "tokens": 48,
        "layers": 2,
        "moe_layers": 2,
    }
    for path in ("run", "run/steps.jsonl", "run/routing.npz"):
        assert main(["plan", str(tmp_path / path), "--planner", "prophet", "--json"]) == OK
        assert json.loads(capsys.readouterr().out)["trace"]["steps"] == 5


def test_a_run_without_its_routing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 2)
    for path in (tmp_path, tmp_path / "steps.jsonl"):
        assert main(["plan", str(path)]) == BAD_INPUT
        said = " ".join(capsys.readouterr().err.split())
        assert "expected routing.npz beside steps.jsonl: this is a run of prophet.monitor without it" in said


def routing_of(folder: Path, experts: tuple[int, ...] = (4, 4)) -> Routing:
    return Routing(folder, [prophet.MoE(8, 8, e) for e in experts], 2)


def test_the_routing_is_whole_at_any_moment_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.import_module("prophet.monitor.routing"), "MOST_BYTES", 20 * 4 * 2 * 2 * 4
    )  # 20 steps
    routing, writes = routing_of(tmp_path), 0
    inode = 0
    for step in range(100):
        routing.add(report(step))
        trace = read_trace(tmp_path / "routing.npz")
        now = (tmp_path / "routing.npz").stat().st_ino
        writes, inode = writes + (now != inode), now
        assert trace.steps <= 20
        assert step + 1 - 20 <= trace.iteration[-1] + 1 <= step + 1
    assert writes == 9  # after 1, 2, 4, 8, 16 steps, 32, 52, 72, 92
    routing.write()
    trace = read_trace(tmp_path / "routing.npz")
    assert trace.iteration.tolist() == list(range(80, 100))
    assert np.array_equal(trace.counts[0], report().counts)
    assert trace.meta["tokens"] == 15  # (120 choices and 3 dropped) / 2 layers / 2 ranks / top 2, rounded
    before = (tmp_path / "routing.npz").stat().st_ino
    routing.write()
    assert (tmp_path / "routing.npz").stat().st_ino == before


def test_layers_that_differ_in_experts_have_no_trace() -> None:
    assert not Routing.serves([prophet.MoE(8, 8, e) for e in (4, 8)])


# --- numbers ---


def test_numbers_of_a_step() -> None:
    row = step_row(report(), time_s=1.0, step_s=0.5, detail=True)
    assert row["max_mean"] == [1.0, 1.0]
    assert row["max_mean_static"] == [1.6, 1.0]
    assert row["copies"] == [1, 0]
    assert row["dropped"] == [3, 0]
    assert row["exposed_s"] == pytest.approx(0.03)
    assert row["hottest"][0][0] == [0, 3.0]
    assert row["experts"] == [[60, 4, 8, 8], [10, 10, 10, 10]]
    # 0.06 s for 60 rows of rank 0: 84 rows on the busiest ranks without replicas, 60 with them and 0.03 s exposed
    assert row["gain_measured"] == pytest.approx(0.084 / 0.09, abs=1e-4)
    assert not {"experts", "rank_load"} & step_row(report(), time_s=1.0, step_s=0.5, detail=False).keys()
    assert json.loads(json.dumps(row)) == row


def test_nothing_measured_is_no_gain() -> None:
    empty = report()
    assert measured_gain(empty, 0) is not None
    empty.seconds.clear()
    assert measured_gain(empty, 0) is None
    assert ratios(np.zeros((2, 3), dtype=np.int64)) == [1.0, 1.0]
    assert hottest(np.zeros((1, 3), dtype=np.int64)) == [[]]


def test_details_are_rarer_in_large_models() -> None:
    assert detail_period(4, 4, 16) == 1
    assert detail_period(60, 64, 256) > 10


def test_a_loss_is_drawn_beside_the_balance(tmp_path: Path) -> None:
    write(tmp_path, 8)
    file = tmp_path / "steps.jsonl"
    header, *lines = file.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for i, loss in ((2, 3.5), (5, -0.25)):  # logged every few steps, and negative as a reward's may be
        rows[i]["loss"] = loss
    rows[7]["loss"] = "low"
    file.write_text("\n".join([header, *map(json.dumps, rows), ""]))
    steps = read_steps(tmp_path)
    assert steps.left_out.why == "loss: expected a number, got 'low'"
    made = make_report(steps, name="x")
    np.testing.assert_array_equal(made.after.loss, [np.nan, 3.5, 3.5, -0.25])  # of the steps with details: 0, 2, 4, 6
    assert ">loss<" in render_report(made)
    write(tmp_path, 3)
    assert ">loss<" not in render_report(make_report(read_steps(tmp_path), name="x"))


def test_pictures() -> None:
    image = heat_map(np.array([[0.0, 1.0, 2.0, 9.0]]))
    assert image.shape == (8, 32, 3)
    assert image[0, 0].tolist() == [0, 34, 78]
    assert image[0, 16].tolist() == image[0, 31].tolist() == [254, 232, 56]
    assert course([1.0, 1.5]) == "▁█"
    assert chosen_layers({"max_mean": [1.0, 3.0, 2.0]}, 2) == [1, 2]


# --- a run ---


def test_a_run_is_written_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run", 3, tensorboard=False, predict_every=1, notes={"data": "ids in a circle"})
    steps = read_steps(tmp_path / "run")
    assert [r["step"] for r in steps.rows] == [0, 1, 2]
    assert steps.header["planner"] == "fixed"
    assert all(len(r["gain_predicted"]) == 2 for r in steps.rows)
    assert sum(steps.rows[2]["copies"]) > 0 == sum(steps.rows[0]["copies"])
    assert np.sum(steps.rows[1]["rank_load"]) == np.sum(steps.rows[1]["experts"]) == 2 * 2 * 2 * 48
    assert main(["watch", str(tmp_path / "run"), "--once"]) == OK
    shown = capsys.readouterr().out
    for word in ("step 3", "2 ranks", "max/mean", "predicted", "exposed", "hottest"):
        assert word in shown
    assert main(["report", str(tmp_path / "run")]) == OK
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    for word in ("as it ran", "Layers", "predicted gain", "ids in a circle", "<svg"):
        assert word in page
    assert "The loss does not notice" not in page


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard: pip install '.[monitor]'"
)
def test_tensorboard_gets_what_the_lines_have(tmp_path: Path) -> None:
    """Read back with TensorBoard's own reader: every scalar, and the heat maps pixel by pixel."""
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, 4, tensorboard=True, heat_every=2, notes={"data": "ids in a circle"})
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    tags = found.Tags()
    lines = (tmp_path / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "max_mean" in row]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    wanted = [scalars(row) for row in rows]
    assert set(tags["scalars"]) == {name for row in wanted for name in row}
    assert {"prophet/max_mean", "prophet_max_mean/layer_01"} <= set(tags["scalars"])
    for name in tags["scalars"]:
        values = {e.step: e.value for e in found.Scalars(name)}
        assert values == pytest.approx({row["step"]: v[name] for row, v in zip(rows, wanted, strict=True) if name in v})
    maps = [images(row) for row in rows]
    assert set(tags["images"]) == set(maps[0]) == {f"prophet_heat/{n}" for n in ("experts", "ranks", "ranks_static")}
    for name in tags["images"]:
        drawn = found.Images(name)
        assert [e.step for e in drawn] == [0, 2], "every second step has heat maps"
        for event in drawn:
            pixels = np.asarray(Image.open(io.BytesIO(event.encoded_image_string)).convert("RGB"))
            np.testing.assert_array_equal(pixels, maps[event.step][name])
    text = found.Tensors("prophet/run/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "ids in a circle" in text


def test_wandb_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that records calls: the library itself needs an account."""
    logged: list[dict[str, Any]] = []
    run = types.SimpleNamespace(
        define_metric=lambda *_, **__: None,
        config=types.SimpleNamespace(update=lambda *_, **__: None),
        log=logged.append,
    )
    stub = types.ModuleType("wandb")
    stub.__dict__.update(run=run, Image=lambda image: ("image", image.shape))
    monkeypatch.setitem(__import__("sys").modules, "wandb", stub)
    assert WandB.active() is run
    sink = WandB(run, heat_every=2)
    sink.start({"layers": 2})
    for i in range(2):
        sink.step(step_row(report(i), time_s=0.0, step_s=0.1, detail=True))
    sink.close()
    assert [line["prophet/step"] for line in logged] == [0, 1]
    assert logged[0]["prophet_heat/experts"] == ("image", (16, 32, 3))
    assert "prophet_heat/experts" not in logged[1]
    assert logged[1]["prophet_dropped/layer_00"] == 3.0


def test_a_sink_that_fails_or_hangs_does_not_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(JsonLines, "step", fails)
    with pytest.warns(UserWarning, match="JSONL failed and is left out from now on"):
        train(tmp_path, 3, tensorboard=False)


def test_a_slow_sink_costs_steps_and_not_time(tmp_path: Path) -> None:
    engine = StandIn(
        on_step=[],
        planner=FixedPlanner([]),
        collective=types.SimpleNamespace(rank=0, size=2),
        layers=[prophet.MoE(8, 8, 4)] * 2,
        balanced=[types.SimpleNamespace(context=types.SimpleNamespace(topology=types.SimpleNamespace(name="t")))],
    )
    live = prophet.monitor(engine, tmp_path, tensorboard=False, predict_every=0)
    hold = live._guarded
    live._guarded = lambda call, what: time.sleep(0.02) is None and hold(call, what)  # type: ignore[method-assign]
    began = time.perf_counter()
    for i in range(3 * WAITING):
        engine.on_step[0](report(i))
    assert time.perf_counter() - began < 1.0
    assert live.skipped >= WAITING
    live._guarded = hold  # type: ignore[method-assign]
    live.close()
    rows = read_steps(tmp_path).rows
    assert len(rows) + live.skipped == 3 * WAITING
    assert rows[-1]["skipped"] == live.skipped


# --- reading ---


def test_a_cut_line_and_a_second_start(tmp_path: Path) -> None:
    write(tmp_path, 5)
    file = tmp_path / "steps.jsonl"
    file.write_bytes(file.read_bytes()[:-40])  # a crash within a line
    assert len(read_steps(tmp_path).rows) == 4
    tail = Tail(file)
    assert tail.poll()
    assert len(tail.rows) == 4
    write(tmp_path, 2)
    assert tail.poll()
    assert [r["step"] for r in tail.rows] == [0, 1]
    assert tail.starts == read_steps(tmp_path).starts == 2
    assert not tail.poll()


def test_lines_that_are_left_out_are_counted_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 4)
    file = tmp_path / "steps.jsonl"
    header, *steps = file.read_text().splitlines()
    wrong = [
        "garbage",
        "[" * 100_000,
        json.dumps({**json.loads(steps[0]), "max_mean": ["a", "b"]}),
        steps[0].replace("[1.0,1.0]", "[NaN,1.0]"),
        json.dumps({**json.loads(steps[0]), "experts": [[1, 2, 3, 4]]}),
        json.dumps({**json.loads(steps[0]), "copies": [10**400, 1]}),
        '{"start": 3}',
    ]
    assert len({*wrong, *steps}) == 11
    file.write_text("\n".join([header, *steps[:2], *wrong, *steps[2:], ""]))
    found = read_steps(tmp_path)
    assert [r["step"] for r in found.rows] == [0, 1, 2, 3]
    assert found.left_out.count == 7
    tail = Tail(file)
    assert tail.poll()
    assert (len(tail.rows), tail.left_out.count) == (4, 7)
    said = "7 lines are no steps of this run and were left out (the first: expected a line of JSON)"
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["watch", str(tmp_path), "--once"]) == OK
    assert said in capsys.readouterr().out
    assert main(["report", str(tmp_path)]) == OK
    assert f"steps.jsonl: {said}" in capsys.readouterr().out
    assert said in (tmp_path / "report.html").read_text(encoding="utf-8")
    file.write_text("\n".join([header, wrong[2], ""]))
    for command in (["watch", str(tmp_path), "--once"], ["report", str(tmp_path)]):
        assert main(command) == BAD_INPUT
        said = "1 line is no step of this run and was left out (max_mean: expected 2 numbers, one per layer, got ['a'"
        assert said in capsys.readouterr().err


def test_a_run_of_long_lines_is_read_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 40)
    file = tmp_path / "steps.jsonl"
    read, lines = (importlib.import_module(f"prophet.monitor.{name}") for name in ("read", "lines"))
    monkeypatch.setattr(read, "_MOST_KEPT_BYTES", file.stat().st_size // 3)
    assert [r["step"] for r in read_steps(tmp_path).rows] == list(range(0, 40, 4))
    tail = Tail(file)
    assert tail.poll()
    assert 8 < len(tail.rows) < 16
    assert tail.rows[-1]["step"] == 39
    for module in (read, lines):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 1000)
    with file.open("a") as f:
        f.write("x" * 5000 + "\n")
    assert read_steps(tmp_path).left_out.why == "expected at most 1000 bytes"


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no run here"), ("{}\n", "expected a first line"), ("", "no step"), ('{"start": 3}\n', "first line")]
    + [
        (json.dumps({"format": 1, "start": {"layers": 1, "ranks": 1, "experts": [4], **wrong}}) + "\n", said)
        for wrong, said in (
            ({"layers": 0}, r"line 1: .*start\.layers: expected a number from 1"),
            ({"ranks": "two"}, r"start\.ranks: expected a number from 1 to 65536, got 'two'"),
            ({"experts": [4, 4]}, r"start\.experts: expected 1 numbers"),
            ({"notes": [1]}, r"start\.notes: expected an object of strings"),
        )
    ],
)
def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "steps.jsonl").write_text(content)
    with pytest.raises(MonitorError, match=said):
        read_steps(tmp_path)
    for command in (["watch", str(tmp_path), "--once"], ["report", str(tmp_path)]):
        assert main(command) == BAD_INPUT
        assert re.search(said, capsys.readouterr().err)


def test_arguments_are_checked(tmp_path: Path) -> None:
    engine = StandIn()
    with pytest.raises(ValueError, match="detail_every"):
        prophet.monitor(engine, tmp_path, detail_every=0)
    with pytest.raises(ValueError, match=r"wandb\.init"):
        prophet.monitor(engine, tmp_path, wandb=True)
    (tmp_path / "routing.npz").write_bytes(b"a trace")
    with pytest.raises(ValueError, match=r"routing\.npz: expected a folder to write the run into, got a file"):
        prophet.monitor(engine, tmp_path / "routing.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["routing.npz"]


def test_the_script_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text(encoding="utf-8")
    script = page.split("```python\n")[1].split("```")[0]
    monkeypatch.setattr("sys.argv", ["script", str(tmp_path / "run")])
    exec(compile(script, "docs/monitoring.md", "exec"), {"__name__": "__main__"})
    steps = read_steps(tmp_path / "run")
    assert len(steps.rows) == 5
    assert steps.header["notes"] == {"data": "random ids"}


def test_the_cost_can_be_measured() -> None:
    from benchmarks.monitoring.__main__ import measure

    row = measure(layers=2, ranks=2, experts=4, steps=5, tensorboard=False)
    assert row["skipped"] == 0
    assert row["training_us"] > 0
    assert row["bytes_per_step"] > 100
