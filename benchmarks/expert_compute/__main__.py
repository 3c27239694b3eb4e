"""`python -m benchmarks.expert_compute`: the experts' products by tokens, shapes and types."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import Row, add_common, add_sampling, chosen, ranks_there, run, shape
from benchmarks.expert_compute.measure import PASSES, measure
from benchmarks.tables import show as show_table


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.expert_compute", description=__doc__)
    add_sampling(p, ranks=1, dtypes=("float32", "bfloat16"))
    p.add_argument("--tokens-per-expert", type=int, nargs="+", default=[16, 64, 256, 1024], metavar="N")
    p.add_argument("--experts", type=int, nargs="+", default=[1, 4], metavar="N", help="of a rank (default: 1 4)")
    p.add_argument("--shapes", type=shape, nargs="+", default=[(256, 512), (512, 2048)], metavar="DIMxHIDDEN")
    p.add_argument("--activation", choices=("gelu", "swiglu"), default="gelu")
    add_common(p)
    return p


def show(rows: Sequence[Row]) -> None:
    lines = []
    for r in rows:
        about = (f"{r['dim']} x {r['hidden']}", r["dtype"], str(r["experts"]), f"{r['tokens_per_expert']:,}")
        if "wrong" in r:
            lines.append(("wrong", *about, r["wrong"]))
            continue
        figures = (f"{1e6 * r['seconds']:.0f}", f"{r['flops_per_s'] / 1e9:.1f}", f"{r['fraction_of_dense']:.2f}")
        lines.append((r["operation"].removeprefix("expert_"), *about, *figures))
    right = ("experts", "tokens each", "us", "GFLOP/s", "of dense")
    show_table(("pass", "dim x hidden", "dtype"), right, lines)


def plot(rows: Sequence[Row], file: Path) -> None:
    """Fraction of dense over tokens per expert, a line for every shape, type and number of experts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, operation in zip(figure.subplots(1, 2, sharey=True), PASSES, strict=True):
        chosen = [r for r in rows if r.get("operation") == operation]
        for key in sorted({(r["dim"], r["hidden"], r["dtype"], r["experts"]) for r in chosen}):
            line = [r for r in chosen if (r["dim"], r["hidden"], r["dtype"], r["experts"]) == key]
            label = "{} x {}, {}, {} experts".format(*key)
            x = [r["tokens_per_expert"] for r in line]
            axes.plot(x, [r["fraction_of_dense"] for r in line], marker="o", label=label)
        axes.set(xscale="log", xlabel="tokens per expert", title=operation.removeprefix("expert_"), ylim=(0, None))
        if chosen:
            axes.legend(fontsize=7)
    figure.axes[0].set_ylabel("speed, as a fraction of dense products")
    figure.savefig(file)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a rank failed or a kernel was wrong."""
    p = parser()
    a = p.parse_args(argv)
    ranks = ranks_there() or a.ranks
    if min(ranks, a.repeats, *a.tokens_per_expert, *a.experts) < 1:
        p.error("expected ranks, repeats, tokens and experts of at least 1")
    options = chosen(a, "tokens_per_expert", "experts", "shapes", "dtypes", "activation", "repeats")
    return run("expert_compute", measure, options, a, ranks=ranks, show=show, plot=plot)


if __name__ == "__main__":
    raise SystemExit(main())
