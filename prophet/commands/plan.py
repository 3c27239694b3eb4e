"""`prophet plan`: what balancing would gain on recorded routing."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
from prophet.errors import SpecError, TraceError, UsageError

if TYPE_CHECKING:
    from prophet.machine.named import Machine
    from prophet.machine.sizes import ModelSizes
    from prophet.planner.base import Planner
    from prophet.traces.npz import RoutingTrace
    from prophet.traces.replay import Replay

_DEFAULT_PLANNERS = ("static", "top2", "top3", "pro-prophet", "prophet")
# Iterations of a trace that are judged, evenly spread: medians no longer move with more
_MOST_ITERATIONS = 25
# Its sizes are taken where neither options nor the trace have any
_ASSUMED_MODEL = "Mixtral-8x7B"
_ALL = "all sizes"
# Defaults of `ModelSizes`, as an answer lists them among what is assumed
_DEFAULTS = {
    "top_k": "top 1",
    "activation": "swiglu",
    "heads": "attention of one head",
    "sequence": "sequences of 4096 tokens",
    "vocabulary": "no output head",
}


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "plan",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Replay routing traces and compare planners. Each iteration's replicas are placed from the iteration\n"
            "before, each step's tokens are split by their exact counts, and the performance model predicts the time\n"
            "of one MoE layer and of a step. The balance (busiest rank over mean) and the replicas are exact; times\n"
            "are predictions."
        ),
        epilog=(
            "A trace is an npz archive without pickle: counts, integers [steps, layers, ranks, experts]; iteration,\n"
            "int32 [steps]; and optionally meta, a JSON string. `prophet demo` writes one. Logs of other tools work\n"
            "too, as a file or as the folder that holds one file per rank: .csv with the columns\n"
            "step,layer,rank,expert,count or SGLang's layer_id,expert_id,count; .jsonl, Megatron-LM's router trace;\n"
            ".safetensors, TensorRT-LLM's expert statistic; .json, sums over ranks. docs/plan.md has the list.\n\n"
            "Sizes are taken from the options, then from --model, then from the trace's metadata. A topology file\n"
            "must have as many ranks as a group. --experts also says how many a log has that does not say.\n\n"
            f"{known_names()}"
        ),
    )
    argument = parser.add_argument
    argument("traces", type=Path, nargs="+", metavar="TRACE", help="routing trace (.npz), or a log or its folder")
    add_planner(parser, _DEFAULT_PLANNERS)
    add_machine(parser)
    add_slots(parser)
    argument("--ranks", type=positive, metavar="R", help="ranks of the job (default: as recorded)")
    argument("--ep", type=positive, metavar="R", help="ranks of one expert-parallel group (default: all)")
    argument("--dp", type=positive, metavar="N", help="groups that train the same experts (default: as recorded)")
    argument("--tokens", type=positive, metavar="N", help="tokens per rank and step (default: as recorded)")
    argument("--html", type=Path, metavar="FILE", help="write a page with figures")
    add_json(parser)
    add_model(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Replay every trace with every planner, and print the comparison."""
    from prophet.planner import get_planner

    # Every figure is relative to no balancing, so `static` is first whoever was asked for
    names = list(dict.fromkeys(["static", *planner_names(arguments.planner, _DEFAULT_PLANNERS)]))
    if arguments.html:
        _check_page(arguments.html, names)
    where = machine(arguments.machine)
    answers = []
    for file in arguments.traces:
        planners = [get_planner(n) for n in names]
        answers.append(_answer(_job(arguments, file), where, arguments.slots, arguments.dp, planners))
    if arguments.json:
        print(json.dumps(answers[0].answer if len(answers) == 1 else _together(answers), indent=2))
    else:
        for one in answers:
            _print(one.answer)
    if arguments.html:
        _write_html(arguments.html, answers)
        if not arguments.json:
            print(f"Page: {arguments.html}")
    return 0


def _check_page(file: Path, planners: list[str]) -> None:
    """Refuse, before anything is replayed, an `--html` that cannot be written or drawn here."""
    from prophet.report import check_can_draw

    if len(planners) < 2:
        raise UsageError("--html: expected at least one planner besides static")
    check_can_write("--html", file)
    check_can_draw()


