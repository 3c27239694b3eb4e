"""The cluster benchmark's peers compute what our model computes, from the same checkpoint."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.cluster.peers import build_peer
from benchmarks.cluster.workload import Workload, build
from benchmarks.layer.implementations import INSTALL
from tests.helpers.launch import on_processes


def losses(system: str) -> tuple[float, float]:
    workload = Workload(dim=16, heads=2, blocks=1, hidden=16, experts=4, length=8, sequences_per_host=2)
    rows = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
    ours: Any = build(workload)
    peer = build_peer(system, workload, ours.state_dict(), rank=dist.get_rank(), ranks=dist.get_world_size())
    return float(ours.loss(rows)), float(peer.loss(rows))


@pytest.mark.parametrize("system", list(INSTALL))
def test_the_same_loss(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(system) is None:
        pytest.skip(f"needs {system}: {INSTALL[system]}")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for ours, theirs in on_processes(2, losses, system, timeout_s=120):
        assert theirs == pytest.approx(ours, rel=1e-5)
