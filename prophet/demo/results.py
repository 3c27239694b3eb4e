"""What the demo has to say: the summary, the table, the predictions and the report, all from the runs' results.

Shape legend: T steps, L layers, R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prophet.demo.train import RunResult, TrainConfig
from prophet.machine.presets import get_preset
from prophet.planner import get_planner
from prophet.report import Report, Run, Table, max_mean, relative_difference
from prophet.traces.npz import RoutingTrace
from prophet.traces.replay import choose_iterations, replay, routed_per_rank

PREDICTED_ON = ("hpwnv:MoE-GPT-M", "h100-nvlink:Mixtral-8x7B", "ethernet-25g:Mixtral-8x7B")
PREDICTED_TOKENS = 8192  # per rank: what such machines train with, where the demo has a few hundred


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One preset's predicted seconds: of an MoE layer, and of the rest of its block."""

    preset: str
    static_layer_s: float
    balanced_layer_s: float
    rest_s: float


def summarise(results: dict[str, RunResult]) -> dict[str, Any]:
    """What `summary.json` holds; `results` are the runs "off" and "on"."""
    off, on = results["off"], results["on"]
    return {
        "off": _summary_of(off),
        "on": _summary_of(on),
        "loss_max_relative_difference": float(relative_difference(off.loss, on.loss).max()),
        "ranks": int(on.rank_load.shape[2]),
    }


def _summary_of(run: RunResult) -> dict[str, float]:
    ratio = max_mean(run.rank_load)
    step_s = float(np.median(run.step_s))
    return {
        "step_s_median": step_s,
        "max_mean_median": float(np.median(ratio)),
        "max_mean_p95": float(np.percentile(ratio, 95)),
        "copies_per_rank_mean": float(run.copies.mean()),
        "tokens_per_s": run.tokens_per_step / step_s,
        "loss_first": float(run.loss[0]),
        "loss_last": float(run.loss[-1]),
    }


def predict(counts: np.ndarray[Any, Any], top_k: int) -> list[Prediction]:
    """What the performance model says of this routing on real machines, at their sizes and `PREDICTED_TOKENS`."""
    trace = RoutingTrace(counts, np.arange(len(counts), dtype=np.int32))
    if trace.steps < 2 or not counts.any():
        return []
    factor = max(1, round(PREDICTED_TOKENS * top_k / routed_per_rank(trace)))
    scaled = RoutingTrace(trace.counts * factor, trace.iteration)
    pairs = choose_iterations(scaled, 20)
    predictions = []
    for name in PREDICTED_ON:
        routed = routed_per_rank(scaled)
        context = get_preset(name).context(trace.ranks, trace.experts, routed_per_rank=routed, top_k=top_k)
        static, balanced = (replay(scaled, get_planner(p), context, pairs).layer_s for p in ("static", "prophet"))
        rest_s = context.windows.fnec_s + context.windows.bnec_s
        found = Prediction(preset=name, static_layer_s=static, balanced_layer_s=balanced, rest_s=rest_s)
        predictions.append(found)
    return predictions


def measured_table(results: dict[str, RunResult], summary: dict[str, Any]) -> Table:
    """Both runs in numbers."""
    off, on, a, b = results["off"], results["on"], summary["off"], summary["on"]

    def row(label: str, key: str, form: str) -> tuple[str, str, str]:
        return label, format(a[key], form), format(b[key], form)

    def activity(label: str, *names: str) -> tuple[str, str, str]:
        values = [1e3 * sum(run.seconds[n] for n in names) for run in (off, on)]
        return label, f"{values[0]:.1f} ms", f"{values[1]:.1f} ms"

    return Table(
        title="Both runs in numbers",
        caption=(
            "One seed, the same tokens; only the balancing differs. Host time is the median over steps, the mean "
            "over ranks."
        ),
        columns=("", "off", "on"),
        rows=(
            row("loss, first step", "loss_first", ".5f"),
            row("loss, last step", "loss_last", ".5f"),
            ("largest relative difference along the way", "", f"{summary['loss_max_relative_difference']:.1e}"),
            ("held-out loss", f"{off.held_out_loss:.5f}", f"{on.held_out_loss:.5f}"),
            row("busiest rank / mean, median", "max_mean_median", ".3f"),
            row("busiest rank / mean, 95th percentile", "max_mean_p95", ".3f"),
            row("copies per rank and layer, mean", "copies_per_rank_mean", ".2f"),
            ("step time, median", f"{1e3 * a['step_s_median']:.0f} ms", f"{1e3 * b['step_s_median']:.0f} ms"),
            row("tokens per second", "tokens_per_s", ",.0f"),
            activity("  in the gate", "gate"),
            activity("  exchanging counts", "counts"),
            activity("  in all-to-all", "a2a"),
            activity("  in experts", "expert"),
            activity("  waiting for Trans (exposed)", "exposed_trans"),
            activity("  waiting for Agg (exposed)", "exposed_agg"),
            activity("  splitting", "split"),
            activity("planning (host thread, hidden)", "plan"),
        ),
    )