def _together(answers: list[_Answer]) -> dict[str, Any]:
    """Put several traces into one JSON document."""
    common = {"slots_per_rank": answers[0].answer["slots_per_rank"]}
    return common | {"traces": [{k: v for k, v in a.answer.items() if k not in common} for a in answers]}


# --------------------------------------------------------------------------------------------------- what is asked


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What a trace and the options come to together.

    Attributes:
        file: The trace.
        trace: Its counts, on the ranks and with the tokens that are asked for.
        groups: Groups that hold the same layers, one after the other in the trace.
        sizes: The model's sizes.
        top_k_given: Whether somebody gave the experts per token.
        pairs: Steps of the iteration before and of the iteration, for all that are judged.
    """

    file: Path
    trace: RoutingTrace
    groups: int
    sizes: ModelSizes
    top_k_given: bool
    pairs: list[tuple[slice, slice]]

    @property
    def repeats(self) -> float:
        """Layers with experts of the model, for each that was recorded."""
        return self.sizes.blocks_with_experts * self.groups / self.trace.layers

    @property
    def microbatches(self) -> float:
        """Microbatches of a step, mean over those judged."""
        return float(sum(now.stop - now.start for _, now in self.pairs)) / len(self.pairs)

    @property
    def planned_from_itself(self) -> bool:
        """Whether the trace has one iteration, as most of what servers publish; it is then planned from itself."""
        return self.pairs[0][0] == self.pairs[0][1]


def _job(arguments: argparse.Namespace, file: Path) -> _Job:
    """Read a trace; on the ranks, in the groups and with the tokens that are asked for."""
    from prophet.machine.models import MODELS
    from prophet.machine.recorded import recorded_sizes
    from prophet.traces.importers import read_any
    from prophet.traces.regroup import scaled
    from prophet.traces.replay import choose_iterations

    trace = read_any(file, experts=arguments.experts, ranks=arguments.ep, job=arguments.ranks)
    _check_experts(file, trace, arguments.experts)
    of_trace = recorded_sizes(trace.meta, str(file))
    groups = trace.meta.get("groups", 1)
    # The metadata comes from outside; `True` would pass as the number 1
    if type(groups) is not int or not 1 <= groups <= trace.layers or trace.layers % groups:
        raise UsageError(f"{file}: meta: groups: expected a divisor of its {trace.layers} layers")
    if arguments.dp is not None and arguments.dp < groups:
        raise UsageError(f"--dp {arguments.dp}: {file} has {groups} groups that train the same layers")
    if of_trace.get("experts", trace.experts) != trace.experts:
        got = of_trace["experts"]
        raise UsageError(f"{file}: meta: experts: expected the {trace.experts} of its counts, got {got}")
    options = {n: v for n in ("dim", "hidden", "top_k", "layers", "heads") if (v := getattr(arguments, n)) is not None}
    recorded = {"layers": trace.layers // groups, "experts": trace.experts}
    try:
        only = list(trace.iteration_slices())
        # A plan is made from the iteration before. With a single one there is none, so the answer is an upper bound
        pairs = [(only[0], only[0])] if len(only) == 1 else choose_iterations(trace, _MOST_ITERATIONS)
        if not any(trace.counts[now].any() for _, now in pairs):
            raise SpecError("counts: expected tokens in the iterations that are judged, all of their counts are 0")
        base = MODELS[_ASSUMED_MODEL] if arguments.model else _without_model(recorded, of_trace, options)
        sizes = model_sizes(arguments, base)
        if arguments.model:
            needs_experts(sizes)
            _check_same(file, of_trace, sizes, options)
        elements = {"element_bytes": sizes.element_bytes or of_trace.get("element_bytes")}
        # The counts show how many experts there are, whatever a model has
        sizes = sizes.with_options({"experts": trace.experts} | elements)
        if arguments.tokens is not None:
            # Counts are of routed tokens: each token is counted once for every expert that it goes to
            trace = scaled(trace, arguments.tokens * sizes.top_k)
    except (SpecError, TraceError) as error:
        raise UsageError(f"{file}: {error}") from None
    return _Job(
        file=file,
        trace=trace,
        groups=groups,
        sizes=sizes,
        top_k_given=bool(arguments.model) or "top_k" in of_trace | options,
        pairs=pairs,
    )


def _check_experts(file: Path, trace: RoutingTrace, asked: int | None) -> None:
    experts, ranks = trace.experts, trace.ranks
    if asked not in (None, experts):
        raise UsageError(f"--experts {asked}: {file} says itself that it has {experts} experts")
    if experts % ranks:
        common = math.gcd(experts, ranks)
        options = [f"--ep {common}"] if common > 1 else []
        raise UsageError(
            f"{file}: {experts} experts cannot be divided among {ranks} ranks, and every rank is home to as many: give "
            f"{' or '.join([*options, f'--ranks {common if common > 1 else experts}'])}, or for a log in which experts "
            f"without tokens are missing --experts {-(-experts // ranks) * ranks}"
        )


def _without_model(recorded: dict[str, int], of_trace: dict[str, Any], options: dict[str, int]) -> ModelSizes:
    """The sizes where there is no `--model`.

    Args:
        recorded: Sizes that the counts show.
        of_trace: Sizes in the trace's metadata, which win over those.
        options: Sizes from the command line, which win over both.
    """
    from prophet.machine.models import MODELS
    from prophet.machine.sizes import ModelSizes

    known: dict[str, Any] = {**recorded, **of_trace, **options}
    if "layers" in options and of_trace.get("moe_layers") == of_trace.get("layers"):
        # All layers of the trace have experts, so all of the model's have some too
        known.pop("moe_layers", None)
    kept = []
    if {"dim", "heads"} & options.keys():
        # What follows from the recorded width does not hold for another
        for name in {"dense_params", "heads", "kv_heads", "head_dim"} - options.keys():
            known.pop(name, None)
        kept = [f"{name} {known[name]} as recorded" for name in ("sequence", "vocabulary") if name in of_trace]
    if not {"dim", "hidden"} <= known.keys():
        there = ("layers", "moe_layers", "experts", "top_k", "sequence", "element_bytes")
        return MODELS[_ASSUMED_MODEL].with_options({n: known.get(n) for n in there} | {"assumed": (_ALL,)})
    assumed = [text for name, text in _DEFAULTS.items() if name not in known] + kept
    if known.get("moe_layers", known["layers"]) < known["layers"] and "dense_hidden" not in known:
        assumed.append("blocks without experts as wide as an expert")
    return ModelSizes(**{"name": "unnamed", "assumed": tuple(assumed), **known})


def _check_same(file: Path, of_trace: dict[str, Any], sizes: ModelSizes, options: dict[str, int]) -> None:
    """Refuse a model that the trace's metadata contradicts, where no option decides."""
    theirs = {name: getattr(sizes, name) for name in ("dim", "hidden", "top_k") if name not in options}
    if names := [name for name, size in theirs.items() if of_trace.get(name, size) != size]:
        model, recorded = (", ".join(f"{name} {of[name]}" for name in names) for of in (theirs, of_trace))
        decide = " ".join(f"--{name.replace('_', '-')} {theirs[name]}" for name in names)
        raise UsageError(
            f"--model: {sizes.name} has {model}, {file} was recorded with {recorded}: leave --model out, or decide, "
            f"as with {decide}"
        )


