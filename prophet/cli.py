"""The command line: `prophet demo` and `prophet plan`.

This module imports nothing but the standard library at its top: it has to be able to say that another distribution
owns the name `prophet` before anything else fails in a less helpful way.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prophet.replay import Replay
    from prophet.traces import RoutingTrace

OK, FAILED, BAD_INPUT, NAME_CONFLICT, INTERRUPTED = 0, 1, 2, 3, 130

_EXIT_CODES = (
    "exit codes: 0 done, 1 the run failed, 2 unusable arguments or input, 3 another distribution has overwritten "
    "the package `prophet`, 130 interrupted"
)
_DEFAULT_PLANNERS = ("static", "top2", "top3", "pro-prophet", "prophet")
_DEFAULT_PRESET = "h100-ib:Mixtral-8x7B"


class UsageError(ValueError):
    """The arguments or the input cannot be used; one line says why."""


def name_conflict(package: Any, installed: Sequence[str]) -> tuple[str, bool] | None:
    """Whether the forecasting library of the same import name is in the way.

    `package` is what `import prophet` gave, `installed` the names of all installed distributions. Returns a message and
    whether it is fatal (the package is not ours any more), or None.
    """
    if not hasattr(package, "MoE") or not hasattr(package, "attach"):
        return (
            "the package `prophet` here is not moe-prophet: the forecasting library of the same import name was "
            "installed over it. Run `pip uninstall prophet` and then `pip install --force-reinstall --no-deps "
            "moe-prophet`",
            True,
        )
    if any(name.lower() == "prophet" for name in installed):
        return (
            "the distribution `prophet` (forecasting) is installed too and owns the same import name; only one of "
            "the two can work in one environment",
            False,
        )
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    import prophet

    conflict = name_conflict(prophet, [d.metadata["Name"] or "" for d in metadata.distributions()])
    if conflict:
        _complain(conflict[0], "error" if conflict[1] else "warning")
        if conflict[1]:
            return NAME_CONFLICT
    from prophet.demo.launch import DemoError
    from prophet.report import ReportError
    from prophet.spec import SpecError
    from prophet.traces import TraceError

    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (UsageError, TraceError, SpecError) as error:
        _complain(str(error))
        return BAD_INPUT
    except (DemoError, ReportError, OSError) as error:
        _complain(str(error))
        return FAILED
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED


def _complain(message: str, kind: str = "error") -> None:
    """One line on stderr."""
    print(f"prophet: {kind}: {' '.join(message.split())}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    import prophet
    from prophet.commands_simulate import add_simulate

    parser = argparse.ArgumentParser(
        prog="prophet",
        description="Keeps the ranks of expert-parallel Mixture-of-Experts training equally busy.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"moe-prophet {prophet.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_plan(commands)
    add_simulate(commands)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return value


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {text}")
    return value


# --- prophet demo ------------------------------------------------------------------------------------------------


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a small MoE language model, without and with balancing",
        description="Train a byte-level MoE language model on real text with several expert-parallel ranks "
        "(processes of this machine), once without and once with balancing, and compare the two. About two minutes "
        "on two cores.",
        epilog="Writes report.html, routing.npz, metrics.jsonl and summary.json into the output folder.",
    )
    add = demo.add_argument
    add("--out", type=Path, default=Path("out/demo"), metavar="FOLDER", help="output folder (default: %(default)s)")
    add(
        "--text",
        type=Path,
        metavar="PATH",
        help="a file or folder to train on (default: Python's own standard library)",
    )
    add("--steps", type=_positive, default=150, metavar="N", help="steps of each run (default: %(default)s)")
    add("--ranks", type=_positive, default=4, metavar="N", help="expert-parallel ranks (default: %(default)s)")
    add("--seed", type=_not_negative, default=0, metavar="N", help="of parameters and data (default: %(default)s)")
    add(
        "--slots",
        type=_not_negative,
        default=2,
        metavar="N",
        help="replicas a rank may hold per layer (default: %(default)s)",
    )
    add(
        "--limit",
        type=_positive,
        default=1200,
        metavar="SECONDS",
        help="give up after this long (default: %(default)s)",
    )
    add("--json", action="store_true", help="print summary.json instead of tables")
    demo.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from prophet.demo.launch import LaunchConfig
    from prophet.demo.main import run_demo
    from prophet.demo.text import TextError
    from prophet.demo.train import TrainConfig

    config = LaunchConfig(
        out=arguments.out,
        train=TrainConfig(steps=arguments.steps, seed=arguments.seed, slots_per_rank=arguments.slots),
        ranks=arguments.ranks,
        text=arguments.text,
        limit_s=float(arguments.limit),
    )
    try:
        summary = run_demo(config, Console(stderr=arguments.json))
    except TextError as error:
        raise UsageError(f"--text: {error}") from None
    if arguments.json:
        print(json.dumps(summary, indent=2))
    return OK


# --- prophet plan ------------------------------------------------------------------------------------------------


def _add_plan(commands: Any) -> None:
    from prophet.planner.presets import CLUSTERS, MODELS

    plan = commands.add_parser(
        "plan",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="what would balancing gain on my routing trace?",
        description=(
            "Replay a routing trace: place replicas from the iteration before, split each step's tokens by its "
            "own\ncounts, and predict the time of an MoE layer on a named machine. Times are predictions of the "
            "performance\nmodel, not measurements; the balance (busiest rank over mean) and the copies are exact."
        ),
        epilog=(
            "A trace is an npz archive without pickle: counts, integers [steps, layers, ranks, experts]; iteration,\n"
            "int32 [steps]; and, if wanted, meta, a JSON string. `prophet demo` writes one.\n\n"
            f"machines:  {', '.join(CLUSTERS)}\n"
            f"models:    {', '.join(MODELS)}"
        ),
    )
    add = plan.add_argument
    add("trace", type=Path, metavar="TRACE", help="routing trace (.npz)")
    add(
        "--planner",
        action="append",
        metavar="NAME",
        help=f"planner to compare; may be repeated (default: {', '.join(_DEFAULT_PLANNERS)})",
    )
    add("--preset", default=_DEFAULT_PRESET, metavar="MACHINE[:MODEL]", help="for the times (default: %(default)s)")
    add(
        "--slots",
        type=_not_negative,
        default=4,
        metavar="N",
        help="replicas a rank may hold per layer (default: %(default)s)",
    )
    add("--top-k", type=_positive, metavar="N", help="experts per token (default: the trace's, else the model's)")
    add("--iterations", type=_positive, default=25, metavar="N", help="judge at most this many (default: %(default)s)")
    add("--json", action="store_true", help="print JSON instead of a table")
    plan.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    from prophet.planner import get_planner
    from prophet.planner.presets import get_preset
    from prophet.replay import choose_iterations, replay, routed_per_rank
    from prophet.spec import SpecError
    from prophet.traces import read_trace

    trace = read_trace(arguments.trace)
    names = list(dict.fromkeys(["static", *(arguments.planner or _DEFAULT_PLANNERS)]))
    planners = [get_planner(name) for name in names]
    preset = get_preset(arguments.preset)
    top_k = arguments.top_k or _top_k(trace) or preset.model.top_k
    try:
        pairs = choose_iterations(trace, arguments.iterations)
        context = preset.context(
            trace.ranks,
            trace.experts,
            routed_per_rank=routed_per_rank(trace),
            top_k=top_k,
            slots_per_rank=arguments.slots,
        )
    except SpecError as error:
        raise UsageError(f"{arguments.trace}: {error}") from None
    results = [replay(trace, planner, context, pairs) for planner in planners]
    answer = {
        "trace": {
            "file": str(arguments.trace),
            "steps": trace.steps,
            "layers": trace.layers,
            "ranks": trace.ranks,
            "experts": trace.experts,
            "top_k": top_k,
            "iterations_judged": len(pairs),
        },
        "preset": preset.name,
        "slots_per_rank": arguments.slots,
        "planners": [_as_json(r, results[0]) for r in results],
    }
    if arguments.json:
        print(json.dumps(answer, indent=2))
    else:
        _print_plan(answer)
    return OK


def _top_k(trace: RoutingTrace) -> int | None:
    value = trace.meta.get("top_k")
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


def _as_json(result: Replay, static: Replay) -> dict[str, Any]:
    return {
        "planner": result.planner,
        "max_mean_median": result.max_mean_median,
        "max_mean_p95": result.max_mean_p95,
        "copies_per_rank_mean": result.copies_per_rank,
        "copies_on_fullest_rank": result.copies_on_fullest_rank,
        "predicted_a2a_s": result.a2a_s,
        "predicted_expert_s": result.expert_s,
        "predicted_exposed_s": result.exposed_s,
        "predicted_layer_s": result.layer_s,
        "predicted_speed_up": static.layer_s / result.layer_s if result.layer_s > 0 else 1.0,
    }


def _print_plan(answer: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    trace, rows = answer["trace"], answer["planners"]
    console = Console()
    console.print(
        f"{trace['file']}: {trace['layers']} layers, {trace['ranks']} ranks, {trace['experts']} experts, top "
        f"{trace['top_k']}; {trace['iterations_judged']} iterations judged, each planned from the one before.",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("planner", no_wrap=True)
    for column in (
        "max/mean\nmedian",
        "\np95",
        "copies\nper rank",
        "A2A\nms",
        "experts\nms",
        "exposed\nms",
        "layer\nms",
        "gain",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for r in rows:
        milliseconds = (f"{1e3 * r[f'predicted_{part}_s']:.3g}" for part in ("a2a", "expert", "exposed", "layer"))
        table.add_row(
            r["planner"],
            f"{r['max_mean_median']:.3f}",
            f"{r['max_mean_p95']:.3f}",
            f"{r['copies_per_rank_mean']:.2f}",
            *milliseconds,
            f"{r['predicted_speed_up']:.2f}×",
        )
    console.print(table)
    best = max(rows, key=lambda r: r["predicted_speed_up"])
    if best["predicted_speed_up"] > 1.0:
        gain = best["predicted_speed_up"]
        verdict = f"{best['planner']!r} is predicted to make the MoE layers {gain:.2f} times as fast as no balancing."
    else:
        verdict = "No planner is predicted to gain anything here."
    console.print(
        f"{verdict} Times are predictions for {answer['preset']} (forward and backward of one layer, mean over steps); "
        "balance and copies are exact.",
        highlight=False,
    )


if __name__ == "__main__":
    raise SystemExit(main())
