"""python -m benchmarks.switch --plan --json out.json; --paper"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import environment, write_json
from benchmarks.switch import paper, plan


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.switch", description=__doc__)
    p.add_argument("--plan", action="store_true", help="how long planning takes, for 64 to 8,192 ranks")
    p.add_argument("--most-ranks", type=int, default=plan.RANKS[-1], help="of --plan (default: %(default)s)")
    p.add_argument("--no-bounds", action="store_true", help="with --plan: time the planning, and nothing else")
    p.add_argument("--paper", action="store_true", help="DynaTran's Tables 1 and 3 and Figure 9, predicted")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the environment to this file")
    return p


def _show(row: dict[str, Any]) -> None:
    print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if not (args.plan or args.paper):
        parser().print_usage(sys.stderr)
        print("expected --plan or --paper", file=sys.stderr)
        return 2
    found: dict[str, Any] = {}
    if args.paper:
        found["paper"] = []
        for row in paper.ROWS:
            found["paper"].append(paper.predicted(row))
            _show(found["paper"][-1])
    if args.plan:
        found["imports_s"], found["plan"] = plan.imports_s(), []
        for case in plan.cases(args.most_ranks):
            found["plan"].append(plan.measured(*case, bounds=not args.no_bounds))
            _show(found["plan"][-1])
    if args.json:
        write_json(args.json, {"environment": environment(), **found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
