"""A client as DeepSpeed's users have it, with two lines for balance: the losses of plain DeepSpeed, saved and resumed.

All cases share one start of the processes.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.deepspeed_support import prepare
from tests.helpers.launch import EXAMPLES, on_processes

SHAPES = {
    "MoE": ("--num-experts", "4"),
    "PR-MoE": ("--num-experts", "2", "4", "--residual"),
    "deep experts": ("--depth", "3", "--top-k", "2", "--object"),
    "whole on every rank": ("--ep-size", "1"),
}
CASES = {f"{name}, ZeRO-{stage}": (*SHAPES[name], "--stage", str(stage)) for name in SHAPES for stage in (0, 1, 2)}


def example() -> Any:
    spec: Any = importlib.util.spec_from_file_location("deepspeed_images", EXAMPLES / "deepspeed_images.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def body(folder: Path) -> dict[str, Any]:
    prepare()
    images, found = example(), {}
    for name, options in CASES.items():
        out = ("--out", str(folder / name))
        plain = images.train(images.read_options([*options, *out, "--plain", "--save-at", "0"]))
        ours = images.train(images.read_options([*options, *out]))
        resumed = images.train(images.read_options([*options, *out, "--resume"]))
        found[name] = (plain[0], *ours, resumed[0])
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    by_rank: list[dict[str, Any]] = on_processes(2, body, tmp_path_factory.mktemp("images"), timeout_s=450)
    return by_rank[0]


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_plain_deepspeed(name: str, runs: dict[str, Any]) -> None:
    plain, ours, replicas, resumed = runs[name]
    print(f"{name}: {max(abs(a - b) for a, b in zip(plain, ours, strict=True)):.1e}, {replicas} replicas")
    assert len(plain) == 20
    assert ours == pytest.approx(plain, abs=1e-6)
    assert resumed == ours[10:]  # bit by bit
    assert (replicas > 0) == ("whole" not in name)
