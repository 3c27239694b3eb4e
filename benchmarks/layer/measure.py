"""Check, then time: all implementations in turn, on all ranks at once.

Shape legend: N tokens of this rank, D model dim, R ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import Row
from benchmarks.layer.cases import Sizes, common_state, inputs
from benchmarks.layer.implementations import OURS, Implementation, build, missing
from benchmarks.measure import meet, quartiles, rotated
from prophet.machine.calibrate import calibrate
from prophet.machine.measure import Ranges
from prophet.ranks.collective import Collective
from prophet.ranks.device.clocks import clock_on, seconds_between, synchronize
from prophet.ranks.operation import Operation
from prophet.spec import Topology

SETS = 4  # batches that take turns: a plan never meets the very tokens that it was made from
CHECKED = 3  # steps; from the third on there are replicas
TOLERANCE = 2e-4  # of the largest value: what sums in another order may differ by in float32


def measured_topology(collective: Collective, sizes: Sizes, device: torch.device) -> Topology:
    """This machine for the planner, measured briefly; collective.

    The ranks count as equally fast: they are processes of one machine, and a planner that took the noise of a short
    measurement for a slow rank would move tokens away from it.
    """
    ranges = Ranges(rows=(64, max(128, sizes.tokens * sizes.top_k)), tokens=(64, 2048), groups=(1, 4), points=3)
    found = calibrate(
        collective, dim=sizes.dim, hidden=sizes.hidden, device=device, ranges=ranges, repeats=5, held_out=False
    )
    typical = statistics.median(found.topology.flops_per_s)
    return replace(found.topology, flops_per_s=(typical,) * collective.size)


def step(one: Implementation, x: Tensor, d_y: Tensor) -> tuple[float, float, Tensor]:
    """One forward and backward pass: seconds of the forward pass, of both, and the output [N, D]. `x.grad` is set.

    On a device they are its own: from a mark after all that came before, to the last mark.
    """
    mark = clock_on(x.device)
    synchronize(x.device)
    began = mark()
    y = one.forward(x)
    middle = mark()
    y.backward(d_y)
    one.end()
    ended = mark()
    synchronize(x.device)
    return seconds_between(began, middle), seconds_between(began, ended), y.detach()


def fresh(one: Implementation, x: Tensor) -> Tensor:
    """The batch as a leaf, and no gradients left."""
    one.layer.zero_grad(set_to_none=True)
    return x.detach().requires_grad_()


def wrong(one: Implementation, truth: Implementation, batches: Sequence[Tensor], d_y: Tensor) -> str | None:
    """What this rank's results of `one` have that those of `truth` have not, over some steps; or None. Collective."""
    found = None
    for i in range(CHECKED):
        answers = []
        for each in (truth, one):
            x = fresh(each, batches[i % len(batches)])
            y = step(each, x, d_y)[2]
            answers.append({"output": y, "input's gradient": x.grad, **each.gradients()})
        for name, expected in answers[0].items():
            found = found or difference(name, answers[1][name], expected)
    return found


def difference(name: str, got: Tensor | None, expected: Tensor | None) -> str | None:
    """What is wrong with `got`, in words, or None."""
    if got is None or expected is None or got.shape != expected.shape:
        shapes = [None if t is None else list(t.shape) for t in (got, expected)]
        return f"{name}: shape {shapes[0]}, expected {shapes[1]}"
    gap, largest = float((got - expected).abs().max()), float(expected.abs().max())
    if not gap <= TOLERANCE * largest:
        return f"{name}: differs by {gap:.3g} where the largest value is {largest:.3g}"
    return None


def padding(static: Implementation, sizes: Sizes) -> float:
    """Rows that DeepSpeed computes without dropping over rows that were chosen, in the last step: every rank sends as
    many for every expert as any rank has for any.
    """
    stats = getattr(static.layer, "stats", None)
    load = np.zeros((1, 1)) if stats is None else stats.load
    return float(load.max() * load.size / load.sum())


def anywhere(collective: Collective, problem: str | None) -> str | None:
    """A rank's problem, told to all; collective."""
    flags = collective.all_gather(torch.tensor([int(problem is not None)]), op=Operation("check of a layer"))
    bad = flags.flatten().nonzero().flatten().tolist()
    if not bad:
        return None
    return problem or f"wrong on rank(s) {bad}"


