"""Whole switches of a training job, and how much of their preparation hides behind steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, cast

import numpy as np
import torch
from torch import nn

import prophet
from pipeline_balance import elastic
from pipeline_balance.elastic import Job, Parallelism
from pipeline_balance.elastic.predict.bound import Rates, demand_of, least_s
from pipeline_balance.pipeline.move.transaction import Switched
from prophet.state.route import Route
from prophet.state.transition import Mode

MICROBATCHES, ROWS = 4, 8
TOKENS, VOCABULARY, EXPERTS = 8, 256, 8
BUDGET_BYTES = 16 << 20
STEPS = 6  # before each preparation


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A job that switches.

    make: from a width and a number of layers to the model and one batch. switches: pairs of layouts, with the mode; the
    first of a pair is gone to before anything is timed. steps_in: the layout in which it trains while others are
    prepared. share: of the width and of the preparations, which the first kind has in full.
    """

    name: str
    make: Callable[[int, int], tuple[Callable[[], Any], Any, Any]]
    switches: tuple[tuple[str, str, Mode], ...]
    steps_in: str
    share: float = 0.25


def _layers(dim: int, layers: int) -> tuple[Callable[[], Any], Any, Any]:
    """Linear layers in a row."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(MICROBATCHES * ROWS, dim, generator=generator) for _ in range(2))
    return lambda: [nn.Linear(dim, dim, device="meta") for _ in range(layers)], x, y


def _tensors(dim: int, layers: int) -> tuple[Callable[[], Any], Any, Any]:
    """A transformers model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=dim,
        intermediate_size=2 * dim,
        num_hidden_layers=layers // 2,
        num_attention_heads=8,
        num_key_value_heads=8,
    )

    def build() -> Any:
        torch.manual_seed(0)
        return LlamaForCausalLM(config)

    ids = torch.randint(1, VOCABULARY, (MICROBATCHES * ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    return build, {"input_ids": ids}, ids


class _Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.moe = prophet.MoE(dim, dim, num_experts=EXPERTS, top_k=2, group=elastic.one_rank())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.moe(x)
        return x + y


def _experts(dim: int, layers: int) -> tuple[Callable[[], Any], Any, Any]:
    """Layers of experts."""

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(_Block(dim) for _ in range(layers // 4)))

    _, x, y = _layers(dim, layers)
    return build, x, y


KINDS: dict[int, tuple[Kind, ...]] = {
    4: (
        Kind(
            name="whole job",
            make=_layers,
            switches=(
                ("pp2", "pp4", "safe"),
                ("dp2,zero1", "dp4,zero1", "safe"),
                ("pp2,dp2,zero0", "pp2,dp2,zero1", "safe"),
                ("pp2", "pp4", "in-place"),
            ),
            steps_in="pp4",
            share=1.0,
        ),
        Kind(
            name="whole job, sharded",
            make=_layers,
            switches=(("dp2,zero2", "dp4,zero2", "safe"), ("dp4,zero1", "dp4,zero3", "safe")),
            steps_in="dp4,zero3",
        ),
        Kind(name="whole job, tp", make=_tensors, switches=(("tp2", "tp4", "safe"),), steps_in="tp4"),
        Kind(
            name="whole job, ep",
            make=_experts,
            switches=(("dp2,ep2,zero1", "dp4,ep4,zero1", "safe"),),
            steps_in="dp4,ep4,zero1",
        ),
    ),
    8: (
        Kind(
            name="whole job",
            make=_layers,
            switches=(
                ("pp4", "pp8", "safe"),
                ("pp2,dp2,zero1", "pp2,dp4,zero1", "safe"),
                ("pp4,dp2,zero0", "pp4,dp2,zero1", "safe"),
                ("pp4", "pp8", "in-place"),
            ),
            steps_in="pp8",
            share=1.0,
        ),
        Kind(
            name="whole job, sharded",
            make=_layers,
            switches=(("dp4,zero2", "dp8,zero2", "safe"), ("dp8,zero1", "dp8,zero3", "safe")),
            steps_in="dp8,zero3",
        ),
        Kind(name="whole job, tp", make=_tensors, switches=(("tp4", "tp8", "safe"),), steps_in="tp8"),
        Kind(
            name="whole job, ep",
            make=_experts,
            switches=(("dp4,ep4,zero1", "dp8,ep8,zero1", "safe"),),
            steps_in="dp8,ep8,zero1",
        ),
    ),
}


def run_jobs(here: Any, options: dict[str, Any], repetitions: int) -> list[dict[str, Any]]:
    """Every kind of job: switches there and back, and preparations beside its steps."""
    return [_run(here, kind, options, repetitions) for kind in KINDS[here.collective.size]]


def _run(here: Any, kind: Kind, options: dict[str, Any], repetitions: int) -> dict[str, Any]:
    dim = max(int(options["dim"] * kind.share) // 8 * 8, 8)
    build, inputs, labels = kind.make(dim, options["layers"])
    job = Job(
        build,
        lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-4),
        Parallelism.parse(kind.switches[0][0]),
        data=[(inputs, labels)],
        loss_fn=None if kind.make is _tensors else nn.functional.mse_loss,
        microbatches=MICROBATCHES,
        timeout_s=here.timeout_s,
        budget_bytes=BUDGET_BYTES,
        nodes=list(range(here.collective.size)),
    )
    job.step()
    rows = []
    for first, second, mode in kind.switches:
        one, two = (Parallelism.parse(f"{text},orderfewest-bytes") for text in (first, second))
        job.switch(one)
        there: list[dict[str, Any]] = []
        back: list[dict[str, Any]] = []
        for _ in range(repetitions):
            there.append(switched(here, job, two, mode))
            back.append(switched(here, job, one, mode))
        rows += [
            {"before": first, "after": second, "mode": mode, "times": there},
            {"before": second, "after": first, "mode": mode, "times": back},
        ]
        if here.rank == 0:
            seconds = " and ".join(f"{t[-1]['blocked_s']:.2f} s" for t in (there, back))
            here.say(f"{kind.name} {first} <-> {second}, {mode}: {seconds}")
    many = max(round(options["beside"] * kind.share), 1)
    found = {"job": kind.name, "switches": rows, "beside": beside(here, job, kind.steps_in, many)}
    job.close()
    return found


def switched(here: Any, job: Job, layout: Parallelism, mode: Mode) -> dict[str, Any]:
    """One prepared switch. blocked_s: of this process, from the call to its return."""
    before = str(job.layout)
    here.meet()
    began = time.perf_counter()
    job.prepare(layout, mode=mode)
    assert job._switching.preparing is not None
    prepared = job._switching.preparing.result(timeout=here.timeout_s)
    hidden_s = time.perf_counter() - began
    sizes = _sizes(prepared.route.route) if prepared.route is not None else {}
    here.meet()
    began = time.perf_counter()
    done: Switched = job.switch(mode=mode)
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
        **sizes,
    }


def _sizes(way: Route) -> dict[str, int]:
    """Bytes of the model, of the fullest rank's larger state, and at least at the busiest port, whatever the plan."""
    space, alike = way.space, Rates(intra_bytes_per_s=1.0, inter_bytes_per_s=1.0)
    demand = demand_of(way.atoms, space.item_bytes)
    return {
        "model_bytes": sum(t.elements * t.item_bytes for t in space.tensors),
        "larger_bytes": int(max(np.max(at.table.rank_bytes()) for at in (way.before, way.after))),
        "least_port_bytes": round(least_s(demand, np.arange(way.ranks), alike)),
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
def timed(job: Job) -> Iterator[dict[str, float]]:
    """Inside, what the job's preparations take: seconds of groups, of all, and of the thread's processor."""
    spent = dict.fromkeys(("groups_s", "prepared_s", "cpu_s"), 0.0)
    groups = cast("Any", job._switching.groups)
    make, beside = groups.make, groups.beside

    def made(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return make(*args)
        finally:
            spent["groups_s"] += time.perf_counter() - began

    def prepared(call: Callable[[], Any]) -> Any:
        def all_of_it() -> Any:
            began, at_work = time.perf_counter(), time.thread_time()
            try:
                return call()
            finally:
                spent["prepared_s"] += time.perf_counter() - began
                spent["cpu_s"] += time.thread_time() - at_work

        return beside(all_of_it)

    groups.make, groups.beside = made, prepared
    try:
        yield spent
    finally:
        groups.make, groups.beside = make, beside


def orders(layout: Parallelism, many: int) -> list[Parallelism]:
    """The layout with other orders of ranks, so that its groups have never been made."""
    found: list[Parallelism] = []
    for order in permutations(reversed(range(layout.ranks))):
        found.append(replace(layout, order=order))
        if len(found) == many:
            break
    return found


def beside(here: Any, job: Job, steps_in: str, many: int) -> list[dict[str, float]]:
    """Preparations while the job trains. Each is thrown away; the last one is switched to.

    before_s: seconds of steps before, meanwhile_s: of as many from the call of `prepare` on. groups_s: of making
    groups, routes_s: of the rest: layouts, the order of ranks, routes, rounds. cpu_s: of a processor, in the thread.
    """
    rows: list[dict[str, float]] = []
    layout = Parallelism.parse(steps_in)
    job.switch(layout)
    for _ in range(2):
        job.step()
    with timed(job) as spent:
        for target in orders(layout, many):
            spent.update(dict.fromkeys(spent, 0.0))
            before = [_step(job) for _ in range(STEPS)]
            here.meet()
            began = time.perf_counter()
            job.prepare(target)
            front_s = time.perf_counter() - began
            preparing = job._switching.preparing
            assert preparing is not None
            meanwhile: list[float] = []
            while len(meanwhile) < STEPS or (not preparing.done() and len(meanwhile) < 20 * STEPS):
                overlapped = not preparing.done()
                taken = _step(job)
                meanwhile.append(taken if overlapped else -taken)
            done = preparing.done()
            here.meet()
            waited = time.perf_counter()
            preparing.result(timeout=here.timeout_s)
            waited_s = 0.0 if done else time.perf_counter() - waited
            rows.append(
                {
                    "groups_s": spent["groups_s"],
                    "routes_s": spent["prepared_s"] - spent["groups_s"] + front_s,
                    "cpu_s": spent["cpu_s"],
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
