"""What every host runs: all cases, all ways in turns, checked before they are believed; host P is the storage.

Shape legend: P hosts, one rank each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cluster.host import Host
from benchmarks.measure import meet, rotated, seconds_of
from benchmarks.switch.cases import Case
from benchmarks.switch.jobs import run_jobs
from benchmarks.switch.storage import Client, Storage
from benchmarks.switch.ways import BUDGET_BYTES, DCP, GATHER, OURS, WAYS, Setting, clear, fresh
from pipeline_balance.elastic.groups import Groups
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.elastic.predict.switch import Plan
from prophet.machine.memory import keep_memory
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import ProcessGroupCollective, collective_for
from prophet.state.layout import Layout, Piece, layout_from
from prophet.state.route import route
from prophet.state.space import Box, Space, TensorSpec
from prophet.state.streams import torch_dtype
from prophet.state.transition import transition

PROBE_BYTES, CHUNK_BYTES, PROBES = 8 << 20, 256 << 10, 3
PROBE_BOXES = (64, 512)
SLOW, SLOW_REPETITIONS = (GATHER, DCP), 2  # several times as long as the others
READY_BYTES = 128 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """One rank's surroundings."""

    collective: Collective
    client: Client | None
    folder: Path | None
    timeout_s: float
    say: Any

    @property
    def rank(self) -> int:
        return self.collective.rank

    def meet(self) -> None:
        meet(self.collective)


def run_host(host: Host, args: dict[str, Any]) -> dict[str, Any]:
    """A host of the emulated cluster: the last one is the storage, the others are ranks."""
    if host.rank == host.hosts - 1:
        Storage(host.address, args["storage_port"], args["limit_s"]).wait()
        return {}
    ranks = replace(host, hosts=host.hosts - 1)
    began = time.perf_counter()
    keep_memory(READY_BYTES)
    touched_s = time.perf_counter() - began
    with ranks.process_group(timeout_s=args["timeout_s"]):
        world = collective_for(None, timeout_s=args["timeout_s"])
        found = {"touched_s": touched_s, "group_s": time.perf_counter() - began - touched_s}
        return {**measured(world, args, host.say), **found}


def measured(world: Collective, args: Mapping[str, Any], say: Any) -> dict[str, Any]:
    """All that this rank measures, on hosts or over loopback; rank 0 ends the storage."""
    client = None
    if args["storage"] is not None:
        client = Client(args["storage"], args["storage_port"], args["timeout_s"])
    here = Here(collective=world, client=client, folder=Path(args["folder"]), timeout_s=args["timeout_s"], say=say)
    try:
        found: dict[str, Any] = {"probe": probe(world) | host_probe(here)}
        cases = [Case(**words) for words in args["cases"]]
        found["cases"] = [
            run_case(here, case, args["repetitions"], args["ways"], f"{k + 1}/{len(cases)}")
            for k, case in enumerate(cases)
        ]
        found["jobs"] = run_jobs(here, args["jobs"], args["repetitions"]) if args["jobs"] else None
        here.meet()
    finally:
        if client is not None:
            if world.rank == 0:
                client.stop()
            client.close()
    return found


