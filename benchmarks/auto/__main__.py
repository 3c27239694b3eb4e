"""`python -m benchmarks.auto`: seconds that `topology="auto"` takes, beside a thorough calibration."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.auto.measure import measure
from benchmarks.cluster.profiles import BUILT_IN, load_profile
from benchmarks.cluster.testbed import Testbed, TestbedError, TestbedUnavailable, unwound_when_ended
from benchmarks.common import Row, add_common, finish, ranks_there, run, shape
from benchmarks.tables import cell
from benchmarks.tables import show as show_table

_COLUMNS = {
    "first_s": "first s",
    "next_s": "next s",
    "thorough_s": "thorough s",
    "predicted": "predicted",
    "predicted_least": "least",
    "predicted_most": "most",
    "planned": "planned",
}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.auto", description=__doc__)
    p.add_argument("--ranks", type=int, default=2, help="processes of this machine (default: %(default)s)")
    p.add_argument("--profile", choices=sorted(BUILT_IN), help="emulated hosts instead, as benchmarks.cluster has them")
    p.add_argument("--shape", type=shape, default=(64, 1024), metavar="DIMxHIDDEN", help="of an expert (64x1024)")
    p.add_argument("--tokens", type=int, default=2048, help="choices of a rank and step in predictions (%(default)s)")
    p.add_argument("--repeats", type=int, help="turns of all three (default: 3, or 1 with --profile)")
    add_common(p, limit_s=1800.0)
    return p


def show(rows: list[Row]) -> None:
    show_table((), ("turn", *_COLUMNS.values()), [(str(r["turn"]), *(cell(r[c]) for c in _COLUMNS)) for r in rows])
    for name in rows[0]["auto"]:
        found = (f"{cell(r['auto'][name])} ({cell(r['thorough'][name])})" for r in rows)
        print(f"{name}, auto (thorough): {', '.join(found)}")


def plot(rows: list[Row], file: Path) -> None:
    """Seconds of first use and of a thorough calibration, by turn."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    for name in ("first_s", "thorough_s"):
        axes.plot([r["turn"] for r in rows], [r[name] for r in rows], marker="o", label=name)
    axes.set(yscale="log", xlabel="turn", ylabel="seconds")
    axes.legend()
    figure.savefig(file)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a rank failed, 2 where the hosts did or cannot be emulated."""
    p = parser()
    a = p.parse_args(argv)
    ranks = ranks_there() or a.ranks
    if a.repeats is None:
        a.repeats = 1 if a.profile else 3
    if ranks < 2 or a.repeats < 1 or a.tokens < 1:
        p.error("expected at least 2 ranks, and repeats and tokens of at least 1")
    options = {"shape": a.shape, "tokens": a.tokens, "repeats": a.repeats}
    if a.profile is None:
        return run("auto", measure, {**options, "ranks_per_node": ranks}, a, ranks=ranks, show=show, plot=plot)
    profile = load_profile(a.profile)
    options |= {"ranks_per_node": profile.hosts_per_node}
    try:
        with unwound_when_ended(), Testbed(profile, paced=True) as bed:
            rows = bed.run("benchmarks.auto.measure:on_host", options, timeout_s=a.limit_s)[0]
    except (TestbedUnavailable, TestbedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return finish("auto", rows, a, show=show, plot=plot, wrong="results were wrong", profile=a.profile)


if __name__ == "__main__":
    raise SystemExit(main())
