"""python -m benchmarks.pipeline.repacked --json out.json

What another number of microbatches gains once the layers have moved to half the ranks. Every policy has a copy of the
model and trains once at every step, in turns. All copies are re-packed at the same step. One keeps its number of
microbatches, one lets the controller choose, and the others have a number each from then on.

Shape legend: L layers, M microbatches.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster.host import Host
from benchmarks.cluster.profiles import ProfileError
from benchmarks.cluster.testbed import TestbedError, TestbedUnavailable, unwound_when_ended
from benchmarks.common import chosen, environment, write_json
from benchmarks.measure import rotated
from benchmarks.pacing import wake_promptly
from benchmarks.pipeline.__main__ import SLOWDOWN, paced_hosts
from benchmarks.pipeline.cases import Case
from benchmarks.pipeline.pacing import PacedAdam, PacedMeter, paced_loss
from benchmarks.tables import cell, columns
from pipeline_balance.control.controller import Controller, ControllerConfig
from pipeline_balance.dynamics.gpt import Block, GPTShape
from pipeline_balance.dynamics.gpt import loss as loss_fn
from pipeline_balance.maps.partition import partition_by_time
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import RankLimits
from prophet.demo.text import VOCABULARY, Corpus, load_corpus
from prophet.machine.memory import keep_memory

GIVEN, CHOSEN = "given", "chosen"
COLUMNS = ("policy", "microbatches", "step_s", "of_given", "least", "most", "predicted", "error")
CORPUS_BYTES = 1 << 20
MEASURED, STRETCHES = 3, 4
"""Steps that the controller measures at a time, and how often it does."""


def case(args: Mapping[str, Any]) -> Case:
    """A GPT of equal blocks on few tokens, whose layers do not change."""
    dim, tokens = int(args["dim"]), int(args["tokens"])
    shape = GPTShape(vocabulary=VOCABULARY, dim=dim, heads=4, blocks=int(args["blocks"]), context=tokens)
    return Case(
        name="repacked",
        shape=shape,
        tokens=tokens,
        microbatches=int(args["microbatches"]),
        make_block=lambda _: Block(dim, 4),
        every_steps=1,
        seed=int(args["repetition"]),
    )


@dataclasses.dataclass
class _Copy:
    """One policy's copy of the model, and what its steps took."""

    policy: str
    pipeline: ElasticPipeline
    controller: Controller | None = None
    step_s: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)


def run(host: Host, args: Mapping[str, Any]) -> dict[str, Any]:
    """What one host does; returns its figures."""
    wake_promptly()
    keep_memory()
    with host.process_group(timeout_s=args["timeout_s"]):
        return trained(host, args)


