"""What the demo shows: the summary, the table, the predictions and the report, all from the runs' results.

Shape legend: T steps, L layers, R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prophet.demo.launch import LaunchConfig, Results
from prophet.demo.train import RunResult
from prophet.machine.presets import get_preset
from prophet.planner import get_planner
from prophet.report import Pairs, Report, Run, Table, max_mean, relative_difference
from prophet.report.gain import CONFIDENCE
from prophet.traces.npz import RoutingTrace
from prophet.traces.regroup import scaled
from prophet.traces.replay import choose_iterations, replay, routed_per_rank

PREDICTED_ON = ("hpwnv:MoE-GPT-M", "h100-nvlink:Mixtral-8x7B", "ethernet-25g:Mixtral-8x7B")
# Per rank: what such machines train with, where the demo has half of it
PREDICTED_TOKENS = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One preset's predicted times.

    Attributes:
        preset: Machine and model.
        static_layer_s: Seconds of an MoE layer without balancing.
        balanced_layer_s: Seconds of it with balancing.
        rest_s: Seconds of the rest of its block.
    """

    preset: str
    static_layer_s: float
    balanced_layer_s: float
    rest_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The results of all seeds.

    Attributes:
        results: Results by seed and name of the run.
        ranks: Expert-parallel ranks.
        cores: Physical cores that the ranks may use.
        pairs: Step times of both runs; None where ranks share cores, and time shows nothing.
        on_gpus: Whether each rank had a GPU.
    """

    results: Results
    ranks: int
    cores: int
    pairs: Pairs | None
    on_gpus: bool = False

    @property
    def shared(self) -> bool:
        """Whether ranks shared cores to compute on."""
        return not self.on_gpus and self.cores < self.ranks

    @property
    def first(self) -> dict[str, RunResult]:
        """Both runs of the first seed."""
        return next(iter(self.results.values()))

    def runs(self, name: str) -> list[RunResult]:
        """One of the runs, from every seed."""
        return [runs[name] for runs in self.results.values()]

    def difference(self) -> float:
        """The largest relative difference of the losses of both runs, over steps and seeds."""
        return max(float(relative_difference(r["off"].loss, r["on"].loss).max()) for r in self.results.values())

    def step_s(self) -> dict[str, float]:
        """Seconds of a run's median step; nothing where time shows nothing."""
        return {} if self.pairs is None else dict(zip(("off", "on"), self.pairs.steps_s, strict=True))


def outcome_of(results: Results, config: LaunchConfig, *, cores: int) -> Outcome:
    """Pair the step times of both runs. The first of several pairs of a seed is its warm-up.

    Args:
        results: Results by seed and name of the run.
        config: How the demo ran.
        cores: Physical cores that the ranks may use.
    """
    runs = results.values()
    pairs = None
    turn = config.train.turn
    # Ranks that share a core work one after the other, so an even share of work cannot make a step shorter. With a
    # single turn there is no pair besides the warm-up.
    if (config.on_gpus or cores >= config.ranks) and config.train.steps // turn > 1:
        pairs = Pairs(
            names=[f"seed {seed}" for seed in results],
            before_s=np.stack([turn_medians(r["off"].step_s, turn) for r in runs]),
            after_s=np.stack([turn_medians(r["on"].step_s, turn) for r in runs]),
        )
    return Outcome(results=results, ranks=config.ranks, cores=cores, pairs=pairs, on_gpus=config.on_gpus)


def turn_medians(step_s: np.ndarray[Any, Any], turn: int) -> np.ndarray[Any, Any]:
    """The median step of every whole turn, [P], from the seconds of all steps, [T]."""
    # A turn that was cut short by the last step is left out: its median is of fewer steps
    whole = len(step_s) // turn
    medians: np.ndarray[Any, Any] = np.median(step_s[: whole * turn].reshape(whole, turn), axis=1)
    return medians


# --- text ---


