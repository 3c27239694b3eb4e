"""What runs on every emulated host: one case, all its policies, step by step in turn.

Shape legend: L layers, P ranks, M microbatches. Every policy has a copy of the model, whose rules change it by what
that copy has trained; all see the same tokens, and at every step each trains once, in another order each time, so that
a drift of the machine favours none. One more copy, the recorder, stays on equal numbers of layers and is measured at
every step: what the static policies are cut by at the start, what the oracle is told before each step, and what the
simulator is given. Hosts are paced (see `pacing`).
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster.host import Host
from benchmarks.measure import rotated
from benchmarks.pacing import Pace, wake_promptly
from benchmarks.pipeline.alone import optimizer_rate
from benchmarks.pipeline.cases import Case, Dynamism, cases
from benchmarks.pipeline.pacing import PacedAdam, PacedMeter, paced_loss
from benchmarks.pipeline.policies import DYNAMIC, ORACLE, best_map, controller_config, smoothed, start_map
from benchmarks.pipeline.swing import STILL, SWINGING, Swing, maps_of
from pipeline_balance.control.controller import Controller, Overhead
from pipeline_balance.dynamics.gpt import loss as loss_fn
from pipeline_balance.pipeline.measure.meter import Meter
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import LayerCost, StageMap
from prophet.demo.text import Corpus, load_corpus
from prophet.machine.memory import keep_memory
from prophet.ranks.process_group import expert_groups

CORPUS_BYTES = 1 << 20
# on what a move sends beside a step
LIMIT_S = 60.0


class RuleMismatch(RuntimeError):
    """The rules of two copies of a model did not do the same, so their times cannot be compared."""


def run_case(host: Host, args: Mapping[str, Any]) -> dict[str, Any]:
    """Run one case; returns this rank's figures (see `rows.summarise`)."""
    wake_promptly()
    keep_memory()
    with host.process_group(timeout_s=args["timeout_s"]):
        steps, replicas = int(args["steps"]), int(args["replicas"])
        experts = expert_groups(host.hosts // replicas)[1] if args["share_experts"] else None
        case = cases(steps, layers=int(args["layers"]), experts=experts)[args["case"]]
        # a repetition is the same life with other weights and other text
        case = replace(case, seed=case.seed + int(args["repetition"]))
        if set(args["policies"]) & set(SWINGING):
            # layers stay as they are: steps with moves and without are to differ in nothing else
            case = replace(case, age=None, pruning=None, freezing=None)
        bench = Bench(
            case,
            host,
            pace=host.pace(),
            budget_bytes=int(args["budget_bytes"]),
            replicas=replicas,
            zero=int(args["zero"]),
        )
        result = bench.run(list(args["policies"]), steps=steps, warm_up=int(args["warm_up"]))
        gc.unfreeze()
        gc.collect()
        return result


@dataclass
class Runner:
    """One policy's copy of the model and what it has taken so far."""

    policy: str
    pipeline: ElasticPipeline
    dynamism: Dynamism
    controller: Controller | Swing | None = None
    step_s: list[float] = field(default_factory=list)
    balance_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    maps: list[StageMap] = field(default_factory=list)
    measured_steps: int = 0
    loss: float = 0.0

    def overhead(self) -> Overhead:
        """What balancing has cost it so far."""
        if isinstance(self.controller, Controller):
            return self.controller.overhead()
        return Overhead(total_s=sum(self.step_s), measure_s=0.0, decide_s=0.0, move_s=0.0, moves=0, moved_bytes=0)


def check_alike(runners: Sequence[Runner]) -> None:
    """Raise `RuleMismatch` unless the rules of all copies have done the same at the same steps."""
    first = runners[0]
    for runner in runners[1:]:
        if runner.dynamism.history != first.dynamism.history:
            raise RuleMismatch(
                f"the copy of {runner.policy} went through {runner.dynamism.history}, "
                f"that of {first.policy} through {first.dynamism.history}"
            )


class Bench:
    """One host's side of one case; `replicas` share the hosts, `ranks` of them each."""

    def __init__(
        self, case: Case, host: Host, *, pace: Pace, budget_bytes: int, replicas: int = 1, zero: int = 0
    ) -> None:
        self.case, self.host, self.zero = case, host, zero
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
            zero=self.zero,
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
        recorder, *runners = (
            Runner(p, self._pipeline(), Dynamism(case, steps, warm_up)) for p in ("recorder", *policies)
        )
        recorder.pipeline.meter.enabled = True
        history: list[list[LayerCost]] = []
        optimizer_s: list[float] = []
        between_s: list[float] = []
        for step in range(warm_up + steps):
            if step == warm_up:
                self._calibrate(between_s[1:] or between_s)
                self._start(runners, smoothed(history[1:] or history, warm_up))
                # what lives until the end need not be looked through by a collection in the middle of some step
                gc.collect()
                gc.freeze()
            inputs, target = case.batch(self.corpus, step, recorder.pipeline.replica, self.replicas)
            with self._changing(recorder, step):
                history.append(self._record(recorder, inputs, target, optimizer_s))
            between_s.append(recorder.pipeline.times().between_s)
            for runner in rotated(runners, step):
                with self._changing(runner, step):
                    if step >= warm_up and runner.policy == ORACLE:
                        self._follow(runner, smoothed(history))
                    self._step(runner, inputs, target, step >= warm_up)
            if self.host.rank == 0 and step % 8 == 0:
                self.host.say(f"step {step}: loss {recorder.loss:.3f}, changes {len(recorder.dynamism.history)}")
        check_alike([recorder, *runners])
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
            "history": recorder.dynamism.history,
            "seed": case.seed,
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
            if runner.policy in (*STILL, *SWINGING):
                start = maps_of(self.case.layers, self.ranks)[int(runner.policy == STILL[1])]
            else:
                start = start_map(runner.policy, costs, self.ranks, self.case.microbatches, self.transfer_s)
            done = pipeline.rebuild(start, durations=self._durations(costs, start))
            if runner.policy in SWINGING:
                runner.controller = Swing(pipeline, within=runner.policy == SWINGING[1], timeout_s=LIMIT_S)
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
            runner.controller = Controller(pipeline, config=config)

    def _durations(self, costs: Sequence[LayerCost], stage_map: StageMap) -> Durations:
        return Durations.of_stages(costs, stage_map, transfer_s=self.transfer_s)

    @contextmanager
    def _changing(self, runner: Runner, step: int) -> Iterator[None]:
        """The copy's own rules, before a step and after it, by what it has trained; no policy's cost."""
        pipeline, dynamism = runner.pipeline, runner.dynamism
        # replicas are pruned alike, each by itself; gradients may lie in any of them
        dynamism.before(pipeline.model.units, pipeline.layers, step, pipeline.groups.collective, pipeline.optimizer)
        yield
        dynamism.after(pipeline.model.units, pipeline.layers, step, runner.loss, pipeline.collective)

    def _follow(self, runner: Runner, costs: list[LayerCost]) -> None:
        """The oracle's move, which costs it nothing."""
        current = runner.pipeline.stage_map
        best = best_map(costs, self.ranks, self.case.microbatches, current, self.transfer_s)
        if best != current:
            runner.pipeline.rebuild(best, durations=self._durations(costs, best))

    def _record(
        self, recorder: Runner, inputs: torch.Tensor, target: torch.Tensor, optimizer_s: list[float]
    ) -> list[LayerCost]:
        pipeline = recorder.pipeline
        pipeline.meter.reset()
        dist.barrier()
        recorder.loss = pipeline.step(inputs, target)
        optimizer_s.append(self._optimizer_s(pipeline))
        return pipeline.measure()

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
        runner.loss = (runner.controller or runner.pipeline).step(inputs, target)
        ended = time.perf_counter()
        if not counted:
            return
        runner.measured_steps += int(runner.pipeline.meter.enabled)
        before_s, after_s = (o.measure_s + o.decide_s + o.move_s for o in (before, runner.overhead()))
        runner.step_s.append(ended - began)
        runner.balance_s.append(after_s - before_s)
        runner.losses.append(runner.loss)
        runner.maps.append(stage_map)

    def _result(self, runner: Runner) -> dict[str, Any]:
        overhead = runner.overhead()
        decisions = runner.controller.decisions if isinstance(runner.controller, Controller) else []
        moves = runner.controller.moves if isinstance(runner.controller, Swing) else []
        even = StageMap.even(self.case.layers, self.ranks)
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
            "even": [m == even for m in runner.maps],
            "early_bytes": sum(m.early_bytes for m in moves),
            "bytes": sum(m.sent_bytes + m.received_bytes for m in moves),
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
