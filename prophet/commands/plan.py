"""`prophet plan`: what balancing would gain on recorded routing."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prophet.commands.arguments import UsageError, no_such, not_negative, positive

if TYPE_CHECKING:
    from prophet.machine.presets import Model
    from prophet.spec import PlanContext, Topology
    from prophet.traces.npz import RoutingTrace
    from prophet.traces.replay import Replay

_DEFAULT_PLANNERS = ("static", "top2", "top3", "pro-prophet", "prophet")
_DEFAULT_PRESET = "h100-ib:Mixtral-8x7B"


def add(commands: Any) -> None:
    """Register the command."""
    from prophet.machine.presets import CLUSTERS, MODELS
    from prophet.planner import PLANNER_NAMES

    plan = commands.add_parser(
        "plan",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="what would balancing gain on my routing trace?",
        description=(
            "Replay routing traces: place replicas from the iteration before, split each step's tokens by its own\n"
            "counts, and predict the time of an MoE layer on a machine, named or measured. Times are predictions of\n"
            "the performance model, not measurements; the balance (busiest rank over mean) and the copies are exact."
        ),
        epilog=(
            "A trace is an npz archive without pickle: counts, integers [steps, layers, ranks, experts]; iteration,\n"
            "int32 [steps]; and, if wanted, meta, a JSON string. `prophet demo` writes one. Logs of other tools are\n"
            "read, too: a .csv with the columns step,layer,rank,expert,count, and Megatron-LM's router trace, a\n"
            ".jsonl file or the folder that holds one per rank.\n\n"
            f"planners:  {', '.join(PLANNER_NAMES[:7])},\n           {', '.join(PLANNER_NAMES[7:])}\n"
            f"machines:  {', '.join(CLUSTERS)}\n"
            f"models:    {', '.join(MODELS)}"
        ),
    )
    argument = plan.add_argument
    argument("traces", type=Path, nargs="*", metavar="TRACE", help="routing trace (.npz), or a log (.csv, .jsonl)")
    argument("--trace", type=Path, action="append", default=[], metavar="TRACE", help="the same; any number of either")
    argument(
        "--planner",
        action="append",
        metavar="NAME",
        help=f"planner to compare, or all; may be repeated (default: {', '.join(_DEFAULT_PLANNERS)})",
    )
    machine = plan.add_mutually_exclusive_group()
    machine.add_argument("--preset", metavar="MACHINE[:MODEL]", help=f"for the times (default: {_DEFAULT_PRESET})")
    machine.add_argument("--topology", type=Path, metavar="FILE", help="a machine measured by `prophet calibrate`")
    argument("--model", metavar="NAME", help="with --topology: the layer's sizes (default: what the trace says)")
    argument(
        "--slots",
        type=not_negative,
        default=4,
        metavar="N",
        help="replicas a rank may hold per layer (default: %(default)s)",
    )
    argument("--top-k", type=positive, metavar="N", help="experts per token (default: the trace's, else the model's)")
    argument("--experts", type=positive, metavar="N", help="experts of a log that does not say (default: as seen)")
    argument("--iterations", type=positive, default=25, metavar="N", help="judge at most this many (default: 25)")
    argument("--html", type=Path, metavar="FILE", help="write a page with figures")
    argument("--json", action="store_true", help="print JSON instead of a table")
    plan.set_defaults(run=run, usage_error=plan.error)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Machine:
    """Where the layer would run: a preset, or a measured topology with the sizes of a model."""

    name: str
    model: Model | None
    topology: Topology | None


def run(arguments: argparse.Namespace) -> int:
    """Replay every trace with every planner, and print the comparison."""
    from prophet.planner import get_planner
    from prophet.traces.importers import read_any

    files = [*arguments.traces, *arguments.trace]
    if not files:
        arguments.usage_error("expected at least one TRACE")
    names = _planner_names(arguments.planner)
    if arguments.html:
        _check_page(arguments.html, names)
    machine = _machine(arguments)
    answers, reports = [], []
    for file in files:
        trace = read_any(file, experts=arguments.experts)
        if arguments.experts not in (None, trace.experts):
            raise UsageError(f"--experts {arguments.experts}: {file} says itself that it has {trace.experts} experts")
        answer, results, pairs = _replay(file, trace, arguments, machine, [get_planner(n) for n in names])
        answers.append(answer)
        iterations = [int(trace.iteration[now.start]) for _, now in pairs]
        reports.append((answer, iterations, results))
    if arguments.json:
        print(json.dumps(answers[0] if len(answers) == 1 else _together(answers), indent=2))
    else:
        for answer in answers:
            _print(answer)
    if arguments.html:
        _write_html(arguments.html, reports)
        if not arguments.json:
            print(f"Page: {arguments.html}")
    return 0


def _check_page(file: Path, planners: list[str]) -> None:
    """Refuse before anything is replayed what `--html` cannot be."""
    if len(planners) < 2:
        raise UsageError("--html: expected at least one planner besides static")
    if file.is_dir():
        raise UsageError(f"--html: expected a file, {file} is a folder")


def _together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Several traces in one JSON document."""
    return {
        "slots_per_rank": answers[0]["slots_per_rank"],
        "traces": [{k: a[k] for k in ("trace", "preset", "planners")} for a in answers],
    }


def _planner_names(asked: list[str] | None) -> list[str]:
    from prophet.planner import PLANNER_NAMES

    names = list(dict.fromkeys(["static", *(asked or _DEFAULT_PLANNERS)]))
    if "all" in names:
        names = list(dict.fromkeys(["static", *PLANNER_NAMES]))
    for name in names:
        if name not in PLANNER_NAMES:
            raise no_such("--planner", "planner", name, PLANNER_NAMES)
    return names


