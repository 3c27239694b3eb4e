"""`prophet report`: the HTML page of a run that was monitored."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "report",
        help="write the HTML page of a run",
        description="Write one HTML page, without scripts or network access, from what prophet.monitor(engine, RUN) "
        "has recorded so far. The run may still be training.",
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder, or its steps.jsonl")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the page here (default: report.html in the run's folder)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page."""
    from prophet.monitor.read import read_steps, run_file
    from prophet.monitor.summary import make_report
    from prophet.report import write_report

    file = run_file(arguments.run_folder)
    out = arguments.out or file.parent / "report.html"
    write_report(out, make_report(read_steps(file), name=file.parent.name or str(file)))
    print(f"Written: {out}")
    return 0
