"""One process without a pipeline: what every layer takes at every step, and what the simulator makes of it.

Shape legend: L layers, P ranks, M microbatches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.pacing import Pace
from benchmarks.pipeline.cases import Case, Dynamism
from benchmarks.pipeline.policies import (
    DYNAMIC,
    ORACLE,
    best_map,
    controller_config,
    simulated_step_s,
    smoothed,
    start_map,
)
from pipeline_balance.control.learn import Learner
from pipeline_balance.dynamics.gpt import loss as loss_fn
from pipeline_balance.pipeline.measure.meter import Meter, local_costs
from pipeline_balance.pipeline.model.added_loss import added_losses
from pipeline_balance.pipeline.run.generators import unit_seed
from pipeline_balance.spec import LayerCost, RankLimits, StageMap, moved_bytes
from prophet.demo.text import Corpus
from prophet.ranks.threads import ThreadWorld


@dataclass(frozen=True, kw_only=True)
class Recording:
    """costs: [steps][L]. losses: [steps]. optimizer_s_per_byte: of trainable parameters. frozen: prefix by step."""

    costs: list[list[LayerCost]]
    losses: list[float]
    optimizer_s_per_byte: float
    frozen: list[int]


def record(case: Case, corpus: Corpus, steps: int, *, warm_up: int = 0, slowdown: float = 1.0) -> Recording:
    """Train `case` alone for `warm_up` steps and the `steps` of its life.

    Times are processor seconds, `slowdown` times as long.
    """
    meter = Meter(work_clock=Pace(slowdown).seconds)
    layers = dict(enumerate(case.modules()))
    optimizer = case.optimizer([(f"{i}.{n}", p) for i, m in layers.items() for n, p in m.named_parameters()])
    dynamism, alone = Dynamism(case, steps, warm_up), ThreadWorld(1).collective(0)
    units = list(layers.values())
    costs, losses, prefixes, optimizer_s = [], [], [], []
    for step in range(warm_up + steps):
        prefixes.append(dynamism.freezer.frozen)
        dynamism.before(units, layers, step, alone, optimizer)
        meter.reset()
        optimizer.zero_grad()
        inputs, target = case.batch(corpus, step)
        parts = []
        cut = zip(inputs.chunk(case.microbatches), target.chunk(case.microbatches), strict=True)
        for number, (ids, wanted) in enumerate(cut):
            with added_losses(1 / case.microbatches) as added:
                x = ids
                for i, layer in layers.items():
                    torch.manual_seed(unit_seed(case.seed, i, step, number))
                    (x,) = meter.run_unit(i, layer, lambda layer=layer, x=x: (layer(x),), (x,))  # type: ignore[misc]
                value = meter.timed(lambda x=x, wanted=wanted: loss_fn(x, wanted))  # type: ignore[misc]
                meter.run_action("B", 0, (value / case.microbatches).backward)
            parts.append(float(value.detach()) + sum(float(v) for v in added.values))
        began = meter.work_s()
        optimizer.step()
        optimizer_s.append(meter.work_s() - began)
        state = {id(p): entries for p, entries in optimizer.state.items()}
        costs.append(list(local_costs(layers, {0: range(case.layers)}, meter, state).values()))
        losses.append(sum(parts) / len(parts))
        dynamism.after(units, layers, step, losses[-1], alone)
    return Recording(
        costs=costs,
        losses=losses,
        optimizer_s_per_byte=optimizer_rate(costs, optimizer_s),
        frozen=prefixes,
    )


def optimizer_rate(costs: Sequence[Sequence[LayerCost]], seconds: Sequence[float]) -> float:
    """Seconds per byte of trainable parameters, by the median step; `costs` [steps][L], `seconds` [steps] of the whole
    optimizer.
    """
    rates = [s / size for s, now in zip(seconds, costs, strict=True) if (size := sum(c.gradient_bytes for c in now))]
    return statistics.median(rates) if rates else 0.0


def simulate_policy(
    policy: str, case: Case, recording: Recording, *, ranks: int, warm_up: int, transfer_s: float, bytes_per_s: float
) -> dict[str, Any]:
    """What a rank of the emulated hosts would report, by the simulator alone; decisions are really made and timed."""
    limits = RankLimits.uniform(ranks)
    current = start_map(policy, smoothed(recording.costs[:warm_up]), ranks, case.microbatches, transfer_s)
    config = controller_config(policy, case.every_steps, transfer_s=transfer_s, bytes_per_s=bytes_per_s, fixed_s=0.05)
    learner = Learner(limits, case.microbatches, config)
    frozen = 0
    step_s: list[float] = []
    maps: list[StageMap] = []
    decide_s = move_s = 0.0
    rebalances = sent = looks = 0
    for step in range(warm_up, len(recording.costs)):
        costs = recording.costs[step]
        if policy == ORACLE:
            seen = smoothed(recording.costs[: step + 1])
            current = best_map(seen, ranks, case.microbatches, current, transfer_s)
        maps.append(current)
        seconds = simulated_step_s(
            costs,
            current,
            microbatches=case.microbatches,
            transfer_s=transfer_s,
            optimizer_s_per_byte=recording.optimizer_s_per_byte,
        )
        foreseen = recording.frozen[step] != frozen and looks > 0
        if recording.frozen[step] != frozen:
            frozen = recording.frozen[step]
            learner.timer.loads_changed(known=foreseen)
        due = learner.timer.due
        learner.timer.step += 1
        if policy in DYNAMIC and due:
            began = time.perf_counter()
            # beside a step: what frozen layers no longer compute is known at once, all else is of the steps before
            known = recording.costs[step : step + 1] if foreseen else recording.costs[:step]
            made = learner.decide(smoothed(known, config.measure_steps), current)
            learner.learn(made)
            if foreseen:
                learner.timer.loads_changed()
            looks += 1
            # beside the step, which gets no longer by it
            decide_s += time.perf_counter() - began
            if made.move:
                rebalances += 1
                sent += moved_bytes(costs, current, made.best)
                move_s += made.move_s
                seconds += made.move_s
                current = made.best
        step_s.append(seconds)
    return {
        "step_s": step_s,
        "losses": recording.losses[warm_up:],
        "maps": [[list(m.boundaries), list(m.ranks)] for m in maps],
        "overhead": {"measure": 0.0, "decide": decide_s, "move": move_s, "total": sum(step_s)},
        "rebalances": rebalances,
        "moved_bytes": sent,
        "looks": looks,
        "measured_steps": 0,
    }
