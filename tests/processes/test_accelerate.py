"""A loop with accelerate trains as the same loop without balancing does: DDP and FSDP2, on two and four ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.accelerate_support import Loop
from tests.helpers.launch import on_processes


def both(kind: str, steps: int, **settings: Any) -> dict[str, Any]:
    plain = Loop(kind, density=None)
    plain.train(0, steps)
    ours = Loop(kind, **settings)
    ours.train(0, steps)
    found = {
        "losses": (plain.losses, ours.losses),
        "norms": (plain.norms, ours.norms),
        "copies": ours.copies,
        "drift": ours.drift(),
    }
    ours.accelerator.free_memory()
    return found


def check(by_rank: list[dict[str, Any]]) -> None:
    for found in by_rank:
        for what, tolerance in (("losses", 1e-6), ("norms", 1e-5)):
            wanted, got = found[what]
            assert got == pytest.approx(wanted, rel=tolerance), what
        assert found["norms"][1] == by_rank[0]["norms"][1]
        assert found["copies"] > 0
        assert found["drift"] == 0.0


def both_kinds() -> list[dict[str, Any]]:
    return [both(kind, 12) for kind in ("ddp", "fsdp2")]


def test_losses_norms_and_shared_parameters_on_two_ranks() -> None:
    for by_rank in zip(*on_processes(2, both_kinds, timeout_s=200), strict=True):
        check(list(by_rank))
