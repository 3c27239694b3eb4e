"""Whole switches of a training job, and how much of their preparation hides behind steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from typing import Any, cast

import torch
from torch import nn

from pipeline_balance.elastic import Job, Parallelism
from pipeline_balance.pipeline.reseat import Reseater, Switched

MICROBATCHES, ROWS = 4, 8
SWITCHES = {  # the first of each pair is gone to before anything is timed
    4: (("pp2", "pp4"), ("dp2,zero1", "dp4,zero1"), ("pp2,dp2,zero0", "pp2,dp2,zero1")),
    8: (("pp4", "pp8"), ("pp2,dp2,zero1", "pp2,dp4,zero1"), ("pp4,dp2,zero0", "pp4,dp2,zero1")),
}
BESIDE = 6  # layouts that are prepared beside steps
STEPS = 6  # before each of them


def run_jobs(here: Any, options: dict[str, Any], repetitions: int) -> dict[str, Any]:
    """Switches there and back of one job, and preparations beside its steps."""
    dim, layers = options["dim"], options["layers"]
    size = here.collective.size
    pairs = SWITCHES[size]
    generator = torch.Generator().manual_seed(0)
    batch = [torch.randn(MICROBATCHES * ROWS, dim, generator=generator) for _ in range(2)]
    job = Job(
        lambda: [nn.Linear(dim, dim, device="meta") for _ in range(layers)],
        lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-4),
        Parallelism.parse(pairs[0][0]),
        data=[tuple(batch)],
        loss_fn=nn.functional.mse_loss,
        microbatches=MICROBATCHES,
        timeout_s=here.timeout_s,
        nodes=list(range(size)),
    )
    job.step()
    rows = []
    for pair in pairs:
        one, two = (Parallelism.parse(f"{text},orderfewest-bytes") for text in pair)
        job.switch(one)
        there: list[dict[str, Any]] = []
        back: list[dict[str, Any]] = []
        for _ in range(repetitions):
            there.append(switched(here, job, two))
            back.append(switched(here, job, one))
        rows += [
            {"before": pair[0], "after": pair[1], "times": there},
            {"before": pair[1], "after": pair[0], "times": back},
        ]
        if here.rank == 0:
            here.say(f"job {pair[0]} <-> {pair[1]}: {there[-1]['blocked_s']:.2f} s, {back[-1]['blocked_s']:.2f} s")
    found = {"switches": rows, "beside": beside(here, job, options["beside"])}
    job.close()
    return found


def switched(here: Any, job: Job, layout: Parallelism) -> dict[str, Any]:
    """One prepared switch. blocked_s: of this process, from the call to its return."""
    before = str(job.layout)
    here.meet()
    began = time.perf_counter()
    job.prepare(layout)
    assert job._preparing is not None
    job._preparing.result(timeout=here.timeout_s)
    hidden_s = time.perf_counter() - began
    here.meet()
    began = time.perf_counter()
    done: Switched = job.switch()
    return {
        "blocked_s": time.perf_counter() - began,
        "hidden_s": hidden_s,
        "from": before,
        "to": str(job.layout),
        "inside_s": done.seconds,
        "wire_bytes": sum(done.link_bytes.values()),
        "port_bytes": port_bytes(done.link_bytes),
        "messages": done.messages,
        "peak_bytes": done.peak_bytes,
    }


def port_bytes(link_bytes: Any) -> int:
    """Bytes of the plan's busiest port in one direction."""
    out: dict[int, int] = {}
    into: dict[int, int] = {}
    for (source, target), n_bytes in link_bytes.items():
        out[source] = out.get(source, 0) + n_bytes
        into[target] = into.get(target, 0) + n_bytes
    return max([0, *out.values(), *into.values()])


@contextmanager
def timed(job: Job) -> Iterator[list[tuple[str, float, float]]]:
    """Inside, what the job does to make groups and find routes is noted: what, when it began, when it ended."""
    notes: list[tuple[str, float, float]] = []
    groups, reseater = cast("Any", job._groups), cast("Any", Reseater)
    make, way = groups.make, reseater.way

    def made(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return make(*args)
        finally:
            notes.append(("groups", began, time.perf_counter()))

    def found(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return way(*args)
        finally:
            notes.append(("routes", began, time.perf_counter()))

    groups.make, reseater.way = made, found
    try:
        yield notes
    finally:
        groups.make, reseater.way = make, way


def orders(layout: Parallelism, many: int) -> list[Parallelism]:
    """The layout with other orders of ranks, so that its groups have never been made."""
    ranks = range(layout.ranks)
    found: list[Parallelism] = []
    for order in permutations(reversed(ranks)):
        found.append(Parallelism(pp=layout.pp, dp=layout.dp, zero=layout.zero, order=order))
        if len(found) == many:
            break
    return found


def beside(here: Any, job: Job, many: int) -> list[dict[str, float]]:
    """Preparations while the job trains. Each is thrown away; the last one is switched to.

    before_s: seconds of steps before, meanwhile_s: of as many from the call of `prepare` on.
    """
    rows: list[dict[str, float]] = []
    layout = Parallelism(pp=job.pipeline.groups.world.size)
    job.switch(layout)
    for _ in range(2):
        job.step()
    with timed(job) as notes:
        for target in orders(layout, many):
            notes.clear()
            before = [_step(job) for _ in range(STEPS)]
            here.meet()
            began = time.perf_counter()
            job.prepare(target)
            front_s = time.perf_counter() - began
            preparing = job._preparing
            assert preparing is not None
            meanwhile: list[float] = []
            while len(meanwhile) < STEPS or (not preparing.done() and len(meanwhile) < 20 * STEPS):
                overlapped = not preparing.done()
                taken = _step(job)
                meanwhile.append(taken if overlapped else -taken)
            here.meet()
            waited = time.perf_counter()
            preparing.result(timeout=here.timeout_s)
            waited_s = time.perf_counter() - waited
            spent = {"groups": 0.0, "routes": 0.0}
            for what, start, stop in notes:
                spent[what] += stop - start
            rows.append(
                {
                    "groups_s": spent["groups"],
                    "routes_s": spent["routes"] + front_s,
                    "exposed_s": front_s + waited_s,
                    "called_s": front_s,
                    "before_s": statistics.median(before),
                    "overlapped": sum(t > 0 for t in meanwhile),
                    "meanwhile_s": statistics.fmean([t for t in meanwhile if t > 0] or [statistics.median(before)]),
                    "all_meanwhile_s": statistics.fmean(map(abs, meanwhile)),
                    "all_before_s": statistics.fmean(before),
                }
            )
    return rows


def _step(job: Job) -> float:
    began = time.perf_counter()
    job.step()
    return time.perf_counter() - began
