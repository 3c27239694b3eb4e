"""`prophet switch`: what a change of the parallel layout would take."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prophet.commands.arguments import add_json, add_model, known_names, model_sizes
from prophet.errors import SpecError, TopologyError, UsageError

if TYPE_CHECKING:
    from pipeline_balance.elastic.layouts.parallelism import Parallelism
    from pipeline_balance.elastic.predict.switch import Prediction
    from prophet.machine.sizes import ModelSizes

MOST_RANKS = 1 << 16
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_SIZES = ("--layers", "--experts", "--dim", "--hidden", "--heads")
_STATE = "bfloat16 parameters, float32 master weights and two moments: 14 bytes a parameter"
_MEASURE = "prophet calibrate --out topology.toml"


class _Help(argparse.Action):
    """`--help`, which alone looks up the names of machines and models: that imports numpy."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="show this help message and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.epilog = f"{parser.epilog}\n{known_names('machines', 'models')}"
        parser.print_help()
        parser.exit()


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "switch",
        add_help=False,
        help="what would it take to change the parallel layout?",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Predict a change of the parallel layout of a running job: bytes by link, seconds and memory. Layouts\n"
            "and routes are computed as for a real switch, so bytes and memory are exact. Seconds are those of the\n"
            "links at the machine's rates; packing and latency of messages come on top."
        ),
        epilog=(
            "A layout is written like tp4,pp8,dp2,ep4. Sizes that are not named are 1. stages3:5 gives the layers of\n"
            "every chunk, v2 the chunks of a stage, slices8 the parts of a sequence, zero0 to zero3 what is sharded\n"
            "over dp. A layout that a job would refuse for the model is refused here.\n\n"
            "machines also: a800 (its stated bandwidths), or a topology file from `prophet calibrate`."
        ),
    )
    argument = parser.add_argument
    argument("-h", "--help", action=_Help)
    argument("--from", dest="before", required=True, metavar="LAYOUT", help="the layout in force")
    argument("--to", dest="after", required=True, metavar="LAYOUT", help="the layout to come")
    argument("--machine", default="a800", metavar="MACHINE", help="default: %(default)s")
    argument("--zero", type=int, choices=range(4), default=1, help="where a layout does not say (default: %(default)s)")
    argument("--keep-order", action="store_true", help="place k is rank k; default: the order with fewest bytes")
    argument(
        "--flat",
        action="store_true",
        help="zero 1 cuts the optimizer state, laid end to end, in equal ranges (Megatron); default: whole tensors",
    )
    add_json(parser)
    add_model(parser, _SIZES)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Predict the switch that the arguments name, and print it. Returns the exit status."""
    # imported here, so that `prophet --help` needs no numpy
    from pipeline_balance.elastic.layouts.parallelism import FEWEST_BYTES
    from pipeline_balance.elastic.predict.models import description_of
    from pipeline_balance.elastic.predict.switch import ports_of, predict

    sizes = model_sizes(arguments, None)
    before = _layout("--from", arguments.before, arguments.zero, sizes)
    after = _layout("--to", arguments.after, arguments.zero, sizes)
    if after.order is None and not arguments.keep_order:
        after = replace(after, order=FEWEST_BYTES)
    try:
        machine = ports_of(arguments.machine)
    except (SpecError, TopologyError) as error:
        # the user gave it: one line with the option, no traceback
        raise UsageError(f"--machine: {error}") from None
    try:
        found = predict(description_of(sizes), before, after, machine=machine, flat=arguments.flat)
    except SpecError as error:
        raise UsageError(str(error)) from None
    assumed = [*_of_model(sizes), *([machine.assumed] if machine.assumed else [])]
    if arguments.json:
        print(json.dumps({"assumed": assumed, **found.as_json()}, indent=2))
    else:
        _print(found, assumed, measured=machine.assumed is None)
    return 0


def _layout(option: str, text: str, zero: int, sizes: ModelSizes) -> Parallelism:
    """The layout that `text` names, if a job could train the model in it."""
    from pipeline_balance.elastic.layouts.parallelism import Parallelism
    from pipeline_balance.elastic.predict.models import check_trainable

    try:
        layout = Parallelism.parse(text)
        # what the text says goes first, zero0 included
        layout = layout if "zero" in text else replace(layout, zero=zero)
        if layout.ranks > MOST_RANKS:
            raise SpecError(f"expected a layout of at most {MOST_RANKS} ranks, got one of {layout.ranks}")
        check_trainable(sizes, layout)
    except SpecError as error:
        raise UsageError(f"{option}: {error}") from None
    return layout


def _of_model(sizes: ModelSizes) -> list[str]:
    """What is assumed of the model and of its training state."""
    found = [*sizes.assumed, _STATE]
    # sizes say how many blocks have experts, not which
    if 0 < sizes.blocks_with_experts < sizes.layers:
        found.append(f"the first {sizes.layers - sizes.blocks_with_experts} of {sizes.layers} layers have no experts")
    return found


def _size(n_bytes: float) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    power = 0
    # decimal units, as links are sold
    while n_bytes >= 1000 and power < len(_UNITS) - 1:
        n_bytes, power = n_bytes / 1000, power + 1
    return f"{n_bytes:.3g} {_UNITS[power]}"


def _fit(found: Prediction) -> str:
    """Whether the fullest rank has room for its training state, before, after and on the way."""
    if found.memory_bytes is None:
        return "Whether it fits is not known: a topology file does not say what memory a rank has."
    memory, held = _size(found.memory_bytes), max(found.before_bytes, found.after_bytes)
    if not found.fits:
        return f"Does not fit: {_size(held)} of {memory} on the fullest rank."
    if found.safe_peak_bytes <= found.memory_bytes:
        return (
            f"Fits: {_size(found.safe_peak_bytes)} of {memory} on the fullest rank, before gradients and activations."
        )
    in_place = found.in_place_peak_bytes
    instead = "save, and load in the other layout"
    if in_place is not None and in_place <= found.memory_bytes:
        instead = f'switch(mode="in-place") needs {_size(in_place)}'
    return (
        f"Does not fit while both are whole: {_size(found.safe_peak_bytes)} of {memory} on the fullest rank; {instead}."
    )


def _print(found: Prediction, assumed: list[str], *, measured: bool) -> None:
    """Print assumptions, whether it fits, bytes by link, seconds and memory."""
    from prophet.terminal import Column, console, print_table

    to = console()

    def say(text: str) -> None:
        # names and figures are printed as they are: rich would colour numbers and read brackets as markup
        to.print(text, highlight=False, markup=False)

    say(f"Assumed: {'; '.join(assumed)}.")
    if not measured:
        say(f"To measure this machine: {_MEASURE}, then --machine topology.toml.")
    say(_fit(found))
    say(
        f"{found.model}: {found.before} -> {found.after}, {found.ranks} ranks on {found.nodes} nodes of "
        f"{found.machine}."
    )
    moved = found.simulated
    print_table(
        [Column("link", align="left"), Column("all ranks"), Column("busiest port")],
        [
            ["within nodes", _size(moved.intra_bytes), _size(moved.busiest_intra_bytes)],
            ["between nodes", _size(moved.inter_bytes), _size(moved.busiest_inter_bytes)],
        ],
        to,
    )
    saved = 1 - found.wire_bytes / found.given_bytes if found.given_bytes else 0.0
    order = f"The order of ranks saves {saved:.0%} of {_size(found.given_bytes)}. " if saved > 0 else ""
    direct = "" if found.least_direct_s is None else f"; without forwarding, {found.least_direct_s:.3g} s"
    say(f"{order}{moved.seconds:.3g} s predicted. The links need {found.least_s:.3g} s at least{direct}.")
    place = "" if found.in_place_peak_bytes is None else f", {_size(found.in_place_peak_bytes)} in place"
    say(
        f"The fullest rank holds {_size(found.before_bytes)} before and {_size(found.after_bytes)} after. Its peak is "
        f"{_size(found.safe_peak_bytes)} while both are whole{place}, and buffers."
    )
