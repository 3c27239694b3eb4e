"""Save, resume in fresh processes, and compare: every tensor just before and just after, then the steps that follow.

Replicas are placed at random. All cases share four starts of processes: one run that saves and goes on, one that
resumes it on as many ranks, one on half as many, which saves again, and one that resumes that on four.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from prophet_deepspeed import CheckpointError

from tests.helpers.deepspeed_support import (
    IN_32,
    Array,
    Case,
    batch,
    dense,
    differences,
    moved,
    parameters,
    raw_state,
    start,
    train,
    values,
)
from tests.helpers.launch import on_processes

STEPS = 5
FP16 = {"fp16": {"initial_scale_power": 4, "loss_scale_window": 2}}  # the scale doubles while a checkpoint is made
# DeepSpeed's gate draws noise for every token: random generators go on, too
BASE = Case(clip=0.5, microbatches=1, sampling=True, section={"effort": 1.0})
SAME = {f"fp32, ZeRO-{s}": replace(BASE, stage=s) for s in (0, 1, 2)}
SAME |= {f"bf16, ZeRO-{s}": replace(BASE, stage=s, dtype="bf16") for s in (0, 2)}
SAME |= {f"fp16, ZeRO-{s}": replace(BASE, stage=s, dtype="fp16", config=FP16) for s in (0, 2)}
SAME |= {"fp16, fused": replace(BASE, dtype="fp16", config=FP16, fused=True)}
SAME |= {"bf16 added in fp32": replace(BASE, stage=1, dtype="bf16", config=IN_32)}
SAME |= {
    "two groups": replace(BASE, stage=1, ep_size=2),
    "planned": replace(BASE, stage=2, random=False, microbatches=2),
}
# noise differs where ranks have other tokens: no noise
OTHER = {f"ZeRO-{s}": Case(stage=s, clip=0.5) for s in (0, 1, 2)}


def save(folder: Path) -> dict[str, Any]:
    found = {}
    for name, case in (SAME | OTHER).items():
        engine = start(case)
        train(engine, 3)
        assert engine.save_checkpoint(folder / name, client_state={"note": name})
        state = raw_state(engine), values(engine)
        losses = train(engine, STEPS if name in SAME else 6)
        found[name] = (*state, losses, moved(engine), parameters(engine) if name in OTHER else raw_state(engine))
    return found


def resume(folder: Path) -> dict[str, Any]:
    found = {}
    for name, case in SAME.items():
        torch.manual_seed(99)  # what a checkpoint restores
        engine = start(case)
        where, client = engine.load_checkpoint(folder / name)
        assert (where, client) == (str(folder / name / "global_step3"), {"note": name})
        state = raw_state(engine), values(engine)
        found[name] = (*state, train(engine, STEPS), moved(engine), raw_state(engine))
    return found


def resized(folder: Path, to: Path | None, changes: dict[str, dict[str, Any]], steps: int) -> dict[str, Any]:
    """Go on from `folder` with some settings changed, and save in `to`."""
    found = {}
    for name, case in OTHER.items():
        engine = start(replace(case, **changes.get(name, {})))
        assert engine.load_checkpoint(folder / name)[0]
        state = values(engine)
        losses = train(engine, steps)
        if to is not None:
            engine.save_checkpoint(to / name)
        found[name] = (state, losses, moved(engine), parameters(engine))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    found: Path = tmp_path_factory.mktemp("checkpoints")
    return found


@pytest.fixture(scope="module")
def saved(folder: Path) -> list[Any]:
    return on_processes(4, save, folder / "four", timeout_s=500)


@pytest.fixture(scope="module")
def resumed(saved: list[Any], folder: Path) -> list[Any]:
    return on_processes(4, resume, folder / "four", timeout_s=500)


def unequal(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of what differs by a bit, or is in one of the two only."""
    return [k for k in sorted(a | b) if k not in a or k not in b or not np.array_equal(a[k], b[k])]


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", SAME)
def test_a_resumed_run_goes_on_bit_by_bit(name: str, saved: list[Any], resumed: list[Any]) -> None:
    for rank, (before, after) in enumerate(zip(saved, resumed, strict=True)):
        raw, state, losses, replicas, last = before[name]
        raw_then, state_then, losses_then, _, last_then = after[name]
        assert min(len(raw), len(state)) > 50
        assert unequal(raw, raw_then) == [], f"rank {rank}, just after loading"
        assert unequal(state, state_then) == [], f"rank {rank}, just after loading"
        assert losses_then == losses
        assert len(set(losses)) == STEPS
        assert unequal(last, last_then) == [], f"rank {rank}, {STEPS} steps later"
        assert replicas > 0
        assert unequal(raw, last) != []
    if name.startswith("fp16"):
        assert saved[0][name][4]["scaler/cur_scale"] > 16  # it has changed, so restoring it is not idle


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_another_expert_parallel_size_and_back(saved: list[Any], folder: Path) -> None:
    """4 -> 2 -> 4 ranks, back to another stage and to two groups, against the run that was not interrupted."""
    half = on_processes(2, resized, folder / "four", folder / "two", {"ZeRO-1": {"microbatches": 2}}, 3, timeout_s=200)
    back = {"ZeRO-1": {"stage": 2}, "ZeRO-2": {"stage": 0, "ep_size": 2}}
    whole = on_processes(4, resized, folder / "two", None, back, 3, timeout_s=200)
    for name in OTHER:
        # every value and moment of every expert is the one that was saved, on whatever rank it is now
        before, after = (union([rank[name][at] for rank in ranks]) for ranks, at in ((saved, 1), (half, 0)))
        assert len(before) > 200
        assert unequal(before, after) == []
        losses, _, parameters_then = saved[0][name][2:]
        assert half[0][name][1] + whole[0][name][1] == pytest.approx(losses, abs=2e-6)  # sums in another order
        # AdamW divides by the root of a moment: tiny gradients' rounding is not tiny
        assert differences(parameters_then, whole[0][name][3]) < 2e-5
        assert half[0][name][2] > 0
        assert whole[0][name][2] > 0


