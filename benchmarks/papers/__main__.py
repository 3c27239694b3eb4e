"""python -m benchmarks.papers --trace FILE --json OUT: every number of four papers beside ours, simulated"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.common import environment, write_json
from benchmarks.papers import dynatran, dynmo, pro_prophet, slimpipe, steps
from benchmarks.papers.rows import Assumption, Derive, Number, Row, printed, row_of, section
from benchmarks.tables import markdown
from prophet.errors import TraceError
from prophet.traces.npz import RoutingTrace, read_trace

PAPERS = (pro_prophet.PAPER, *dynmo.PAPERS, dynatran.PAPER, slimpipe.PAPER)
Progress = Callable[[], object]


def numbers() -> list[Number]:
    """All printed numbers: the data file's, and those of `benchmarks.switch`."""
    return [*printed(), *dynatran.numbers()]


def derived(
    trace: RoutingTrace,
    *,
    papers: Iterable[str] = PAPERS,
    iterations: int = 10,
    layers: int | None = None,
    causes: bool = True,
    done: Progress = lambda: None,
) -> dict[str, list[Row]]:
    """Return a row for every printed number, the cells of Tables IV and V, and the aims over them.

    Args:
        trace: Real routing.
        papers: Which.
        iterations: How many of a run are simulated.
        layers: At most so many layers of Pro-Prophet's models; None for all.
        causes: Whether to look for the assumption behind every miss.
        done: Called after every row.
    """
    lab = steps.Lab(trace, iterations, layers)
    moved = dynmo.DynMo(trace, iterations)
    how: Mapping[str, tuple[Derive, Mapping[str, Assumption]]] = {
        pro_prophet.PAPER: (pro_prophet.ProProphet(lab), steps.ASSUMPTIONS),
        **dict.fromkeys(dynmo.PAPERS, (moved, dynmo.ASSUMPTIONS)),
        dynatran.PAPER: (dynatran.DynaTran(), dynatran.ASSUMPTIONS),
        slimpipe.PAPER: (slimpipe.SlimPipe(), slimpipe.ASSUMPTIONS),
    }
    rows = []
    asked = [number for number in numbers() if number.paper in papers]
    for number in asked:
        rows.append(row_of(number, *how[number.paper], causes=causes))
        done()
    cells = pro_prophet.cells(asked, lab)
    table_one = [row for row in rows if row["table"] == "Pro-Prophet, Table I"]
    return {"rows": rows, "cells": cells, "targets": pro_prophet.targets(cells, table_one) if cells else []}


def page(found: Mapping[str, Sequence[Row]]) -> str:
    """The tables of a results page."""
    parts = []
    if found["targets"]:
        lines = [
            [t["what"], f"{t['value']:.3g}", f"{t['at_least']:.3g}", "yes" if t["met"] else "**no**"]
            for t in found["targets"]
        ]
        parts += ["## Aims", markdown(["aim", "ours", "at least", "met"], lines)]
    if found["cells"]:
        head = [name.replace("_", " ") for name in found["cells"][0]]
        lines = [[f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()] for row in found["cells"]]
        parts += ["## Tables IV and V under both loads", markdown(head, lines)]
    for paper in PAPERS:
        mine = [row for row in found["rows"] if row["table"].startswith(f"{paper}, ")]
        if not mine:
            continue
        parts += [f"## {paper}", section(paper, mine)]
    return "\n\n".join(parts) + "\n"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=__doc__)
    p.add_argument("--trace", type=Path, required=True, help="a routing trace (npz) of 16 ranks and 32 experts")
    p.add_argument("--paper", action="append", choices=PAPERS, help="may be repeated (default: all)")
    p.add_argument("--iterations", type=int, default=10, help="of a run that are simulated (default: %(default)s)")
    p.add_argument("--no-causes", action="store_true", help="do not look for the assumption behind every miss")
    p.add_argument("--page", type=Path, metavar="FILE", help="write the tables of a results page to this file")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the environment to this file")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        trace = read_trace(args.trace)
    except TraceError as error:
        parser().error(str(error))
    found = derived(
        trace,
        papers=args.paper or PAPERS,
        iterations=args.iterations,
        causes=not args.no_causes,
        done=lambda: print(".", end="", file=sys.stderr, flush=True),
    )
    print(file=sys.stderr)
    print(page(found), end="")
    if args.page:
        args.page.write_text(page(found), encoding="utf-8")
    if args.json:
        write_json(args.json, {"benchmark": "papers", "environment": environment(gpu=False), **found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
