"""What several benchmarks share: their arguments, ranks to measure on, and what becomes of the rows."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from prophet.errors import RankFailed
from prophet.ranks.launch import joined_group, launched, run_ranks
from prophet.ranks.process_group import collective_for

Row = dict[str, Any]
Measure = Callable[..., list[Row]]
Show = Callable[[list[Row]], None]
Plot = Callable[[list[Row], Path], None]
TIMEOUT_S = 60.0
DTYPES = ("float32", "bfloat16", "float16")
MOST = 1 << 16  # of an expert's dimensions


def shape(text: str) -> tuple[int, int]:
    """An expert's (dim, hidden), from text such as 256x512."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(p.isdigit() and 1 <= int(p) <= MOST for p in parts):
        raise argparse.ArgumentTypeError(
            f"expected DIMxHIDDEN, numbers from 1 to {MOST}, such as 256x512; got {text!r}"
        )
    return int(parts[0]), int(parts[1])


def add_common(parser: argparse.ArgumentParser, *, limit_s: float = 600.0) -> None:
    """Add `--limit-s`, `--json` and `--plot`: what `finish`, and whoever starts ranks, reads."""
    parser.add_argument(
        "--limit-s", type=float, default=limit_s, help="end the ranks after so many seconds (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the environment to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them to this PNG")


def add_sampling(parser: argparse.ArgumentParser, *, ranks: int, dtypes: Sequence[str] = ("float32",)) -> None:
    """Add `--ranks`, `--dtypes` and `--repeats`, of a benchmark that runs on one number of ranks."""
    parser.add_argument("--ranks", type=int, default=ranks, help="ranks that measure at once (default: %(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=list(dtypes), choices=DTYPES)
    parser.add_argument("--repeats", type=int, default=15, help="samples of each case (default: %(default)s)")


def chosen(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """These arguments by name."""
    return {name: getattr(arguments, name) for name in names}


def ranks_there() -> int | None:
    """How many ranks torchrun has started, this process among them; None where it has not."""
    launch = launched()
    return None if launch is None else launch.ranks


def rows_on_ranks(
    measure: Measure, options: Mapping[str, Any], *, ranks: int, limit_s: float, on_gpus: bool = False
) -> list[Row] | None:
    """`measure(collective, device=..., **options)` on ranks that torchrun has started, or else on `ranks` started here.

    measure: importable, collective, the same rows on all ranks. Under torchrun every rank that has a GPU uses it, by
    NCCL; on_gpus: so do ranks that are started here, which are gloo's otherwise. None means that another rank speaks.
    Raises `RankFailed` where a started rank fails or takes too long.
    """
    launch = launched()
    if launch is not None:
        with joined_group(launch, timeout_s=TIMEOUT_S) as collective:
            rows = measure(collective, device=launch.device, **options)
            return rows if collective.rank == 0 else None
    with tempfile.TemporaryDirectory(prefix="prophet-benchmark-") as scratch:
        folder = Path(scratch)
        run_ranks(
            _rank_body,
            (measure, dict(options), folder / "rows.json", on_gpus),
            ranks=ranks,
            folder=folder,
            limit_s=limit_s,
            timeout_s=TIMEOUT_S,
            what="the benchmark",
            on_gpus=on_gpus,
        )
        found: list[Row] = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    return found


def _rank_body(rank: int, measure: Measure, options: dict[str, Any], answer: Path, on_gpus: bool) -> None:
    """What every rank does that a benchmark has started; rank 0 writes the rows."""
    device = f"cuda:{rank}" if on_gpus else "cpu"
    rows = measure(collective_for(None, timeout_s=TIMEOUT_S), device=device, **options)
    if rank == 0:
        answer.write_text(json.dumps(rows), encoding="utf-8")


def run(
    name: str,
    measure: Measure,
    options: Mapping[str, Any],
    arguments: argparse.Namespace,
    *,
    ranks: int,
    show: Show,
    plot: Plot,
    wrong: str = "results were wrong",
) -> int:
    """`rows_on_ranks`, then `finish`; the exit code, which is 1 where a rank failed."""
    try:
        rows = rows_on_ranks(measure, options, ranks=ranks, limit_s=arguments.limit_s)
    except RankFailed as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        return 1
    if rows is None:
        return 0
    return finish(name, rows, arguments, show=show, plot=plot, wrong=wrong, repeats=arguments.repeats)


def finish(
    name: str, rows: list[Row], arguments: argparse.Namespace, *, show: Show, plot: Plot, wrong: str, **more: Any
) -> int:
    """Show the rows, and write and draw them where `add_common`'s arguments ask for it; the exit code.

    It is 1 where a row holds "wrong" instead of a time; wrong: what those rows are called in the message. more: goes
    into the file beside the environment.
    """
    show(rows)
    if arguments.json:
        write_rows(arguments.json, name, rows, **more)
    if arguments.plot:
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        plot(rows, arguments.plot)
    bad = sum("wrong" in row for row in rows)
    if bad:
        print(f"benchmarks.{name}: {bad} {wrong} and were not timed", file=sys.stderr)
    return 1 if bad else 0


def environment(*, gpu: bool | None = None) -> dict[str, Any]:
    """When and on what something was measured. gpu: whether a GPU took part; None where it did if there is one."""
    if gpu is None:
        gpu = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if gpu else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
    }


def write_rows(file: Path, benchmark: str, rows: Sequence[Row], **more: Any) -> None:
    """Write the rows as JSON, with the benchmark's name and the environment: what `prophet calibrate --from` reads."""
    write_json(file, {"benchmark": benchmark, "environment": {**environment(), **more}, "rows": list(rows)})


def write_json(file: Path, document: Any) -> None:
    """Write what a benchmark found; its folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
