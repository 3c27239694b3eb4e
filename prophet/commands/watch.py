"""`prophet watch`: a run's balance in the terminal, while it trains."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from prophet.commands.arguments import add_json
from prophet.errors import UsageError

# Seconds between two reads of the run's file
_EVERY_S = 1.0


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "watch",
        description="Show the last steps of a run that prophet.monitor(engine, RUN) writes: every layer's balance, "
        "replicas, hottest experts and predicted gain. Leave it open; Ctrl-C ends it.",
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder, or its steps.jsonl")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the run until the user has seen enough."""
    from rich.live import Live

    from prophet.errors import MonitorError
    from prophet.monitor.read import Tail, no_steps, run_file
    from prophet.monitor.view import frame
    from prophet.terminal import console

    tail = Tail(run_file(arguments.run_folder))
    # A stream of frames is no use to a program: the run's file is one already
    if arguments.json and not arguments.once:
        raise UsageError(f"--json goes with --once: every step is a line of JSON in {tail.file} as it comes")
    tail.poll()
    to = console()

    def shown() -> Any:
        return frame(tail, now_s=time.time(), height=to.height, width=to.width)

    if arguments.once:
        if not tail.rows:
            raise MonitorError(no_steps(tail.file, tail.left_out))
        if arguments.json:
            print(json.dumps(tail.as_json(), indent=2))
        else:
            to.print(shown())
        return 0
    try:
        with Live(
            # The alternate screen leaves a terminal's text as it was; a log has no such screen
            f"{tail.file}: waiting for the first step",
            console=to,
            screen=to.is_terminal,
            auto_refresh=False,
        ) as live:
            while True:
                if tail.rows or tail.left_out.count:
                    live.update(shown() if tail.rows else no_steps(tail.file, tail.left_out), refresh=True)
                time.sleep(_EVERY_S)
                tail.poll()
    except KeyboardInterrupt:
        return 0
