"""What a layer's host does between the counts and the next kernel, in turns with the code of another checkout.

One process stands for one rank of R, without peers: it trains MoE layers with counts of the other ranks drawn from
`skewed_load`. Figures, of processor time but for the last:

- *split*, *digest*: the planner's split and its digest, each alone;
- *to the next kernel*: from the counts on the host to the kernel that orders the rows for dispatch;
- *numbers*: what a message of counts carries, over what its layer needs.

The processes run this file with the package of either checkout, so it uses only what both have.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import prophet
from benchmarks.planner.scale import skewed_load
from benchmarks.planner.walks import timed
from prophet.comm import Collective, Operation, Pending
from prophet.layer import moe
from prophet.layer.counts import Counts
from prophet.machine.presets import get_preset
from prophet.planner import get_planner
from prophet.ranks.collective import Channel, Done, Messages, Rows
from prophet.ranks.messages import COUNTS, HEAD

SIZES = ((8, 64), (64, 256), (256, 256))  # ranks and experts
LARGEST_TRAINED = 64 * 256  # no training beyond it
PRESET, ROUTED, SLOTS = "h100-ib:Mixtral-8x7B", 8192, 4
DIM, LAYERS, WARM_UP, STEPS, CALLS = 8, 4, 3, 8, 5
LIMIT_S = 600.0
FIGURES = ("split_ms", "digest_ms", "split_and_digest_ms", "to_next_kernel_ms", "numbers_over_needed")


class HostError(RuntimeError):
    """A checkout's process failed."""


# --- in a process of either checkout ---


class Alone(Collective):
    """One rank whose peers are imagined: they say what it says, have other experts, and send zeros."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size, timeout_s=LIMIT_S)
        self.ratios: list[float] = []

    def _renewed(self, timeout_s: float) -> Collective:
        return self

    def all_to_all(
        self, x: Tensor, send_rows: Rows, recv_rows: Rows, *, op: Operation, channel: Channel = "tokens"
    ) -> Pending:
        return Done(x.new_zeros((sum(recv_rows), *x.shape[1:])))

    def all_gather(self, x: Tensor, *, op: Operation, channel: Channel = "tokens") -> Tensor:
        rows = torch.stack([x] * self.size)
        if op.name == COUNTS:
            self.ratios.append(x.numel() / (HEAD + int(x[0])))
        if op.name == "comparison of experts":
            rows[:, HEAD:] += torch.arange(self.size).unsqueeze(1)
        return rows

    def exchange(self, sends: Messages, recvs: Messages, *, op: Operation, channel: Channel = "weights") -> Pending:
        for _, out in recvs:
            out.zero_()
        return Done(torch.empty(0))


def split_times(ranks: int, experts: int) -> dict[str, float]:
    """Milliseconds of a split and of its digest: medians over counts drawn anew."""
    context = get_preset(PRESET).context(ranks, experts, routed_per_rank=ROUTED, slots_per_rank=SLOTS)
    planner = get_planner("prophet")
    placement = planner.place(skewed_load(ranks, experts, 0), context)
    split_us, digest_us = [], []
    for draw in range(1, CALLS + 2):
        load = skewed_load(ranks, experts, 0, draw)
        split, us = timed(lambda at=load: planner.split(at, placement, context))  # type: ignore[misc]
        split_us.append(us)
        digest_us.append(timed(split.digest)[1])
    # The first call fills caches
    split_ms, digest_ms = (1e-3 * statistics.median(us[1:]) for us in (split_us, digest_us))
    return {"split_ms": split_ms, "digest_ms": digest_ms, "split_and_digest_ms": split_ms + digest_ms}


def training_times(ranks: int, experts: int) -> dict[str, float]:
    """Milliseconds from the counts to the next kernel, the median over layers and steps; and how long messages are."""
    torch.manual_seed(0)
    alone = Alone(ranks)
    model = nn.Sequential(
        *(prophet.MoE(DIM, DIM, experts, 2, activation="relu", bias=False, group=alone) for _ in range(LAYERS))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    # Slow products and fast links: replicas pay
    topology = prophet.Topology.uniform(ranks, flops_per_s=1e8)
    config = prophet.EngineConfig(planner="prophet", topology=topology, slots_per_rank=SLOTS)
    engine = prophet.attach(model, optimizer, config=config)
    exchange, order = moe.exchange_counts, moe.send_order
    taken: list[float] = []
    began, layer, copies = 0.0, 0, 0

    def exchanged(*given: Any, **named: Any) -> Counts:
        nonlocal began, layer
        counts = exchange(*given, **named)
        load = skewed_load(ranks, experts, layer % LAYERS, 1 + layer // LAYERS)
        load[0] = counts.load[0]
        layer += 1
        counts = replace(counts, load=load)
        began = time.thread_time()
        return counts

    def ordered(*given: Any, **named: Any) -> Any:
        taken.append(1e3 * (time.thread_time() - began))
        return order(*given, **named)

    moe.exchange_counts, moe.send_order = exchanged, ordered  # type: ignore[assignment]
    try:
        for _ in range(WARM_UP + STEPS):
            optimizer.zero_grad()
            model(torch.randn(ROUTED // 2, DIM)).sum().backward()
            optimizer.step()
            copies += 0 if engine.last_step is None else int(engine.last_step.copies.sum())
    finally:
        moe.exchange_counts, moe.send_order = exchange, order
        engine.close()
    if not copies:
        raise HostError("expected replicas: without any there is nothing to split")
    # From the second step on for messages; splits only have a choice once placements are in force
    return {
        "to_next_kernel_ms": statistics.median(taken[LAYERS * WARM_UP :]),
        "numbers_over_needed": max(alone.ratios[LAYERS:]),
    }


def figures() -> Iterator[dict[str, Any]]:
    """A row by size, of the code that this process has imported."""
    for ranks, experts in SIZES:
        trained = training_times(ranks, experts) if ranks * experts <= LARGEST_TRAINED else {}
        yield {"ranks": ranks, "experts": experts, **split_times(ranks, experts), **trained}


# --- in turns ---


def figures_of(root: Path) -> list[dict[str, Any]]:
    """Rows of a fresh process with the code of one checkout."""
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, __file__]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise HostError(f"{root}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def host_rows(former: Path, turns: int) -> Iterator[dict[str, Any]]:
    """The median of every figure over all processes, of either code, and the present one's over the former one's."""
    roots = {"present": Path(__file__).resolve().parents[2], "former": former.resolve()}
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in roots}
    for turn in range(turns):
        for name in list(roots)[:: 1 if turn % 2 else -1]:
            found[name].append(figures_of(roots[name]))
    for i, (ranks, experts) in enumerate(SIZES):
        for figure in FIGURES:
            by_code = {name: [rows[i][figure] for rows in runs if figure in rows[i]] for name, runs in found.items()}
            if not all(by_code.values()):
                continue
            medians = {name: statistics.median(values) for name, values in by_code.items()}
            yield {
                "ranks": ranks,
                "experts": experts,
                "figure": figure,
                **medians,
                "present_over_former": medians["present"] / medians["former"],
                **{f"{name}_range": f"{min(values):.3g} to {max(values):.3g}" for name, values in by_code.items()},
            }


if __name__ == "__main__":
    for row in figures():
        print(json.dumps(row), flush=True)
