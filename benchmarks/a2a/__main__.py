"""`python -m benchmarks.a2a`: bandwidths of the all-to-all."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.a2a.exchange import measure
from benchmarks.common import Row, add_common, add_sampling, chosen, ranks_there, run
from benchmarks.tables import show as show_table


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.a2a", description=__doc__)
    add_sampling(p, ranks=2)
    p.add_argument("--sizes", type=int, nargs="+", default=[1 << n for n in range(12, 25, 2)], metavar="BYTES")
    p.add_argument("--uneven", type=float, nargs="+", default=[0.0, 0.5], help="shares that go to rank 0")
    p.add_argument("--ranks-per-node", type=int, metavar="N", help="measure two levels, too")
    add_common(p)
    return p


def show(rows: list[Row]) -> None:
    lines = [
        (
            *(f"{r['bytes']:,}", r["dtype"], f"{r['uneven']:g}", str(r["levels"]), f"{1e6 * r['seconds']:.0f}"),
            *(f"{r[name] / 1e9:.3f}" for name in ("algbw_bytes_per_s", "busbw_bytes_per_s")),
        )
        for r in rows
    ]
    show_table((), ("bytes", "dtype", "uneven", "levels", "us", "algbw GB/s", "busbw GB/s"), lines)


def plot(rows: list[Row], file: Path) -> None:
    """Bus bandwidth over size, a line for every dtype, share and number of levels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for dtype, uneven, levels in sorted({(r["dtype"], r["uneven"], r["levels"]) for r in rows}):
        line = [r for r in rows if (r["dtype"], r["uneven"], r["levels"]) == (dtype, uneven, levels)]
        label = f"{dtype}, {uneven:g} to rank 0, {levels} level{'s' if levels > 1 else ''}"
        axes.plot([r["bytes"] for r in line], [r["busbw_bytes_per_s"] / 1e9 for r in line], marker="o", label=label)
    axes.set(xscale="log", xlabel="bytes sent by a rank", ylabel="bus bandwidth, GB/s", ylim=(0, None))
    axes.legend()
    figure.savefig(file)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a rank failed."""
    p = parser()
    a = p.parse_args(argv)
    ranks = ranks_there() or a.ranks
    if ranks < 2 or min(a.sizes) < 1 or a.repeats < 1 or not all(0 <= u <= 1 for u in a.uneven):
        p.error("expected at least 2 ranks, sizes and repeats of at least 1, and shares from 0 to 1")
    if a.ranks_per_node is not None and (a.ranks_per_node < 1 or ranks % a.ranks_per_node):
        p.error(f"--ranks-per-node: expected a number that divides {ranks} ranks, got {a.ranks_per_node}")
    options = {**chosen(a, "sizes", "dtypes", "uneven", "repeats"), "per_node": a.ranks_per_node}
    return run("a2a", measure, options, a, ranks=ranks, show=show, plot=plot)


if __name__ == "__main__":
    raise SystemExit(main())
