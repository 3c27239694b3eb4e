"""python -m benchmarks.switch --json out.json: switches on emulated hosts; --plan and --paper need none"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster.testbed import ROOT, TestbedError, unwound_when_ended
from benchmarks.common import environment, write_json
from benchmarks.switch import measured, paper, plan
from benchmarks.switch.page import page
from benchmarks.switch.universal import UNIVERSAL
from benchmarks.switch.ways import OURS, USUAL, WAYS
from benchmarks.tables import words
from prophet.errors import RankFailed, SpecError

PEERS = (*WAYS, UNIVERSAL)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.switch", description=__doc__)
    p.add_argument("--plan", action="store_true", help="how long planning takes, for 64 to 8,192 ranks")
    p.add_argument("--most-ranks", type=int, default=plan.RANKS[-1], help="of --plan (default: %(default)s)")
    p.add_argument("--no-bounds", action="store_true", help="with --plan: time the planning, and nothing else")
    p.add_argument("--paper", action="store_true", help="DynaTran's Tables 1 and 3 and Figure 9, predicted")
    p.add_argument("--page", nargs="+", type=Path, metavar="FILE", help="write OUT.md from the JSON files that follow")
    p.add_argument("--hosts", type=int, default=4, choices=(4, 8), help="emulated hosts (default: %(default)s)")
    p.add_argument("--link-mbit-per-s", type=float, default=200.0, help="of every host (default: %(default)s)")
    p.add_argument("--loopback", action="store_true", help="no hosts, as without root")
    p.add_argument("--cases", default="", help="beginnings of names, comma-separated; default: all")
    p.add_argument("--ways", default=",".join((*USUAL, UNIVERSAL)), help=f"beside ours, of {', '.join(PEERS)}")
    p.add_argument("--no-jobs", action="store_true", help="no whole switches of a training job")
    p.add_argument("--repetitions", type=int, default=measured.Sizes().repetitions)
    p.add_argument("--smoke", action="store_true", help="tiny models, one repetition: no figure means anything")
    p.add_argument("--limit-s", type=float, default=1500.0, help="limit on everything (default: %(default)s)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the environment to this file")
    return p


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    print(words(row), flush=True)
    return row


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    sizes = measured.SMOKE if args.smoke else measured.Sizes(repetitions=args.repetitions)
    with unwound_when_ended():
        return measured.measure(
            args.hosts,
            sizes,
            names=[n for n in args.cases.split(",") if n],
            ways=list(dict.fromkeys([OURS, *(n for n in args.ways.split(",") if n)])),
            jobs=not args.no_jobs,
            link_mbit_per_s=args.link_mbit_per_s,
            loopback=args.loopback,
            limit_s=args.limit_s,
        )


def command(argv: Sequence[str]) -> str:
    """How this was called, without the name of the file that it writes."""
    words = ["python", "-m", "benchmarks.switch", *argv]
    if "--json" in words:
        words[words.index("--json") + 1] = "OUT"
    return shlex.join(words)


def _commit() -> str:
    asked = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() or "unknown"


def _page(out: Path, *files: Path) -> int:
    try:
        if not files:
            raise SpecError("--page needs the page's name and the files that --json wrote")
        text = page(files)
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    out.write_text(text, encoding="utf-8")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    unknown = {n for n in args.ways.split(",") if n} - {*PEERS}
    if unknown or args.repetitions < 1:
        parser().error(f"--ways must be of {', '.join(PEERS)}, --repetitions at least 1")
    if args.page:
        return _page(*args.page)
    began = {"load_before": os.getloadavg()[0], "command": command(sys.argv[1:] if argv is None else argv)}
    found: dict[str, Any] = {}
    if args.paper:
        found["paper"] = [_shown(paper.predicted(row)) for row in paper.ROWS]
    if args.plan:
        found["imports_s"] = plan.imports_s()
        cases = plan.cases(args.most_ranks)
        found["plan"] = [_shown(plan.measured(*case, bounds=not args.no_bounds)) for case in cases]
    if not (args.plan or args.paper):
        try:
            found["measured"] = _measured(args)
        except (TestbedError, RankFailed) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        measured.show(found["measured"])
    if args.json:
        write_json(args.json, {"environment": {**environment(), **began, "commit": _commit()}, **found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
