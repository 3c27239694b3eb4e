"""What the benchmark runs on every host: warm-up, calibration, and the policies one after the other.

Shape legend: R ranks, L blocks, E experts.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import prophet
from benchmarks.auto.measure import on_nodes
from benchmarks.cluster import calibrate, peers
from benchmarks.cluster.calibrate import Calibration, Observed
from benchmarks.cluster.host import Host
from benchmarks.cluster.policies import Policy, planner_of, policy
from benchmarks.cluster.replay import layers_of, simulated, step_of
from benchmarks.cluster.routing import even_row, given, max_mean_at_home
from benchmarks.cluster.workload import (
    Workload,
    batches,
    build,
    load_checkpoint,
    optimizer_of,
    train_step,
    warm_up,
)
from benchmarks.measure import peak_memory_bytes, reset_peak_memory, resident_bytes, rotated
from prophet import Engine, EngineConfig, attach
from prophet.demo.text import load_corpus
from prophet.engine.config import Experiment
from prophet.engine.step_report import StepReport
from prophet.layer.moe import moe_layers
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from prophet.scheduler.actions import Window
from prophet.scheduler.pieces import Form
from prophet.scheduler.recording import ObservedCollective, Recording
from prophet.spec import Placement, Windows
from prophet.traces import read_trace

SETTLING_STEPS = 5  # uncounted ones before all else
CALIBRATION_STEPS = 4  # watched ones of each routing, behind those that are skipped


def steps_of_repetition(steps: int, skip: int) -> int:
    """The most that anything runs from one checkpoint: so many steps of a trace one repetition needs."""
    return max(SETTLING_STEPS, skip + max(steps, CALIBRATION_STEPS))


def prepare(host: Host, args: Mapping[str, Any]) -> list[float]:
    """Make the common checkpoint; see `workload.warm_up`."""
    with host.process_group(timeout_s=args["timeout_s"]):
        return warm_up(
            Workload(**args["workload"]),
            steps=args["warm_up_steps"],
            rank=host.rank,
            ranks=host.hosts,
            folder=Path(args["folder"]),
        )


def measure(host: Host, args: Mapping[str, Any]) -> dict[str, Any]:
    """Calibrate, then run every policy `repetitions` times, interleaved; returns this rank's figures."""
    nodes = on_nodes(host.rank, args["ranks_per_node"])
    with host.process_group(timeout_s=args["timeout_s"]), host.paced(), nodes:
        bench = Bench(host, args)
        bench.settle()
        calibration = bench.calibrate()
        host.say(f"calibrated: {calibration}")
        runs: list[dict[str, Any]] = []
        for repetition in range(args["repetitions"]):
            for name in rotated(args["policies"], repetition):
                run = bench.run(policy(name), repetition)
                runs.append(run)
                host.say(f"repetition {repetition}, {name}: {float(np.median(run['step_s'])):.3f} s per step")
        assert bench.observed is not None
        return {
            "runs": runs,
            "calibration": dataclasses.asdict(calibration),
            "observed": dataclasses.asdict(bench.observed),
            "layers": bench.layers,
            "spans": bench.traced,
        }


