"""AutoEP with balanced experts on gloo processes: losses and gradients, checkpoints, export.

Replicas stand at random places in every step. SGD shows the size of gradients: what parameters differ by after some
steps is what gradients differ by, times the learning rate.
"""

from __future__ import annotations

import importlib
import json
import runpy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from prophet_deepspeed import CheckpointError

from tests.helpers.autoep_support import Case, alone, counts, difference, start, state, train
from tests.helpers.deepspeed_support import moved
from tests.helpers.launch import EXAMPLES, on_processes, torchrun
from tests.helpers.moe_models import hugging_face, loss_of

STEPS = 3
CASES = {
    f"{family}, ZeRO-{stage}, ep {ep}": Case(family=family, stage=stage, ep_size=ep, clip=clip)
    for family, stage, ep, clip in [
        ("deepseek_v3", 0, 2, 0.5),
        ("deepseek_v3", 1, 2, 0.0),
        ("deepseek_v3", 2, 2, 0.5),
        ("deepseek_v3", 0, 4, 0.0),
        ("deepseek_v3", 1, 4, 0.5),
        ("deepseek_v3", 2, 4, 0.0),
        ("mixtral", 0, 2, 0.0),
        ("mixtral", 2, 4, 0.5),
        ("mixtral", 2, 1, 0.0),
    ]
} | {
    "an optimizer object, ZeRO-0": Case(optimizer="object", family="mixtral", ep_size=4),
    "an optimizer object, ZeRO-2": Case(optimizer="object", stage=2),
    "frozen experts, ZeRO-2": Case(stage=2, frozen=(".experts.",), clip=0.5),
}
IN_16 = Case(stage=2, config={"bf16": {"enabled": True}}, expert_parallel={"use_grouped_mm": False})


def trained(cases: Mapping[str, Case], steps: int) -> dict[str, Any]:
    """After some steps of every case: losses, the state under the names before AutoEP, replicas, AutoEP's counts."""
    found = {}
    for name, case in cases.items():
        engine = start(case)
        losses = train(engine, steps)
        whole = {} if case.plain else state(engine)
        found[name] = (
            losses,
            whole if dist.get_rank() == 0 else {},
            0 if case.plain else moved(engine),
            counts(engine),
        )
    return found


@pytest.mark.timeout(300)
def test_losses_gradients_and_counts_are_autoeps() -> None:
    """Two ranks; against plain AutoEP, and against one process."""
    case = Case(stage=2, optimizer="object", clip=0.5, microbatches=1)
    ranks = on_processes(2, trained, {"ours": case, "plain": case.plainly()}, 2, timeout_s=240)
    wanted, theirs = alone(case, 2, 2)
    losses, states, replicas, _ = ranks[0]["ours"]
    assert losses == pytest.approx(ranks[0]["plain"][0], abs=1e-6)
    assert losses == pytest.approx(wanted, abs=1e-6)
    assert difference(theirs, states) < 1e-6
    assert replicas > 0
    for rank in ranks:
        assert np.array_equal(rank["ours"][3], rank["plain"][3])
        assert rank["ours"][3].sum() > 0


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    cases = CASES | {"bf16": IN_16, "plain bf16": IN_16.plainly()}
    ranks: list[dict[str, Any]] = on_processes(4, trained, cases, STEPS, timeout_s=500)
    return ranks[0]


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_process(name: str, found: dict[str, Any]) -> None:
    """The one process runs transformers' own model, with torch's optimizer and clipping."""
    case = CASES[name]
    losses, states, replicas, _ = found[name]
    wanted, theirs = alone(case, 4, STEPS)
    assert losses == pytest.approx(wanted, abs=1e-6)
    assert difference(theirs, states) < 1e-6
    before = {k: v.numpy() for k, v in case.build().state_dict().items()}
    by = {k: float(np.abs(v - before[k]).max()) for k, v in states.items()}
    assert (max(v for k, v in by.items() if ".experts." in k) > 1e-3) == (not case.frozen)
    assert replicas > 0 or case.ep_size == 1


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_in_16_bit_losses_are_as_near_to_32_bit_as_autoeps(found: dict[str, Any]) -> None:
    exact, _ = alone(IN_16, 4, STEPS)
    ours, plain = (np.array(found[name][0]) for name in ("bf16", "plain bf16"))
    assert np.abs(ours - plain).max() < np.abs(plain - exact).max()
    assert found["bf16"][2] > 0


# --- checkpoints and export ---

