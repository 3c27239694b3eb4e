"""Ranks that meet, tell each other what they have found, and exchange something.

Shape legend: R ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch

from prophet.doctor.check import Check, finding, merged, named, sound
from prophet.doctor.installed import equal
from prophet.doctor.launcher import INTERFACE
from prophet.ranks.collective import Collective
from prophet.ranks.launch import Launch, joined_group
from prophet.ranks.operation import Operation

_ROWS, _WIDTH = 256, 1024  # of float32 to each rank: 1 MiB


def exchange(collective: Collective, device: str) -> list[Check]:
    """One all-to-all whose content is compared; every rank gets the same answer."""
    R, rank = collective.size, collective.rank
    rows = [_ROWS] * R
    sent = torch.arange(R * _ROWS, device=device, dtype=torch.float32).add_(rank * R * _ROWS).unsqueeze(1)
    sent = sent.expand(-1, _WIDTH).contiguous()
    op = Operation("exchange of `prophet doctor`")
    collective.all_to_all(sent, rows, rows, op=op).wait()  # makes the connections
    before = time.perf_counter()
    got = collective.all_to_all(sent, rows, rows, op=op).wait()
    sources = torch.arange(R, device=device).repeat_interleave(_ROWS) * R * _ROWS
    expected = sources + torch.arange(_ROWS, device=device).repeat(R) + rank * _ROWS
    right = bool((got == expected.unsqueeze(1)).all())
    took_s = time.perf_counter() - before
    verdicts = [json.loads(text) for text in gather(collective, json.dumps([right, took_s]))]
    wrong = [r for r, (well, _) in enumerate(verdicts) if not well]
    if wrong:
        return [finding("exchange", f"rank(s) {wrong} received other numbers than were sent", INTERFACE)]
    slowest = max(seconds for _, seconds in verdicts)
    on = device.partition(":")[0]
    return [sound("exchange", f"{R} ranks, {4 * R * _ROWS * _WIDTH >> 20} MiB each ({on}) in {1e3 * slowest:.1f} ms")]


def gather(collective: Collective, text: str) -> list[str]:
    """`text` of all ranks, by rank; over the host's group."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    op = Operation("what `prophet doctor` has found")
    sizes = collective.all_gather(torch.tensor([len(data)]), op=op).reshape(-1).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = data
    rows = collective.all_gather(padded, op=op)
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]


def together(
    launch: Launch,
    versions: Mapping[str, str],
    backend: str,
    checks: list[Check],
    limit_s: float,
    show: Callable[[list[Check], list[dict[str, str]]], None],
) -> None:
    """Put into `checks`, which has what this rank has seen alone, what all ranks see: the same on each of them.

    `show` is called with it before any rank ends: a launcher ends the others of one that ends with findings.
    """
    device = launch.device if backend == "nccl" else "cpu"
    groups = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"  # words travel on the host
    with joined_group(launch, timeout_s=limit_s, backend=groups) as collective:
        mine = {"versions": dict(versions), "device": device, "checks": [asdict(check) for check in checks]}
        told = [json.loads(text) for text in gather(collective, json.dumps(mine))]
        by_rank = [one["versions"] for one in told]
        checks[:] = merged([[Check(**check) for check in one["checks"]] for one in told]) + equal(by_rank)
        without = [rank for rank, one in enumerate(told) if one["device"] == "cpu"]
        if 0 < len(without) < len(told):
            device = "cpu"
            said = f"no GPU for {named(without)}, and one for the others"
            checks.append(finding("GPUs", said, "start as many ranks on each machine as it has GPUs"))
        checks += exchange(collective, device)
        show(checks, by_rank)
        gather(collective, "shown")
        collective.close()