def trained(host: Host, args: Mapping[str, Any]) -> dict[str, Any]:
    """Train all copies in turns, on a group that has been made."""
    model, pace = case(args), host.pace()
    corpus: Corpus = load_corpus(max_bytes=CORPUS_BYTES)
    warm_up, steps = int(args["warm_up"]), int(args["steps"])

    def optimizer(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        made = PacedAdam(named, lr=model.learning_rate)
        made.pace = pace
        return made

    def pipeline() -> ElasticPipeline:
        return ElasticPipeline.from_modules(
            model.modules(),
            paced_loss(pace, loss_fn),
            make_optimizer=optimizer,
            microbatches=model.microbatches,
            meter=PacedMeter(pace),
        )

    copies = [_Copy(p, pipeline()) for p in (GIVEN, CHOSEN, *map(str, args["numbers"]))]
    # of the trial that the controller makes, and of the step after it
    counted = warm_up + MEASURED * STRETCHES + 1
    for step in range(counted + steps):
        if step == warm_up:
            _repack(copies, host.hosts // 2)
        if step == counted:
            gc.collect()
            gc.freeze()
        copies[0].pipeline.meter.enabled = step < warm_up
        batch = model.batch(corpus, step)
        for copy in rotated(copies, step):
            dist.barrier()
            began = time.perf_counter()
            copy.losses.append((copy.controller or copy.pipeline).step(*batch))
            if step >= counted:
                copy.step_s.append(time.perf_counter() - began)
        if host.rank == 0 and step % 8 == 0:
            host.say(f"step {step}: loss {copies[0].losses[-1]:.3f}")
    gc.unfreeze()
    return {"policies": {copy.policy: _result(copy) for copy in copies}}


def _repack(copies: Sequence[_Copy], ranks: int) -> None:
    """All copies go to the first `ranks` ranks, cut by the times that the first copy has shown."""
    first = copies[0].pipeline
    costs = first.measure()
    best = partition_by_time(costs, RankLimits.uniform(ranks), microbatches=first.config.microbatches)
    for copy in copies:
        copy.pipeline.rebuild(best, durations=Durations.of_stages(costs, best))
        if copy.policy == CHOSEN:
            # decides nothing else in the steps that count
            config = ControllerConfig(every_steps=1 << 20, measure_steps=MEASURED)
            copy.controller = Controller(copy.pipeline, config=config)
            copy.controller.choose_microbatches()
        elif copy.policy != GIVEN:
            copy.pipeline.change_microbatches(int(copy.policy))


def _result(copy: _Copy) -> dict[str, Any]:
    choices = copy.controller.report.microbatches if copy.controller is not None else ()
    return {
        "step_s": copy.step_s,
        "losses": copy.losses,
        "microbatches": copy.pipeline.config.microbatches,
        "choices": [dataclasses.asdict(c) for c in choices],
    }


def rows_of(repetitions: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """One row per policy, over all repetitions, each a list of the hosts' figures.

    `step_s` is the median of the slowest host's steps. `of_given`, with its `least` and `most`, is that over the same
    of the copy that keeps its number. `predicted` is what the controller expected that to be, give or take `error`.
    """

    def step_s(hosts: Sequence[Mapping[str, Any]], policy: str) -> float:
        return statistics.median(map(max, zip(*(h["policies"][policy]["step_s"] for h in hosts), strict=True)))

    rows = []
    for policy in repetitions[0][0]["policies"]:
        found = [hosts[0]["policies"][policy] for hosts in repetitions]
        ratios = [step_s(hosts, policy) / step_s(hosts, GIVEN) for hosts in repetitions]
        made = [one["choices"][-1] for one in found if one["choices"]]
        # where nothing was gained, nothing was changed
        predicted = [1 - c["gain_s"] / c["step_s"] if c["after"] != c["before"] else 1.0 for c in made]
        rows.append(
            {
                "policy": policy,
                "microbatches": [one["microbatches"] for one in found],
                "step_s": statistics.median(step_s(hosts, policy) for hosts in repetitions),
                "of_given": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "predicted": statistics.median(predicted) if predicted else None,
                "error": max((c["error_s"] / c["step_s"] for c in made if c["step_s"]), default=None),
                "choices": made,
                "losses": found[0]["losses"],
            }
        )
    return rows


def missed(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the controller's choice misses: no step longer than before, and a gain where one was predicted."""
    given, row = (next(r for r in rows if r["policy"] == name) for name in (GIVEN, CHOSEN))
    if row["microbatches"] == given["microbatches"]:
        # copies that run the same differ by the machine's noise alone
        return ""
    most = 0.97 if row["predicted"] is not None and row["predicted"] < 0.97 else 1.0
    return "" if row["of_given"] <= most else f"{CHOSEN}: {row['of_given']:.3f} of {GIVEN}, needs {most}"


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.pipeline.repacked", description=__doc__.split("\n")[0])
    p.add_argument("--json", type=Path, help="file for the rows")
    p.add_argument("--hosts", type=int, default=4, help="ranks before; half of them afterwards")
    p.add_argument("--blocks", type=int, default=14, help="blocks of the model")
    p.add_argument("--dim", type=int, default=96)
    p.add_argument("--tokens", type=int, default=62, help="tokens of a row")
    p.add_argument("--microbatches", type=int, default=8, help="as given, of one row each")
    p.add_argument("--numbers", default="4,2", help="other numbers of microbatches that are measured, too")
    p.add_argument("--steps", type=int, default=40, help="counted steps")
    p.add_argument("--repetitions", type=int, default=3)
    p.add_argument("--warm-up", type=int, default=4)
    p.add_argument("--slowdown", type=float, default=SLOWDOWN, help="how much slower a host is than the machine")
    p.add_argument("--link-mbit-per-s", type=float, default=1000.0)
    p.add_argument("--timeout-s", type=float, default=60.0, help="limit on every wait between hosts")
    p.add_argument("--limit-s", type=float, default=600.0, help="limit on each repetition")
    args = p.parse_args(argv)
    try:
        numbers = [int(n) for n in args.numbers.split(",") if n]
    except ValueError:
        p.error(f"numbers must be whole, got {args.numbers}")
    if args.hosts < 2 or any(not 1 <= n <= args.microbatches for n in numbers):
        p.error(f"needs two hosts, and numbers from 1 to {args.microbatches}")
    names = ("hosts", "blocks", "dim", "tokens", "microbatches", "steps", "warm_up", "slowdown", "link_mbit_per_s")
    job = chosen(args, *names, "timeout_s") | {"numbers": numbers}
    found = []
    try:
        for repetition in range(args.repetitions):
            with unwound_when_ended(), paced_hosts("repacked", args.hosts, args) as bed:
                target = "benchmarks.pipeline.repacked:run"
                found.append(bed.run(target, job | {"repetition": repetition}, timeout_s=args.limit_s))
    except (ProfileError, TestbedUnavailable, TestbedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = rows_of(found)
    print(columns(COLUMNS, [[cell(row.get(name), 4) for name in COLUMNS] for row in rows]))
    print(missed(rows) or "all targets met")
    print("\n".join(c["reason"] for row in rows for c in row["choices"]))
    if args.json:
        write_json(args.json, {**job, "environment": environment(), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
