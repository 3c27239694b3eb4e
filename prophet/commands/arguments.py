"""Arguments that several commands share, each with one name, one meaning and one default."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prophet.errors import SpecError, TopologyError, UsageError, no_such

if TYPE_CHECKING:
    from prophet.machine.named import Machine

DEFAULT_MACHINE = "h100-ib:Mixtral-8x7B"
DEFAULT_SLOTS = 4


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return value


def not_negative(text: str) -> int:
    """A whole number of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {text}")
    return value


def add_planner(parser: Any, default: Sequence[str]) -> None:
    """`--planner NAME`, as often as wanted."""
    parser.add_argument(
        "--planner",
        action="append",
        metavar="NAME",
        help=f"planner to compare, or all; may be repeated (default: {', '.join(default)})",
    )


def planner_names(asked: Sequence[str] | None, default: Sequence[str], more: Sequence[str] = ()) -> list[str]:
    """What `--planner` asked for, each name once; `more` are names besides the planners'. `UsageError` for others."""
    from prophet.planner import PLANNER_NAMES

    known = [*PLANNER_NAMES, *more]
    names = list(asked or default)
    if "all" in names:
        names = list(PLANNER_NAMES)
    for name in names:
        if name not in known:
            raise UsageError(f"--planner: {no_such('planner', name, known)}")
    return list(dict.fromkeys(names))


def add_machine(parser: Any) -> None:
    """`--machine`, a preset or a topology file."""
    parser.add_argument(
        "--machine",
        default=DEFAULT_MACHINE,
        metavar="MACHINE[:MODEL]",
        help="a machine of the list below, or a topology file from `prophet calibrate` (default: %(default)s)",
    )


def machine(text: str) -> Machine:
    """What `--machine` names; `UsageError` where it names nothing."""
    from prophet.machine.named import machine_named

    try:
        return machine_named(text)
    except (SpecError, TopologyError) as error:
        raise UsageError(f"--machine: {error}") from None


def known_names() -> str:
    """The names that `--planner` and `--machine` take, for the end of a command's help."""
    from prophet.machine.presets import CLUSTERS, MODELS
    from prophet.planner import PLANNER_NAMES

    half = len(PLANNER_NAMES) // 2
    return (
        f"planners:  {', '.join(PLANNER_NAMES[:half])},\n           {', '.join(PLANNER_NAMES[half:])}\n"
        f"machines:  {', '.join(CLUSTERS)}\n"
        f"models:    {', '.join(MODELS)}"
    )


def add_slots(parser: Any) -> None:
    """`--slots N`."""
    parser.add_argument(
        "--slots",
        type=not_negative,
        default=DEFAULT_SLOTS,
        metavar="N",
        help="replicas a rank may hold per layer (default: %(default)s)",
    )


def add_json(parser: Any) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
