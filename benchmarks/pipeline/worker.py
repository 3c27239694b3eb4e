"""What runs on every emulated host: one case, all its policies, step by step in turn.

Shape legend: L layers, P ranks, M microbatches. Every policy has a copy of the model; all see the same tokens, and at
every step each trains once, in another order each time, so that a drift of the machine favours none. One more copy,
the recorder, stays on equal numbers of layers and is measured at every step: what the static policies are cut by at the
start, what the oracle is told before each step, and what the simulator is given. Hosts are paced (see `pacing`).
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster.host import Host
from benchmarks.measure import rotated
from benchmarks.pacing import PacedOperators, wake_promptly
from benchmarks.pipeline.alone import optimizer_rate
from benchmarks.pipeline.cases import Case, Dynamism, cases
from benchmarks.pipeline.pacing import Pace, PacedAdam, PacedMeter, paced_loss
from benchmarks.pipeline.policies import DYNAMIC, ORACLE, best_map, controller_config, smoothed, start_map
from pipeline_balance.control.controller import Controller, ControllerConfig, Decision, Overhead
from pipeline_balance.dynamics.gpt import loss as loss_fn
from pipeline_balance.pipeline.measure.meter import Meter
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import LayerCost, StageMap
from prophet.demo.text import Corpus, load_corpus
from prophet.machine.memory import keep_memory

CORPUS_BYTES = 1 << 20


def run_case(host: Host, args: Mapping[str, Any]) -> dict[str, Any]:
    """Run one case; returns this rank's figures (see `rows.summarise`)."""
    wake_promptly()
    keep_memory()
    with host.process_group(timeout_s=args["timeout_s"]):
        case = cases(int(args["steps"]))[args["case"]]
        pace, budget_bytes = Pace(float(args["slowdown"])), int(args["budget_bytes"])
        bench = Bench(case, host, pace=pace, budget_bytes=budget_bytes, replicas=int(args["replicas"]))
        result = bench.run(list(args["policies"]), steps=int(args["steps"]), warm_up=int(args["warm_up"]))
        gc.unfreeze()
        gc.collect()
        return result


@dataclass
class Runner:
    """One policy's copy of the model and what it has taken so far."""

    policy: str
    pipeline: ElasticPipeline
    dynamism: Dynamism
    controller: Controller | None = None
    step_s: list[float] = field(default_factory=list)
    balance_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    maps: list[StageMap] = field(default_factory=list)
    measured_steps: int = 0

    def overhead(self) -> Overhead:
        """What balancing has cost it so far."""
        if self.controller is not None:
            return self.controller.overhead()
        return Overhead(total_s=sum(self.step_s), measure_s=0.0, decide_s=0.0, move_s=0.0, moves=0, moved_bytes=0)


class PacedController(Controller):
    """A controller on a slower host: its tensors' work takes the host's time, planning is a processor's work."""

    def __init__(self, pipeline: ElasticPipeline, pace: Pace, *, config: ControllerConfig) -> None:
        super().__init__(pipeline, config=config)
        self.pace = pace

    def rebalance(self) -> Decision:
        with PacedOperators(self.pace.slowdown):
            return super().rebalance()


