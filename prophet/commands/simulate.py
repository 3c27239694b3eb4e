"""`prophet simulate`: what a step would take on many ranks, by planner, with an error bar."""

from __future__ import annotations

import argparse
import json
from typing import Any

from prophet.commands.arguments import (
    add_json,
    add_machine,
    add_model,
    add_planner,
    add_slots,
    known_names,
    machine,
    model_sizes,
    needs_experts,
    planner_names,
    positive,
)

_PLANNERS = ("static", "pro-prophet", "prophet", "forced-balance")
_RANKS = "8,64,512,4096"
_GROUP = 64  # ranks of one expert-parallel group, at most
_LAYERS, _EXPERTS_PER_RANK = 4, 2
_MODEL = "Mixtral-8x7B"  # where none is named
_WIDTH = 110  # columns of the table where it goes to a file


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser(
        "simulate",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="how long would a step take on 8 to 4096 ranks?",
        description=(
            "Simulate a training step on more ranks than you have, by planner: the scheduler's own lists of\n"
            "operations under the performance model of a machine. The error bar comes from steps that were both\n"
            "simulated and measured. Those ran on few hosts, so for more ranks it is a lower bound of the error."
        ),
        epilog=(
            f"Simulates {_LAYERS} MoE layers with {_EXPERTS_PER_RANK} experts per rank, in expert-parallel groups of "
            f"at most {_GROUP} ranks.\n"
            f"A topology file is stretched to the number of ranks; without --model it gets {_MODEL}.\n"
            "forced-balance, perfectly even routing, is always simulated: it is the ceiling.\n\n"
            f"{known_names()}"
        ),
    )
    add = command.add_argument
    add("--ranks", type=_ranks, default=_ranks(_RANKS), metavar="N,N,...", help=f"sizes (default: {_RANKS})")
    add_planner(command, _PLANNERS)
    add_machine(command)
    add_model(command, ())
    add_slots(command)
    add(
        "--skew",
        type=_skew,
        default=0.5,
        metavar="S",
        help="expert popularity falls as place^-S, from 0 (even) up (default: %(default)s)",
    )
    add("--tokens", type=positive, default=4096, metavar="N", help="tokens per rank and step (default: %(default)s)")
    add_json(command)
    command.set_defaults(run=run)


def _ranks(text: str) -> list[int]:
    try:
        values = [positive(word) for word in text.split(",") if word]
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


def run(arguments: argparse.Namespace) -> int:
    """Simulate every planner at every size, and print the comparison."""
    from prophet.machine.models import MODELS
    from prophet.spec import PlanContext
    from prophet.traces.extrapolate import BALANCED, MEASURED, Scenario, extrapolate

    where = machine(arguments.machine)
    model = needs_experts(model_sizes(arguments, MODELS[_MODEL]))
    # as large as the largest case: nodes keep their size when it is cut
    topology = where.topology(max(arguments.ranks))
    context = PlanContext(
        topology=topology,
        shape=model.shape(where.element_bytes),
        home=tuple(e // _EXPERTS_PER_RANK for e in range(topology.ranks * _EXPERTS_PER_RANK)),
        windows=model.windows(arguments.tokens, sum(topology.flops_per_s) / topology.ranks),
        slots_per_rank=arguments.slots,
    )
    scenario = Scenario(
        context=context,
        layers=_LAYERS,
        routed_per_rank=arguments.tokens * model.top_k,
        skew=arguments.skew,
        dense_bytes=model.met_by_every_token * _LAYERS * where.element_bytes,
    )
    names = list(dict.fromkeys([*planner_names(arguments.planner, _PLANNERS, [BALANCED]), BALANCED]))
    rows = []
    for ranks in arguments.ranks:
        found = {name: extrapolate(scenario, name, ranks, min(ranks, _GROUP), MEASURED) for name in names}
        ceiling_s = found[BALANCED].step_s
        rows += [r.as_dict() | {"fraction_of_forced_balance": ceiling_s / r.step_s} for r in found.values()]
    answer = {
        "machine": topology.name,
        "model": model.name,
        "layers": scenario.layers,
        "schedule": scenario.schedule,
        "skew": arguments.skew,
        "error": {"mean_absolute": MEASURED.mean, "errors": list(MEASURED.errors), "source": MEASURED.source},
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
        console = Console(width=max(console.width, _WIDTH))
    console.print(
        f"{answer['layers']} layers of {answer['model']} on {answer['machine']}, schedule {answer['schedule']}; every "
        f"figure is simulated.",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("ranks", justify="right", no_wrap=True)
    table.add_column("planner", no_wrap=True)
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
            r["planner"],
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
