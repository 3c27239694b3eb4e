"""Step times and counted bytes of several schedules on real ranks, in turn.

Shape legend: P ranks, M microbatches, N slices, V stages per rank, T tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import Row
from benchmarks.measure import peak_memory_bytes, quartiles, reset_peak_memory, rotated
from benchmarks.slices.by_hand import chunk_gradient_bytes, unit_bytes
from benchmarks.slices.contenders import Contender, Counted, contender
from benchmarks.slices.workload import Work, apart, oracle
from pipeline_balance.schedules.closed_forms import sliced_peak_bytes, sliced_peak_units
from prophet.machine.memory import keep_memory
from prophet.ranks.collective import Collective

BASELINE = "own-1f1b"


def measure(
    collective: Collective,
    *,
    device: str,
    case: str,
    work: dict[str, int],
    names: Sequence[str],
    repeats: int,
    pace: Callable[[], AbstractContextManager[None]] = nullcontext,
    more: Callable[[Contender], Row] = lambda one: {},
) -> list[Row]:
    """A row per schedule. Every round runs all schedules once, another one first each time; the first round does not
    count, and gives gradients that are compared with those of one process. Schedules run in the context `pace`, and
    `more` adds to a schedule's row.
    """
    keep_memory()
    job = Work(**work)
    alone = oracle(job)
    # ranks that share cores come to its end at other times
    dist.barrier()
    return _in_turns(job, collective.size, case, names, repeats, alone, pace, more)


def _in_turns(
    job: Work,
    ranks: int,
    case: str,
    names: Sequence[str],
    repeats: int,
    alone: tuple[float, dict[str, Tensor]],
    pace: Callable[[], AbstractContextManager[None]],
    more: Callable[[Contender], Row],
) -> list[Row]:
    loss, want = alone
    running: list[Contender] = []
    rows: dict[str, Row] = {}
    for name in names:
        rows[name] = job.named(case, name, ranks)
        try:
            one = contender(name, job, ranks)
            with pace():
                first = one.step()
            got = _sum(first if one.name.startswith("torch") else first / ranks)
        except Exception as error:
            rows[name]["reason"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        rows[name] |= {"v": one.stages_per_rank, "n": one.slices, "order": one.order, "balance": one.balance}
        rows[name] |= {"loss": got, "loss_alone": loss}
        rows[name]["worst_gradient_error"] = _most(apart(one.gradients(), want))
        rows[name] |= crossing(job, ranks, one)
        one.busy_s()
        running.append(one)
    taken: dict[str, list[float]] = {one.name: [] for one in running}
    worked = dict.fromkeys(taken, 0.0)
    with pace():
        for turn in range(repeats):
            for one in rotated(running, turn):
                step_s, cpu_s = _timed(one)
                taken[one.name].append(step_s)
                worked[one.name] += cpu_s / repeats
    for one in running:
        rows[one.name] |= more(one)
        rows[one.name]["cpu_s"] = all_of(worked[one.name])
        rows[one.name] |= _times(taken[one.name], all_of(one.busy_s()), ranks)
        rows[one.name] |= held(job, ranks, one)
    return list(rows.values())


def _timed(one: Contender) -> tuple[float, float]:
    """Seconds of the slowest rank, and of this rank's processor."""
    dist.barrier()
    began, worked = time.perf_counter(), time.process_time()
    one.step()
    cpu_s = time.process_time() - worked
    return _most(time.perf_counter() - began), cpu_s


def _times(step_s: list[float], busy: list[float], ranks: int) -> Row:
    """Of all rounds together; idle is what a rank does besides its forward and backward actions."""
    if not step_s:
        return {"step_s": []}
    total = sum(step_s)
    idle = [total - b for b in busy]
    return {
        "step_s": step_s,
        "step_s_median": statistics.median(step_s),
        "step_s_quartiles": quartiles(step_s),
        "busy_s": [b / len(step_s) for b in busy],
        "idle_s": [i / len(step_s) for i in idle],
        "idle_over_work": sum(idle) / sum(busy),
        "bubble_ratio": sum(idle) / (ranks * total),
    }


