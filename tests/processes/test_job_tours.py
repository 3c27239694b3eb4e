"""Tours by chance: a job goes through maps, layouts, slices and files as a seed says, equal to one process."""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

import prophet
from pipeline_balance import ControllerConfig, elastic
from pipeline_balance.control.decide import MoveCost
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from prophet.errors import SpecError
from tests.helpers import sliced_layers as own
from tests.helpers.elastic_experts import whole
from tests.helpers.elastic_jobs import same
from tests.helpers.launch import run_gloo
from tests.helpers.releases import needs_orders
from tests.helpers.sliced_experts import layers

RANKS, CHANGES, UNITS = 4, 8, 6
HERE = 5  # the usual lane's seed: every kind of change, ep, zero, v, stages, an order, slices, spare ranks


def layouts() -> list[Parallelism]:
    """All that a model with experts trains in on four processes, slices of whole tokens."""
    found = []
    sizes = itertools.product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 4), (0, 1), (1, 2), (1, 2, 4, 6))
    for pp, dp, ep, zero, v, slices in sizes:
        try:
            layout = Parallelism(pp=pp, dp=dp, ep=ep, zero=zero, v=v, slices=slices)
            layout.check_trainable(experts=True)
            layout.stage_map(UNITS)
        except SpecError:
            continue
        if layout.ranks <= RANKS and own.PARTS % dp == 0:  # else dropout draws others
            found.append(layout)
    return found


def drawn(chance: random.Random) -> Parallelism:
    """A layout, half of the time with stages and an order of ranks by chance."""
    layout = chance.choice(layouts())
    stages = None
    if layout.v == 1 and chance.random() < 0.5:
        cuts = sorted(chance.sample(range(1, UNITS), layout.pp - 1))
        stages = tuple(b - a for a, b in itertools.pairwise((0, *cuts, UNITS)))
    order = tuple(chance.sample(range(RANKS), layout.ranks)) if stages is not None else None
    return dataclasses.replace(layout, stages=stages, order=order)


def start(layout: Parallelism, updates: int) -> Job:
    stages = ControllerConfig(
        every_steps=1, measure_steps=1, min_gain=0.0, horizon_steps=9, move_cost=MoveCost(fixed_s=0.0)
    )
    return Job(
        lambda: layers(elastic.one_rank()),
        own.adam,
        layout,
        data=[own.batch(update, 0) for update in range(updates)],
        loss_fn=own.loss_fn,
        counted=own.counted,
        microbatches=own.PARTS,
        seed=own.SEED,
        timeout_s=60.0,
        balance_stages=stages,
        balance_experts=prophet.EngineConfig(),
    )


def _tour(rank: int, size: int, seed: int, folder: str) -> dict[str, Any]:
    chance = random.Random(seed)
    job = start(drawn(chance), 2 * CHANGES + 2)
    losses, went, changed = [], [str(job.layout)], []

    def steps() -> None:
        for _ in range(2):
            losses.append((job.layout.slices, job.step(max_norm=own.MAX_NORM)))

    steps()
    for _ in range(CHANGES):
        kind = chance.choice(["switch", "switch", "in-place", "ahead", "files"])
        layout = drawn(chance)
        went.append(f"{kind} {layout}")
        if kind == "ahead":
            job.prepare(layout)
            losses.append((job.layout.slices, job.step(max_norm=own.MAX_NORM)))
        before = whole(job)
        if kind == "files":
            job.save(folder)
            job.close()
            job = start(layout, 2 * CHANGES + 2)
            job.load(folder)
        elif kind == "ahead":
            job.switch()
        else:
            job.switch(layout, mode="safe" if kind == "switch" else "in-place")
        if not same(before, whole(job)):
            changed.append(went[-1])
        losses.append((job.layout.slices, job.step(max_norm=own.MAX_NORM)))
        if len(losses) > 2 * CHANGES:
            break
    job.close()
    return {"losses": losses, "went": went, "changed": changed}


@needs_orders
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed == HERE else pytest.mark.slow) for seed in range(30)]
)
def test_a_tour_by_chance(seed: int, tmp_path: Path) -> None:
    results = run_gloo(_tour, RANKS, seed, str(tmp_path), timeout_s=240.0)
    slices = [n for n, _ in results[0]["losses"]]
    alone, _ = own.one_process(len(slices), slices, 1, layers(elastic.one_rank()))
    for result in results:
        assert result["changed"] == [], result["went"]
        assert [loss for _, loss in result["losses"]] == pytest.approx(alone, rel=1e-10), result["went"]
