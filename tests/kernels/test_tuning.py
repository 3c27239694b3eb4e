"""Tile shapes: the rule, the file, the choice among candidates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import tune
from benchmarks.kernels.tune import CANDIDATES, best, candidates
from prophet.kernels import tuning
from prophet.kernels.tuning import Config, config_for, read, shape_class, write

CPU = torch.device("cpu")


def test_classes_are_few() -> None:
    assert shape_class(1, 100, 4096) == (16, 128, 4096)
    assert shape_class(0, 1, 1) == (16, 1, 1)
    assert len({shape_class(n, 512, 512) for n in range(100_000)}) == 9


def test_every_class_has_an_answer() -> None:
    for kind in ("rows", "weights"):
        for dtype in (torch.float32, torch.bfloat16):
            assert isinstance(config_for(kind, CPU, dtype, 77, 33, 5), Config)  # type: ignore[arg-type]
            assert 1 <= len(candidates(kind, dtype)) <= CANDIDATES  # type: ignore[arg-type]


def test_the_file_is_written_read_and_merged(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tiles.json"
    assert read(path) == {}
    first, second = Config(rows=64, cols=32, depth=16), Config(rows=128, cols=32, depth=16, warps=8)
    write(path, {"a": first})
    write(path, {"b": second})
    assert read(path) == {"a": first, "b": second}


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"a": 3}', '{"a": {"rows": 3, "cols": 16, "depth": 16}}', '{"a": {"rows": "16"}}', '{"a": {"x": 1}}'],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"tiles\.json"):
        read(path)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps({"x": "y" * tuning.FILE_BYTES}))
    with pytest.raises(ValueError, match="at most"):
        read(path)


def test_the_fastest_candidate_that_runs_is_chosen() -> None:
    configs = [Config(rows=2**i, cols=16, depth=16) for i in range(4, 8)]
    asked = []

    def measure_s(config: Config) -> float:
        asked.append(config)
        if config.rows == 128:
            raise RuntimeError("out of shared memory")
        return abs(config.rows - 40)

    assert best(measure_s, configs) == configs[1]
    assert asked == configs
    assert best(measure_s, [configs[3]]) is None
    asked.clear()
    best(measure_s, configs * 5)
    assert len(asked) == CANDIDATES


def test_what_is_tried_is_forgotten_and_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiles.json"
    kept, tried = Config(rows=64, cols=32, depth=16), Config(rows=32, cols=32, depth=16)
    monkeypatch.setattr(tuning, "cache_file", lambda: path)
    write(path, {"a": kept})
    tuning.forget()
    try:
        with tuning.trying("a", tried), tuning.trying("b", tried):
            assert tuning._measured() == {"a": tried, "b": tried}
            assert read(path) == {"a": kept}
        assert tuning._measured() == {"a": kept}
        assert read(path) == {"a": kept}
    finally:
        tuning.forget()


def test_a_search_that_runs_out_of_time_keeps_what_it_has() -> None:
    configs = [Config(rows=2**i, cols=16, depth=16) for i in range(4, 8)]

    def measure_s(config: Config) -> float:
        if config.rows > 32:
            raise TimeoutError
        return float(config.rows)

    assert best(measure_s, configs) == configs[0]
    assert best(measure_s, configs[2:]) is None


def test_tuning_passes_over_tiles_that_triton_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("triton.runtime.errors", reason="Triton is not installed")
    path = tmp_path / "tiles.json"
    monkeypatch.setattr(tuning, "cache_file", lambda: path)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(tune, "once_us", lambda *_: 100.0 - tuning._measured()["rows|x"].rows)
    configs = [Config(rows=2**i, cols=16, depth=16) for i in range(4, 8)]

    def step() -> None:
        if tuning._measured()["rows|x"].rows == 128:
            raise errors.OutOfResources(1 << 20, 1 << 17, "shared memory")

    tuning.forget()
    try:
        assert tune._choose("rows|x", configs, step, tune.Flusher("cpu"), deadline=float("inf")) == configs[2]
        assert read(path) == {"rows|x": configs[2]}
        assert tune._choose("rows|y", configs, step, tune.Flusher("cpu"), deadline=0.0) is None
    finally:
        tuning.forget()