def measure(
    collective: Collective,
    *,
    sizes: Sizes,
    gates: Mapping[str, list[list[float]] | str],
    names: Sequence[str],
    repetitions: int,
    device: str = "cpu",
) -> list[Row]:
    """Rows of all skews and implementations; collective, and equal on all ranks but for words of a rank's problem.

    gates: by skew, the gate's weights [E, D], or why there are none. All layers and batches are made on the CPU, and
    go to `device` from there.
    """
    on = torch.device(device)
    topology = measured_topology(collective, sizes, on)
    absent = {name: why for name in names if (why := missing(name)) is not None}
    seed = 1000 * collective.rank
    batches = [inputs(sizes, seed + i).to(on) for i in range(SETS)]
    d_y = torch.randn(sizes.tokens, sizes.dim, generator=torch.Generator().manual_seed(seed + SETS)).to(on)
    rows: list[Row] = []
    for skew, gate in gates.items():
        base: Row = {"ranks": collective.size, "skew": skew}
        if isinstance(gate, str):
            rows.append({**base, "note": gate})
            continue
        state = common_state(sizes, torch.tensor(gate))
        built = {n: build(n, sizes, state, collective, topology, on) for n in ("static", *names) if n not in absent}
        bad: dict[str, str] = {}
        for name, one in built.items():
            problem = wrong(one, built["static"], batches, d_y) if name != "static" else None
            if (told := anywhere(collective, problem)) is not None:
                bad[name] = told
        padded = padding(built["static"], sizes)
        right = [built[n] for n in names if n in built and n not in bad]
        timed = time_all(collective, right, batches, d_y, repetitions)
        ours_ms = timed.get("prophet", {}).get("fwd_bwd_ms")
        for name in names:
            row: Row = {**base, "impl": name, "tokens_per_rank": sizes.tokens}
            if name in absent:
                row["note"] = absent[name]
            elif name in bad:
                row["wrong"] = bad[name]
            else:
                row |= timed[name]
                if name == "deepspeed":
                    row["rows_padded"] = padded
                row["ratio_to_prophet"] = row["fwd_bwd_ms"] / ours_ms if ours_ms else None
            rows.append(row)
        for one in built.values():
            one.close()
    return rows


def time_all(
    collective: Collective, implementations: Sequence[Implementation], batches: Sequence[Tensor], d_y: Tensor, n: int
) -> dict[str, Row]:
    """Medians over `n` rounds by implementation; every round visits all of them, another one first each time.

    A sample is the time of the slowest rank; the breakdown is the mean over ranks.
    """
    samples: dict[str, list[tuple[float, float]]] = {one.name: [] for one in implementations}
    parts: dict[str, list[dict[str, float]]] = {one.name: [] for one in implementations if one.name in OURS}
    loads: dict[str, list[float]] = {one.name: [] for one in implementations}
    replicas: dict[str, list[int]] = {one.name: [] for one in implementations if one.engine is not None}
    for i in range(n + 1):
        for one in rotated(implementations, i):
            x = fresh(one, batches[i % len(batches)])
            meet(collective)
            forward_s, both_s, _ = step(one, x, d_y)
            own = one.parts(both_s) if one.name in parts else {}
            mine = torch.tensor([forward_s, both_s, *own.values()], dtype=torch.float64)
            table = collective.all_gather(mine, op=Operation("end of a sample"))
            if i == 0:  # caches, allocations
                continue
            samples[one.name].append((float(table[:, 0].max()), float(table[:, 1].max())))
            if own:
                parts[one.name].append(dict(zip(own, table[:, 2:].mean(dim=0).tolist(), strict=True)))
            if (load := one.max_mean()) is not None:
                loads[one.name].append(load)
            if one.name in replicas:
                replicas[one.name].append(one.replicas())
    rows = {name: summary(found, parts.get(name, []), loads[name]) for name, found in samples.items()}
    for name, counts in replicas.items():
        rows[name]["replicas"] = statistics.median(counts)
    return rows


def summary(
    samples: Sequence[tuple[float, float]], parts: Sequence[Mapping[str, float]], loads: Sequence[float]
) -> Row:
    """The figures of one row from samples of (forward, both) seconds, and what is known beside them."""
    forward_ms, both_ms = ([1e3 * s for s in seconds] for seconds in zip(*samples, strict=True))
    row: Row = {
        "fwd_ms": statistics.median(forward_ms),
        "fwd_bwd_ms": statistics.median(both_ms),
        "fwd_bwd_ms_quartiles": quartiles(both_ms),
        "repetitions": len(samples),
    }
    if loads:
        row["max_mean"] = statistics.median(loads)
    if parts:
        row["breakdown_ms"] = {k: 1e3 * statistics.median(p[k] for p in parts) for k in parts[0]}
    return row