def headline(outcome: Outcome) -> str:
    """Say what balancing gains in time on this machine, or why there is no such figure."""
    pairs, ranks, cores = outcome.pairs, outcome.ranks, outcome.cores
    if outcome.shared:
        shared = "1 core" if cores == 1 else f"{cores} cores"
        return f"Time shows nothing here: {ranks} ranks share {shared}."
    if pairs is None or pairs.interval is None:
        return "No difference measurable: too few steps to compare times."
    low, high = pairs.interval
    counted = f"{pairs.counted.size} pairs of turns, {_count(len(pairs.names), 'seed')}"
    if not pairs.measurable:
        return (
            f"No difference measurable in time: with balancing a step takes {low:.3f} to {high:.3f} of the time "
            f"without ({CONFIDENCE:.0%} interval, {counted})."
        )
    before, after = pairs.steps_s
    return (
        f"With balancing a step takes {pairs.median:.3f} of the time without ({CONFIDENCE:.0%} interval {low:.3f} to "
        f"{high:.3f}, {counted}): {1e3 * before:.0f} → {1e3 * after:.0f} ms."
    )


def balance_line(outcome: Outcome) -> str:
    """Say how even the ranks are, in one sentence."""
    # Medians, as a single early step may be far off
    before, after = (_median_max_mean(outcome.runs(name)) for name in ("off", "on"))
    return f"The busiest rank computes {before:.2f} times the mean without balancing, {after:.2f} times with it."


def loss_line(outcome: Outcome) -> str:
    """Say that the losses are equal, in one sentence."""
    seeds = _count(len(outcome.results), "seed")
    return f"The losses do not change: their largest relative difference is {outcome.difference():.1e} ({seeds})."


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def _median_max_mean(runs: Iterable[RunResult]) -> float:
    return float(np.median([max_mean(run.rank_load) for run in runs]))


def remarks(outcome: Outcome, config: LaunchConfig) -> tuple[str, ...]:
    """Say what this machine can and cannot show."""
    ranks, cores, train = outcome.ranks, outcome.cores, config.train
    seeds = ", ".join(map(str, outcome.results))
    if outcome.shared:
        time = (
            f"{ranks} ranks share {_count(cores, 'core')} here. A step's work is the same with balancing on or off, "
            "only its distribution changes. The cores are busy either way, so times would only show what balancing "
            "costs, and this page shows none."
        )
        warm_up = []
    else:
        time = (
            "Each rank has its own core here, but all share one memory bus and one loopback network. Step times on "
            "real machines differ."
        )
        if outcome.on_gpus:
            time = (
                "Each rank has its own GPU here. The planner works from the preset of a slower machine, so that every "
                "demo plans alike; a calibrated topology fits yours better."
            )
        warm_up = [
            f"The first pair of turns of each seed is the warm-up, and no ratio or interval counts it. A turn has "
            f"{_count(train.turn, 'step')}. The interval treats all pairs as independent. Pairs of one seed are "
            "alike, so another seed may lie outside."
        ]
    busy = []
    if outcome.pairs is not None and outcome.pairs.interval is not None and not outcome.pairs.measurable:
        where = "GPUs or the cores" if outcome.on_gpus else "cores"
        busy = [f"Other work on the {where} widens the interval: try a quiet machine, or more steps (--steps)."]
    return (
        time,
        *busy,
        *warm_up,
        f"The seeds are {seeds}: nobody picked them. The router has no bias; it learns from its random start.",
        "The losses differ by rounding. Where the router finds two experts almost equal, rounding can swap them for a "
        "token, and from there the losses differ a little more.",
        "Load by rank and the figures after the losses are those of the first seed.",
        "With balancing on, each rank computes more different experts on fewer tokens each, and parameters travel "
        + ("between GPUs." if outcome.on_gpus else "between processes through the cores that compute."),
        *(() if outcome.pairs is None else ("Times in all-to-all include waiting for the slowest rank.",)),
    )


# --- numbers ---


def summarise(outcome: Outcome) -> dict[str, Any]:
    """What `summary.json` holds; without `step_ratio` and any time where ranks share cores."""
    found: dict[str, Any] = {"headline": headline(outcome)}
    if outcome.pairs is not None:
        found["step_ratio"] = _ratio(outcome.pairs)
    step_s = outcome.step_s()
    for name in ("off", "on"):
        runs = outcome.runs(name)
        # [seeds, T, L]: each seed, step and layer counts alike
        ratio = np.stack([max_mean(run.rank_load) for run in runs])
        found[name] = {
            "max_mean_median": float(np.median(ratio)),
            "max_mean_p95": float(np.percentile(ratio, 95)),
            "copies_per_rank_mean": float(np.mean([run.copies.mean() for run in runs])),
        }
        if name in step_s:
            found[name]["step_s_median"] = step_s[name]
            found[name]["tokens_per_s"] = runs[0].tokens_per_step / step_s[name]
    found["loss_max_relative_difference"] = outcome.difference()
    found["losses"] = {
        str(seed): {
            name: {"first": float(run.loss[0]), "last": float(run.loss[-1]), "held_out": run.held_out_loss}
            for name, run in runs.items()
        }
        for seed, runs in outcome.results.items()
    }
    return found | {
        "ranks": outcome.ranks,
        "cores": outcome.cores,
        "device": "cuda" if outcome.on_gpus else "cpu",
    }


