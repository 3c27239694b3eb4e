"""What is wrong on one rank is one error on all of them, before any of them waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from tests.helpers.launch import run_gloo

DIM, SOON_S = 6, 20.0


def _layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(DIM, DIM).double() for _ in range(4)]


def _pipe(layers: Any = None, stage_map: StageMap | None = None, **options: Any) -> ElasticPipeline:
    given: dict[str, Any] = {"microbatches": 2, "make_optimizer": lambda n: torch.optim.SGD(n, lr=0.1), "timeout_s": 60}
    made = layers if layers is not None else _layers()
    return ElasticPipeline.from_modules(made, nn.functional.mse_loss, stage_map, **{**given, **options})


def _refused(call: Callable[[], Any]) -> str:
    began = time.monotonic()
    with pytest.raises(SpecError) as caught:
        call()
    assert time.monotonic() - began < SOON_S, "one rank has waited for the other"
    return str(caught.value)


def _fails(*_: object) -> Any:
    raise OSError("no such file")


def _starts(rank: int, size: int) -> dict[str, str]:
    bad = rank == 1
    layers = _layers()
    other = StageMap((0, 1, 4), (0, 1)) if bad else None
    said = {
        "map": _refused(lambda: _pipe(layers, StageMap((0, 2, 3), (0, 1)) if bad else None)),
        "other map": _refused(lambda: _pipe(layers, other)),
        "microbatches": _refused(lambda: _pipe(layers, microbatches=0 if bad else 2)),
        "seed": _refused(lambda: _pipe(layers, seed=rank)),
        "replicas": _refused(lambda: _pipe(layers, replicas=2 if bad else 1)),
        "layers": _refused(lambda: _pipe([] if bad else layers)),
        "slices": _refused(lambda: _pipe(layers, slices=_fails if bad else None)),
    }
    x = torch.ones(4, DIM, dtype=torch.float64)
    loss = _pipe(layers).step(x, x)  # nothing of that has changed them
    with torch.no_grad():
        assert loss == pytest.approx(float(nn.functional.mse_loss(nn.Sequential(*_layers())(x), x)), rel=1e-12)
    said["optimizer"] = _refused(lambda: _pipe(make_optimizer=_fails if bad else lambda n: torch.optim.SGD(n, lr=0.1)))
    return said


def test_a_pipeline_starts_on_all_ranks_or_on_none() -> None:
    first, second = run_gloo(_starts, 2)
    assert first == second
    assert first["map"] == "rank 1: the stage map is of 3 layers, the model has 4"
    assert first["other map"] == "ranks [1] were given another stage map than the first"
    assert first["microbatches"] == "rank 1: microbatches must be positive, got 0"
    assert first["seed"] == "ranks [1] have another setting of seed than rank 0"
    assert first["replicas"] == "ranks [1] have another setting of replicas than rank 0"
    assert first["layers"].startswith("rank 1: a pipeline needs one or more layers")
    assert first["slices"].startswith(
        "rank 1: slices: expected pipeline_balance.slices.SliceOptions(...), got <function "
    )
    assert first["optimizer"] == "rank 1: OSError: no such file"


class _Broken:
    """A scheduler whose state cannot be had, or taken."""

    def state_dict(self) -> Any:
        return _fails()

    load_state_dict = _fails


class _Counter:
    def state_dict(self) -> Any:
        return {"at": 1}

    def load_state_dict(self, state: Any) -> Any:
        self.state = state


class _Saves(nn.Sequential):
    def save_pretrained(self, folder: str, state_dict: dict[str, Any]) -> None:
        Path(folder, "model").write_text(str(sorted(state_dict)))


def _saves(rank: int, size: int, folder: str) -> dict[str, str]:
    bad = rank == 1
    pipe = _pipe(_Saves(*_layers()))
    x = torch.ones(4, DIM, dtype=torch.float64)
    path, file = Path(folder), Path(folder) / "file"
    file.touch()
    beside: dict[str, Any] = {"it": _Broken() if bad else _Counter()}
    well: dict[str, Any] = {"it": _Counter()}
    said = {
        "also": _refused(lambda: pipe.save(path / "a", step=0, also=beside)),
        "step": _refused(lambda: pipe.save(path / "a", step=rank)),
        "file": _refused(lambda: pipe.save(file, step=0)),
        "collected on": _refused(lambda: pipe.state_dict(rank=rank)),
        "no rank": _refused(lambda: pipe.state_dict(rank=7 * rank)),
        "folder": _refused(lambda: pipe.save_pretrained(path / "missing")),
    }
    late = pipe.module[3]  # type: ignore[index]
    kept = late.weight
    if bad:
        late.weight = nn.Parameter(torch.empty(DIM, DIM, dtype=torch.float64, device="meta"))
    said["no memory"] = _refused(pipe.state_dict)
    late.weight = kept
    before = pipe.evaluate(x, x)
    pipe.save_pretrained(path)
    pipe.save(path / "good", step=0, also=well)
    said["missing"] = _refused(lambda: pipe.load(path / ("none" if bad else "good")))
    said["restored"] = _refused(lambda: pipe.load(path / "good", also=beside))
    pipe.load(path / "good", also=well)
    assert well["it"].state == {"at": 1}
    assert pipe.evaluate(x, x) == before
    return said


def test_a_model_is_saved_and_loaded_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    first, second = run_gloo(_saves, 2, str(tmp_path))
    assert first == second
    assert first["also"] == "rank 1: OSError: no such file"
    assert "another step" in first["step"]
    assert first["file"].startswith("rank 0: FileExistsError")
    assert first["collected on"] == "ranks [1] collect the model on another rank than rank 0"
    assert first["no rank"] == "rank 1: the model is to be collected on rank 7 of 2"
    assert first["folder"].startswith("rank 0: FileNotFoundError")
    assert first["no memory"].startswith("rank 1: 3.weight has no memory on rank 1")
    assert first["missing"].startswith("rank 1: ")
    assert first["restored"] == "rank 1: OSError: no such file"


def _apart(rank: int, size: int, folder: str) -> dict[str, str]:
    pipe = _pipe(replicas=2)
    x = torch.ones(4, DIM, dtype=torch.float64)
    pipe.step(x, x)
    before = pipe.state_dict()
    elsewhere = StageMap((0, 3, 4), (0, 1))
    last = pipe.layers.get(3)
    if rank == 3:
        with torch.no_grad():
            last.bias[0] += 1e-9  # type: ignore[union-attr,index,operator]
    said = {
        "move": _refused(lambda: pipe.rebuild(elsewhere)),
        "save": _refused(lambda: pipe.save(folder, step=1)),
        "export": _refused(pipe.state_dict),
    }
    if rank == 1:
        with torch.no_grad():
            last.bias[0] += 1e-9  # type: ignore[union-attr,index,operator]
    pipe.rebuild(elsewhere)
    after = pipe.state_dict()
    assert after.keys() == before.keys()
    return said


def test_replicas_that_have_come_apart_are_named(tmp_path: Path) -> None:
    results = run_gloo(_apart, 4, str(tmp_path))
    assert all(said == results[0] for said in results)
    for words in results[0].values():
        assert "'3.bias' differs on rank(s) [3] from rank 1" in words


def _apart_in_training(rank: int, size: int, changed: str) -> tuple[int, str, str]:
    pipe = _pipe(replicas=2)
    x = torch.ones(4, DIM, dtype=torch.float64)
    for _ in range(5):
        pipe.step(x, x)
    if rank == 3:
        with torch.no_grad():
            pipe.module.get_parameter(changed)[0] += 1e-9
    steps = 0
    while True:
        try:
            pipe.step(x, x)
        except SpecError as error:
            return steps, str(error), _refused(lambda: pipe.evaluate(x, x))
        steps += 1
        assert steps < 5, "nobody has seen it"


@pytest.mark.parametrize("changed", ["2.bias", "3.bias"])
def test_replicas_that_come_apart_in_training_are_named_once_it_is_the_layers_turn(changed: str) -> None:
    results = run_gloo(_apart_in_training, 4, changed)
    assert len(set(results)) == 1
    steps, words, evaluated = results[0]
    assert 1 <= steps <= 2, "a rank has two layers"
    assert words == evaluated == "ranks [3] hold other weights of the same stages than rank 1"


def _steps(rank: int, size: int) -> dict[str, str]:
    bad = rank == 1
    x = torch.ones(4, DIM, dtype=torch.float64)

    def halves(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        parameters = [p for _, p in named]
        return torch.optim.SGD([{"params": parameters[:3]}, {"params": parameters[3:]}] if bad else parameters, lr=0.1)

    pipe = _pipe()
    said = {
        "groups": _refused(lambda: _pipe(make_optimizer=halves)),
        "labels": _refused(lambda: pipe.step(x, 3 if bad else x)),  # type: ignore[arg-type]
    }
    first = pipe.module[0]  # type: ignore[index]
    if bad:
        first.added = nn.Parameter(torch.zeros(2, device="meta"))
    said["model"] = _refused(lambda: pipe.step(x, x))
    if bad:
        del first.added
    with torch.set_grad_enabled(not bad):
        said["gradients"] = _refused(lambda: pipe.step(x, x))
    pipe.step(x, x)
    return said


def test_ranks_that_differ_in_a_step_are_named() -> None:
    first, second = run_gloo(_steps, 2)
    assert first == second
    assert first["groups"] == "ranks [1] have other optimizer groups than rank 0"
    assert first["labels"] == "rank 1: labels must be a tensor or None, got a int"
    assert first["model"] == "ranks [1] hold a model with other names, shapes or types than rank 0"
    assert first["gradients"].startswith("rank 1: step trains, and gradients are off here")


def _batches(rank: int, size: int) -> str:
    pipe = _pipe([nn.Flatten(), nn.Linear(9000, 1).double()])
    x = torch.ones(4, 9000, dtype=torch.float64)
    x[3, 8999] += 1e-6 * rank
    return _refused(lambda: pipe.step(x, torch.ones(4, 1, dtype=torch.float64)))


def test_batches_are_compared_to_their_end() -> None:
    assert run_gloo(_batches, 2) == ["ranks [1] were given other inputs or labels than rank 0"] * 2
