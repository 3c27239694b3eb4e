"""A loop with accelerate trains as the same loop without balancing does: DDP and FSDP2, on two and four ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.accelerate_support import Loop
from tests.helpers.launch import on_processes


def both(kind: str, steps: int, *, ep_size: int | None = None, **settings: Any) -> dict[str, Any]:
    """The same loop twice, without and with balancing; what comes of it on this rank."""
    plain = Loop(kind, density=None, **settings)
    plain.train(0, steps)
    ours = Loop(kind, ep_size=ep_size, **settings)
    ours.train(0, steps)
    found = {
        "losses": (plain.losses, ours.losses),
        "norms": (plain.norms, ours.norms),
        "skipped": (plain.skipped, ours.skipped),
        "copies": ours.copies,
        "drift": ours.drift(),
        "evaluated": (plain.evaluate(), ours.evaluate()),
        "travelled": ours.travelled(),
    }
    ours.accelerator.free_memory()
    return found


def check(by_rank: list[dict[str, Any]], losses: float = 1e-6, norms: float = 1e-5) -> None:
    for found in by_rank:
        for what, tolerance in (("losses", losses), ("norms", norms)):
            wanted, got = found[what]
            assert got == pytest.approx(wanted, rel=tolerance, nan_ok=True), what
        assert repr(found["norms"][1]) == repr(by_rank[0]["norms"][1])  # bit by bit; one may be nan
        assert found["skipped"][1] == found["skipped"][0]
        assert found["evaluated"][1] == pytest.approx(found["evaluated"][0], rel=losses)
        assert found["copies"] > 0
        assert found["travelled"] == 1  # with the last of two microbatches
        assert found["drift"] == 0.0


def both_kinds() -> list[dict[str, Any]]:
    return [both(kind, 6) for kind in ("ddp", "fsdp2")]


def test_losses_norms_and_shared_parameters_on_two_ranks() -> None:
    for by_rank in zip(*on_processes(2, both_kinds, timeout_s=200), strict=True):
        check(list(by_rank))


@pytest.mark.slow
@pytest.mark.parametrize("ep_size", [None, 2])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_on_four_ranks(kind: str, ep_size: int | None) -> None:
    check(on_processes(4, _in_groups, kind, ep_size, timeout_s=200))


def _in_groups(kind: str, ep_size: int | None) -> dict[str, Any]:
    return both(kind, 12, ep_size=ep_size)


def _in_sixteen_bits(kind: str, precision: str) -> dict[str, Any]:
    return both(kind, 6, options={"mixed_precision": precision}, prepared=scaled if precision == "fp16" else nothing)


def nothing(_: Loop) -> None:
    pass


def scaled(loop: Loop) -> None:
    """accelerate has no fp16 on CPUs: what it has on GPUs, with a scale whose first step overflows."""
    loop.accelerator.native_amp = loop.kind == "ddp"
    loop.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_mixed_precision(kind: str, precision: str) -> None:
    by_rank = on_processes(2, _in_sixteen_bits, kind, precision, timeout_s=200)
    check(by_rank, losses=1e-2, norms=0.2)  # a router of sixteen bits sends some tokens elsewhere
    assert (by_rank[0]["skipped"][1] > 0) is (precision == "fp16")