def _ratio(pairs: Pairs) -> dict[str, Any]:
    # [seeds, pairs]; the warm-up is the first pair of every seed
    counted = pairs.ratios[:, pairs.warm_up :]
    return {
        "median": pairs.median,
        "interval": None if pairs.interval is None else list(pairs.interval),
        "confidence": CONFIDENCE,
        "measurable": pairs.measurable,
        "pairs": int(counted.size),
        "warm_up_pairs_left_out": int(pairs.ratios.size - counted.size),
        "by_seed": dict(zip(pairs.names, np.median(counted, axis=1).tolist(), strict=True)),
    }


def predict(counts: np.ndarray[Any, Any], top_k: int) -> list[Prediction]:
    """What the performance model predicts for this routing on real machines, at their sizes and `PREDICTED_TOKENS`."""
    trace = RoutingTrace(counts, np.arange(len(counts), dtype=np.int32))
    # A step is planned from the one before
    if trace.steps < 2 or not counts.any():
        return []
    # With the demo's few tokens, such machines would spend their time on latencies
    trace = scaled(trace, PREDICTED_TOKENS * top_k)
    pairs = choose_iterations(trace, 20)
    predictions = []
    for name in PREDICTED_ON:
        routed = routed_per_rank(trace)
        # The preset brings the sizes of its model; the demo's routing brings experts, ranks and top k
        context = get_preset(name).context(trace.ranks, trace.experts, routed_per_rank=routed, top_k=top_k)
        static, balanced = (replay(trace, get_planner(p), context, pairs).layer_s for p in ("static", "prophet"))
        rest_s = context.windows.fnec_s + context.windows.bnec_s
        found = Prediction(preset=name, static_layer_s=static, balanced_layer_s=balanced, rest_s=rest_s)
        predictions.append(found)
    return predictions


def measured_table(outcome: Outcome) -> Table:
    """Both runs in numbers."""
    summary, step_s = summarise(outcome), outcome.step_s()
    a, b = summary["off"], summary["on"]

    def row(label: str, key: str, form: str) -> tuple[str, str, str]:
        return label, format(a[key], form), format(b[key], form)

    def activity(label: str, *names: str) -> tuple[str, str, str]:
        # Parts of a step that belong to one activity are added up before the mean over seeds
        sums = ([sum(run.seconds[n] for n in names) for run in outcome.runs(name)] for name in ("off", "on"))
        before, after = (f"{1e3 * np.mean(values):.1f} ms" for values in sums)
        return label, before, after

    rows = [
        row("busiest rank / mean, median", "max_mean_median", ".3f"),
        row("busiest rank / mean, 95th percentile", "max_mean_p95", ".3f"),
        row("copies per rank and layer, mean", "copies_per_rank_mean", ".2f"),
    ]
    for seed, runs in outcome.results.items():
        off, on = runs["off"], runs["on"]
        rows.append((f"seed {seed}: loss, last step", f"{off.loss[-1]:.5f}", f"{on.loss[-1]:.5f}"))
        rows.append((f"seed {seed}: held-out loss", f"{off.held_out_loss:.5f}", f"{on.held_out_loss:.5f}"))
    rows.append(("largest relative difference of the losses", "", f"{summary['loss_max_relative_difference']:.1e}"))
    # Times stay out where they would show how ranks share cores
    if step_s:
        rows = [
            ("step time, median", f"{1e3 * step_s['off']:.0f} ms", f"{1e3 * step_s['on']:.0f} ms"),
            row("tokens per second", "tokens_per_s", ",.0f"),
            *rows,
            activity("  in the gate", "gate"),
            activity("  exchanging counts", "counts"),
            activity("  in all-to-all", "a2a"),
            activity("  in experts", "expert"),
            activity("  waiting for copies (Trans)", "exposed_trans"),
            activity("  waiting for copies' gradients (Agg)", "exposed_agg"),
            activity("  splitting", "split"),
            activity("planning, beside the step", "plan"),
        ]
    where = "passes on the GPU" if outcome.on_gpus else "the host does"
    return Table(
        title="Both runs in numbers",
        caption="The same seeds and tokens; only the balancing differs."
        + (f" What {where} in a step follows the losses: medians over steps, means over ranks." if step_s else ""),
        columns=("", "balancing off", "balancing on"),
        rows=rows,
    )