def held(work: Work, ranks: int, one: Contender) -> Row:
    """Loss and counted bytes of one more step by rank, and the closed form where there is one."""
    reset_peak_memory()
    found: Counted = one.counted()
    row: Row = {
        "loss": _sum(found.loss if one.name.startswith("torch") else found.loss / ranks),
        "activation_bytes": _bytes(found.activations),
        "chunk_bytes": _bytes(found.chunks),
        "chunk_gradient_bytes": _bytes(found.chunk_gradients),
        "boundary_bytes": _bytes(found.boundaries),
        "sent_bytes": _bytes(found.sent),
        "rss_bytes": _bytes(peak_memory_bytes()),
    }
    if one.slices > 1 and one.stages_per_rank == 1 and one.balance == "none":
        form = form_bytes(work, ranks, one.slices, one.order)
        row |= {"form_bytes": form, "over_form": max(a / f for a, f in zip(row["activation_bytes"], form, strict=True))}
    return row


def form_bytes(work: Work, ranks: int, slices: int, order: Any) -> list[int]:
    """Form 4 by rank, [P], with one stage per rank and the count by hand."""
    a, g = unit_and_gradients(work, ranks, slices)
    units = [sliced_peak_units(rank, ranks, 1, work.microbatches, slices, order) for rank in range(ranks)]
    return [sliced_peak_bytes(n, slices, a, g) for n in units]


def unit_and_gradients(work: Work, ranks: int, slices: int) -> tuple[int, int]:
    """Form 4's a and g, by hand: of a unit on a rank's share of the layers."""
    each = (1, work.tokens // slices, work.layers // ranks)
    return unit_bytes(work.layer(), *each), chunk_gradient_bytes(work.layer(), *each)


def crossing(work: Work, ranks: int, one: Contender) -> Row:
    """What crosses from rank to rank in a step: hidden states of every unit one way, their gradients the other."""
    crossings = ranks * one.stages_per_rank - 1
    if one.name == "torch-zbv":
        crossings -= 1  # the middle two stages are on one rank
    crossings = crossings if ranks > 1 else 0
    each = crossings * work.microbatches
    amount = each * work.tokens * work.hidden * 4
    return {
        "messages": {"activations": each * one.slices, "gradients": each * one.slices},
        "message_bytes": {"activations": amount, "gradients": amount},
    }


def against_baseline(rows: list[Row], *, target: dict[str, float]) -> list[Row]:
    """How many times as fast as the baseline each row is: the median over rounds, of which each timed both.

    So a disturbance that lasts longer than a round counts for neither. `target` is the least by schedule.
    """
    base = next((r["step_s"] for r in rows if r["schedule"] == BASELINE and r.get("step_s")), None)
    for row in rows:
        if base is None or not row.get("step_s"):
            continue
        ratios = [a / b for a, b in zip(base, row["step_s"], strict=True)]
        row["speed_over_own_1f1b"] = statistics.median(ratios)
        row["speed_quartiles"] = quartiles(ratios)
        if row["schedule"] in target:
            least = target[row["schedule"]]
            row |= {"target": f">= {least:g}", "met": row["speed_over_own_1f1b"] >= least}
    return rows


def with_slice_cost(rows: list[Row], *, at_most: float) -> list[Row]:
    """What each slice costs over its share of the whole, in seconds, by the least of steps.

    Where a sequence is so short that arithmetic takes no time, that is what slicing costs besides.
    """
    least = {r["schedule"]: min(r["step_s"]) for r in rows if r.get("step_s")}
    for row in rows:
        if row.get("n", 1) > 1 and row["schedule"] in least and BASELINE in least:
            row["slice_cost_s"] = (least[row["schedule"]] - least[BASELINE]) / row["n"]
            row |= {"target": f"<= {at_most:g} s", "met": row["slice_cost_s"] <= at_most}
    return rows


def _bytes(of_this_rank: int | None) -> list[int] | None:
    """By rank; None where nobody counts them."""
    return None if of_this_rank is None else [int(n) for n in all_of(of_this_rank)]


def all_of(value: float) -> list[float]:
    """Every rank's."""
    found = [torch.zeros((), dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor(float(value), dtype=torch.float64))
    return [float(t) for t in found]


def _most(value: float) -> float:
    return max(all_of(value))


def _sum(value: float) -> float:
    return sum(all_of(value))
