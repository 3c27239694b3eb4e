"""`prophet plan`: what balancing would gain on recorded routing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prophet.commands.arguments import (
    add_json,
    add_machine,
    add_planner,
    add_slots,
    known_names,
    machine,
    planner_names,
    positive,
)
from prophet.errors import UsageError

if TYPE_CHECKING:
    from prophet.machine.named import Machine
    from prophet.machine.sizes import ModelSizes
    from prophet.spec import PlanContext
    from prophet.traces.npz import RoutingTrace
    from prophet.traces.replay import Replay

_DEFAULT_PLANNERS = ("static", "top2", "top3", "pro-prophet", "prophet")
_MOST_ITERATIONS = 25  # of a trace that are judged, evenly spread: medians no longer move with more


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "plan",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="what would balancing gain on my routing trace?",
        description=(
            "Replay routing traces and compare planners. Each iteration's replicas are placed from the iteration\n"
            "before, each step's tokens are split by their exact counts, and the performance model predicts the time\n"
            "of one MoE layer. The balance (busiest rank over mean) and the replicas are exact; times are predictions."
        ),
        epilog=(
            "A trace is an npz archive without pickle: counts, integers [steps, layers, ranks, experts]; iteration,\n"
            "int32 [steps]; and optionally meta, a JSON string. `prophet demo` writes one. Logs of other tools work\n"
            "too, as a file or as the folder that holds one file per rank: .csv with the columns\n"
            "step,layer,rank,expert,count or SGLang's layer_id,expert_id,count; .jsonl, Megatron-LM's router trace;\n"
            ".safetensors, TensorRT-LLM's expert statistic; .json, sums over ranks. docs/plan.md has the list.\n\n"
            "A topology file must have as many ranks as the trace. Without :MODEL the layer's sizes come from dim\n"
            "and hidden in the trace's metadata.\n\n"
            f"{known_names()}"
        ),
    )
    argument = parser.add_argument
    argument("traces", type=Path, nargs="+", metavar="TRACE", help="routing trace (.npz), or a log or its folder")
    add_planner(parser, _DEFAULT_PLANNERS)
    add_machine(parser)
    add_slots(parser)
    argument(
        "--experts",
        type=_experts,
        default=(None, None),
        metavar="N[/RANKS]",
        help="experts of a log that does not say (default: as seen), and ranks of a group, if it has more or none",
    )
    argument("--html", type=Path, metavar="FILE", help="write a page with figures")
    add_json(parser)
    parser.set_defaults(run=run)


def _experts(text: str) -> tuple[int | None, int | None]:
    """ "64" or "64/8": experts, and ranks of a group."""
    experts, _, ranks = text.partition("/")
    return positive(experts), positive(ranks) if ranks else None


def run(arguments: argparse.Namespace) -> int:
    """Replay every trace with every planner, and print the comparison."""
    from prophet.planner import get_planner
    from prophet.traces.importers import read_any

    names = list(dict.fromkeys(["static", *planner_names(arguments.planner, _DEFAULT_PLANNERS)]))
    if arguments.html:
        _check_page(arguments.html, names)
    where = machine(arguments.machine)
    answers, reports = [], []
    for file in arguments.traces:
        experts, ranks = arguments.experts
        trace = read_any(file, experts=experts, ranks=ranks)
        if experts not in (None, trace.experts):
            raise UsageError(f"--experts {experts}: {file} says itself that it has {trace.experts} experts")
        answer, results, pairs = _replay(file, trace, arguments.slots, where, [get_planner(n) for n in names])
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
    """Refuse before anything is replayed what `--html` cannot be, or cannot be drawn here."""
    from prophet.report import check_can_draw

    if len(planners) < 2:
        raise UsageError("--html: expected at least one planner besides static")
    if file.is_dir():
        raise UsageError(f"--html: expected a file, {file} is a folder")
    check_can_draw()


def _together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Several traces in one JSON document."""
    return {
        "slots_per_rank": answers[0]["slots_per_rank"],
        "traces": [{k: a[k] for k in ("trace", "machine", "planners")} for a in answers],
    }


