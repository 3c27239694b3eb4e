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
    from prophet.errors import MonitorError
    from prophet.monitor.read import read_steps, run_file
    from prophet.monitor.summary import make_report
    from prophet.report import check_can_draw, write_report

    file = run_file(arguments.run_folder)
    check_can_draw()
    steps = read_steps(file)
    out = arguments.out or file.parent / "report.html"
    try:
        page = make_report(steps, name=file.parent.name or str(file))
    except MonitorError as error:
        raise MonitorError(f"{file}: {error}") from None
    write_report(out, page)
    print(f"Written: {out}")
    if steps.left_out.count:
        print(f"{file}: {steps.left_out}")
    return 0
