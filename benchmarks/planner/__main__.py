"""How good and how fast is every planner? `python -m benchmarks.planner --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import chosen, write_json
from benchmarks.planner.break_even import break_even_rows, plot
from benchmarks.planner.cases import cases_of
from benchmarks.planner.first import first_rows, first_summary
from benchmarks.planner.host import host_rows
from benchmarks.planner.mechanisms import losses, study_rows
from benchmarks.planner.optimum import gap_rows, optima
from benchmarks.planner.predictions import rows, summary
from benchmarks.planner.scale import scale_rows, skewed_load
from benchmarks.planner.splits import split_rows
from benchmarks.planner.uneven import behind, by_workload, workload_rows
from benchmarks.planner.workloads import WORKLOADS
from benchmarks.tables import cell, columns
from prophet.errors import SpecError, TraceError
from prophet.machine.presets import PRESET_NAMES
from prophet.planner import PLANNER_NAMES
from prophet.traces.npz import read_trace

POLICIES = tuple(n for n in PLANNER_NAMES if n != "top-k")
SCALE_PRESETS = ("h100-nvlink:Mixtral-8x7B", "h100-nvlink:Qwen3-30B-A3B")
Rows = list[dict[str, Any]]


def optimum_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """How far from the optimum of small cases: the default planner, as it trains and with more effort, and others."""
    trace = read_trace(arguments.trace[0]) if arguments.trace else None
    how = {"path": arguments.optima, "processes": arguments.processes, "first": arguments.first_case}
    solved = list(optima(trace, arguments.optimum, limit_s=arguments.limit, **how))
    yield from gap_rows(
        solved,
        {
            **{f"prophet, {n} calls": {"calls": n} for n in (1, 10, 50, 100, 200, 400)},
            "prophet, 100 calls, effort 1": {"calls": 100, "effort": 1.0},
            **{name: {} for name in ("static", "pro-prophet", "laer", "fine-ep")},
        },
    )


def even_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The gain over tokens per rank, link rate and skew, for loads of the first trace, or drawn ones."""
    if arguments.trace:
        loads = [case.present for case in cases_of(read_trace(arguments.trace[0]), exact=True, count=arguments.cases)]
    else:
        loads = [skewed_load(16, 32, seed) for seed in range(arguments.cases)]
    yield from break_even_rows(loads, arguments.preset, arguments.policy, arguments.slots)


def first_call_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """First calls, and first calls after a swap of layers."""
    yield from first_rows(arguments.trace, arguments.preset, slots=arguments.slots, folder=arguments.first)


def beside_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What a layer's host does, in turns with another checkout's code."""
    yield from host_rows(arguments.former, arguments.turns)


def mechanism_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every mechanism, or those whose name holds what `--only` says."""
    how = chosen(arguments, "slots", "processes", "draws", "only")
    yield from study_rows(arguments.trace, arguments.preset, folder=arguments.mechanisms, **how)


VIEWS: dict[Any, tuple[Callable[[Rows], Rows], ...]] = {  # tables of the rows, where they are not printed as they are
    rows: (list, summary),
    first_call_rows: (first_summary,),
    mechanism_rows: (losses,),
    workload_rows: (by_workload, behind),
}


Source = Callable[[argparse.Namespace], Iterator[dict[str, Any]]]
STUDIES: dict[str, tuple[Source, list[str]]] = {  # by the option that asks for one; with the usual policies
    "break_even": (even_rows, ["prophet"]),
    "optimum": (optimum_rows, ["all"]),
    "scale": (scale_rows, ["all"]),
    "splits": (split_rows, ["prophet"]),
    "first": (first_call_rows, ["prophet"]),
    "former": (beside_rows, ["prophet"]),
    "mechanisms": (mechanism_rows, ["prophet"]),
    "workload": (workload_rows, ["all"]),
}


_COMPLETE = ("trace", "workload", "scale", "optimum", "break_even", "former")  # each says what to do by itself


def print_table(table: Rows) -> None:
    """Print rows with their keys as columns."""
    if not table:
        return
    print(columns(list(table[0]), [[cell(v, 4) for v in row.values()] for row in table], left=0))


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return value