def _model_line(sizes: ModelSizes) -> str:
    if _ALL in sizes.assumed:
        return f"The sizes of {sizes.name} are assumed: give --model."
    assumed = f" Assumed: {', '.join(sizes.assumed)}." if sizes.assumed else ""
    return f"Model: {sizes.name}, {sizes.dim} x {sizes.hidden}, {sizes.activation}.{assumed}"


def _machine_line(where: Machine, element_bytes: int) -> str:
    if where.ranks is not None:
        return f"Machine: {where.name}, measured; {element_bytes} bytes an element."
    return (
        f"Machine: {where.name}, by data sheets. Yours: prophet calibrate --out topology.toml, then --machine "
        "topology.toml."
    )


# ------------------------------------------------------------------------------------------------------ the answer


class _Answer(NamedTuple):
    """One trace's answer.

    Attributes:
        answer: What `--json` prints.
        results: Every planner's replay.
        iterations: Numbers of the iterations judged.
    """

    answer: dict[str, Any]
    results: list[Replay]
    iterations: list[int]


def _answer(job: _Job, where: Machine, slots: int, dp: int | None, planners: list[Planner]) -> _Answer:
    """Replay one trace with every planner."""
    from prophet.commands.advice import advice
    from prophet.machine.step import rest_of_step
    from prophet.spec import PlanContext
    from prophet.terminal import progress
    from prophet.traces.replay import replay, routed_per_rank

    trace, sizes = job.trace, job.sizes
    if where.ranks not in (None, trace.ranks):
        raise UsageError(
            f"--machine: {where.name} has {where.ranks} ranks, {job.file} has {trace.ranks}: calibrate with --ranks "
            f"{trace.ranks}, regroup the trace with --ranks {where.ranks}, or name a machine that comes in any size"
        )
    tokens = routed_per_rank(trace) / sizes.top_k
    topology, element_bytes = where.topology(trace.ranks), sizes.element_bytes or where.element_bytes
    windows = sizes.windows(tokens, min(topology.flops_per_s))
    context = PlanContext(
        topology=topology,
        shape=sizes.shape(element_bytes),
        # Experts lie on ranks in order, as many on each: where MoE layers have them at first
        home=tuple(e * trace.ranks // trace.experts for e in range(trace.experts)),
        windows=windows,
        slots_per_rank=slots,
    )
    n, copies = len(job.pairs), dp or job.groups
    with progress(f"Replaying {job.file.name}", job.pairs * len(planners), n * len(planners)) as left:
        # One line of progress for all planners: each takes its part of it
        results = [replay(trace, planner, context, itertools.islice(left, n)) for planner in planners]
    rest = rest_of_step(
        sizes,
        topology,
        tokens=tokens,
        windows=windows,
        element_bytes=element_bytes,
        # Gradients of what every rank has are averaged over all groups, so it is the whole job that says who shares a
        # node
        ranks_per_node=where.topology(trace.ranks * copies).ranks_per_node,
        groups=copies,
    )
    answer = {
        "trace": {
            "file": str(job.file),
            "steps": trace.steps,
            "layers": trace.layers,
            "ranks": trace.ranks,
            "experts": trace.experts,
            "top_k": sizes.top_k,
            "top_k_assumed": not job.top_k_given,
            "groups": job.groups,
            "tokens_per_rank": tokens,
            "iterations_judged": n,
            "planned_from": "itself" if job.planned_from_itself else "the iteration before",
        },
        "assumed": [_model_line(sizes), _machine_line(where, element_bytes)],
        "machine": where.name,
        "model": {name: value for name, value in asdict(sizes).items() if name != "assumed"},
        "slots_per_rank": slots,
        "step": {
            "layers": sizes.layers,
            "moe_layers": sizes.blocks_with_experts,
            "microbatches": job.microbatches,
            "dp": copies,
            **asdict(rest),
        },
        "memory_bytes": where.memory_bytes,
        "replica_bytes": context.shape.replica_bytes,
        "planners": _as_json(job, results, rest.seconds(job.microbatches), context.shape.replica_bytes),
    }
    return _Answer(
        answer | {"advice": advice(answer)}, results, [int(trace.iteration[now.start]) for _, now in job.pairs]
    )


def _as_json(job: _Job, results: list[Replay], rest_s: float, replica_bytes: int) -> list[dict[str, Any]]:
    """Each planner's figures. Groups run side by side, and a step is as long as that of the slowest one."""
    found: list[dict[str, Any]] = []
    for r in results:
        judged, groups = len(r.layers_s), job.groups
        # [iterations, groups, layers]: layers of a group follow each other, the slowest group is waited for
        layers_s = r.layers_s.reshape(judged, groups, -1).sum(axis=2).max(axis=1).mean()
        held = r.rank_copies.reshape(judged, groups, -1, job.trace.ranks).sum(axis=2).max()
        # Only some of the model's layers were recorded; the others are taken to be like them
        replicas = math.ceil(job.repeats * int(held))
        found.append(
            {
                "planner": r.planner,
                "max_mean_median": r.max_mean_median,
                "max_mean_p95": r.max_mean_p95,
                "copies_per_rank_mean": r.copies_per_rank,
                "copies_on_fullest_rank": r.copies_on_fullest_rank,
                "predicted_a2a_s": r.a2a_s,
                "predicted_expert_s": r.expert_s,
                "predicted_exposed_s": r.exposed_s,
                "predicted_layer_s": r.layer_s,
                "predicted_speed_up": _ratio(results[0].layer_s, r.layer_s),
                "predicted_step_s": job.repeats * float(layers_s) + rest_s,
                "replicas_on_fullest_rank": replicas,
                "replica_bytes_on_fullest_rank": replicas * replica_bytes,
                "planning_s": job.repeats * r.place_s,
                "splitting_s": job.repeats * r.split_s,
            }
        )
    for row in found:
        row["predicted_step_speed_up"] = _ratio(found[0]["predicted_step_s"], row["predicted_step_s"])
    return found


def _ratio(before_s: float, after_s: float) -> float:
    return before_s / after_s if after_s > 0 else 1.0


# ---------------------------------------------------------------------------------------------------- how it is shown


def _describe(answer: dict[str, Any]) -> str:
    """The sizes of a trace as a sentence."""
    trace = answer["trace"]
    judged = f"{trace['iterations_judged']} iterations judged, each planned from the one before."
    if trace["planned_from"] == "itself":
        judged = "its only iteration judged, planned from itself: no more than this can be gained."
    assumed = " (assumed)" if trace["top_k_assumed"] else ""
    groups = f" in each of {trace['groups']} groups" if trace["groups"] > 1 else ""
    return (
        f"{trace['layers'] // trace['groups']} layers, {trace['ranks']} ranks{groups}, {trace['experts']} experts, top "
        f"{trace['top_k']}{assumed}, {trace['tokens_per_rank']:,.0f} tokens per rank; {judged}"
    )


def _write_html(file: Path, answers: list[_Answer]) -> None:
    from prophet.commands.advice import sentences
    from prophet.report import Comparison, write_comparison

    pages = []
    for a in answers:
        slots = a.answer["slots_per_rank"]
        pages.append(
            Comparison(
                name=Path(a.answer["trace"]["file"]).name,
                subtitle=f"{' '.join(a.answer['assumed'])} {_describe(a.answer)} At most {slots} copies of a layer's "
                "experts on a rank.",
                iterations=a.iterations,
                results=a.results,
                step_s=[p["predicted_step_s"] for p in a.answer["planners"]],
                remarks=sentences(a.answer),
            )
        )
    write_comparison(file, pages)


def _print(answer: dict[str, Any]) -> None:
    from prophet.commands.advice import milliseconds, sentences
    from prophet.terminal import Column, console, print_table

    to = console()
    for line in answer["assumed"]:
        to.print(line, highlight=False, markup=False)
    to.print(f"{answer['trace']['file']}: {_describe(answer)}", highlight=False, markup=False)
    columns = [
        Column("planner", align="left"),
        Column("max/mean\nmedian", 2),
        Column("\np95", 6),
        Column("copies\nper rank", 3),
        Column("A2A\nms", 5),
        Column("experts\nms", 5),
        Column("exposed\nms", 5),
        Column("layer\nms", 4),
        Column("layer\ngain", 2),
        Column("step\nms", 1),
        Column("step\ngain"),
    ]
    rows = [
        [
            p["planner"],
            f"{p['max_mean_median']:.3f}",
            f"{p['max_mean_p95']:.3f}",
            f"{p['copies_per_rank_mean']:.2f}",
            *(milliseconds(p[f"predicted_{part}_s"]) for part in ("a2a", "expert", "exposed", "layer")),
            f"{p['predicted_speed_up']:.2f}×",
            milliseconds(p["predicted_step_s"]),
            f"{p['predicted_step_speed_up']:.2f}×",
        ]
        for p in answer["planners"]
    ]
    print_table(columns, rows, to)
    for line in sentences(answer):
        to.print(line, highlight=False, markup=False)
