"""python -m benchmarks.pipeline.slow_link --json out.json

One link gets slower in mid-run. The last host's link to all others is the one to the stage before it, so the layers
have to leave the last two stages. Every policy has a copy of the model, and trains once at every step, in turns.

Shape legend: L layers, P ranks, M microbatches.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.cluster.host import Host
from benchmarks.cluster.profiles import ProfileError
from benchmarks.cluster.testbed import Running, Testbed, TestbedError, TestbedUnavailable, unwound_when_ended
from benchmarks.common import chosen, environment, write_json
from benchmarks.measure import rotated
from benchmarks.pacing import wake_promptly
from benchmarks.pipeline.__main__ import SLOWDOWN, paced_hosts
from benchmarks.pipeline.cases import Case
from benchmarks.pipeline.pacing import PacedAdam, PacedMeter, paced_loss
from benchmarks.pipeline.policies import simulated_step_s, smoothed
from benchmarks.tables import cell, columns
from pipeline_balance.control.controller import Controller, ControllerConfig, MoveCost
from pipeline_balance.dynamics.gpt import Block, GPTShape
from pipeline_balance.dynamics.gpt import loss as loss_fn
from pipeline_balance.maps.compare import predicted_makespan_s
from pipeline_balance.maps.partition import partition_by_time
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import LayerCost, RankLimits, StageMap
from prophet.demo.text import VOCABULARY, Corpus, load_corpus
from prophet.machine.memory import keep_memory
from prophet.spec import FloatArray

STATIC, ORACLE = "optimal-at-start", "oracle"
POLICIES = (STATIC, "partition", "diffusion", ORACLE)
COLUMNS = (
    "policy",
    "before_s",
    "after_s",
    "of_oracle",
    "decisions_until_moved",
    "map_before",
    "map_after",
    "simulated_before",
    "simulated_after",
)
EVERY = 4
"""Steps between two decisions."""
CORPUS_BYTES = 1 << 20
# Until a rate has come into force, and for the hosts to hear of it
PAUSE_S, LIMIT_S = 1.0, 60.0


def case(blocks: int, microbatches: int) -> Case:
    """A GPT of equal blocks, whose layers do not change."""
    shape = GPTShape(vocabulary=VOCABULARY, dim=128, heads=4, blocks=blocks, context=248)
    return Case(
        name="slow-link",
        shape=shape,
        tokens=248,
        microbatches=microbatches,
        make_block=lambda _: Block(128, 4),
        every_steps=EVERY,
    )


@dataclasses.dataclass
class _Copy:
    """One policy's copy of the model, and what its steps took."""

    policy: str
    pipeline: ElasticPipeline
    controller: Controller | None = None
    step_s: list[float] = dataclasses.field(default_factory=list)
    maps: list[StageMap] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)


def run(host: Host, args: Mapping[str, Any]) -> dict[str, Any]:
    """What one host does; returns its figures."""
    wake_promptly()
    keep_memory()
    with host.process_group(timeout_s=args["timeout_s"]):
        return Bench(host, args).run()


