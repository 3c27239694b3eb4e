"""The example script on real processes: with the call, Tutel's own losses, and Tutel's own checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.launch import EXAMPLES, torchrun

WHY = "needs tutel: make test-peers PEERS_TUTEL=folder"
pytest.importorskip("tutel.moe", reason=WHY)


def run(out: Path, *options: str, ranks: int = 2) -> tuple[list[float], int]:
    """Losses of the example by step, and replicas over all steps."""
    torchrun(EXAMPLES / "tutel_training.py", "--out", str(out), *options, ranks=ranks)
    found = json.loads((out / "losses.json").read_text())
    return found["losses"], found["replicas"]


def saved(folder: Path, rank: int, ranks: int, prefix: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / f"{prefix}{rank}-{ranks}.pt", weights_only=True)
    return found


def both(folder: Path, *options: str, ranks: int, rel: float = 1e-5) -> None:
    """Run without the call and with it, and compare losses, checkpoints and what `revert` gives."""
    plain, _ = run(folder / "plain", "--plain", *options, ranks=ranks)
    balanced, replicas = run(folder / "balanced", "--planner", "pro-prophet", *options, ranks=ranks)
    assert replicas > 0
    assert plain[-1] < plain[0]
    assert balanced == pytest.approx(plain, rel=rel)
    for rank in range(ranks):
        expected, got = saved(folder / "plain", rank, ranks), saved(folder / "balanced", rank, ranks)
        assert list(got) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=rel, msg=f"rank {rank}: {name}")
        reverted = saved(folder / "balanced", rank, ranks, "reverted-")
        assert list(reverted) == list(expected)
        assert all(torch.equal(reverted[name], value) for name, value in got.items())


def test_losses_and_checkpoints_on_two_processes(tmp_path: Path) -> None:
    both(tmp_path, ranks=2)
    # a file of either run starts either
    for source in ("plain", "balanced"):
        more = ["--load", str(tmp_path / source), "--steps", "3"]
        plain, _ = run(tmp_path / f"plain-after-{source}", "--plain", *more)
        balanced, _ = run(tmp_path / f"balanced-after-{source}", "--planner", "pro-prophet", *more)
        assert balanced == pytest.approx(plain, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--aux", "0.3")])
def test_losses_on_four_processes(tmp_path: Path, options: tuple[str, ...]) -> None:
    both(tmp_path, *options, ranks=4)


@pytest.mark.slow
def test_groups_of_two_of_four_processes(tmp_path: Path) -> None:
    """Against one group of four: Tutel 0.3 on its own runs the backward exchange of smaller groups over all processes,
    and fails."""
    plain, _ = run(tmp_path / "plain", "--plain", ranks=4)
    balanced, replicas = run(tmp_path / "balanced", "--planner", "pro-prophet", "--ep-size", "2", ranks=4)
    assert replicas > 0
    assert balanced == pytest.approx(plain, rel=1e-5)


def test_custom_experts_and_gates_under_ddp(tmp_path: Path) -> None:
    both(tmp_path, "--custom", "--ddp", ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("custom", [(), ("--custom",)])
def test_autocast(tmp_path: Path, custom: tuple[str, ...]) -> None:
    both(tmp_path, "--amp", *custom, ranks=2, rel=4e-3)  # bfloat16 has 8 bits


@pytest.mark.slow
def test_tutels_distributed_optimizer(tmp_path: Path) -> None:
    both(tmp_path, "--sharded", ranks=2)
