"""AutoEP with balanced experts on gloo processes: losses and gradients, checkpoints, export.

Replicas stand at random places in every step. SGD shows the size of gradients: what parameters differ by after some
steps is what gradients differ by, times the learning rate.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from prophet_deepspeed import CheckpointError, ConfigError

from tests.helpers.autoep_support import Case, alone, batch, difference, moved, start, state, train
from tests.helpers.launch import on_processes

MOMENTUM = {"optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}}
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
    "bf16, ZeRO-2": Case(stage=2, config={"bf16": {"enabled": True}}),
}
STEPS = 3


def trained(cases: Mapping[str, Case]) -> dict[str, Any]:
    """Losses, the state before AutoEP's names, and replicas of every case, after some steps."""
    found = {}
    for name, case in cases.items():
        engine = start(case)
        losses, whole = train(engine, STEPS), state(engine)
        found[name] = losses, whole if dist.get_rank() == 0 else {}, moved(engine)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    ranks: list[dict[str, Any]] = on_processes(4, trained, CASES, timeout_s=500)
    return ranks[0]


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_process(name: str, found: dict[str, Any]) -> None:
    """The one process runs transformers' own model, with torch's optimizer and clipping."""
    case = CASES[name]
    losses, states, replicas = found[name]
    wanted, their_states = alone(case, 4, STEPS)
    bound = 2e-2 if "bf16" in case.config else 1e-6
    assert losses == pytest.approx(wanted, abs=bound)
    assert difference(their_states, states) < bound
    before = {k: v.float().numpy() for k, v in case.build().state_dict().items()}
    moved_by = {k: float(np.abs(v - before[k]).max()) for k, v in states.items()}
    assert max(v for k, v in moved_by.items() if ".experts." in k) > 1e-3 or case.frozen
    assert replicas > 0 or case.ep_size == 1
