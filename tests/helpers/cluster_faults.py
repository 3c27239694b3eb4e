"""Programs with faults that the testbed's fault tests run on the emulated hosts."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import prophet
from benchmarks.cluster.calibrate import fit_experts, slowness_of
from benchmarks.cluster.host import Host
from prophet import EngineConfig, attach
from prophet.engine.step_report import StepReport
from prophet.experts.feed_forward import FeedForwardBank
from prophet.kernels.grouped_ffn.naive import ExpertWeights, expert_ffn
from prophet.ranks.collective import Channel, Collective, Pending
from prophet.ranks.forwarding import ForwardingCollective
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import collective_for
from prophet.spec import Topology
from tests.helpers.support import RandomPlanner, TinyModel, dense_parameters

STEPS = 3


class StopsItself(ForwardingCollective):
    """At its `at`-th operation called `name` this process stops.

    A transfer of weights is launched first, and is under way when this rank falls silent; an all-to-all of tokens,
    which is too short for that, is not: the others are in the middle of it and wait for this rank's part.
    """

    def __init__(self, inner: Collective, name: str, at: int, number: int) -> None:
        super().__init__(inner)
        self.name, self.left, self.number = name, at, number

    def around(self, inner: Collective) -> Collective:
        return StopsItself(inner, self.name, self.left, self.number)

    def transfer(self, launch: Callable[[], Pending], op: Operation, channel: Channel) -> Pending:
        named = op.name == self.name
        self.left -= named
        stops = named and self.left == 0
        if stops and channel == "tokens":
            self._stop(op)
        pending = launch()
        if stops:
            self._stop(op)
        return pending

    def _stop(self, op: Operation) -> None:
        print(f"stopping in {op}", flush=True)
        os.kill(os.getpid(), self.number)


def train(host: Host, args: dict[str, Any]) -> list[str]:
    """A few steps with replicas everywhere; returns a digest of every step's gradients on this rank.

    stop: (rank, operation, which of them, signal). pause_s: between steps, for faults from outside.
    """
    with host.process_group(timeout_s=60):
        collective = collective_for(None, timeout_s=args["timeout_s"])
        if args.get("stop") and args["stop"][0] == host.rank:
            _, name, at, number = args["stop"]
            collective = StopsItself(collective, name, at, number)
        # experts of about 0.25 MB, so that a transfer lasts
        model = TinyModel(blocks=2, dim=32, hidden=1024, num_experts=2 * host.hosts, group=collective)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = EngineConfig(planner=RandomPlanner(density=1.0), slots_per_rank=2)
        engine = attach(model, optimizer, config=config)
        digests = []
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(1000 * step + host.rank)
            ids = torch.randint(0, 11, (64,), generator=generator)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(ids), ids.roll(1)).backward()
            shared = [p.grad for p in dense_parameters(model).values() if p.grad is not None]
            collective.all_reduce_mean_(shared)
            digests.append(gradients_digest(model))
            optimizer.step()
            copies = 0 if engine.last_step is None else int(engine.last_step.copies.sum())
            host.say(f"step {step} ended with {copies} copies")
            time.sleep(args.get("pause_s", 0.0))
        engine.close()
    return digests


def gradients_digest(model: torch.nn.Module) -> str:
    """A fingerprint of all gradients, bit by bit."""
    h = hashlib.blake2b(digest_size=8)
    for name, p in sorted(model.named_parameters()):
        h.update(name.encode())
        if p.grad is not None:
            h.update(p.grad.contiguous().numpy().tobytes())
    return h.hexdigest()


def replan(host: Host, args: dict[str, Any]) -> dict[str, Any]:
    """Measure speeds and train; while a host is slowed from outside, measure again and plan from that.

    Returns the rates measured and the rows each rank computed, before and after.
    """
    found: dict[str, Any] = {"flops_per_s": [], "rank_load": []}
    with host.process_group(timeout_s=60):
        collective = collective_for(None, timeout_s=30.0)
        model = TinyModel(blocks=1, dim=32, hidden=512, num_experts=2 * host.hosts, group=collective)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for phase in ("before", "after"):
            rates = measured_speed(model, collective)
            topology = dataclasses.replace(Topology.uniform(host.hosts), flops_per_s=rates)
            config = EngineConfig(planner="prophet", topology=topology, slots_per_rank=4)
            engine = attach(model, optimizer, config=config)
            reports: list[StepReport] = []
            engine.on_step.append(reports.append)
            for step in range(3):
                ids = torch.randint(0, 11, (2048,), generator=torch.Generator().manual_seed(step + 77 * host.rank))
                optimizer.zero_grad()
                model(ids).square().mean().backward()
                optimizer.step()
            engine.close()
            found["flops_per_s"].append(list(rates))
            found["rank_load"].append(reports[-1].rank_load.sum(axis=0).tolist())
            if phase == "before":
                host.say("measured once")
                time.sleep(args["pause_s"])
    return found


def measured_speed(model: TinyModel, collective: Collective) -> tuple[float, ...]:
    """Rates of all ranks from a moment of real expert products, [R]."""
    moe = model.moes[0]
    assert isinstance(moe, prophet.MoE)
    bank = moe.experts
    assert isinstance(bank, FeedForwardBank)
    weights = ExpertWeights(*(torch.randn(s) for s in ((bank.hidden, bank.dim), (bank.dim, bank.hidden))))
    x = torch.randn(512, bank.dim)
    collective.all_gather(torch.zeros(1), op=Operation("start of a measurement"))
    began, rows = time.perf_counter(), 0
    while time.perf_counter() - began < 0.6:  # many quota periods
        expert_ffn(x, weights, "gelu")
        rows += x.shape[0]
    seconds = 3 * (time.perf_counter() - began)  # as a forward and a backward pass of that many rows
    mine = torch.tensor([seconds, rows], dtype=torch.float64)
    table = collective.all_gather(mine, op=Operation("measured speeds")).numpy()
    shape = moe.experts.shape()
    observed = np.ones((1, collective.size), dtype=np.int64)
    seconds, rows = table[None, :, 0], table[None, :, 1].astype(np.int64)
    rates, _ = fit_experts(seconds, rows, 0 * observed, shape, slowness_of(seconds / rows))
    return rates


STOP = int(signal.SIGSTOP)
KILL = int(signal.SIGKILL)