class Bench:
    """One rank's side of the comparison: a model of our own that is loaded anew for every run."""

    def __init__(self, host: Host, args: Mapping[str, Any]) -> None:
        self.host = host
        self.workload = Workload(**args["workload"])
        self.steps, self.skip = int(args["steps"]), int(args["skip"])
        self.ranks_per_node = int(args["ranks_per_node"])
        self.slots = int(args["slots_per_rank"])
        self.first_step = int(args["warm_up_steps"])
        self.trace_policies = set(args.get("trace", ()))
        self.traced: dict[str, list[list[Any]]] = {}
        self.state = load_checkpoint(Path(args["folder"]), host.rank)
        # [repetitions * window, L, E] of this rank
        self.replayed = None if args["routing"] is None else read_trace(args["routing"]).counts[:, :, host.rank]
        self.corpus = load_corpus()
        self.model = build(self.workload)
        self.collective = moe_layers(self.model)[0].collective
        self.calibration: Calibration | None = None
        self.observed: Observed | None = None
        self.layers: dict[str, Any] = {}

    def rows(self) -> Iterator[Tensor]:
        return batches(
            self.workload, self.corpus, rank=self.host.rank, ranks=self.host.hosts, first_step=self.first_step
        )

    def settle(self) -> None:
        """Some steps with transfers that nobody counts: the first ones find cold memory and cold connections."""
        with ExitStack() as stack:
            optimizer, _ = self._attached(policy("pro-prophet"), stack)
            for rows in itertools.islice(self.rows(), SETTLING_STEPS):
                train_step(self.model, optimizer, rows)

    # --- calibration ---

    def calibrate(self) -> Calibration:
        """Measure links by probes, and compute by watching some steps without balancing; collective."""
        reports: list[StepReport] = []
        windows: list[dict[str, float]] = []
        # What a host computes while others wait for a busy one, and beside all the others: half of the steps each.
        for p in (policy("static"), Policy(name="even", even=True)):
            seen: list[StepReport] = []
            recording = self._watched_steps(p, self.skip + CALIBRATION_STEPS, seen.append)
            reports += seen[self.skip :]
            for step in range(self.skip, recording.steps):
                windows.append(added({s.name: s.seconds} for s in recording.compute(step)))
        bank = moe_layers(self.model)[0].experts
        rank_load = np.stack([r.rank_load for r in reports])
        self.observed = Observed(
            **calibrate.probes(self.collective, bank, self.ranks_per_node, rows=int(rank_load.mean())),
            windows=calibrate.gathered(self.collective, windows, self.workload.blocks),
            rank_load=rank_load.tolist(),
            even=CALIBRATION_STEPS,
            experts=self.workload.experts // self.host.hosts,
        )
        self.calibration = calibrate.calibration_of(self.observed, bank.shape())
        return self.calibration

    # --- our engine ---

    def config(self, p: Policy) -> EngineConfig:
        calibration = self.calibration
        known = "uniform" if calibration is None else calibration.topology
        return EngineConfig(
            planner=planner_of(p),
            topology=known if p.topology == "calibrated" else p.topology,
            windows=calibration.windows if calibration is not None and p.use_windows else Windows(),
            slots_per_rank=self.slots,
            refetch=p.refetch,
        )

    def _give(self, p: Policy, gates: list[nn.Module], repetition: int, stack: ExitStack) -> None:
        """Let the gates choose evenly, or what the trace says from this repetition's first step on, if they shall."""
        workload, rank, replayed = self.workload, self.host.rank, self.replayed
        if p.even:
            even = even_row(workload.tokens_per_host() * workload.top_k, workload.experts, rank)
            row_of = lambda step, layer: even  # noqa: E731
        elif replayed is not None:
            first = repetition * steps_of_repetition(self.steps, self.skip)
            row_of = lambda step, layer: replayed[first + step, layer]  # noqa: E731
        else:
            return
        stack.enter_context(given(gates, row_of, top_k=workload.top_k, seed=(workload.seed, repetition, rank)))

    def _attached(
        self, p: Policy, stack: ExitStack, repetition: int = 0
    ) -> tuple[torch.optim.Optimizer, Engine | None]:
        """Load the checkpoint and, unless the policy is plain, attach the engine, until the stack is closed."""
        self.model.load_state_dict(self.state)
        self.model.zero_grad()
        optimizer = optimizer_of(self.model, self.workload)
        self._give(p, [layer.gate for layer in moe_layers(self.model)], repetition, stack)
        if p.plain:
            return optimizer, None
        experiment = Experiment(schedule=p.schedule, transfers=p.transfers, replan=p.replan)
        engine = attach(self.model, optimizer, config=self.config(p), experiment=experiment)
        stack.callback(engine.close)
        return optimizer, engine

    def _watched_steps(self, p: Policy, steps: int, on_step: Callable[[StepReport], None] | None = None) -> Recording:
        """Run some steps with every operation recorded; not for timing."""
        with ExitStack() as stack:
            optimizer, engine = self._attached(p, stack)
            if engine is None:
                recording = Recording(self.host.rank)
                layers = moe_layers(self.model)
                use_collective(layers, ObservedCollective(self.collective, recording.recorder))
                stack.callback(use_collective, layers, self.collective)
            else:
                recording = stack.enter_context(engine.recording())
                if on_step is not None:
                    engine.on_step.append(on_step)
            for rows in itertools.islice(self.rows(), steps):
                if engine is None:
                    recording.begin()
                # with the loss the last block's FNEC is over
                edges = iter([partial(recording.enter, Window("BNEC", self.workload.blocks - 1)), recording.gradients])
                train_step(self.model, optimizer, rows, on_edge=lambda e=edges: next(e)())
                if engine is None:
                    recording.end()
        return recording

    def _trace(self, p: Policy) -> None:
        """Keep the spans of one step, by the clock that all hosts share."""
        spans = self._watched_steps(p, self.skip + 2).spans()
        self.traced[p.name] = [[s.start_s, s.end_s, s.rank, s.stream, s.name] for s in spans]

    def run(self, p: Policy, repetition: int) -> dict[str, Any]:
        """One repetition of a policy: `skip` steps that are not counted, then `steps` that are."""
        gc.collect()
        reset_peak_memory()
        if p.system == "prophet":
            result = self._run_ours(p, repetition)
            if repetition == 0 and p.name in self.trace_policies:
                self._trace(p)
        else:
            result = self._run_peer(p, repetition)
        return {"policy": p.name, "repetition": repetition, "peak_memory_bytes": peak_memory_bytes(), **result}

    def _run_ours(self, p: Policy, repetition: int) -> dict[str, Any]:
        reports: list[StepReport] = []
        planned: list[tuple[tuple[Placement, ...], tuple[Form, ...]]] = []
        step_s, losses, resident = [], [], []
        with ExitStack() as stack:
            optimizer, engine = self._attached(p, stack, repetition)
            if engine is not None:
                engine.on_step.append(reports.append)
                engine.on_step.append(lambda report: planned.append((report.placements, report.forms)))
            layers = moe_layers(self.model) if engine is None else []
            plain_seconds, plain_max_mean = [], []
            for rows in itertools.islice(self.rows(), self.skip + self.steps):
                seconds, loss = train_step(self.model, optimizer, rows)
                step_s.append(seconds)
                losses.append(loss)
                resident.append(resident_bytes())
                if engine is None:
                    plain_seconds.append(added(layer.port.stopwatch.take() for layer in layers))
                    plain_max_mean.append(float(np.mean([layer.stats.max_mean for layer in layers if layer.stats])))
        seconds_of = [r.seconds for r in reports] if reports else plain_seconds
        result = {
            "step_s": step_s[self.skip :],
            "losses": losses[self.skip :],
            "resident_bytes": resident[self.skip :],
            "seconds": {
                name: float(np.median([s.get(name, 0.0) for s in seconds_of[self.skip :]]))
                for name in ("a2a", "expert", "counts", "exposed_plan", "exposed_trans", "exposed_agg", "plan", "split")
            },
            "max_mean": ([r.max_mean for r in reports] or plain_max_mean)[self.skip :],
            "max_mean_static": ([r.max_mean_static for r in reports] or plain_max_mean)[self.skip :],
            "copies_per_rank": [float(r.copies.sum(axis=0).mean()) for r in reports[self.skip :]] or [0.0],
            "actions": [str(a) for a in reports[-1].actions] if reports else [],
        }
        if self.host.rank == 0 and engine is not None and self.calibration is not None:
            done = [step_of(r, *x) for r, x in zip(reports[self.skip :], planned[self.skip :], strict=True)]
            self.layers = layers_of(engine.contexts)
            # for `--record`
            result |= {"steps": done, "schedule": [str(a) for a in engine.schedule]}
            result["simulated_s"] = simulated(p.name, self.calibration, self.layers, engine.schedule, done)
        return result

    # --- the peers ---

    def _run_peer(self, p: Policy, repetition: int) -> dict[str, Any]:
        model = peers.build_peer(
            p.system, self.workload, self.state, rank=self.host.rank, ranks=self.host.hosts, capacity=p.capacity
        )
        layers: list[peers.Peer] = [block.moe for block in model.blocks]  # type: ignore[misc]
        optimizer = optimizer_of(model, self.workload)
        steps, counts = [], []
        with ExitStack() as stack:
            self._give(p, [layer.gate for layer in layers], repetition, stack)
            for rows in itertools.islice(self.rows(), self.skip + self.steps):
                steps.append(train_step(model, optimizer, rows))
                counts.append([layer.counts() for layer in layers])
        step_s, losses = zip(*steps[self.skip :], strict=True)
        result = {"step_s": step_s, "losses": losses, "max_mean": [], "copies_per_rank": [0.0]}
        told = [c.to(torch.int64) for step in counts[self.skip :] for c in step if c is not None]
        if len(told) < self.steps * len(layers):
            return result  # a release that does not tell
        table = torch.stack(told)
        load = self.collective.all_gather(table, op=Operation("loads of a peer")).numpy()  # [R, T * L, E]
        load = load.reshape(self.host.hosts, self.steps, len(layers), -1).transpose(1, 2, 0, 3)  # [T, L, R, E]
        result["max_mean"] = max_mean_at_home(load).mean(axis=1).tolist()
        if p.capacity is not None:
            capacity = layers[0].capacity(self.workload.tokens_per_host(), self.workload.experts)
            result["dropped"] = [peers.dropped_fraction(step, capacity) for step in load]
        return result


def use_collective(layers: list[prophet.MoE], collective: Collective) -> None:
    """Let the layers talk through `collective`."""
    for layer in layers:
        layer.collective = collective


def added(tables: Iterator[dict[str, float]]) -> dict[str, float]:
    """Sums by name."""
    total: dict[str, float] = {}
    for table in tables:
        for name, value in table.items():
            total[name] = total.get(name, 0.0) + value
    return total
