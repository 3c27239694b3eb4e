"""Whole switches of a training job, and how much of their preparation hides behind steps."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, permutations
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from torch import nn

import prophet
from benchmarks.measure import seconds_of
from benchmarks.switch.cases import least_port_bytes, model_bytes
from pipeline_balance import elastic
from pipeline_balance.elastic import Job, Parallelism
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


def _kinds(hosts: int, copies: tuple[str, str]) -> tuple[Kind, ...]:
    """Jobs on half of the hosts and on all of them. copies: layouts with half of the copies, and with all."""
    half = hosts // 2
    pipelines, experts = (f"pp{half}", f"pp{hosts}"), (f"dp{half},ep{half},zero1", f"dp{hosts},ep{hosts},zero1")
    sharded = (f"dp{half},zero2", f"dp{hosts},zero2"), (f"dp{hosts},zero1", f"dp{hosts},zero3")
    zeros = f"pp{half},dp2,zero0", f"pp{half},dp2,zero1"
    whole: tuple[tuple[str, str, Mode], ...] = (
        *((*pair, "safe") for pair in (pipelines, copies, zeros)),
        (*pipelines, "in-place"),
    )
    return (
        Kind(name="whole job", make=_layers, switches=whole, steps_in=f"pp{hosts}", share=1.0),
        Kind(
            name="whole job, sharded",
            make=_layers,
            switches=tuple((*pair, "safe") for pair in sharded),
            steps_in=f"dp{hosts},zero3",
        ),
        Kind(
            name="whole job, tp", make=_tensors, switches=((f"tp{half}", f"tp{hosts}", "safe"),), steps_in=f"tp{hosts}"
        ),
        Kind(name="whole job, ep", make=_experts, switches=((*experts, "safe"),), steps_in=experts[1]),
    )


KINDS = {
    4: _kinds(4, ("dp2,zero1", "dp4,zero1")),
    8: _kinds(8, ("pp2,dp2,zero1", "pp2,dp4,zero1")),
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
    return {
        "model_bytes": model_bytes(way),
        "larger_bytes": int(max(np.max(at.table.rank_bytes()) for at in (way.before, way.after))),
        "least_port_bytes": least_port_bytes(way),
    }


def port_bytes(link_bytes: Any) -> int:
    """Bytes of the plan's busiest port in one direction."""
    through: Counter[tuple[str, int]] = Counter()
    for (source, target), n_bytes in link_bytes.items():
        through.update({("out of", source): n_bytes, ("into", target): n_bytes})
    return max(through.values(), default=0)


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

    with mock.patch.multiple(groups, make=made, beside=prepared):
        yield spent


def orders(layout: Parallelism, many: int) -> list[Parallelism]:
    """The layout with other orders of ranks, so that its groups have never been made."""
    return [replace(layout, order=order) for order in islice(permutations(reversed(range(layout.ranks))), many)]


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
            before = [seconds_of(job.step) for _ in range(STEPS)]
            here.meet()
            front_s = seconds_of(lambda to=target: job.prepare(to))
            preparing = job._switching.preparing
            assert preparing is not None
            meanwhile: list[float] = []
            while len(meanwhile) < STEPS or (not preparing.done() and len(meanwhile) < 20 * STEPS):
                overlapped = not preparing.done()
                taken = seconds_of(job.step)
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