class Bench:
    """One host's side."""

    def __init__(self, host: Host, args: Mapping[str, Any]) -> None:
        self.host, self.args = host, args
        self.case = case(int(args["blocks"]), int(args["microbatches"]))
        self.pace, self.replicas = host.pace(), int(args["replicas"])
        self.ranks = host.hosts // self.replicas
        self.corpus: Corpus = load_corpus(max_bytes=CORPUS_BYTES)
        self.limits = RankLimits.uniform(self.ranks)
        self.optimizer_s: list[float] = []
        self.between_s: list[float] = []
        self.around_s: list[float] = []

    def run(self) -> dict[str, Any]:
        recorder = self._pipeline()
        copies = [_Copy(p, self._pipeline()) for p in self.args["policies"]]
        warm_up, each, factor = (int(self.args[name]) for name in ("warm_up", "steps", "factor"))
        history: list[list[LayerCost]] = []
        links: list[FloatArray] = []
        truth: FloatArray = np.zeros((self.ranks, self.ranks))
        for step in range(warm_up + 2 * each):
            if step == warm_up:
                # what the oracle is told later is this, and the factor by which the link gets slower
                truth = np.nanmedian(np.stack(links[1:] or links), axis=0)
                truth = np.where(np.isnan(truth), np.nanmedian(truth), truth)
                self._start(copies, smoothed(history[1:] or history, warm_up), truth)
                gc.collect()
                gc.freeze()
            if step == warm_up + each and factor > 1:
                self._slow_down()
                truth[-1, -2] = truth[-2, -1] = factor * truth[-1, -2]
            batch = self.case.batch(self.corpus, step, recorder.replica, self.replicas)
            recorder.meter.reset()
            dist.barrier()
            began = time.perf_counter()
            recorder.step(*batch)
            took_s = time.perf_counter() - began
            optimizer = recorder.optimizer
            assert isinstance(optimizer, PacedAdam)
            times = recorder.times()
            self.optimizer_s.append(optimizer.took_s)
            self.between_s.append(times.between_s)
            self.around_s.append(took_s - times.step_s - optimizer.took_s)
            history.append(recorder.measure())
            links.append(recorder.measure_links().transfer_s)
            for copy in rotated(copies, step):
                if copy.policy == ORACLE and step >= warm_up:
                    self._follow(copy, smoothed(history), truth)
                self._step(copy, batch, counted=step >= warm_up)
            if self.host.rank == 0 and step % 4 == 0:
                self.host.say(f"step {step}: links {np.round(1e3 * links[-1].ravel(), 1).tolist()} ms")
        gc.unfreeze()
        figures = (self.between_s, self.optimizer_s, self.around_s)
        shared = torch.tensor([statistics.median(x) for x in figures])
        # those that are done early wait there for the slowest one
        least = shared.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(shared, dist.ReduceOp.SUM)
        held = sum(c.gradient_bytes for c in history[-1]) * self.replicas
        return {
            "costs": [[dataclasses.asdict(c) for c in row] for row in history[warm_up:]],
            "links": [x.tolist() for x in links[warm_up:]],
            "between_s": float(least[0]),
            # with replicas the wait for means is in it, which the simulator knows
            "around_s": float(least[2]) if self.replicas == 1 else 0.0,
            "optimizer_s_per_byte": float(shared[1]) / held,
            "policies": {c.policy: self._result(c) for c in copies},
        }

    def _pipeline(self) -> ElasticPipeline:
        pipeline = ElasticPipeline.from_modules(
            self.case.modules(),
            paced_loss(self.pace, loss_fn),
            make_optimizer=self._optimizer,
            microbatches=int(self.args["microbatches"]),
            replicas=self.replicas,
            meter=PacedMeter(self.pace),
        )
        pipeline.meter.enabled = True
        return pipeline

    def _optimizer(self, named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        optimizer = PacedAdam(named, lr=self.case.learning_rate)
        optimizer.pace = self.pace
        return optimizer

    def _start(self, copies: Sequence[_Copy], costs: Sequence[LayerCost], truth: FloatArray) -> None:
        """All go to the best map for links as they are."""
        for copy in copies:
            self._follow(copy, costs, truth)
            if copy.policy in (STATIC, ORACLE):
                continue
            config = ControllerConfig(
                every_steps=EVERY,
                policy="diffusion" if copy.policy == "diffusion" else "partition",
                move_cost=MoveCost(fixed_s=0.1, bytes_per_s=1e6 * float(self.args["link_mbit_per_s"]) / 8),
                horizon_steps=100,
            )
            copy.controller = Controller(copy.pipeline, config=config)

    def _follow(self, copy: _Copy, costs: Sequence[LayerCost], truth: FloatArray) -> None:
        """Go to the map with the least simulated step, for free."""
        known: dict[str, Any] = {"microbatches": int(self.args["microbatches"]), "transfer_s": truth}
        now = copy.pipeline.stage_map
        best = climbed(costs, self.limits, now, **known)
        if best != now:
            copy.pipeline.rebuild(best, durations=Durations.of_stages(costs, best, transfer_s=truth))

    def _slow_down(self) -> None:
        """All wait until the testbed has made the link slow."""
        if self.host.rank == 0:
            self.host.say("the link")
        deadline = time.monotonic() + LIMIT_S
        while not Path(self.args["slow"]).exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the link was not made slow")
            time.sleep(0.01)
        dist.barrier()

    def _step(self, copy: _Copy, batch: tuple[torch.Tensor, torch.Tensor], *, counted: bool) -> None:
        stage_map = copy.pipeline.stage_map
        dist.barrier()
        began = time.perf_counter()
        loss = (copy.controller or copy.pipeline).step(*batch)
        if counted:
            copy.step_s.append(time.perf_counter() - began)
            copy.maps.append(stage_map)
            copy.losses.append(loss)

    def _result(self, copy: _Copy) -> dict[str, Any]:
        return {
            "step_s": copy.step_s,
            "maps": [list(m.boundaries) for m in copy.maps],
            "losses": copy.losses,
            "reasons": [d.reason for d in copy.controller.decisions] if copy.controller else [],
        }


def climbed(
    costs: Sequence[LayerCost],
    limits: Sequence[RankLimits],
    start: StageMap,
    *,
    microbatches: int,
    transfer_s: FloatArray,
) -> StageMap:
    """The best map that shifts of single boundaries reach, by the simulator; `start` unless another is 0.3 % better."""

    def step_s(stage_map: StageMap) -> float:
        return predicted_makespan_s(costs, stage_map, limits, microbatches=microbatches, transfer_s=transfer_s)

    tried = [
        start,
        partition_by_time(costs, limits, microbatches=microbatches),
        partition_by_time(costs, limits, microbatches=microbatches, transfer_s=transfer_s),
    ]
    best = min(tried, key=step_s)
    while (near := min(shifted(best), key=step_s, default=best)) != best and step_s(near) < step_s(best):
        best = near
    return best if step_s(best) < (1 - 1 / 300) * step_s(start) else start


def shifted(stage_map: StageMap) -> Iterator[StageMap]:
    """Every map with one boundary a layer further up or down."""
    bounds = stage_map.boundaries
    for k in range(1, len(bounds) - 1):
        for cut in (bounds[k] - 1, bounds[k] + 1):
            if bounds[k - 1] < cut < bounds[k + 1]:
                yield StageMap.contiguous((*bounds[:k], cut, *bounds[k + 1 :]))


def rows_of(results: Sequence[Mapping[str, Any]], steps: int, microbatches: int) -> list[dict[str, Any]]:
    """One row per policy.

    `before_s` and `after_s` are medians of the slowest host's steps, the first without the decision that begins it and
    the second of the last half of the steps with the slow link. `simulated_` is the simulated step over the measured.
    """
    first = results[0]
    costs = [[LayerCost(**c) for c in row] for row in first["costs"]]
    known = {"microbatches": microbatches, "optimizer_s_per_byte": first["optimizer_s_per_byte"]}
    known |= {"between_s": first["between_s"], "around_s": first["around_s"]}
    rows = []
    for policy in first["policies"]:
        step_s = np.max([r["policies"][policy]["step_s"] for r in results], axis=0)
        maps = [StageMap.contiguous(b) for b in first["policies"][policy]["maps"]]
        moved = next((i for i in range(steps, 2 * steps) if maps[i] != maps[steps - 1]), None)
        row: dict[str, Any] = {"policy": policy, "step_s": step_s.tolist(), "maps": [list(m.boundaries) for m in maps]}
        # a move is made when the step after its decision begins
        row["decisions_until_moved"] = None if moved is None else -(-(moved - steps) // EVERY)
        row["reasons"] = first["policies"][policy]["reasons"]
        for name, part in (("before", range(steps)), ("after", range(steps + steps // 2, 2 * steps))):
            row[f"{name}_s"] = float(np.median(step_s[part.start : part.stop]))
            row[f"map_{name}"] = list(maps[part[-1]].boundaries)
            said = []
            for i in part:
                links = np.array(first["links"][i])
                # what the runtime takes before it sends and after it has received is in no link's time
                filled = np.where(np.isnan(links), np.nanmedian(links), links) + first["between_s"]
                said.append(simulated_step_s(costs[i], maps[i], transfer_s=filled, **known))
            row[f"simulated_{name}"] = float(np.median(said)) / row[f"{name}_s"]
        rows.append(row)
    oracle = next((r["after_s"] for r in rows if r["policy"] == ORACLE), None)
    for row in rows:
        row["of_oracle"] = row["after_s"] / oracle if oracle else None
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.pipeline.slow_link", description=__doc__.split("\n")[0])
    p.add_argument("--json", type=Path, help="file for the rows")
    p.add_argument("--policies", default=",".join(POLICIES), help=f"comma-separated, of {', '.join(POLICIES)}")
    p.add_argument("--hosts", type=int, default=4)
    p.add_argument("--replicas", type=int, default=1, help="copies of the pipeline, which share the hosts")
    p.add_argument("--blocks", type=int, default=24, help="blocks of the model")
    p.add_argument("--microbatches", type=int, default=8)
    p.add_argument("--steps", type=int, default=24, help="counted steps with fast links, and as many with a slow one")
    p.add_argument("--warm-up", type=int, default=4)
    p.add_argument("--factor", type=int, default=4, help="how much slower the link gets (1: it stays)")
    p.add_argument("--slowdown", type=float, default=SLOWDOWN, help="how much slower a host is than the machine")
    p.add_argument("--link-mbit-per-s", type=float, default=100.0)
    p.add_argument("--timeout-s", type=float, default=60.0, help="limit on every wait between hosts")
    p.add_argument("--limit-s", type=float, default=900.0, help="limit on the whole run")
    args = p.parse_args(argv)
    policies = [n for n in args.policies.split(",") if n]
    if set(policies) - set(POLICIES) or not policies:
        p.error(f"policies must be of {', '.join(POLICIES)}, got {args.policies}")
    try:
        with unwound_when_ended(), paced_hosts("slow-link", args.hosts, args) as bed:
            found = measured(bed, args, policies)
    except (ProfileError, TestbedUnavailable, TestbedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = rows_of(found, args.steps, args.microbatches)
    print(columns(COLUMNS, [[cell(row.get(name), 4) for name in COLUMNS] for row in rows]))
    if args.json:
        write_json(args.json, {**vars_of(args), "environment": environment(), "rows": rows, "links": found[0]["links"]})
    return 0


def vars_of(args: argparse.Namespace) -> dict[str, Any]:
    return chosen(args, "hosts", "replicas", "blocks", "microbatches", "steps", "factor", "slowdown", "link_mbit_per_s")


def measured(bed: Testbed, args: argparse.Namespace, policies: Sequence[str]) -> list[dict[str, Any]]:
    """Run it on the hosts; the last one's link gets slow when they have come so far."""
    slow = bed.scratch / "slow"

    def slow_down(running: Running) -> None:
        if args.factor > 1:
            running.wait_for(0, "the link", timeout_s=args.limit_s)
            bed.set_rate(args.hosts - 1, args.link_mbit_per_s / args.factor)
            time.sleep(PAUSE_S)
            slow.touch()

    job = vars_of(args) | chosen(args, "warm_up", "timeout_s") | {"policies": list(policies), "slow": str(slow)}
    target = "benchmarks.pipeline.slow_link:run"
    return bed.run(target, job, timeout_s=args.limit_s, while_running=slow_down)


if __name__ == "__main__":
    sys.exit(main())
