"""The command line: `prophet demo`, `plan`, `calibrate`, `simulate`, `watch`, `report` and what others register.

At its top this module imports the standard library only. If another distribution owns the name `prophet`, the command
can then say so before any other import fails with a less helpful message.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

OK, FAILED, BAD_INPUT, NAME_CONFLICT, INTERRUPTED = 0, 1, 2, 3, 130

_EXIT_CODES = (
    "exit codes: 0 done, 1 the run failed, 2 unusable arguments or input, 3 another distribution has overwritten "
    "the package `prophet`, 130 interrupted"
)


def name_conflict(package: Any, installed: Sequence[str]) -> tuple[str, bool] | None:
    """Whether the forecasting library of the same import name is in the way.

    `package` is what `import prophet` gave, `installed` the names of all installed distributions. Returns a message and
    whether it is fatal (the package is not ours any more), or None.
    """
    if not hasattr(package, "MoE") or not hasattr(package, "attach"):
        return (
            "the package `prophet` here is not moe-prophet: the forecasting library of the same import name was "
            "installed over it. Run `pip uninstall prophet` and then `pip install --force-reinstall --no-deps "
            "moe-prophet`",
            True,
        )
    if any(name.lower() == "prophet" for name in installed):
        return (
            "the distribution `prophet` (forecasting) is installed too and owns the same import name; only one of "
            "the two can work in one environment",
            False,
        )
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    import prophet

    conflict = name_conflict(prophet, [d.metadata["Name"] or "" for d in metadata.distributions()])
    if conflict:
        _complain(conflict[0], "error" if conflict[1] else "warning")
        if conflict[1]:
            return NAME_CONFLICT
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

    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (UsageError, MonitorError, TraceError, TopologyError, SpecError) as error:
        _complain(str(error))
        return BAD_INPUT
    except (CoreError, RankFailed, ReportError, OSError) as error:
        _complain(str(error))
        return FAILED
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED


def _complain(message: str, kind: str = "error") -> None:
    """One line on stderr."""
    print(f"prophet: {kind}: {' '.join(message.split())}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    import prophet
    from prophet.commands import calibrate, demo, plan, report, simulate, watch

    parser = argparse.ArgumentParser(
        prog="prophet",
        description="Keep the ranks of expert-parallel Mixture-of-Experts training equally busy.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"moe-prophet {prophet.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (demo, plan, calibrate, simulate, watch, report):
        command.add(commands)
    for entry in sorted(metadata.entry_points(group="prophet.commands"), key=lambda e: e.name):
        entry.load()(commands)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
