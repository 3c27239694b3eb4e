"""`python -m benchmarks.trans_agg`: moving replicas' parameters out and their gradients home, in both forms."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import Row, add_common, add_sampling, chosen, ranks_there, run, shape
from benchmarks.tables import show as show_table
from benchmarks.trans_agg.measure import OPERATIONS, measure


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.trans_agg", description=__doc__)
    add_sampling(p, ranks=4)
    p.add_argument(
        "--shapes", type=shape, nargs="+", default=[(128, 256), (256, 512), (512, 1024)], metavar="DIMxHIDDEN"
    )
    p.add_argument("--copies", type=int, nargs="+", metavar="N", help="replicas of an expert (default: 1 to ranks - 1)")
    add_common(p)
    return p


def show(rows: Sequence[Row]) -> None:
    left = ("operation", "form", "homes", "dtype")
    lines = []
    for r in rows:
        about = (*(r[name] for name in left), str(r["copies"]), f"{r['expert_bytes'] / 1024:,.0f}")
        if "wrong" in r:
            lines.append((*about, r["wrong"]))
            continue
        alone = (f"{1e6 * r['seconds']:.0f}", f"{r['busiest_bytes'] / r['seconds'] / 1e9:.3f}")
        lines.append((*about, *alone, f"{1e6 * r['exposed_s']:.0f}", f"{100 * r['hidden']:.0f} %"))
    show_table(left, ("copies", "expert KiB", "alone us", "GB/s", "exposed us", "hidden"), lines, width=100)


def plot(rows: Sequence[Row], file: Path) -> None:
    """Seconds alone over copies: left Trans, right Agg; a line for every size, form and whose experts are moved."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, operation in zip(figure.subplots(1, 2, sharey=True), OPERATIONS, strict=True):
        chosen = [r for r in rows if r["operation"] == operation and "seconds" in r]
        for key in sorted({(r["expert_bytes"], r["dtype"], r["form"], r["homes"]) for r in chosen}):
            line = [r for r in chosen if (r["expert_bytes"], r["dtype"], r["form"], r["homes"]) == key]
            label = f"{key[0] / 1024:,.0f} KiB, {key[1]}, {key[2]}, of {key[3]}"
            style = "--" if key[2] == "two-phase" else "-"
            axes.plot([r["copies"] for r in line], [1e3 * r["seconds"] for r in line], style, marker="o", label=label)
        axes.set(xlabel="copies of an expert", title=operation.capitalize(), yscale="log")
        if chosen:
            axes.legend(fontsize=6)
    figure.axes[0].set_ylabel("alone, ms")
    figure.savefig(file)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a rank failed or something else arrived than was sent."""
    p = parser()
    a = p.parse_args(argv)
    ranks = ranks_there() or a.ranks
    copies = a.copies or list(range(1, ranks))
    if ranks < 2 or a.repeats < 1:
        p.error("expected at least 2 ranks and 1 repeat")
    if not all(1 <= n < ranks for n in copies):
        p.error(f"--copies: expected numbers from 1 to {ranks - 1}, one less than the ranks; got {copies}")
    options = {**chosen(a, "shapes", "dtypes", "repeats"), "copies": copies}
    return run("trans_agg", measure, options, a, ranks=ranks, show=show, plot=plot, wrong="transfers were wrong")


if __name__ == "__main__":
    raise SystemExit(main())
