"""`prophet simulate`: what a step would take on many ranks, by policy, with an error bar."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

_POLICIES = ("static", "pro-prophet", "prophet", "forced-balance")
_RANKS = "8,64,512,4096"
WIDTH = 110  # columns of the table where it goes to a file


def add(commands: Any) -> None:
    """Register the command."""
    from prophet.machine.presets import CLUSTERS, MODELS
    from prophet.scheduler.schedules import NAMES

    command = commands.add_parser(
        "simulate",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="how long would a step take on 8 to 4096 ranks?",
        description=(
            "Play a training step on more ranks than there are, by policy: the scheduler's own lists of operations\n"
            "under the performance model of a named or calibrated machine. The error bar is that of steps which were\n"
            "both simulated and measured; those ran on few hosts, so beyond them it says the least doubt there is."
        ),
        epilog=f"machines:  {', '.join(CLUSTERS)}\nmodels:    {', '.join(MODELS)}",
    )
    add = command.add_argument
    add("--ranks", type=_ranks, default=_ranks(_RANKS), metavar="N,N,...", help=f"sizes (default: {_RANKS})")
    add(
        "--group", type=_whole, default=64, metavar="N", help="ranks of one expert-parallel group at most (default: 64)"
    )
    add("--topology", type=Path, metavar="FILE", help="a calibrated machine, stretched; instead of the preset's")
    add("--preset", default="h100-ib:Mixtral-8x7B", metavar="MACHINE:MODEL", help="(default: %(default)s)")
    add("--policy", action="append", metavar="NAME", help=f"may be repeated (default: {', '.join(_POLICIES)})")
    add("--schedule", choices=NAMES, default="block-wise", help="(default: %(default)s)")
    add("--layers", type=_whole, default=4, metavar="N", help="MoE layers (default: %(default)s)")
    add("--experts-per-rank", type=_whole, default=2, metavar="N", help="(default: %(default)s)")
    add("--tokens", type=_whole, default=4096, metavar="N", help="tokens per rank and step (default: %(default)s)")
    add("--skew", type=_skew, default=0.5, metavar="S", help="popularity falls as place^-S (default: %(default)s)")
    add("--slots", type=_whole, default=4, metavar="N", help="replicas per rank and layer (default: %(default)s)")
    add("--measured", type=Path, metavar="FILE", help="rows of the cluster benchmark, for the error bar")
    add("--json", action="store_true", help="print JSON instead of a table")
    command.set_defaults(run=_simulate)


def _whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return value


def _ranks(text: str) -> list[int]:
    try:
        values = [_whole(word) for word in text.split(",") if word]
    except ValueError:
        values = []
    if not values or max(values) > 1 << 16:
        raise argparse.ArgumentTypeError(f"expected numbers of ranks from 1 to {1 << 16}, got {text!r}")
    return values


def _skew(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 8:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 8, got {text}")
    return value


def _simulate(arguments: argparse.Namespace) -> int:
    from prophet.commands.arguments import no_such
    from prophet.errors import SpecError, TopologyError
    from prophet.machine.presets import get_preset
    from prophet.machine.topology import read_topology
    from prophet.planner import PLANNER_NAMES
    from prophet.spec import PlanContext
    from prophet.traces.extrapolate import (
        BALANCED,
        MEASURED,
        Scenario,
        extrapolate,
        read_error_bar,
    )

    error = MEASURED if arguments.measured is None else read_error_bar(arguments.measured)
    preset = get_preset(arguments.preset)
    model = preset.model
    # as large as the largest case: nodes keep their size when it is cut
    topology = preset.cluster.topology(max(arguments.ranks))
    if arguments.topology is not None:
        try:
            topology = read_topology(arguments.topology)
        except TopologyError as problem:
            raise SpecError(str(problem)) from None
    experts = topology.ranks * arguments.experts_per_rank
    context = PlanContext(
        topology=topology,
        shape=model.shape(preset.cluster.element_bytes),
        home=tuple(e // arguments.experts_per_rank for e in range(experts)),
        windows=model.windows(arguments.tokens, sum(topology.flops_per_s) / topology.ranks),
        slots_per_rank=arguments.slots,
    )
    scenario = Scenario(
        context=context,
        layers=arguments.layers,
        routed_per_rank=arguments.tokens * model.top_k,
        skew=arguments.skew,
        dense_bytes=model.dense_params * arguments.layers * context.shape.grad_bytes,
        schedule=arguments.schedule,
    )
    policies = list(dict.fromkeys([*(arguments.policy or _POLICIES), BALANCED]))
    known = [*PLANNER_NAMES, BALANCED]
    for name in policies:
        if name not in known:
            raise no_such("--policy", "policy", name, known, "policies")
    rows = []
    for ranks in arguments.ranks:
        found = {p: extrapolate(scenario, p, ranks, min(ranks, arguments.group), error) for p in policies}
        rows += [
            r.as_dict() | {"fraction_of_forced_balance": found[BALANCED].step_s / r.step_s} for r in found.values()
        ]
    answer = {
        "machine": context.topology.name,
        "model": model.name,
        "layers": arguments.layers,
        "schedule": arguments.schedule,
        "skew": arguments.skew,
        "error": {"mean_absolute": error.mean, "errors": list(error.errors), "source": error.source},
        "rows": rows,
    }
    if arguments.json:
        print(json.dumps(answer, indent=2))
    else:
        _print(answer)
    return 0


def _ms(seconds: float) -> str:
    """Milliseconds in four digits, without an exponent."""
    ms = 1e3 * seconds
    return f"{ms:.0f}" if ms >= 1e3 else f"{ms:.4g}"


def _print(answer: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:  # a file has room
        console = Console(width=max(console.width, WIDTH))
    console.print(
        f"{answer['layers']} layers of {answer['model']} on {answer['machine']}, schedule {answer['schedule']}; every "
        f"figure is simulated.",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("ranks", justify="right", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    for column in (
        "step\nms",
        "error bar\nms",
        "of\nceiling",
        "max/\nmean",
        "copies\nper rank",
        "exposed\nms",
        "idle\nms",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for r in answer["rows"]:
        table.add_row(
            str(r["ranks"]),
            r["policy"],
            _ms(r["step_s"]),
            f"{_ms(r['low_s'])}..{_ms(r['high_s'])}",
            f"{r['fraction_of_forced_balance']:.3f}",
            f"{r['max_mean']:.3f}",
            f"{r['copies_per_rank']:.1f}",
            _ms(sum(r["exposed_s"].values())),
            _ms(r["idle_s"]),
        )
    console.print(table)
    error = answer["error"]
    console.print(
        f"Error bar: simulated against measured steps of {error['source']}, mean {100 * error['mean_absolute']:.1f} %, "
        f"at most {100 * max(map(abs, error['errors'])):.1f} %. "
        f"Nothing was measured at these sizes.",
        highlight=False,
    )