def _context(file: Path, trace: RoutingTrace, slots: int, where: Machine) -> tuple[PlanContext, int, str]:
    """What the planners know, experts per token, and the name of the machine with its model."""
    from prophet.spec import PlanContext, check_experts_per_rank
    from prophet.traces.replay import routed_per_rank

    if where.ranks not in (None, trace.ranks):
        raise UsageError(
            f"--machine: {where.name} has {where.ranks} ranks, {file} was recorded on {trace.ranks}: calibrate with "
            f"--ranks {trace.ranks}, or name one of the machines that come in any size"
        )
    m = check_experts_per_rank(trace.experts, trace.ranks)
    model = where.model or _model_of(file, trace)
    top_k = _whole_meta(file, trace, "top_k") or model.top_k
    topology = where.topology(trace.ranks)
    context = PlanContext(
        topology=topology,
        shape=model.shape(where.element_bytes),
        home=tuple(e // m for e in range(trace.experts)),
        windows=model.windows(routed_per_rank(trace) / top_k, min(topology.flops_per_s)),
        slots_per_rank=slots,
    )
    return context, top_k, where.label(model)


def _model_of(file: Path, trace: RoutingTrace) -> ModelSizes:
    """The layer's sizes as the trace's metadata has them; the rest of the block is taken as attention of that size."""
    from prophet.machine.sizes import ModelSizes

    dim, hidden = _whole_meta(file, trace, "dim"), _whole_meta(file, trace, "hidden")
    if dim is None or hidden is None:
        raise UsageError(f"{file}: its metadata has no dim and hidden; write --machine FILE:MODEL")
    return ModelSizes(
        name=f"{dim} x {hidden}",
        dim=dim,
        hidden=hidden,
        activation="gelu",
        bias=True,
        sequence=1024,
    )


def _whole_meta(file: Path, trace: RoutingTrace, name: str) -> int | None:
    value = trace.meta.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise UsageError(f"{file}: meta: {name}: expected a whole number of at least 1, got {value!r}")


def _replay(
    file: Path, trace: RoutingTrace, slots: int, where: Machine, planners: list[Any]
) -> tuple[dict[str, Any], list[Replay], list[tuple[slice, slice]]]:
    from prophet.errors import SpecError
    from prophet.traces.replay import choose_iterations, replay

    try:
        only = list(trace.iteration_slices())  # what servers publish is often one dump
        pairs = [(only[0], only[0])] if len(only) == 1 else choose_iterations(trace, _MOST_ITERATIONS)
        if not any(trace.counts[now].any() for _, now in pairs):
            raise SpecError("counts: expected tokens in the iterations that are judged, all of their counts are 0")
        context, top_k, label = _context(file, trace, slots, where)
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
            "planned_from": "itself" if len(only) == 1 else "the iteration before",
        },
        "machine": label,
        "slots_per_rank": slots,
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
    judged = f"{trace['iterations_judged']} iterations judged, each planned from the one before."
    if trace["planned_from"] == "itself":
        judged = "its only iteration judged, planned from itself: no more than this can be gained."
    return (
        f"{trace['layers']} layers, {trace['ranks']} ranks, {trace['experts']} experts, top {trace['top_k']}; {judged}"
    )


def _write_html(file: Path, reports: list[tuple[dict[str, Any], list[int], list[Replay]]]) -> None:
    from prophet.report import Comparison, write_comparison

    pages = []
    for answer, iterations, results in reports:
        pages.append(
            Comparison(
                name=Path(answer["trace"]["file"]).name,
                subtitle=f"{_describe(answer)} Predicted for {answer['machine']}, at most "
                f"{answer['slots_per_rank']} copies of a layer's experts on a rank.",
                iterations=iterations,
                results=results,
            )
        )
    write_comparison(file, pages)


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
        f"{verdict} Times are predictions for {answer['machine']} (forward and backward of one layer, mean over "
        "steps); balance and copies are exact.",
        highlight=False,
    )