def _workloads(text: str) -> list[str]:
    names = list(WORKLOADS) if text == "all" else text.split(",")
    if unknown := set(names) - set(WORKLOADS):
        raise argparse.ArgumentTypeError(f"expected all, or some of {', '.join(WORKLOADS)}; got {min(unknown)!r}")
    return names


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    parser.add_argument(
        "--trace", type=Path, action="append", default=[], help="a routing trace (npz); may be repeated"
    )
    parser.add_argument("--preset", action="append", help="cluster or cluster:model, or all; may be repeated")
    parser.add_argument("--policy", action="append", help="a planner, forced-balance, or all (default)")
    parser.add_argument("--cases", type=_count, default=200, help="layer-steps per trace, evenly spaced (default 200)")
    parser.add_argument("--slots", type=_count, default=16, help="replica slots per rank (default 16)")
    parser.add_argument("--top-k", type=int, default=2, help="experts per token where the trace does not say")
    parser.add_argument("--exact", action="store_true", help="plan from the present counts")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--optimum", type=_count, metavar="N", help="compare with the optimum of N small cases instead"
    )
    parser.add_argument("--optima", type=Path, metavar="FILE", help="solved optima, read and added to (--optimum)")
    parser.add_argument("--limit", type=float, default=10.0, help="solver's seconds per form (--optimum, default 10)")
    parser.add_argument("--processes", type=_count, default=1, help="solvers at a time (--optimum, default 1)")
    parser.add_argument(
        "--first-case", type=int, default=0, metavar="K", help="number of the first small case (--optimum, default 0)"
    )
    instead.add_argument(
        "--workload", type=_workloads, metavar="W0,W1", help="routing that is uneven in one way, or all such instead"
    )
    parser.add_argument("--ranks", type=_count, action="append", help="of a workload; may be repeated (default 8, 64)")
    parser.add_argument("--seeds", type=_count, default=3, help="of a workload, from 0 on (default 3)")
    instead.add_argument("--scale", action="store_true", help="time planning and splitting at several sizes instead")
    parser.add_argument("--cold", action="store_true", help="with --scale: other data in the caches before every call")
    instead.add_argument("--splits", action="store_true", help="what a split's effort buys, with --trace, instead")
    instead.add_argument(
        "--break-even", action="store_true", help="where replicas pay: tokens, link rate, skew instead"
    )
    instead.add_argument(
        "--first", type=Path, metavar="FOLDER", help="first plans, with --trace; the folder keeps what is compiled"
    )
    instead.add_argument(
        "--mechanisms",
        type=Path,
        metavar="FOLDER",
        help="what every mechanism of ours is worth, with --trace; as --first",
    )
    instead.add_argument(
        "--former", type=Path, metavar="FOLDER", help="host time of a layer, in turns with that checkout's code instead"
    )
    parser.add_argument("--turns", type=_count, default=5, help="processes of either code (--former, default 5)")
    parser.add_argument("--only", default="", metavar="TEXT", help="mechanisms with this in their names (--mechanisms)")
    parser.add_argument("--draws", type=_count, default=1, help="of layers and tries (--mechanisms, default 1)")
    parser.add_argument("--plot", type=Path, help="write the picture of --break-even here (PNG)")
    parser.add_argument("--json", type=Path, help="write the rows here")
    return parser


def check(arguments: argparse.Namespace) -> str:
    """What is wrong with the arguments together; empty where nothing is."""
    wrong = (
        (arguments.splits and not arguments.trace, "--splits goes with --trace FILE"),
        (arguments.first and not arguments.trace, "--first goes with --trace FILE"),
        (arguments.mechanisms and not arguments.trace, "--mechanisms goes with --trace FILE"),
        (
            not any(getattr(arguments, name) for name in _COMPLETE),
            "give --trace FILE, --workload NAME, --scale, --optimum N, --break-even or --former FOLDER",
        ),
        (arguments.workload and arguments.trace, "--workload draws its routing: leave --trace out"),
        (arguments.ranks and not arguments.workload, "--ranks goes with --workload"),
        (arguments.plot and not arguments.break_even, "--plot goes with --break-even"),
        (
            arguments.former and not (arguments.former / "prophet").is_dir(),
            f"--former: expected a checkout of this project, got {arguments.former}",
        ),
        (arguments.cold and not arguments.scale, "--cold goes with --scale"),
        (arguments.draws > 1 and not arguments.mechanisms, "--draws goes with --mechanisms"),
        (arguments.only and not arguments.mechanisms, "--only goes with --mechanisms"),
        (
            arguments.splits and not set(arguments.policy or ()) <= {"prophet"},
            "--splits: expected --policy to be one of prophet, whose splits have an effort",
        ),
        (not arguments.limit > 0, f"--limit: expected a positive number of seconds, got {arguments.limit}"),
        (
            arguments.first_case < 0,
            f"--first-case: expected a case's number, at least 0, got {arguments.first_case}",
        ),
    )
    return next((message for is_wrong, message in wrong if is_wrong), "")


def main(argv: list[str] | None = None) -> int:
    parser = parser_of()
    arguments = parser.parse_args(argv)
    if problem := check(arguments):
        parser.error(problem)
    presets = arguments.preset or (list(SCALE_PRESETS) if arguments.break_even or arguments.scale else ["all"])
    arguments.preset = list(PRESET_NAMES) if "all" in presets else presets
    usual = (rows, ["all"])
    source, policies = next((study for name, study in STUDIES.items() if getattr(arguments, name)), usual)
    policies = arguments.policy or policies
    arguments.policy = ["forced-balance", *POLICIES] if "all" in policies else policies
    table = []
    try:
        for row in source(arguments):
            table.append(row)
            print(".", end="", file=sys.stderr, flush=True)
    except (TraceError, SpecError) as error:
        print(file=sys.stderr)
        parser.error(str(error))
    print(file=sys.stderr)
    for view in VIEWS.get(source, (list,)):
        print_table(view(table))
    if arguments.plot:
        plot(table, arguments.plot)
    if arguments.json:
        write_json(arguments.json, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
