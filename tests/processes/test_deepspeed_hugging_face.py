"""Trainer and accelerate under DeepSpeed, balanced by configuration: losses, saved, resumed, exported.

All cases share one start of the processes; the plain runs are DeepSpeed's own, with all experts on every rank.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.deepspeed_support import prepare
from tests.helpers.launch import EXAMPLES, on_processes

pytest.importorskip("accelerate", reason="needs accelerate")
pytest.importorskip("peft", reason="needs peft")

CASES = {f"Trainer, ZeRO-{stage}": ("--stage", str(stage)) for stage in (1, 2)}
CASES |= {f"accelerate, ZeRO-{stage}": ("--stage", str(stage), "--accelerate") for stage in (1, 2)}
CASES |= {"Trainer, PEFT": ("--peft",)}


def example() -> Any:
    spec: Any = importlib.util.spec_from_file_location("deepspeed_example", EXAMPLES / "deepspeed_hugging_face.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def body(folder: Path) -> dict[str, Any]:
    prepare()
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}  # accelerate reads no group
    client, found = example(), {}
    from accelerate.state import AcceleratorState, GradientState

    def run(name: str, *more: str, out: str) -> Any:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        return client.train(client.read_options([*CASES[name], *more, "--out", str(folder / f"{name}{out}")]))

    for name in CASES:
        plain, _ = run(name, "--plain", out=" plain")
        ours, replicas = run(name, out="")
        resumed, _ = run(name, "--resume", out="")
        found[name] = (plain, ours, replicas, resumed)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hugging_face")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Any]:
    by_rank: list[dict[str, Any]] = on_processes(2, body, folder, timeout_s=450)
    return by_rank[0]


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_plain_deepspeed(name: str, runs: dict[str, Any], folder: Path) -> None:
    plain, ours, replicas, resumed = runs[name]
    print(f"{name}: {max(abs(a - b) for a, b in zip(plain, ours, strict=True)):.1e}, {replicas} replicas")
    assert ours == pytest.approx(plain, abs=1e-6)
    assert resumed[-3:] == pytest.approx(ours[-3:], abs=1e-6)
    assert replicas > 0


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", [name for name in CASES if "PEFT" not in name])
def test_the_exported_model_is_that_of_plain_deepspeed(name: str, runs: dict[str, Any], folder: Path) -> None:
    from transformers import MixtralForCausalLM

    # a checkpoint of Trainer's has such a model, too
    for saved in ("model", "checkpoint-3") if "Trainer" in name else ("model",):
        a, b = (MixtralForCausalLM.from_pretrained(folder / f"{name}{kind}" / saved) for kind in ("", " plain"))
        for (key, mine), (_, wanted) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
            np.testing.assert_allclose(mine.numpy(), wanted.numpy(), atol=1e-4, err_msg=key)  # Adam, resumed
        ids = torch.arange(16).view(1, -1)
        with torch.no_grad():
            assert torch.allclose(a(ids).logits, b(ids).logits, atol=1e-3)
