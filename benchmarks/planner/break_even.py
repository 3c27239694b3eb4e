"""Where do replicas pay? The predicted gain over tokens per rank, link rate and skew, as a table and a picture.

Shape legend: R ranks, E experts.

One cluster and model (`--preset`), whose links between ranks are all given the same rate; loads are those of a trace's
layer-steps (or drawn, without a trace) scaled to so many tokens, planned from the same counts that are then split.
`skew` mixes a load with an even one of the same size: 1 is the load itself, 0 is balanced routing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.walks import geomean, predicted_s
from prophet.machine.presets import get_preset
from prophet.planner import get_planner
from prophet.spec import IntArray, Link, PlanContext

TOKENS = (64, 256, 1024, 4096, 16384, 65536)  # routed tokens per rank
RATES = (1e8, 1e9, 5e9, 2.5e10, 1e11, 4.5e11)  # bytes per second, from 1 GbE to NVLink
SKEWS = (0.0, 0.1, 0.25, 0.5, 1.0)
USUAL_TOKENS, USUAL_RATE, USUAL_SKEW = 16384, 2.5e10, 1.0


def scaled(load: IntArray, tokens_per_rank: int, skew: float) -> IntArray:
    """`load` [R, E] with so many tokens per rank in the mean, mixed with an even one."""
    mixed = skew * load / load.sum() + (1.0 - skew) / load.size
    return np.rint(mixed * tokens_per_rank * load.shape[0]).astype(np.int64)


def context_at(preset: str, ranks: int, experts: int, tokens: int, rate: float, slots: int) -> PlanContext:
    """The preset's layer on ranks whose links all have this rate (and the preset's latency)."""
    context = get_preset(preset).context(ranks, experts, routed_per_rank=tokens, slots_per_rank=slots)
    given = context.topology
    intra, inter = (Link(bytes_per_s=rate, latency_s=link.latency_s) for link in (given.intra, given.inter))
    # A node has as many such links as ranks
    links = dataclasses.replace(given, intra=intra, inter=inter, port_bytes_per_s=None)
    return dataclasses.replace(context, topology=links)


def points() -> list[tuple[int, float, float]]:
    """(tokens per rank, bytes per second, skew) to look at: a grid of the first two, and a line of the third."""
    grid = [(tokens, rate, USUAL_SKEW) for tokens in TOKENS for rate in RATES]
    return grid + [(USUAL_TOKENS, USUAL_RATE, skew) for skew in SKEWS if skew != USUAL_SKEW]


def break_even_rows(
    loads: Sequence[IntArray], presets: Sequence[str], policies: Sequence[str], slots: int
) -> Iterator[dict[str, Any]]:
    """One row per preset, policy and point: geometric mean of static seconds over the policy's, and the worst case."""
    for preset in presets:
        for tokens, rate, skew in points():
            cases = [scaled(load, tokens, skew) for load in loads]
            ranks, experts = cases[0].shape
            context = context_at(preset, ranks, experts, tokens, rate, slots)
            static, homes = get_planner("static"), context.homes_only()
            static_s = np.array([predicted_s(static, case, homes, context) for case in cases])
            for policy in policies:
                planner = get_planner(policy)
                placed = [(case, planner.place(case, context)) for case in cases]
                gain = static_s / np.array([predicted_s(planner, case, at, context) for case, at in placed])
                yield {
                    "preset": preset,
                    "policy": policy,
                    "tokens_per_rank": tokens,
                    "gb_per_s": rate / 1e9,
                    "skew": skew,
                    "cases": len(cases),
                    "gain": geomean(gain),
                    "gain_least": float(gain.min()),
                    "copies_per_rank": float(np.mean([at.copies_per_rank().mean() for _, at in placed])),
                }


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The gain over tokens and link rate as a map with its break-even, one per preset, and the gain over skew."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    presets = list(dict.fromkeys(r["preset"] for r in rows))
    policy = rows[0]["policy"]
    figure, axes = plt.subplots(1, len(presets) + 1, figsize=(4.6 * (len(presets) + 1), 4.0), layout="constrained")
    for axis, preset in zip(axes, presets, strict=False):
        gain = {
            (r["tokens_per_rank"], r["gb_per_s"]): r["gain"]
            for r in rows
            if r["preset"] == preset and r["policy"] == policy and r["skew"] == USUAL_SKEW
        }
        grid = np.array([[gain[t, rate / 1e9] for t in TOKENS] for rate in RATES])
        axis.imshow(grid, origin="lower", cmap="viridis", vmin=1.0, aspect="auto")
        middle = 0.5 * (1.0 + grid.max())
        for (y, x), value in np.ndenumerate(grid):
            axis.text(x, y, f"{value:.2f}", ha="center", va="center", color="white" if value < middle else "black")
        if grid.min() < 1.01 < grid.max():
            axis.contour(grid, levels=[1.01], colors="red", linewidths=1.5)
        axis.set_xticks(range(len(TOKENS)), [f"{t}" for t in TOKENS], rotation=45)
        axis.set_yticks(range(len(RATES)), [f"{rate / 1e9:g}" for rate in RATES])
        axis.set(title=preset, xlabel="routed tokens per rank", ylabel="link, GB/s")
    for preset in presets:
        line = sorted(
            (r["skew"], r["gain"])
            for r in rows
            if r["preset"] == preset
            and r["policy"] == policy
            and (r["tokens_per_rank"], r["gb_per_s"]) == (USUAL_TOKENS, USUAL_RATE / 1e9)
        )
        axes[-1].plot(*zip(*line, strict=True), marker="o", label=preset)
    axes[-1].axhline(1.0, color="grey", linewidth=0.8)
    axes[-1].set(xlabel="skew (0: balanced routing)", title=f"{USUAL_TOKENS} tokens, {USUAL_RATE / 1e9:g} GB/s")
    axes[-1].legend(frameon=False)
    figure.suptitle(f"Predicted step time without replicas over that with {policy}; red: where they begin to pay (1 %)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
