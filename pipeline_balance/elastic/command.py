"""`prophet switch`: what a change of the parallel layout would take."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prophet.errors import SpecError, UsageError

if TYPE_CHECKING:
    from pipeline_balance.elastic.parallelism import Parallelism
    from pipeline_balance.elastic.switch import Prediction

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "switch",
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
            "over dp.\n\n"
            "machines: a800 (its stated bandwidths), the presets of `prophet plan`, or a topology file."
        ),
    )
    argument = parser.add_argument
    argument("--model", required=True, metavar="NAME", help="llama2-70b, qwen3-235b-a22b, ...")
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
    argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Predict, and print."""
    from pipeline_balance.elastic.models import model_named
    from pipeline_balance.elastic.parallelism import FEWEST_BYTES
    from pipeline_balance.elastic.switch import machine_rates, predict

    before = _layout("--from", arguments.before, arguments.zero)
    after = _layout("--to", arguments.after, arguments.zero)
    if after.order is None and not arguments.keep_order:
        after = replace(after, order=FEWEST_BYTES)
    try:
        rates, per_node, name = machine_rates(arguments.machine)
        model = model_named(arguments.model)
        found = predict(model, before, after, rates=rates, ranks_per_node=per_node, machine=name, flat=arguments.flat)
    except SpecError as error:
        raise UsageError(str(error)) from None
    if arguments.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        _print(found)
    return 0


def _layout(option: str, text: str, zero: int) -> Parallelism:
    from pipeline_balance.elastic.parallelism import Parallelism

    try:
        layout = Parallelism.parse(text)
        return layout if "zero" in text else replace(layout, zero=zero)
    except SpecError as error:
        raise UsageError(f"{option}: {error}") from None


def _size(n_bytes: float) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    power = 0
    while n_bytes >= 1000 and power < len(_UNITS) - 1:
        n_bytes, power = n_bytes / 1000, power + 1
    return f"{n_bytes:.3g} {_UNITS[power]}"


def _print(found: Prediction) -> None:
    from prophet.terminal import Column, console, print_table

    to = console()
    to.print(
        f"{found.model}: {found.before} -> {found.after}, {found.ranks} ranks on {found.nodes} nodes of "
        f"{found.machine}.",
    )
    moved = found.simulated
    rows = (
        ("within nodes", _size(moved.intra_bytes), _size(moved.busiest_intra_bytes)),
        ("between nodes", _size(moved.inter_bytes), _size(moved.busiest_inter_bytes)),
    )
    print_table((Column("link", align="left"), Column("all ranks"), Column("busiest port")), rows, to)
    saved = 1 - found.wire_bytes / found.given_bytes if found.given_bytes else 0.0
    order = f"The order of ranks saves {saved:.0%} of {_size(found.given_bytes)}. " if saved > 0 else ""
    direct = "" if found.least_direct_s is None else f"; without forwarding, {found.least_direct_s:.3g} s"
    to.print(
        f"{order}{moved.seconds:.3g} s predicted. The links need {found.least_s:.3g} s at least{direct}.",
    )
    place = "" if found.in_place_peak_bytes is None else f", {_size(found.in_place_peak_bytes)} in place"
    to.print(
        f"The fullest rank holds {_size(found.before_bytes)} before and {_size(found.after_bytes)} after. Its peak is "
        f"{_size(found.safe_peak_bytes)} while both are whole{place}, and buffers.",
    )
