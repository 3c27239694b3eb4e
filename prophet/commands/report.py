"""`prophet report`: the HTML page of a run that was monitored."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from prophet.commands.arguments import add_json, check_can_write


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "report",
        description="Write one HTML page, without scripts or network access, from what prophet.monitor(engine, RUN) "
        "has recorded so far. The run may still be training.",
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder, or its steps.jsonl")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the page here (default: report.html in the run's folder)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page."""
    from prophet.errors import MonitorError
    from prophet.monitor.read import read_steps, run_file
    from prophet.monitor.summary import make_report, summarise
    from prophet.monitor.timelines import joined
    from prophet.report import check_can_draw, write_report
    from prophet.terminal import working

    file = run_file(arguments.run_folder)
    out = arguments.out or file.parent / "report.html"
    check_can_write("--out", out)
    with working(f"Drawing the page of {file.parent}"):
        # Reading a long run takes a while: a missing Matplotlib is named before it
        check_can_draw()
        steps = read_steps(file)
        timelines = joined(file.parent).items()
        # The page may be moved together with its run, so links are relative to it
        links = [(f"step {n}", quote(os.path.relpath(path, out.parent))) for n, path in timelines]
        try:
            page = make_report(steps, name=file.parent.name or str(file), timelines=links)
        except MonitorError as error:
            raise MonitorError(f"{file}: {error}") from None
        write_report(out, page)
    if arguments.json:
        print(json.dumps({"page": str(out), "lines_left_out": steps.left_out.count} | summarise(steps), indent=2))
        return 0
    print(f"Written: {out}")
    if steps.left_out.count:
        print(f"{file}: {steps.left_out}")
    return 0