class Bench:
    """One host's side of one case; `replicas` share the hosts, `ranks` of them each."""

    def __init__(self, case: Case, host: Host, *, pace: Pace, budget_bytes: int, replicas: int = 1) -> None:
        self.case, self.host = case, host
        self.pace, self.budget_bytes = pace, budget_bytes
        self.corpus: Corpus = load_corpus(max_bytes=CORPUS_BYTES)
        self.replicas, self.ranks = replicas, host.hosts // replicas
        self.transfer_s, self.bytes_per_s = self._probe()
        self.between_s = 0.0

    def _pipeline(self) -> ElasticPipeline:
        case = self.case
        return ElasticPipeline.from_modules(
            case.modules(),
            paced_loss(self.pace, loss_fn),
            make_optimizer=self._optimizer,
            microbatches=case.microbatches,
            replicas=self.replicas,
            seed=case.seed,
            budget_bytes=self.budget_bytes,
            meter=PacedMeter(self.pace),
        )

    def _optimizer(self, named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        optimizer = PacedAdam(named, lr=self.case.learning_rate)
        optimizer.pace = self.pace
        return optimizer

    def _probe(self) -> tuple[float, float]:
        """(seconds of one activation between neighbours, bytes per second of a long message); equal on all ranks.

        The receiver sleeps when the message is sent, as a stage does that waits.
        """
        activation = self.case.activation_bytes
        found = []
        for size, times in ((activation, 9), (8 << 20, 3)):
            message = torch.zeros(size, dtype=torch.uint8)
            taken = []
            for _ in range(times):
                dist.barrier()
                time.sleep(0.01 * (1 - min(self.host.rank, 1)))
                began = time.perf_counter()
                if self.host.rank == 0:
                    dist.send(message, 1)
                    dist.recv(message, 1)
                elif self.host.rank == 1:
                    dist.recv(message, 0)
                    dist.send(message, 0)
                taken.append((time.perf_counter() - began) / 2)
            shared = torch.tensor([statistics.median(taken)], dtype=torch.float64)
            dist.broadcast(shared, 0)
            found.append(float(shared))
        return found[0], (8 << 20) / found[1]

    def run(self, policies: Sequence[str], *, steps: int, warm_up: int) -> dict[str, Any]:
        case = self.case
        recorder = Runner("recorder", self._pipeline(), Dynamism(case))
        runners = [Runner(p, self._pipeline(), Dynamism(case)) for p in policies]
        recorder.pipeline.meter.enabled = True
        history: list[list[LayerCost]] = []
        losses: list[float] = []
        optimizer_s: list[float] = []
        between_s: list[float] = []
        frozen = 0
        for step in range(warm_up + steps):
            if step == warm_up:
                self._calibrate(between_s[1:] or between_s)
                self._start(runners, smoothed(history[1:] or history, warm_up))
                # what lives until the end need not be looked through by a collection in the middle of some step
                gc.collect()
                gc.freeze()
            inputs, target = case.batch(self.corpus, step, recorder.pipeline.replica, self.replicas)
            self._change(recorder, step, frozen)
            costs, loss = self._record(recorder, inputs, target, optimizer_s)
            history.append(costs)
            between_s.append(recorder.pipeline.times().between_s)
            losses.append(loss)
            counted = step >= warm_up
            for runner in rotated(runners, step):
                self._change(runner, step, frozen)
                if counted and runner.policy == ORACLE:
                    self._follow(runner, smoothed(history))
                self._step(runner, inputs, target, counted)
            pipeline = recorder.pipeline
            layers = dict(enumerate(pipeline.model.units))
            frozen = recorder.dynamism.decide_frozen(layers, loss, pipeline.collective)
            if self.host.rank == 0 and step % 8 == 0:
                self.host.say(f"step {step}: loss {loss:.3f}, frozen {frozen}")
        every = torch.tensor(optimizer_s, dtype=torch.float64) / self.replicas
        dist.all_reduce(every)
        return {
            "policies": {r.policy: self._result(r) for r in runners},
            "costs": [[dataclasses.asdict(c) for c in costs] for costs in history[warm_up:]],
            "optimizer_s_per_byte": optimizer_rate(history, every.tolist()),
            "transfer_s": self.transfer_s,
            "bytes_per_s": self.bytes_per_s,
            "between_s": self.between_s,
            "metering_s": self._metering_s(),
        }

    def _calibrate(self, between_s: Sequence[float]) -> None:
        """What the runtime takes for an action, by the rank that waits least; a message passes it on both sides."""
        shared = torch.tensor([statistics.median(between_s)], dtype=torch.float64)
        dist.all_reduce(shared, dist.ReduceOp.MIN)
        self.between_s = float(shared)
        self.transfer_s += self.between_s

    def _start(self, runners: Sequence[Runner], costs: list[LayerCost]) -> None:
        """Every policy goes to its own map, by what the warm-up has shown; not counted."""
        for runner in runners:
            pipeline = runner.pipeline
            start = start_map(runner.policy, costs, self.ranks, self.case.microbatches, self.transfer_s)
            done = pipeline.rebuild(start, durations=self._durations(costs, start))
            if runner.policy not in DYNAMIC:
                continue
            slowest = torch.tensor([done.seconds], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            config = controller_config(
                runner.policy,
                self.case.every_steps,
                transfer_s=self.transfer_s,
                bytes_per_s=self.bytes_per_s,
                fixed_s=float(slowest),
            )
            runner.controller = PacedController(pipeline, self.pace, config=config)

    def _durations(self, costs: Sequence[LayerCost], stage_map: StageMap) -> Durations:
        return Durations.of_stages(costs, stage_map, transfer_s=self.transfer_s)

    def _change(self, runner: Runner, step: int, frozen: int) -> None:
        """The model's own dynamism; no policy's cost."""
        pipeline = runner.pipeline
        layers = dict(enumerate(pipeline.model.units))
        runner.dynamism.change(layers, pipeline.layers, step, frozen, pipeline.collective)

    def _follow(self, runner: Runner, costs: list[LayerCost]) -> None:
        """The oracle's move, which costs it nothing."""
        current = runner.pipeline.stage_map
        best = best_map(costs, self.ranks, self.case.microbatches, current, self.transfer_s)
        if best != current:
            runner.pipeline.rebuild(best, durations=self._durations(costs, best))

    def _record(
        self, recorder: Runner, inputs: torch.Tensor, target: torch.Tensor, optimizer_s: list[float]
    ) -> tuple[list[LayerCost], float]:
        pipeline = recorder.pipeline
        pipeline.meter.reset()
        dist.barrier()
        started = time.perf_counter()
        loss = pipeline.step(inputs, target)
        optimizer_s.append(self._optimizer_s(pipeline))
        recorder.step_s.append(time.perf_counter() - started)
        return pipeline.measure(), loss

    def _optimizer_s(self, pipeline: ElasticPipeline) -> float:
        """What the optimizer's last step took on this host."""
        optimizer = pipeline.optimizer
        assert isinstance(optimizer, PacedAdam)
        return optimizer.took_s

    def _step(self, runner: Runner, inputs: torch.Tensor, target: torch.Tensor, counted: bool) -> None:
        before = runner.overhead()
        stage_map = runner.pipeline.stage_map
        dist.barrier()
        began = time.perf_counter()
        loss = (runner.controller or runner.pipeline).step(inputs, target)
        ended = time.perf_counter()
        if not counted:
            return
        runner.measured_steps += int(runner.pipeline.meter.enabled)
        before_s, after_s = (o.measure_s + o.decide_s + o.move_s for o in (before, runner.overhead()))
        runner.step_s.append(ended - began)
        runner.balance_s.append(after_s - before_s)
        runner.losses.append(loss)
        runner.maps.append(stage_map)

    def _result(self, runner: Runner) -> dict[str, Any]:
        overhead = runner.overhead()
        decisions = runner.controller.decisions if runner.controller else []
        return {
            "step_s": runner.step_s,
            "balance_s": runner.balance_s,
            "losses": runner.losses,
            "maps": [[list(m.boundaries), list(m.ranks)] for m in runner.maps],
            "reasons": [d.reason for d in decisions],
            "overhead": {name: getattr(overhead, f"{name}_s") for name in ("measure", "decide", "move", "total")},
            "rebalances": overhead.moves,
            "moved_bytes": overhead.moved_bytes,
            "measured_steps": runner.measured_steps,
            "looks": len(decisions),
        }

    def _metering_s(self) -> float:
        """What metering adds to one microbatch of one layer, forward and backward, by a layer that does nothing."""
        x, nothing = torch.zeros(8, requires_grad=True), torch.nn.Identity()
        taken = []
        for enabled in (False, True):
            meter = Meter(enabled=enabled, work_clock=self.pace.seconds)

            def pass_once(meter: Meter = meter) -> None:
                given = x * 1.0
                (out,) = meter.run_unit(0, nothing, lambda: (nothing(given),), (given,))
                meter.run_action("B", 0, out.sum().backward)

            pass_once()
            began = self.pace.seconds()
            for _ in range(200):
                pass_once()
            taken.append((self.pace.seconds() - began) / 200)
        return max(taken[1] - taken[0], 0.0)