def _machine(arguments: argparse.Namespace) -> _Machine:
    from prophet.machine.presets import CLUSTERS, MODELS, get_preset
    from prophet.machine.topology import read_topology

    if arguments.topology is None:
        if arguments.model:
            raise UsageError("--model goes with --topology; with --preset write MACHINE:MODEL")
        name = arguments.preset or _DEFAULT_PRESET
        cluster, _, model = name.partition(":")
        if cluster not in CLUSTERS:
            raise no_such("--preset", "machine", cluster, list(CLUSTERS))
        if model and model not in MODELS:
            raise no_such("--preset", "model", model, list(MODELS))
        preset = get_preset(name)
        return _Machine(name=preset.name, model=None, topology=None)
    topology = read_topology(arguments.topology)
    if arguments.model and arguments.model not in MODELS:
        raise no_such("--model", "model", arguments.model, list(MODELS))
    model_of = MODELS[arguments.model] if arguments.model else None
    return _Machine(name=f"{topology.name} ({arguments.topology})", model=model_of, topology=topology)


def _context(
    file: Path, trace: RoutingTrace, arguments: argparse.Namespace, machine: _Machine
) -> tuple[PlanContext, int, str]:
    """What the planners know, experts per token, and the name of the machine and model."""
    from prophet.machine.presets import get_preset
    from prophet.spec import PlanContext, check_experts_per_rank
    from prophet.traces.replay import routed_per_rank

    routed = routed_per_rank(trace)
    top_k = arguments.top_k or _whole_meta(file, trace, "top_k")
    if machine.topology is None:
        preset = get_preset(machine.name)
        top_k = top_k or preset.model.top_k
        context = preset.context(
            trace.ranks, trace.experts, routed_per_rank=routed, top_k=top_k, slots_per_rank=arguments.slots
        )
        return context, top_k, preset.name
    topology = machine.topology
    if topology.ranks != trace.ranks:
        raise UsageError(
            f"{arguments.topology} is a machine of {topology.ranks} ranks, {file} was recorded on {trace.ranks}: "
            f"calibrate with --ranks {trace.ranks}, or take a --preset"
        )
    model = machine.model or _model_of(file, trace)
    top_k = top_k or model.top_k
    m = check_experts_per_rank(trace.experts, trace.ranks)
    context = PlanContext(
        topology=topology,
        shape=model.shape(4),  # the precision that `prophet calibrate` measures unless told otherwise
        home=tuple(e // m for e in range(trace.experts)),
        windows=model.windows(routed / top_k, min(topology.flops_per_s)),
        slots_per_rank=arguments.slots,
    )
    return context, top_k, f"{machine.name}, {model.name}"


def _model_of(file: Path, trace: RoutingTrace) -> Model:
    """The layer's sizes as the trace's metadata has them; the rest of the block is taken as attention of that size."""
    from prophet.machine.presets import Model

    dim, hidden = _whole_meta(file, trace, "dim"), _whole_meta(file, trace, "hidden")
    if dim is None or hidden is None:
        raise UsageError(f"{file}: its metadata has no dim and hidden; say --model NAME with --topology")
    return Model(
        name=f"{dim} x {hidden}",
        dim=dim,
        hidden=hidden,
        activation="gelu",
        bias=True,
        top_k=1,
        dense_params=4 * dim * dim,
        attention_dim=dim,
        sequence=1024,
    )


def _whole_meta(file: Path, trace: RoutingTrace, name: str) -> int | None:
    value = trace.meta.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise UsageError(f"{file}: meta: {name}: expected a whole number of at least 1, got {value!r}")


def _replay(
    file: Path, trace: RoutingTrace, arguments: argparse.Namespace, machine: _Machine, planners: list[Any]
) -> tuple[dict[str, Any], list[Replay], list[tuple[slice, slice]]]:
    from prophet.errors import SpecError
    from prophet.traces.replay import choose_iterations, replay

    try:
        pairs = choose_iterations(trace, arguments.iterations)
        context, top_k, where = _context(file, trace, arguments, machine)
    except SpecError as error:
        raise UsageError(f"{file}: {error}") from None
    results = [replay(trace, planner, context, pairs) for planner in planners]
    answer = {
        "trace": {
            "file": str(file),
            "steps": trace.steps,
            "layers": trace.layers,
            "ranks": trace.ranks,
            "experts": trace.experts,
            "top_k": top_k,
            "iterations_judged": len(pairs),
        },
        "preset": where,
        "slots_per_rank": arguments.slots,
        "planners": [_as_json(r, results[0]) for r in results],
    }
    return answer, results, pairs


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


def _describe(answer: dict[str, Any]) -> str:
    """Sizes of a trace in words."""
    trace = answer["trace"]
    return (
        f"{trace['layers']} layers, {trace['ranks']} ranks, {trace['experts']} experts, top {trace['top_k']}; "
        f"{trace['iterations_judged']} iterations judged, each planned from the one before."
    )


def _write_html(file: Path, reports: list[tuple[dict[str, Any], list[int], list[Replay]]]) -> None:
    from prophet.report import PlanReport, write_plan

    pages = []
    for answer, iterations, results in reports:
        pages.append(
            PlanReport(
                name=Path(answer["trace"]["file"]).name,
                subtitle=f"{_describe(answer)} Predicted for {answer['preset']}, at most {answer['slots_per_rank']} "
                "copies of a layer's experts on a rank.",
                iterations=iterations,
                results=results,
            )
        )
    write_plan(file, pages)


def _print(answer: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = answer["planners"]
    console = Console()
    console.print(f"{answer['trace']['file']}: {_describe(answer)}", highlight=False)
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