def predicted_table(predictions: Sequence[Prediction]) -> Table:
    """The predictions, marked as such."""
    return Table(
        title="Predicted, not measured: the same routing on real machines",
        caption=(
            f"The performance model's times with data-sheet bandwidths, {PREDICTED_TOKENS} tokens per rank and the "
            "named model's sizes. A block is the MoE layer and the attention around it. They compare policies; no "
            "such machine was run."
        ),
        columns=("machine : model", "layer, off", "layer, on", "layer gain", "block gain"),
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


def remarks(results: dict[str, RunResult], cores: int | None) -> tuple[str, ...]:
    """What this machine can and cannot show, in plain words."""
    ranks = results["on"].rank_load.shape[2]
    if cores is not None and cores < ranks:
        time = (
            f"{ranks} ranks share {cores} core{'s' if cores > 1 else ''} here. The work of a step is the same with "
            "balancing on or off, only its distribution changes, and the cores are busy either way: the step time "
            "cannot fall on this machine. It can only show what balancing costs."
        )
    else:
        time = (
            "Each rank can have its own core here, but all share one memory bus and one loopback network; step times "
            "on real machines differ."
        )
    return (
        time,
        "What it can show: that the loss is the same, that every rank computes the same number of tokens, how many "
        "copies that takes, and that the same routing would leave most ranks waiting on machines where each has its "
        "own device.",
        "With balancing on, each rank computes more different experts on fewer tokens each, and parameters travel "
        "between processes through the cores that compute. That is why the step may take longer here.",
        "Times in all-to-all include waiting for the slowest rank.",
    )


def make_report(
    config: TrainConfig,
    results: dict[str, RunResult],
    summary: dict[str, Any],
    predictions: Sequence[Prediction],
    *,
    source: str,
    cores: int | None,
) -> Report:
    """The page of the demo."""
    off, on, a, b = results["off"], results["on"], summary["off"], summary["on"]
    ranks, model = summary["ranks"], config.model
    tables = [measured_table(results, summary)]
    if predictions:
        tables.append(predicted_table(predictions))
    return Report(
        title=f"{ranks} ranks train one mixture of experts, without and with balancing",
        lead=(
            f"A byte-level language model with {model.blocks} blocks of {model.experts} experts (top {model.top_k}), "
            f"trained for {config.steps} steps on the {source}. Without balancing the busiest rank computes "
            f"{a['max_mean_median']:.2f} times the mean, with it {b['max_mean_median']:.2f} times, and the loss "
            "stays the same."
        ),
        before=Run(name="balancing off", loss=off.loss, step_s=off.step_s, rank_load=off.rank_load),
        after=Run(name="balancing on", loss=on.loss, step_s=on.step_s, rank_load=on.rank_load),
        counts=on.counts,
        spans=on.spans,
        figures=(
            (
                f"{a['max_mean_median']:.2f} → {b['max_mean_median']:.2f}",
                "busiest rank / mean, median over steps and layers",
            ),
            (f"{summary['loss_max_relative_difference']:.1e}", "largest relative difference of the two losses"),
            (f"{b['copies_per_rank_mean']:.1f}", "expert copies per rank and layer, on average"),
            (
                f"{1e3 * a['step_s_median']:.0f} → {1e3 * b['step_s_median']:.0f} ms",
                "step time on this machine, where it cannot fall except by noise (see below)"
                if cores is not None and cores < ranks
                else "step time on this machine",
            ),
        ),
        tables=tables,
        remarks=remarks(results, cores),
    )
