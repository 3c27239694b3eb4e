"""`prophet gpu-check`: what works on this machine's GPUs, the most doubtful things first, within ten minutes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prophet.commands.arguments import add_json, check_can_write
from prophet.errors import UsageError

if TYPE_CHECKING:
    from prophet.gpu_check.verdict import Verdict


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "gpu-check",
        description=(
            "Try this machine's GPUs: environment and NCCL, kernels, both channels beside compute, a balanced model "
            "against one rank, a lost rank, a pipeline with replicas, a change of layout, a calibration, and a layer "
            "and a model of eight without and with balancing. Each check runs in separate processes within a limit, "
            "all take ten minutes at most, and what dies or hangs is a line of the page. The exit code is 1 where "
            "there are findings."
        ),
    )
    argument = parser.add_argument
    argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small, over gloo (default: %(default)s)")
    argument("--checks", metavar="LIST", help="of these only, such as kernels,engine (default: all)")
    argument("--out", type=Path, metavar="FILE", help="write the page here too, as Markdown (.md) or HTML (.html)")
    argument(
        "--machine",
        type=Path,
        metavar="FILE",
        help="keep the calibration here, as a topology file (default: topology-HOST.toml; none with --device cpu)",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the checks, print the page, and return 1 where there are findings."""
    from prophet.gpu_check import checks, page
    from prophet.gpu_check.run import run_all
    from prophet.terminal import working

    on_gpus, out = arguments.device == "cuda", arguments.out
    if "RANK" in os.environ:
        raise UsageError("gpu-check starts its ranks itself: run it without torchrun, or `unset RANK WORLD_SIZE`")
    tasks = checks.chosen(arguments.checks, checks.TASKS)
    if out is not None:
        if out.suffix not in (".md", ".html"):
            raise UsageError(f"--out: expected a file that ends in .md or .html, got {out}")
        check_can_write("--out", out)
    # The CPU's figures are those of an emulation, so they are kept where that was asked for only
    calibrates = any(task.name == "calibration" for task in tasks)
    if arguments.machine is not None and not calibrates:
        raise UsageError("--machine: keeps the calibration, which --checks leaves out: add `calibration`, or drop it")
    default = _free(Path(f"topology-{platform.node() or 'host'}.toml")) if on_gpus and calibrates else None
    kept = arguments.machine or default
    if kept is not None:
        check_can_write("--machine", kept)
    # Without a GPU Triton has its interpreter
    added = {} if on_gpus else {"TRITON_INTERPRET": "1"}
    folder = tempfile.TemporaryDirectory(prefix="prophet-gpu-check-", ignore_cleanup_errors=True)
    with _ended_in_order(), folder as name:
        scratch = Path(name)
        verdicts = run_all(tasks, os.environ, added, on_gpus=on_gpus, scratch=scratch, working=working)
        measured = scratch / "shared" / checks.TOPOLOGY
        problem: OSError | None = None
        try:
            if kept is not None and measured.exists():
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(measured, kept)
            else:
                kept = None
        # told last: what minutes have found must not be lost because a file cannot be written
        except OSError as error:
            kept, problem = None, error
    file = None if kept is None else str(kept.absolute())
    found = page.answer(verdicts, device_of(verdicts, on_gpus=on_gpus), file)
    if arguments.json:
        print(json.dumps(found, indent=2), flush=True)
    else:
        show(verdicts, found["device"])
        show_lines(found)
    if out is not None:
        from prophet.report.page import write_page

        write_page(out, (page.markdown if out.suffix == ".md" else page.html_page)(verdicts, found))
    if problem is not None:
        raise problem
    return int(not found["sound"])


def _free(file: Path) -> Path:
    """The file, or one beside it that is not there yet: a longer calibration may have its name."""
    found, number = file, 2
    while found.exists():
        found, number = file.with_stem(f"{file.stem}-{number}"), number + 1
    return found


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Inside, a signal that ends this process ends the checks' processes first, as Ctrl-C does."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, end) for number in numbers if signal.getsignal(number) == signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def device_of(verdicts: Sequence[Verdict], *, on_gpus: bool) -> str:
    """Name what the checks are about: the GPUs by the first check's figures, or the CPU."""
    if not on_gpus:
        return "the CPU"
    names = [str(gpu["name"]) for gpu in verdicts[0].figures.get("gpus", [])]
    return " + ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "unknown GPUs"


def show(verdicts: Sequence[Verdict], device: str) -> None:
    """Print the findings, and a table of all checks."""
    from prophet.gpu_check import page
    from prophet.terminal import Column, console, print_table

    to = console()
    to.print(f"prophet gpu-check on {device}\n", markup=False, highlight=False)
    for line, check in zip(*page.headed(verdicts), strict=True):
        to.print(line, markup=False, highlight=False, style="bold red")
        # As one line, to be copied whatever the terminal's width
        to.print(f"   mend: {check.mend}", markup=False, highlight=False, soft_wrap=True)
    heads = [Column(head, align="right" if head == "s" else "left", wrap=head == "found") for head in page.COLUMNS]
    print_table(heads, page.rows(verdicts), to)
    to.print(f"\n{page.total(verdicts)}", highlight=False)


def show_lines(found: dict[str, Any]) -> None:
    """Print what is to be copied, each as one line whatever the terminal's width; `found` is the answer."""
    from prophet.gpu_check.page import compact

    if found["paste"]:
        print("\nLines to paste:", *found["paste"], sep="\n")
    print("\nTo send with a report:", compact(found), sep="\n")
