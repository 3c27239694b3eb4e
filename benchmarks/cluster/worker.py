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
from benchmarks.cluster.calibrate import Calibration
from benchmarks.cluster.host import Host
from benchmarks.cluster.policies import Policy, planner_of, policy
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
from benchmarks.pacing import compute_apart
from prophet import Engine, EngineConfig, attach
from prophet.demo.text import load_corpus
from prophet.engine.config import Experiment
from prophet.engine.step_report import StepReport
from prophet.layer.moe import moe_layers
from prophet.machine.measure import Probe, measure_overlap
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from prophet.scheduler.actions import Window
from prophet.scheduler.pieces import Form
from prophet.scheduler.recording import ObservedCollective, Recording
from prophet.scheduler.simulate import predicted_durations, simulate
from prophet.scheduler.timeline import Span
from prophet.spec import IntArray, Placement, PlanContext, Split, Topology, Windows
from prophet.traces import read_trace

SETTLING_STEPS = 5  # uncounted ones before all else
CALIBRATION_STEPS = 4  # watched ones of each routing, behind those that are skipped
SIMULATED_PARTS = ("compute", "slowed", "a2a", "shared", "exposed_trans", "exposed_agg", "exposed_plan", "idle")


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
        return {"runs": runs, "calibration": dataclasses.asdict(calibration), "spans": bench.traced}


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
        compute_apart()

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
        intra, inter = calibrate.probe_links(self.collective, self.ranks_per_node)
        blocks = self.workload.blocks
        reports: list[StepReport] = []
        windows: list[dict[str, float]] = []
        spans: list[Span] = []
        # What a host computes while others wait for a busy one, and beside all the others: half of the steps each.
        for p in (policy("static"), Policy(name="even", even=True)):
            seen: list[StepReport] = []
            recording = self._watched_steps(p, self.skip + CALIBRATION_STEPS, seen.append)
            reports += seen[self.skip :]
            spans += recording.recorder.spans()
            for step in range(self.skip, recording.steps):
                windows.append(added({s.name: s.seconds} for s in recording.compute(step)))
        even = windows[len(windows) // 2 :]
        counts_s = [s.seconds for s in spans if s.name.startswith("exchange of counts")]

        def median(name: str) -> float:
            return float(np.median([w.get(name, 0.0) for w in windows]))

        even_s = [sum(w.get(f"{kind}({i})", 0.0) for kind in ("FEC", "BEC") for i in range(blocks)) for w in even]
        last = blocks - 1
        fnec = [median(f"FNEC({i})") + median(f"route({i + 1})") for i in range(last)] or [median("FNEC(0)")]
        bnec = [median(f"BNEC({i})") for i in range(last)] or [median("BNEC(0)")]
        # beside the blocks' common windows: what the last one has more, with the head and the loss
        extra = median(f"FNEC({last})") - float(np.mean(fnec)) + median(f"BNEC({last})") - float(np.mean(bnec))
        figures = [
            float(np.mean(fnec)),
            float(np.mean(bnec)),
            median("start") + median("route(0)"),
            median("end"),
            median("update") + extra,
            min(counts_s),
            *even_s,
            *(w.get(f"FEC({i})", 0.0) + w.get(f"BEC({i})", 0.0) for w in windows for i in range(blocks)),
        ]
        op = Operation("figures of compute")
        table = self.collective.all_gather(torch.tensor(figures, dtype=torch.float64), op=op).numpy()
        rows = np.concatenate([r.rank_load for r in reports])  # [T * L, R]
        m = self.workload.experts // self.host.hosts
        bank = moe_layers(self.model)[0].experts
        shape = bank.shape()
        overlap_cost = measure_overlap(  # of a transfer as long as a busy step's: short ones drown in noise
            Probe(self.collective, torch.device("cpu"), 6), bank, rows=int(rows.mean()), n_bytes=4 * shape.expert_bytes
        )
        expert_s = table[:, 6 + len(even) :].T
        slowness = calibrate.slowness_of(table[:, 6 : 6 + len(even)].T)
        rates, overhead = calibrate.fit_experts(expert_s, rows, np.full_like(rows, m), shape, slowness)
        ranks = self.host.hosts
        topology = Topology(
            ranks=ranks,
            ranks_per_node=self.ranks_per_node,
            intra=intra,
            inter=inter,
            flops_per_s=rates,
            free_bytes=(1 << 40,) * ranks,
            expert_overhead_s=overhead,
            overlap_cost=overlap_cost,
            name="measured",
        )
        self.calibration = Calibration(
            topology=topology,
            windows=Windows(fnec_s=float(table[:, 0].min()), bnec_s=float(table[:, 1].min())),
            start_s=float(table[:, 2].mean()),
            end_s=max(0.0, float(table[:, 3].mean())),
            update_s=max(0.0, float(table[:, 4].mean())),
            counts_s=float(table[:, 5].mean()),
        )
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
        compute_apart()
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
        """Keep the spans of one step, with times from its start."""
        spans = self._watched_steps(p, self.skip + 2).spans()
        zero = spans[0].start_s
        self.traced[p.name] = [[s.start_s - zero, s.end_s - zero, s.rank, s.stream, s.name] for s in spans]

    def run(self, p: Policy, repetition: int) -> dict[str, Any]:
        """One repetition of a policy: `skip` steps that are not counted, then `steps` that are."""
        gc.collect()
        compute_apart()
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
            result["simulated_s"] = self._simulated(p, engine, reports[self.skip :], planned[self.skip :])
        return result

    def _simulated(
        self,
        p: Policy,
        engine: Engine,
        reports: list[StepReport],
        planned: list[tuple[tuple[Placement, ...], tuple[Form, ...]]],
    ) -> list[dict[str, float]]:
        """Seconds by part that the simulator says of the same steps, from the calibration alone."""
        assert self.calibration is not None
        c = self.calibration
        contexts = [
            dataclasses.replace(
                x, topology=c.topology, windows=dataclasses.replace(c.windows, experts=x.windows.experts)
            )
            for x in engine.contexts
        ]
        planner = planner_of(p)
        found = []
        for report, (placed, cut) in zip(reports, planned, strict=True):
            splits = [
                split_of(planner, load, placement, context)
                for load, placement, context in zip(report.counts, placed, contexts, strict=True)
            ]
            durations = predicted_durations(
                placed,
                splits,
                contexts,
                forms=cut,
                start_s=c.start_s,
                end_s=c.end_s,
                update_s=c.update_s,
                counts_s=c.counts_s,
            )
            found.append(simulate(engine.schedule, durations))
        return [
            {"step": s.makespan_s, **{p: float(getattr(s, f"{p}_s").mean()) for p in SIMULATED_PARTS}} for s in found
        ]

    # --- the peers ---

    def _run_peer(self, p: Policy, repetition: int) -> dict[str, Any]:
        model = peers.build_peer(
            p.system, self.workload, self.state, rank=self.host.rank, ranks=self.host.hosts, capacity=p.capacity
        )
        layers: list[peers.Peer] = [block.moe for block in model.blocks]  # type: ignore[misc]
        optimizer = optimizer_of(model, self.workload)
        compute_apart()
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


def split_of(planner: Any, load: IntArray, placement: Placement, context: PlanContext) -> Split:
    """The split that the engine used."""
    if placement.is_static:
        return Split.to_homes(load, placement)
    split: Split = planner.split(load, placement, context)
    return split


def added(tables: Iterator[dict[str, float]]) -> dict[str, float]:
    """Sums by name."""
    total: dict[str, float] = {}
    for table in tables:
        for name, value in table.items():
            total[name] = total.get(name, 0.0) + value
    return total
