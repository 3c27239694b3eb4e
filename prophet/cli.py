"""The command line: `prophet demo`, `plan`, `calibrate`, `doctor`, `gpu-check` and more, and others' commands.

At its top this module imports the standard library only. If another distribution owns the name `prophet`, the command
can then say so before any other import fails with a less helpful message.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

OK, FAILED, BAD_INPUT, NAME_CONFLICT, INTERRUPTED = 0, 1, 2, 3, 130

_COMMANDS = {
    "demo": "train a small MoE language model, without and with balancing",
    "plan": "what would balancing gain on my routing trace?",
    "calibrate": "measure this machine for the performance model",
    "doctor": "check the installation, this machine and the ranks of a job",
    "gpu-check": "try this machine's GPUs, within ten minutes",
    "simulate": "how long would a step take on 8 to 4096 ranks?",
    "watch": "show a run's balance in the terminal while it trains",
    "report": "write the HTML page of a run",
}
"""Ours, each in its module of `prophet.commands` (`gpu_check` for `gpu-check`), imported when it is asked for."""

_EXIT_CODES = (
    "exit codes: 0 done, 1 the run failed, 2 unusable arguments or input, 3 another distribution has overwritten "
    "the package `prophet`, 130 interrupted"
)


def name_conflict(package: Any, beside: bool) -> tuple[str, bool] | None:
    """Find out whether the forecasting library of the same import name is in the way.

    Args:
        package: What `import prophet` gave.
        beside: Whether a distribution `prophet` is installed.

    Returns:
        A message, and whether it is fatal because the package is not ours any more; None where nothing is wrong.
    """
    # Names are looked for and not imported, which would import torch
    if not {"MoE", "attach"} <= set(getattr(package, "__all__", ())):
        return (
            "the package `prophet` here is not moe-prophet: the forecasting library of the same import name was "
            "installed over it. Run `pip uninstall prophet`, and in the checkout of moe-prophet `pip install "
            "--force-reinstall --no-deps .`",
            True,
        )
    if beside:
        return (
            "the distribution `prophet` (forecasting) is installed too and owns the same import name; only one of "
            "the two can work in one environment",
            False,
        )
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    import prophet

    conflict = name_conflict(prophet, _other_installed())
    if conflict:
        _complain(conflict[0], "error" if conflict[1] else "warning")
        if conflict[1]:
            return NAME_CONFLICT
    # Imported only now: had the other library taken the package's place, this would fail with a riddle
    from prophet.errors import (
        CoreError,
        MonitorError,
        RankFailed,
        ReportError,
        SpecError,
        TopologyError,
        TraceError,
        UsageError,
    )

    arguments = _parser(sys.argv[1:] if argv is None else argv).parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (UsageError, MonitorError, TraceError, TopologyError, SpecError) as error:
        _complain(str(error))
        return BAD_INPUT
    except (CoreError, RankFailed, ReportError, OSError) as error:
        _complain(str(error))
        # What the user gave was right, and something else went wrong: a script may try again
        return FAILED
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED


def _complain(message: str, kind: str = "error") -> None:
    """Print one line on stderr."""
    print(f"prophet: {kind}: {' '.join(message.split())}", file=sys.stderr)


def _other_installed() -> bool:
    """Whether a distribution `prophet` is installed."""
    # Every command pays for this, so folders are listed here: importing importlib.metadata would take longer
    folders = [folder for folder in sys.path if os.path.isdir(folder) and os.access(folder, os.R_OK)]
    names = [name.lower() for folder in folders for name in os.listdir(folder)]
    return any(name.startswith("prophet-") and name.endswith((".dist-info", ".egg-info")) for name in names)


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for `argv`. It knows the arguments of the command that is asked for; of none of ours, all commands."""
    import prophet

    parser = argparse.ArgumentParser(
        prog="prophet",
        description="Keep the ranks of expert-parallel Mixture-of-Experts training equally busy.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"moe-prophet {prophet.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    asked = next((word for word in argv if not word.startswith("-")), "")
    # Other packages' entry points are loaded only where none of our commands is asked for, as that takes time
    if asked in _COMMANDS:
        importlib.import_module(f"prophet.commands.{asked.replace('-', '_')}").add(commands)
        return parser
    from importlib import metadata

    for name, what in _COMMANDS.items():
        commands.add_parser(name, help=what)
    for entry in sorted(metadata.entry_points(group="prophet.commands"), key=lambda e: e.name):
        entry.load()(commands)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
