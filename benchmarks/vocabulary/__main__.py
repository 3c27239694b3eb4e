"""`python -m benchmarks.vocabulary [--json OUT]`: a pipeline's step with its vocabulary split, and the best without."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import Row, rows_on_ranks, write_rows
from benchmarks.vocabulary import measured, simulated

WORDS = 32_000
WANTED = 0.95


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.vocabulary", description=__doc__)
    p.add_argument("--simulate", action="store_true", help="only on paper")
    p.add_argument("--ranks", type=int, default=2, help="that are measured, of one thread each (%(default)s)")
    p.add_argument("--layers", type=int, default=4, help="of the measured model (%(default)s)")
    p.add_argument("--hidden", type=int, default=256, help="its hidden size (%(default)s)")
    p.add_argument("--tokens", type=int, default=256, help="of a microbatch (%(default)s)")
    p.add_argument("--microbatches", type=int, default=8, help="of a measured step (%(default)s)")
    p.add_argument("--repeats", type=int, default=8, help="counted rounds (%(default)s)")
    p.add_argument("--limit-s", type=float, default=600.0, help="end the ranks after so many seconds")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the environment to this file")
    return p


def simulate() -> list[Row]:
    return [
        simulated.rows(ranks=4, microbatches=m, layers=layers, hidden=1024, words=WORDS, one_block=one_block)
        for layers in (4, 5, 6, 7)
        for m in (8, 16)
        for one_block in (True, False)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    rows = simulate()
    if not args.simulate:
        names = ("layers", "hidden", "tokens", "microbatches", "repeats")
        options = {"words": WORDS, **{name: getattr(args, name) for name in names}}
        found = rows_on_ranks(measured.measure, options, ranks=args.ranks, limit_s=args.limit_s)
        if found is None:
            return 0
        rows += found
    for row in rows:
        what = row.get("schedule", f"one block: {row.get('one_block')}")
        print(
            f"{row['case']:9} p={row['p']} m={row['m']} layers={row['layers']} head={row['head_share']:.2f} "
            f"{what:24} step over the best whole map: {row['ratio']:.3f}"
            + (f", of processor time: {row['cpu_ratio']:.3f}" if "cpu_ratio" in row else "")
        )
    if args.json:
        write_rows(args.json, "vocabulary", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