def probe(world: Collective) -> dict[str, float]:
    """What the links do: bytes per second around a ring, in chunks with some under way; seconds of a small message."""
    size, rank = world.size, world.rank
    chunks = [torch.zeros(CHUNK_BYTES, dtype=torch.uint8) for _ in range(2 * PROBE_BYTES // CHUNK_BYTES)]
    half = len(chunks) // 2
    op, taken, short = Operation("measuring the links"), [], []
    for number in range(PROBES + 1):
        world.all_gather(torch.zeros(1), op=op)
        began = time.perf_counter()
        waits = [
            world.exchange([((rank + 1) % size, a)], [((rank - 1) % size, b)], op=op)
            for a, b in zip(chunks[:half], chunks[half:], strict=True)
        ]
        for wait in waits:
            wait.wait()
        if number:
            taken.append(time.perf_counter() - began)
    for _ in range(10):
        short.append(seconds_of(lambda: world.all_gather(torch.zeros(1), op=op)))
    return {"bytes_per_s": PROBE_BYTES / statistics.median(taken), "gather_s": statistics.median(short)}


def host_probe(here: Here) -> dict[str, float]:
    """What a rank's host takes, all ranks at once: per box that moves, per byte that is copied, to begin at all.

    Moves of a few and of many boxes to the next rank, of 64 bytes each, and a large tensor that is cut in two where it
    is. What the same boxes take where nothing moves is no part of it: a case measures that with its own. start_s: what
    a move of few boxes takes beyond its boxes and a move of nothing.
    """
    few, many = (_ring_of_boxes(here.collective.size, n) for n in PROBE_BOXES)
    few_s, many_s = (_moved_s(here, *ring) - _moved_s(here, ring[0], ring[0]) for ring in (few, many))
    box_s = max(many_s - few_s, 0.0) / (2 * (PROBE_BOXES[1] - PROBE_BOXES[0]))
    whole, halves = _cut_in_two(here.collective.size, PROBE_BYTES)
    copied_s = max(_moved_s(here, whole, halves) - _moved_s(here, whole, whole), 0.0)
    start_s = max(few_s - 2 * PROBE_BOXES[0] * box_s, 0.0)
    return {"box_s": box_s, "copied_byte_s": copied_s / PROBE_BYTES, "start_s": start_s}


def _ring_of_boxes(ranks: int, boxes: int) -> tuple[Layout, Layout]:
    """Every rank holds `boxes` small tensors, and afterwards those of the rank before it."""
    space = Space(
        tuple(TensorSpec(name=f"{r}.{k}", shape=(64,), dtype="uint8") for r in range(ranks) for k in range(boxes))
    )
    rows = [[(t.name, t.box) for t in space.tensors[r * boxes : (r + 1) * boxes]] for r in range(ranks)]
    before, after = ({r: rows[(r - ahead) % ranks] for r in range(ranks)} for ahead in (0, 1))
    return layout_from(space, ranks, before), layout_from(space, ranks, after)


def _cut_in_two(ranks: int, n_bytes: int) -> tuple[Layout, Layout]:
    """Every rank holds a tensor of `n_bytes`, and afterwards its halves."""
    space = Space(tuple(TensorSpec(name=f"{r}", shape=(n_bytes,), dtype="uint8") for r in range(ranks)))
    half = n_bytes // 2
    halves = [Box((0,), (half,)), Box((half,), (n_bytes,))]
    before = {r: [(t.name, t.box)] for r, t in enumerate(space.tensors)}
    after = {r: [(t.name, box) for box in halves] for r, t in enumerate(space.tensors)}
    return layout_from(space, ranks, before), layout_from(space, ranks, after)


def _moved_s(here: Here, before: Layout, after: Layout) -> float:
    """Median seconds of a move from one layout to the other, the first one aside."""
    way, taken = route(before, after), []
    state: dict[Piece, Tensor] = {p: torch.zeros(p.box.shape, dtype=torch.uint8) for p in before.on(here.rank)}
    for _ in range(PROBES + 1):
        here.meet()
        taken.append(seconds_of(lambda: transition(way, state, here.collective, budget_bytes=BUDGET_BYTES)))
    return statistics.median(taken[1:])


# --- one case ---


def truth_of(space: Space) -> dict[str, Tensor]:
    """Every tensor whole, with values that all ranks draw alike."""
    generator = torch.Generator().manual_seed(1)
    return {
        t.name: torch.empty(t.shape, dtype=torch_dtype(t)).uniform_(-1, 1, generator=generator) for t in space.tensors
    }


def part_of(truth: Mapping[str, Tensor], piece: Piece) -> Tensor:
    """A piece of it, in its memory."""
    whole = truth[piece.name]
    return whole[piece.box.slices(Box.whole(whole.shape))]


def pieces_of(truth: Mapping[str, Tensor], pieces: Sequence[Piece]) -> dict[Piece, Tensor]:
    """These pieces of it, in memory of their own."""
    return {p: part_of(truth, p).clone() for p in pieces}


def wrong(truth: Mapping[str, Tensor], pieces: Sequence[Piece], state: Mapping[Piece, Tensor]) -> str:
    """What is not as it should be; nothing if all is."""
    if set(pieces) != set(state):
        return f"{len(set(pieces) ^ set(state))} pieces too many or too few"
    for p, tensor in state.items():
        if not torch.equal(tensor, part_of(truth, p)):
            return f"{p} is not as it was sent"
    return ""


@contextmanager
def in_turn(here: Here) -> Iterator[None]:
    """Rank 0 first and alone, then the others: what it times is not disturbed by their doing the same."""
    if here.rank:
        here.meet()
    yield
    if not here.rank:
        here.meet()


def run_case(here: Here, case: Case, repetitions: int, names: Sequence[str], number: str) -> dict[str, Any]:
    """Seconds, bytes and messages of every way."""
    with in_turn(here):
        plan = case.plan(here.collective.size)
    group_s = making_groups(here, plan.parallelism)
    truth = truth_of(plan.before.space)
    state = pieces_of(truth, plan.before.on(here.rank))
    setting = Setting(route=plan.route, state=state, collective=here.collective, client=here.client, folder=here.folder)
    ways: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in names}
    empty_s = []
    for k in range(repetitions):
        turn = [name for name in names if k < SLOW_REPETITIONS or name not in SLOW]
        for name in rotated(turn, k):
            ways[name] |= _once(here, name, setting, ways[name]["seconds"], truth if k == 0 else None)
        empty_s.append(_nothing(here, plan))
    own = ways[OURS]["seconds"] if OURS in ways else [0.0]
    if here.rank == 0:
        here.say(f"{number} {case.name}: {case.before} -> {case.after}: {statistics.median(own):.2f} s")
    planned = {"layouts_s": plan.layouts_s, "order_s": plan.order_s, "routes_s": plan.routes_s}
    return {"plan": planned, "group_s": group_s, "empty_s": empty_s, "ways": ways}


def _once(
    here: Here, name: str, setting: Setting, seconds: list[float], truth: Mapping[str, Tensor] | None
) -> dict[str, Any]:
    here.meet()
    began = time.perf_counter()
    done = WAYS[name](setting)
    seconds.append(time.perf_counter() - began)
    if truth is not None:
        fault = wrong(truth, setting.route.after.on(here.rank), done.state)
        fault = fault or wrong(truth, setting.route.before.on(here.rank), setting.state)
        if fault:
            raise RuntimeError(f"{name}: {fault}")
    here.meet()
    if here.rank == 0 and name.startswith("DCP"):
        clear(setting)
    return {"phases": done.phases, "messages": done.messages, "peak_bytes": done.peak_bytes, **done.more}


def _nothing(here: Here, plan: Plan) -> float:
    """Seconds of a move of nothing: ranks agree, and vote."""
    still = route(plan.before, plan.before)
    state = fresh(still, plan.before.on(here.rank))
    here.meet()
    return seconds_of(lambda: transition(still, state, here.collective, budget_bytes=1 << 20))


def making_groups(here: Here, layout: Parallelism) -> float:
    """Seconds of making the groups of a layout, none of which is there yet; they are destroyed again."""
    groups = Groups(here.timeout_s)
    axes = [axis for axis in ("tp", "dp", "pp", "ep", "edp") if getattr(layout, axis) > 1]
    wanted = [(members, axis) for axis in axes for members in layout.groups(axis)]  # type: ignore[arg-type]
    here.meet()
    began = time.perf_counter()
    problem = groups.make(wanted)
    taken = time.perf_counter() - began
    if problem:
        raise RuntimeError(problem)
    here.meet()
    for members, axis in dict.fromkeys(wanted):
        if here.rank in members:
            made = groups.get(members, axis)
            if isinstance(made, ProcessGroupCollective):
                made.close()
    groups.close()
    dist.barrier()
    return taken
