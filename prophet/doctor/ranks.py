"""Ranks that meet, gather what each has found, and exchange something.

Shape legend: R ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch

from prophet.doctor.check import Check, finding, merged, named, sound
from prophet.doctor.installed import equal
from prophet.doctor.launcher import INTERFACE
from prophet.ranks.collective import Collective
from prophet.ranks.json_messages import gather_json
from prophet.ranks.launch import Launch, joined_group
from prophet.ranks.operation import Operation

# Rows of float32 that go to each rank: 1 MiB
_ROWS, _WIDTH = 256, 1024
_FOUND = Operation("what `prophet doctor` has found")


def exchange(collective: Collective, device: str) -> list[Check]:
    """Run one all-to-all and compare its content; collective, and every rank gets the same answer."""
    R, rank = collective.size, collective.rank
    rows = [_ROWS] * R
    sent = torch.arange(R * _ROWS, device=device, dtype=torch.float32).add_(rank * R * _ROWS).unsqueeze(1)
    sent = sent.expand(-1, _WIDTH).contiguous()
    op = Operation("exchange of `prophet doctor`")
    # The first exchange makes the connections, which would be in the time
    collective.all_to_all(sent, rows, rows, op=op).wait()
    before = time.perf_counter()
    got = collective.all_to_all(sent, rows, rows, op=op).wait()
    sources = torch.arange(R, device=device).repeat_interleave(_ROWS) * R * _ROWS
    expected = sources + torch.arange(_ROWS, device=device).repeat(R) + rank * _ROWS
    # Numbers name the row that they were sent from. Up to 256 ranks, float32 tells all of them apart
    right = bool((got == expected.unsqueeze(1)).all())
    took_s = time.perf_counter() - before
    verdicts = gather_json([right, took_s], collective, _FOUND)
    wrong = [r for r, (well, _) in enumerate(verdicts) if not well]
    if wrong:
        return [finding("exchange", f"rank(s) {wrong} received other numbers than were sent", INTERFACE)]
    slowest = max(seconds for _, seconds in verdicts)
    on = device.partition(":")[0]
    return [sound("exchange", f"{R} ranks, {4 * R * _ROWS * _WIDTH >> 20} MiB each ({on}) in {1e3 * slowest:.1f} ms")]


def compare_ranks(
    launch: Launch,
    versions: Mapping[str, str],
    backend: str,
    checks: list[Check],
    limit_s: float,
    show: Callable[[list[Check], list[dict[str, str]]], None],
) -> None:
    """Put what all ranks see into `checks`; collective, and the same on each of them.

    Args:
        launch: What the launcher has written into the environment.
        versions: What is installed here.
        backend: The backend that the job takes.
        checks: What this rank has seen alone; replaced by what all have seen.
        limit_s: Limit in seconds on each wait for other ranks.
        show: Called with checks and versions by rank before any rank ends: a launcher ends the others of one that ends
            with findings.
    """
    device = launch.device if backend == "nccl" else "cpu"
    # Text travels on the host, so gloo is needed in any case
    groups = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    with joined_group(launch, timeout_s=limit_s, backend=groups) as collective:
        mine = {"versions": dict(versions), "device": device, "checks": [asdict(check) for check in checks]}
        reports = gather_json(mine, collective, _FOUND)
        by_rank = [report["versions"] for report in reports]
        checks[:] = merged([[Check(**check) for check in report["checks"]] for report in reports]) + equal(by_rank)
        without = [rank for rank, report in enumerate(reports) if report["device"] == "cpu"]
        # The exchange takes one device for all, or ranks would wait for each other in different groups
        if 0 < len(without) < len(reports):
            device = "cpu"
            message = f"no GPU for {named(without)}, and one for the others"
            checks.append(finding("GPUs", message, "start as many ranks on each machine as it has GPUs"))
        checks += exchange(collective, device)
        show(checks, by_rank)
        # Nobody leaves before rank 0 has printed
        gather_json("shown", collective, _FOUND)
        collective.close()
