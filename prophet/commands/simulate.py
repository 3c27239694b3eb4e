"""`prophet simulate`: what a step would take on many ranks, by planner, with an error bar."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prophet.commands.advice import EVEN, NO_ROOM, TOO_DEAR, TOO_EVEN, WORTH, binary, lines_to_add, too_much_memory
from prophet.commands.arguments import (
    add_json,
    add_machine,
    add_model,
    add_planner,
    add_slots,
    check_can_write,
    known_names,
    machine,
    model_sizes,
    needs_experts,
    planner_names,
    positive,
)
from prophet.errors import UsageError

if TYPE_CHECKING:
    from prophet.machine.named import Machine
    from prophet.machine.sizes import ModelSizes
    from prophet.traces.extrapolate import Extrapolated, Scenario

_PLANNERS = ("static", "pro-prophet", "prophet", "forced-balance")
_STATIC = "static"
_RANKS = "8,64,512"
# The most ranks of an expert-parallel group that is chosen without --ep
_GROUP = 64
_MODEL = "Mixtral-8x7B"
_MOST_RANKS, _MOST_LAYERS, _MOST_EXPERTS = 1 << 16, 10_000, 1 << 16
# A process holds the splits of a stage: int64 [layers, ranks, experts, ranks]
_MOST_SPLIT_BYTES = 1 << 33
# Layers of all groups and planners from which on processes are worth starting, and the most of these: each holds one
# group's splits in memory
_MANY_LAYERS, _WORKERS = 200, 3


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser(
        "simulate",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Simulate a training step on more ranks than you have, by planner. A run of many steps is planned as a\n"
            "real one is, and its last step is played: the scheduler's own lists of operations under the performance\n"
            "model of a machine. The error bar comes from steps that were both simulated and measured. Those ran on\n"
            "few hosts, so for more ranks it is a lower bound of the error."
        ),
        epilog=(
            f"Without --model it is {_MODEL}. A topology file is stretched to the number of ranks.\n"
            "forced-balance, perfectly even routing, is always simulated, and so is static.\n\n"
            f"{known_names()}"
        ),
    )
    add = command.add_argument
    add("--ranks", type=_ranks, default=_ranks(_RANKS), metavar="N,N,...", help=f"sizes (default: {_RANKS})")
    add_planner(command, _PLANNERS)
    add_machine(command)
    add_model(command)
    job = command.add_argument_group("job")
    job.add_argument(
        "--ep",
        type=positive,
        metavar="N",
        help=f"ranks of an expert-parallel group (default: as many as divide ranks and experts, at most {_GROUP})",
    )
    job.add_argument("--dp", type=positive, metavar="N", help="groups side by side (default: as many as there is room)")
    job.add_argument("--pp", type=positive, default=1, metavar="N", help="pipeline stages (default: %(default)s)")
    job.add_argument(
        "--microbatches", type=positive, metavar="N", help="of a step (default: 4 for every stage, 1 without stages)"
    )
    job.add_argument(
        "--tokens", type=positive, default=4096, metavar="N", help="per rank and microbatch (default: %(default)s)"
    )
    job.add_argument(
        "--steps", type=positive, default=300, metavar="N", help="of the run; the last is judged (default: %(default)s)"
    )
    job.add_argument(
        "--skew",
        type=_skew,
        default=0.5,
        metavar="S",
        help="expert popularity falls as place^-S, from 0 (even) up (default: %(default)s)",
    )
    add_slots(command)
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page with figures")
    add_json(command)
    command.set_defaults(run=run)


def _ranks(text: str) -> list[int]:
    try:
        values = [positive(part) for part in text.split(",") if part]
    except ValueError:
        values = []
    if not values or max(values) > _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"expected numbers of ranks from 1 to {_MOST_RANKS}, got {text!r}")
    # A number that is given twice would be simulated twice
    return list(dict.fromkeys(values))


def _skew(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 8:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 8, got {text}")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Simulate every planner at every size, and print the comparison."""
    from prophet.machine.models import model_named
    from prophet.terminal import progress
    from prophet.traces.extrapolate import BALANCED, MEASURED, extrapolate

    where = machine(arguments.machine)
    sizes = needs_experts(model_sizes(arguments, model_named(_MODEL)))
    asked = planner_names(arguments.planner, _PLANNERS, [BALANCED])
    # `_rows` relies on this order: no balancing first, even routing last
    names = list(dict.fromkeys([_STATIC, *(name for name in asked if name != BALANCED), BALANCED]))
    if arguments.html:
        from prophet.report import check_can_draw

        check_can_write("--html", arguments.html)
        check_can_draw()
    # All sizes are checked before the first is simulated, which may take minutes
    jobs = [_scenario(arguments, where, sizes, ranks) for ranks in arguments.ranks]
    total = sum(len(names) * job.samples_of for job in jobs)
    rows: list[dict[str, Any]] = []
    layers = len(names) * sum(job.samples_of * job.layers for job in jobs)
    with progress("Simulating", range(total), total) as steps, _processes(layers) as over:
        for job in jobs:
            found = [extrapolate(job, name, MEASURED, over=over, done=lambda: next(steps)) for name in names]
            rows += _rows(job, found)
        # The line of progress ends with its last item
        next(steps, None)
    answer = {
        "machine": where.name,
        "model": sizes.name,
        "assumed": _assumed(arguments, where, sizes),
        "layers": jobs[0].layers,
        "experts": sizes.experts,
        "steps": jobs[0].steps,
        "microbatches": jobs[0].microbatches,
        "tokens_per_microbatch": arguments.tokens,
        "schedule": jobs[0].schedule,
        "skew": arguments.skew,
        "slots_per_rank": arguments.slots,
        "replica_bytes": jobs[0].context.shape.replica_bytes,
        "memory_bytes": where.memory_bytes,
        "error": {"mean_absolute": MEASURED.mean, "errors": list(MEASURED.errors), "source": MEASURED.source},
        "rows": rows,
    }
    answer["advice"] = _advice(answer)
    if arguments.json:
        print(json.dumps(answer, indent=2))
    else:
        _print(answer)
    if arguments.html:
        from prophet.report.simulated import write_simulated

        write_simulated(arguments.html, answer, [*_head(answer), *_sizes(answer), *_tail(answer)])
        if not arguments.json:
            print(f"Page: {arguments.html}")
    return 0


