"""Arguments that several commands share, each with one name, one meaning and one default."""

from __future__ import annotations

import argparse
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from prophet.errors import SpecError, TopologyError, UsageError, no_such

if TYPE_CHECKING:
    from pathlib import Path

    from prophet.machine.named import Machine
    from prophet.machine.sizes import ModelSizes

DEFAULT_MACHINE = "h100-ib"
DEFAULT_SLOTS = 4
# Larger numbers overflow what numpy and torch count with long before they mean anything
_MOST = (1 << 31) - 1
_SIZES = {
    "--layers": "blocks of the model",
    "--experts": "routed experts of a layer",
    "--top-k": "experts that a token is routed to",
    "--dim": "width of a token (hidden_size)",
    "--hidden": "inner width of one expert (moe_intermediate_size)",
    "--heads": "attention heads",
}


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if not 1 <= value <= _MOST:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to {_MOST}, got {text}")
    return value


def not_negative(text: str) -> int:
    """A whole number of at least 0."""
    value = int(text)
    if not 0 <= value <= _MOST:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to {_MOST}, got {text}")
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
    """The planners that `--planner` asked for, each name once.

    Args:
        asked: Names from the command line; None: the option was not given.
        default: Names to take then.
        more: Names to allow besides the planners'.

    Raises:
        UsageError: A name is unknown.
    """
    from prophet.planner import PLANNER_NAMES

    known = [*PLANNER_NAMES, *more]
    # `argparse` would append to a default instead of replacing it, so the default is filled in here
    names = list(asked or default)
    if "all" in names:
        names = list(PLANNER_NAMES)
    for name in names:
        if name not in known:
            raise UsageError(f"--planner: {no_such('planner', name, known)}")
    # Each once, in the order in which they were asked for
    return list(dict.fromkeys(names))


def add_machine(parser: Any) -> None:
    """`--machine`, a preset or a topology file."""
    parser.add_argument(
        "--machine",
        default=DEFAULT_MACHINE,
        metavar="MACHINE",
        help="a machine of the list below, or a topology file from `prophet calibrate` (default: %(default)s)",
    )


def machine(text: str) -> Machine:
    """The machine that `--machine` names.

    Raises:
        UsageError: It names none, or a file that cannot be read.
    """
    from prophet.machine.named import machine_named

    try:
        return machine_named(text)
    # The same text as for a file in a program, but with the option in front and without a traceback
    except (SpecError, TopologyError) as error:
        raise UsageError(f"--machine: {error}") from None


def add_model(parser: Any, sizes: Iterable[str] = tuple(_SIZES)) -> Any:
    """Add `--model` and options for sizes, which win over it; all sizes, or those that the command has a use for.

    Returns:
        The group of options, for more of them.
    """
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="NAME|FILE",
        help="a model of the list below, or a Hugging Face config.json or its folder",
    )
    for option in sizes:
        group.add_argument(option, type=positive, metavar="N", help=_SIZES[option])
    return group


def model_sizes(arguments: argparse.Namespace, base: ModelSizes | None) -> ModelSizes:
    """The sizes of the job's model: from the options, then from `--model`, then from `base`.

    Args:
        arguments: The parsed command line.
        base: Sizes to take without `--model`; None: there has to be a model.

    Raises:
        UsageError: `--model` names nothing that can be read or is not given, or sizes contradict each other.
    """
    from prophet.machine.models import model_named

    try:
        found = base if arguments.model is None else model_named(arguments.model)
        if found is None:
            raise UsageError("--model: expected a model by name, or a Hugging Face config.json or its folder")
        given = {option.strip("-").replace("-", "_") for option in _SIZES}
        # A command without an option for a size has no such attribute
        return found.with_options({name: getattr(arguments, name, None) for name in given})
    except SpecError as error:
        raise UsageError(str(error) if arguments.model is None else f"--model: {error}") from None


def needs_experts(sizes: ModelSizes) -> ModelSizes:
    """Return `sizes` if it has experts.

    Raises:
        UsageError: It has none.
    """
    if not sizes.blocks_with_experts:
        raise UsageError(f"{sizes.name} has no experts: give --experts and --top-k, or a --model that has some")
    return sizes


def known_names(*kinds: str) -> str:
    """The names that options take, for the end of a command's help.

    Args:
        kinds: Which lists: planners, machines, models; all if none is named.
    """
    from prophet.machine.models import MODELS
    from prophet.machine.presets import CLUSTERS
    from prophet.planner import PLANNER_NAMES

    # Whoever mistypes a name needs the list, so help has it
    lists = {"planners": PLANNER_NAMES, "machines": CLUSTERS, "models": MODELS}
    shown = kinds or tuple(lists)
    return "\n".join(
        textwrap.fill(f"{what + ':':<11}{', '.join(names)}", 100, subsequent_indent=11 * " ", break_on_hyphens=False)
        for what, names in lists.items()
        if what in shown
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


def check_can_write(option: str, path: Path, *, folder: bool = False) -> None:
    """Refuse, before the work, a file or folder that could not be written after it; leaves nothing behind.

    Args:
        option: The option that names it, for errors.
        path: The file or folder.
        folder: Whether it is a folder.

    Raises:
        UsageError: It cannot be written, or is there as the other kind.
    """
    kind, other = ("folder", "file") if folder else ("file", "folder")
    try:
        if path.exists() and path.is_dir() != folder:
            raise UsageError(f"{option}: expected a {kind}, {path} is a {other}")
        # Opening for appending asks the system for the right to write and changes nothing
        if path.exists() and not folder:
            path.open("ab").close()
        else:
            # Permissions do not show that a mount is read only, so a file is made where the first one will be
            tempfile.TemporaryFile(dir=next(p for p in (path, *path.absolute().parents) if p.exists())).close()
    except OSError as error:
        raise UsageError(f"{option}: expected a {kind} that can be written, {path} cannot: {error.strerror}") from None


def say_torch_is_imported() -> None:
    """Print a line on stderr where what follows imports PyTorch, which takes seconds."""
    if "torch" not in sys.modules:
        print("Importing PyTorch", file=sys.stderr, flush=True)


def add_json(parser: Any) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