MOMENTUM = {"optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}}
SAVED = Case(stage=2, config=MOMENTUM)
RESUMED = {
    "the same": SAVED,
    "ep 4": replace(SAVED, ep_size=4),
    "ep 1": replace(SAVED, ep_size=1),
    "ZeRO-0": replace(SAVED, stage=0),
    "ZeRO-1": replace(SAVED, stage=1),
}


def saved_and_resumed(folder: Path) -> dict[str, Any]:
    """Save after two steps, go on for two; then resume in several ways and go on. Losses and states of all."""
    engine = start(SAVED)
    train(engine, 2)
    engine.save_checkpoint(folder / "ours")
    found = {"not interrupted": (train(engine, 2), state(engine), moved(engine))}
    engine.save_16bit_model(folder / "exported")
    engine.module.save_pretrained(folder / "pretrained")
    for name, case in RESUMED.items():
        engine = start(case)
        assert engine.load_checkpoint(folder / "ours")[0]
        found[name] = train(engine, 2), state(engine), moved(engine)
    plain = start(SAVED.plainly())
    plain.save_checkpoint(folder / "plain")
    engine = start(SAVED)
    before = state(engine)
    try:
        engine.load_checkpoint(folder / "plain")
        refused = ""
    except CheckpointError as error:
        refused = str(error)
    assert difference(before, state(engine)) == 0
    return {"refused": refused} | (found if dist.get_rank() == 0 else {})


def resumed_on_fewer(folder: Path) -> tuple[list[float], dict[str, Any]]:
    engine = start(replace(SAVED, ep_size=2))
    assert engine.load_checkpoint(folder / "ours")[0]
    return train(engine, 2), state(engine)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_is_resumed_at_any_size_and_exported(tmp_path: Path) -> None:
    ranks = on_processes(4, saved_and_resumed, tmp_path, timeout_s=400)
    losses, states, _ = ranks[0]["not interrupted"]
    for name in RESUMED:
        own, theirs, replicas = ranks[0][name]
        if name == "the same":  # bit by bit
            assert own == losses
            assert difference(states, theirs) == 0
        assert own == pytest.approx(losses, abs=1e-6)
        assert difference(states, theirs) < 1e-6
        assert replicas > 0 or name == "ep 1"
    for rank in ranks:  # AutoEP's own checkpoint: nothing is read
        assert "expected a checkpoint of prophet_deepspeed" in rank["refused"]
        assert "mp_rank_00_model_states.pt" in rank["refused"]
    fewer = on_processes(2, resumed_on_fewer, tmp_path, timeout_s=200)[0]
    assert fewer[0] == pytest.approx(losses, abs=1e-6)
    assert difference(states, fewer[1]) < 1e-6

    exported = torch.load(tmp_path / "exported" / "pytorch_model.bin", weights_only=True)
    model = hugging_face("deepseek_v3")
    model.load_state_dict(exported, strict=True)
    assert difference(states, {k: v.numpy() for k, v in model.state_dict().items()}) == 0
    again = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained")
    ids = torch.arange(12).reshape(2, 6)
    assert torch.equal(loss_of(model.eval(), ids)[1], loss_of(again.eval(), ids)[1])


# --- the example ---


def example(out: Path, *options: str) -> list[float]:
    """Losses of the example on four processes, by step."""
    starter = out.parent / f"{out.name}.py"
    starter.write_text(
        "import runpy\n"
        # DeepSpeed would compile an operation for processes of one machine, and wait for whoever compiles it already
        "import deepspeed; deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False\n"
        f"runpy.run_path({str(EXAMPLES / 'deepspeed_autoep.py')!r}, run_name='__main__')\n"
    )
    torchrun(starter, "--out", str(out), "--planner", "pro-prophet", *options, ranks=4, DS_ACCELERATOR="cpu")
    found: list[float] = json.loads((out / "losses.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_has_autoeps_losses_and_exports_the_whole_model(tmp_path: Path) -> None:
    plain = example(tmp_path / "plain", "--plain", "--save-at", "0")
    balanced = example(tmp_path / "out", "--save-at", "3")
    assert balanced == pytest.approx(plain, abs=2e-6)
    assert example(tmp_path / "out", "--resume", "--save-at", "0") == balanced[3:]
    wide = example(tmp_path / "out", "--resume", "--save-at", "0", "--ep-size", "4")
    assert wide == pytest.approx(balanced[3:], abs=2e-6)
    model = runpy.run_path(str(EXAMPLES / "deepspeed_autoep.py"))["build"]()
    model.load_state_dict(torch.load(tmp_path / "out" / "model" / "pytorch_model.bin", weights_only=True), strict=True)