@contextmanager
def _processes(layers: int) -> Iterator[Any]:
    """Give `map`, or that of a few processes where there are so many layers that starting them pays."""
    # Cores that this process may use: a container or a batch system may allow fewer than there are
    workers = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, _WORKERS)
    if layers < _MANY_LAYERS or workers < 2:
        yield map
        return
    # Spawned, because a line of progress is a thread, and a process with threads must not be forked
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield pool.map


# --- the job ---


def _scenario(arguments: argparse.Namespace, where: Machine, sizes: ModelSizes, ranks: int) -> Scenario:
    """The job on so many ranks.

    Raises:
        UsageError: They do not form its groups and stages, or there is too much to simulate.
    """
    from prophet.spec import PlanContext
    from prophet.traces.extrapolate import Scenario, stretched

    stages, experts, layers = arguments.pp, sizes.experts, sizes.blocks_with_experts
    for option, n, most in (("--layers", layers, _MOST_LAYERS), ("--experts", experts, _MOST_EXPERTS)):
        if n > most:
            raise UsageError(f"{option}: expected at most {most} to simulate, got {n}")
    if stages > layers:
        raise UsageError(f"--pp: expected at most the {layers} layers with experts, got {stages}")
    if ranks % stages:
        raise UsageError(f"--ranks: expected a multiple of the {stages} pipeline stages, got {ranks}")
    group = arguments.ep or _largest_group(ranks // stages, experts, arguments.dp)
    if experts % group:
        raise UsageError(f"--ep: expected a divisor of the {experts} experts, got {group}")
    groups = arguments.dp or max(1, ranks // (group * stages))
    if group * groups * stages != ranks:
        product = f"--ep {group} x --dp {groups} x --pp {stages}" if arguments.dp else f"--ep {group} x --pp {stages}"
        raise UsageError(f"--ranks: expected {'' if arguments.dp else 'a multiple of '}{product}, got {ranks}")
    # The memory of one process, counted before it is asked for
    split_bytes = 8 * -(-layers // stages) * experts * group**2
    if split_bytes > _MOST_SPLIT_BYTES:
        raise UsageError(
            f"--ranks {ranks}: expected splits of at most {binary(_MOST_SPLIT_BYTES)} for {layers} layers of {experts} "
            f"experts on groups of {group} ranks, got {binary(split_bytes)}: give a smaller --ep or fewer --layers"
        )
    whole = where.topology(ranks)
    topology = stretched(whole, group)
    # The mean rank: windows are those of the whole group
    rate = sum(topology.flops_per_s) / group
    # With four microbatches for every stage, the bubble of a 1F1B schedule is at most a fifth of the step
    microbatches = arguments.microbatches or (4 * stages if stages > 1 else 1)
    context = PlanContext(
        topology=topology,
        shape=sizes.shape(where.element_bytes),
        home=tuple(e * group // experts for e in range(experts)),
        windows=sizes.windows(arguments.tokens, rate),
        slots_per_rank=arguments.slots,
    )
    # A block without experts
    dense = sizes.with_options({"dense_params": sizes.dense_block})
    dense_layers = sizes.layers - layers
    return Scenario(
        context=context,
        layers=layers,
        routed_per_rank=arguments.tokens * sizes.top_k,
        groups=groups,
        stages=stages,
        microbatches=microbatches,
        steps=arguments.steps,
        skew=arguments.skew,
        ranks_per_node=whole.ranks_per_node,
        dense_s=dense_layers * dense.windows(arguments.tokens, rate).fnec_s,
        dense_bytes=(sizes.met_by_every_token * layers + sizes.dense_block * dense_layers)
        * (sizes.element_bytes or where.element_bytes),
    )


def _largest_group(ranks: int, experts: int, groups: int | None) -> int:
    """The largest group of at most `_GROUP` ranks among which both ranks and experts can be divided."""
    if groups is not None and ranks % groups == 0 and experts % (ranks // groups) == 0:
        return ranks // groups
    return max(p for p in range(1, min(ranks, _GROUP) + 1) if ranks % p == 0 and experts % p == 0)


def _rows(job: Scenario, found: list[Extrapolated]) -> list[dict[str, Any]]:
    """A row for every planner, each beside no balancing and even routing."""
    static_s, even_s = found[0].step_s, found[-1].step_s
    return [
        r.as_dict()
        | {
            "groups": job.groups,
            "stages": job.stages,
            "gain": static_s / r.step_s,
            "fraction_of_even_routing": even_s / r.step_s,
        }
        for r in found
    ]


# --- text ---


def _assumed(arguments: argparse.Namespace, where: Machine, sizes: ModelSizes) -> list[str]:
    """What nobody measured or gave, an item each."""
    model = f"the sizes of {sizes.name}" if arguments.model is None else None
    of_machine = where.assumed or (None if sizes.element_bytes else f"{where.element_bytes} bytes an element")
    return [item for item in (model, *sizes.assumed, of_machine, "the routing (--skew)") if item]


def _ms(seconds: float) -> str:
    """Milliseconds in four digits, without an exponent."""
    ms = 1e3 * seconds
    return f"{ms:.0f}" if ms >= 1e3 else f"{ms:.4g}"


def _head(answer: dict[str, Any]) -> list[str]:
    """The lines above the table."""
    assumed = answer["assumed"]
    several = "" if answer["microbatches"] == 1 else f" in each of {answer['microbatches']} microbatches"
    return [
        f"{answer['layers']} layers of {answer['experts']} experts ({answer['model']}) on {answer['machine']}, "
        f"{answer['tokens_per_microbatch']} tokens a rank{several}; step {answer['steps']} of a run. Every figure is "
        "simulated.",
        f"Assumed: {'; '.join(assumed)}. To measure this machine: prophet calibrate --out topology.toml",
    ]


def _sizes(answer: dict[str, Any]) -> list[str]:
    """Name the groups and their sizes, a line for each number of ranks."""
    lines = []
    for ranks, row in {r["ranks"]: r for r in answer["rows"]}.items():
        stages = "" if row["stages"] == 1 else f" in each of {row['stages']} stages"
        lines.append(
            f"{ranks} ranks: {_count(row['groups'], 'group')} of {_count(row['group'], 'rank')}{stages}, "
            f"{_count(answer['experts'] // row['group'], 'expert')} of a layer on a rank."
        )
    return lines


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _tail(answer: dict[str, Any]) -> list[str]:
    """The lines below the table: gain, cost and advice, and how sure that is."""
    lines = []
    for ranks in dict.fromkeys(r["ranks"] for r in answer["rows"]):
        best = _best(answer, ranks)
        if best["gain"] < WORTH:
            lines.append(f"{ranks} ranks: no planner gains 1 % or more.")
            continue
        memory, takes = answer["memory_bytes"], f"{binary(best['replica_bytes'])} on the fullest rank for replicas"
        fits = not memory or best["replica_bytes"] <= memory
        lines.append(
            f"{ranks} ranks: {best['planner']} {'makes' if fits else 'would make'} a step {best['gain']:.2f} times as "
            f"fast as static. It costs {takes}{'' if fits else f', which do not fit into {binary(memory)}'}, and "
            f"{_ms(best['plan_s'])} ms of planning a step, {_ms(best['exposed_s']['plan'])} of them exposed."
        )
    error = answer["error"]
    above = "Above 1 of even routing: replicas also keep tokens on their own ranks, which even routing does not."
    return [
        *lines,
        answer["advice"],
        *([above] if any(r["fraction_of_even_routing"] > 1 for r in answer["rows"]) else []),
        f"Error bar: simulated against measured steps of {error['source']}, mean {100 * error['mean_absolute']:.1f} %, "
        f"at most {100 * max(map(abs, error['errors'])):.1f} %. Nothing was measured at these sizes.",
    ]


def _best(answer: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The planner with the shortest step; no balancing where none is shorter."""
    from prophet.traces.extrapolate import BALANCED

    rows = [r for r in answer["rows"] if r["ranks"] == ranks and r["planner"] != BALANCED]
    best: dict[str, Any] = min(rows, key=lambda r: (r["step_s"], r["planner"] != _STATIC))
    return best


def _advice(answer: dict[str, Any]) -> str:
    """Say what to do next, in one sentence, for the largest number of ranks."""
    ranks = max(r["ranks"] for r in answer["rows"])
    best = _best(answer, ranks)
    # By the order of `names` in `run`
    static, *others, even = [r for r in answer["rows"] if r["ranks"] == ranks]
    experts = answer["experts"]
    if static["group"] == 1:
        return f"Groups of one rank have nothing to balance: choose --ranks with a divisor of {experts} experts."
    if answer["slots_per_rank"] == 0:
        return NO_ROOM
    if best["gain"] >= WORTH and (too_large := too_much_memory(best["replica_bytes"], answer["memory_bytes"])):
        return too_large
    if best["gain"] >= WORTH:
        return lines_to_add(best["planner"])
    if static["max_mean"] <= EVEN:
        return TOO_EVEN
    # Even routing is the most that any planner could reach
    if even["gain"] < WORTH:
        return (
            f"Most of this step is {_MOST[static['limited_by']]}, and balancing does not change that: try more tokens "
            "(--tokens), smaller groups (--ep) or a faster network (--machine)."
        )
    if not others:
        return (
            f"Even routing would make a step {even['gain']:.2f} times as fast: leave --planner out to see what "
            "planners gain of that."
        )
    if answer["steps"] == 1:
        return "In the first step of a run nothing has been planned yet: leave --steps out."
    return TOO_DEAR


# The answer in JSON keeps the short keys, which programs read; people see these
_MOST = {
    "experts": "experts",
    "all-to-all": "all-to-all",
    "transfers": "exposed transfers",
    "dense": "dense compute",
    "average": "gradient average",
    "host": "host",
    "bubble": "pipeline bubble",
}


def _print(answer: dict[str, Any]) -> None:
    from prophet.terminal import Column, console, print_table

    to = console()
    for line in [*_head(answer), *_sizes(answer)]:
        to.print(line)
    columns = (
        Column("ranks"),
        Column("planner", align="left"),
        Column("step\nms"),
        Column("gain", 1),
        Column("of even\nrouting", 2),
        Column("error bar\nms", 4),
        Column("most of it", 3, "left"),
        Column("max/\nmean", 5),
        Column("copies\na rank", 6),
        Column("exposed\nms", 7),
        Column("idle\nms", 8),
    )
    rows = [
        [
            str(r["ranks"]),
            r["planner"],
            _ms(r["step_s"]),
            f"{r['gain']:.2f}",
            f"{r['fraction_of_even_routing']:.3f}",
            f"{_ms(r['low_s'])}..{_ms(r['high_s'])}",
            _MOST[r["limited_by"]],
            f"{r['max_mean']:.3f}",
            f"{r['copies_per_rank']:.1f}",
            _ms(sum(r["exposed_s"].values())),
            _ms(r["idle_s"]),
        ]
        for r in answer["rows"]
    ]
    print_table(columns, rows, to)
    for line in _tail(answer):
        to.print(line)