def predicted_table(predictions: Sequence[Prediction]) -> Table:
    """The predictions, marked as such."""
    return Table(
        title="Predicted, not measured: the same routing on real machines",
        caption=(
            f"Milliseconds of one MoE layer with {PREDICTED_TOKENS} tokens per rank and the named model's sizes, by "
            "the performance model and data-sheet bandwidths. A block is the layer and the attention around it. No "
            "such machine was run."
        ),
        columns=("machine : model", "balancing off", "balancing on", "layer gain", "block gain"),
        rows=tuple(
            (
                p.preset.replace(":", " : "),
                f"{1e3 * p.static_layer_s:.2f} ms",
                f"{1e3 * p.balanced_layer_s:.2f} ms",
                f"{p.static_layer_s / p.balanced_layer_s:.2f} ×",
                f"{(p.static_layer_s + p.rest_s) / (p.balanced_layer_s + p.rest_s):.2f} ×",
            )
            for p in predictions
        ),
    )


def make_report(outcome: Outcome, config: LaunchConfig, predictions: Sequence[Prediction], *, source: str) -> Report:
    """The page of the demo.

    Args:
        outcome: The results of all seeds.
        config: How the demo ran.
        predictions: Times on real machines; may be empty.
        source: What was trained on, for the page's head.
    """
    train, summary = config.train, summarise(outcome)
    model, a, b = train.model, summary["off"], summary["on"]
    tables = [measured_table(outcome)]
    if predictions:
        tables.append(predicted_table(predictions))
    (before, after), *others = [
        tuple(
            Run(name=f"balancing {name}", loss=runs[name].loss, rank_load=runs[name].rank_load)
            for name in ("off", "on")
        )
        for runs in outcome.results.values()
    ]
    on = outcome.first["on"]
    return Report(
        title=f"{outcome.ranks} ranks train one mixture of experts, without and with balancing",
        lead=(
            f"{headline(outcome)} {balance_line(outcome)} {loss_line(outcome)} Byte-level language models with "
            f"{model.blocks} blocks of {model.experts} experts (top {model.top_k}), trained for {train.steps} steps "
            f"on the {source}."
        ),
        before=before,
        after=after,
        others=[(off, on) for off, on in others],
        counts=on.counts,
        pairs=outcome.pairs,
        # Where ranks share cores, a timeline shows how the system schedules them; beside GPUs, what the host launches
        spans=() if outcome.pairs is None or outcome.on_gpus else on.spans,
        figures=(
            *_time_tiles(outcome),
            (
                f"{a['max_mean_median']:.2f} → {b['max_mean_median']:.2f}",
                "busiest rank / mean, median over steps, layers and seeds",
            ),
            (f"{summary['loss_max_relative_difference']:.1e}", "largest relative difference of the two losses"),
            (f"{b['copies_per_rank_mean']:.1f}", "expert copies per rank and layer, on average"),
        ),
        tables=tables,
        remarks=remarks(outcome, config),
    )


def _time_tiles(outcome: Outcome) -> list[tuple[str, str]]:
    pairs = outcome.pairs
    if pairs is None or pairs.interval is None:
        return []
    low, high = pairs.interval
    interval = f"{CONFIDENCE:.0%} interval {low:.3f} to {high:.3f}"
    if not pairs.measurable:
        return [("no difference measurable", f"in step time, with balancing over without ({interval})")]
    before, after = pairs.steps_s
    return [
        (f"{pairs.median:.3f}", f"of the step time without balancing ({interval})"),
        (f"{1e3 * before:.0f} → {1e3 * after:.0f} ms", "step time on this machine, median"),
    ]