def union(parts: list[dict[str, Array]]) -> dict[str, Array]:
    """All ranks' values; what several have must be equal."""
    found: dict[str, Array] = {}
    for part in parts:
        for key, value in part.items():
            np.testing.assert_array_equal(found.setdefault(key, value), value, err_msg=key)
    return found


def refused(folder: Path, out: Path) -> dict[str, Any]:
    """What is not loaded, how many microbatches a step has, and the model alone."""
    found: dict[str, Any] = {}
    engine = start(OTHER["ZeRO-1"])
    before = raw_state(engine)

    def message(*args: Any, **options: Any) -> str:
        try:
            return str(engine.load_checkpoint(*args, **options))
        except CheckpointError as error:
            return str(error)

    found["none"] = engine.load_checkpoint(out / "empty")
    found["missing"] = message(out, tag="nowhere")
    here = folder if dist.get_rank() != 1 else out  # one rank finds nothing
    found["elsewhere"] = message(here / "ZeRO-1", tag="global_step3")
    found["unchanged"] = unequal(before, raw_state(engine)) == []
    engine.load_checkpoint(folder / "ZeRO-1", load_module_only=True)
    found["steps"] = engine.global_steps
    engine.save_16bit_model(out / "model")
    loss = engine(batch(0, 0).chunk(dist.get_world_size())[dist.get_rank()])
    try:
        engine.save_checkpoint(out / "never")
    except CheckpointError as error:
        found["within"] = str(error)
    engine.backward(loss)
    four = start(replace(OTHER["ZeRO-0"], microbatches=4))
    four.load_checkpoint(folder / "ZeRO-0")
    found["microbatches"] = (four.micro_steps % 4, four.global_steps)
    return found


CHANGED: dict[str, tuple[str, Case]] = {  # the run that saved, and one of another configuration
    "optimizer.type": ("ZeRO-1", replace(OTHER["ZeRO-1"], optimizer="SGD")),
    "scheduler.type": ("ZeRO-1", replace(OTHER["ZeRO-1"], scheduler=False)),
    "fp32 to fp16": ("ZeRO-1", replace(OTHER["ZeRO-1"], dtype="fp16", config=FP16)),
    "fp16 to fp32": ("fp16, ZeRO-2", replace(SAME["fp16, ZeRO-2"], dtype="fp32", config={})),
}


def changed(folder: Path) -> dict[str, tuple[str, bool, float]]:
    """What is said where the configuration has changed, whether anything else has, and the loss scale afterwards."""
    found = {}
    for name, (saved, case) in CHANGED.items():
        engine = start(case)
        before, said = raw_state(engine), ""
        try:
            engine.load_checkpoint(folder / saved)
        except CheckpointError as error:
            said = str(error)
        found[name] = (said, unequal(before, raw_state(engine)) == [], float(engine.optimizer.loss_scale))
        assert np.isfinite(train(engine, 2)).all()
    return found


def alone(model: Path) -> float:
    """The loss of one process with the model that was written."""
    return dense(OTHER["ZeRO-1"], 1, 1, state=torch.load(model, weights_only=True))[0][0]


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_what_is_not_loaded_is_said_on_every_rank(saved: list[Any], folder: Path) -> None:
    results = on_processes(2, refused, folder / "four", folder / "out", timeout_s=120)
    for rank, found in enumerate(results):
        assert found["none"] == (None, None)
        assert "nowhere/dense.pt is missing; expected a checkpoint of prophet_deepspeed" in found["missing"]
        assert ("dense.pt is missing" if rank == 1 else "rank(s) [1] could not read it") in found["elsewhere"]
        assert found["unchanged"]
        assert found["steps"] == 0  # the module only
        assert "between two steps" in found["within"]
        assert found["microbatches"] == (0, 3)
    one = on_processes(1, alone, folder / "out" / "model" / "pytorch_model.bin", timeout_s=60)[0]
    assert np.isfinite(one)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_changed_configuration_is_named_or_has_its_own_loss_scale(saved: list[Any], folder: Path) -> None:
    for found in on_processes(2, changed, folder / "four", timeout_s=200):
        for key in ("optimizer.type", "scheduler.type"):
            said, unchanged, _ = found[key]
            assert said.startswith(f"{key}: ")
            assert unchanged
        for name, scale in (("fp32 to fp16", 16.0), ("fp16 to fp32", 1.0)):
            said, unchanged, found_scale = found[name]
            assert (said, unchanged, found_scale) == ("", False, scale)
