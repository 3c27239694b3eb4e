"""`prophet calibrate`: measures this machine's ranks and writes a topology file."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prophet.commands.arguments import UsageError, not_negative, positive

if TYPE_CHECKING:
    from prophet.ranks.launch import Launch

_TIMEOUT_S = 60.0  # on every wait of one rank for another
_NOISY = 0.08  # spread of samples beyond which figures are not worth keeping
_MOST = 1 << 16  # of an expert's dimensions
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every rank does: picklable, and equal on all of them."""

    out: Path | None
    lines: dict[str, tuple[float, float, float]] | None  # fixed, per unit, per expert: checked instead of fitted
    held_out: bool
    dim: int
    hidden: int
    activation: Literal["gelu", "swiglu"]
    dtype: str
    ranks_per_node: int | None
    free_bytes: int
    rows: tuple[int, int]
    tokens: tuple[int, int]
    repeats: int
    name: str


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine for the performance model",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Measure the all-to-all, the experts' forward and backward pass, Trans and Agg on all ranks at once,\n"
            "fit the performance model, and write a topology file for `prophet plan --topology` and\n"
            "EngineConfig(topology=...). Starts the ranks itself, as processes of this machine; under torchrun it\n"
            "joins those that are there (NCCL where every rank has a GPU, else gloo)."
        ),
        epilog="About half a minute on two cores. Sizes between the fitted ones are kept out of the fit: --check "
        "reports how\nfar off the model is on those. Measure while nothing else runs.",
    )
    add_argument = parser.add_argument
    add_argument("--ranks", type=positive, metavar="N", help="ranks to start (default: 2)")
    add_argument("--out", type=Path, metavar="FILE", help="where the topology file goes (TOML)")
    add_argument("--check", action="store_true", help="measure sizes that the fit has not seen, and report the error")
    add_argument("--topology", type=Path, metavar="FILE", help="with --check: fit nothing, check this file instead")
    add_argument(
        "--from",
        dest="files",
        type=Path,
        action="append",
        metavar="FILE",
        help="measure nothing: fit to what benchmarks.a2a, .expert_compute and .trans_agg wrote with --json "
        "(give it once for every file)",
    )
    add_argument("--dim", type=positive, metavar="N", help="model dimension of the expert (default: 256)")
    add_argument("--hidden", type=positive, metavar="N", help="its hidden dimension (default: 512)")
    add_argument("--activation", choices=("gelu", "swiglu"), help="(default: gelu)")
    add_argument("--dtype", choices=_DTYPES, help="(default: float32)")
    add_argument(
        "--rows",
        type=positive,
        nargs=2,
        default=(256, 2048),
        metavar=("MIN", "MAX"),
        help="token rows that a rank sends in one all-to-all: about those of your layer (default: 256 2048)",
    )
    add_argument(
        "--tokens",
        type=positive,
        nargs=2,
        default=(256, 2048),
        metavar=("MIN", "MAX"),
        help="token rows that a rank's experts compute (default: 256 2048)",
    )
    add_argument("--ranks-per-node", type=positive, metavar="N", help="ranks that share a node (default: all)")
    add_argument(
        "--free-bytes",
        type=not_negative,
        default=1 << 30,
        metavar="N",
        help="memory for replicas on every rank, for the file (default: %(default)s)",
    )
    add_argument("--repeats", type=positive, default=25, metavar="N", help="samples per size (default: %(default)s)")
    add_argument("--name", default="calibrated", help="the topology's name (default: %(default)s)")
    add_argument(
        "--limit", type=positive, default=600, metavar="SECONDS", help="give up after this long (default: %(default)s)"
    )
    add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the file, and print what was found."""
    from prophet.ranks.launch import launched, run_ranks

    if arguments.files:
        return _from_files(arguments)
    job, ranks = _job(arguments)
    launch = launched()
    if launch is not None:
        answer = _join(launch, job, ranks)
    else:
        if os.cpu_count() and (ranks or 2) > 4 * (os.cpu_count() or 1):
            raise UsageError(
                f"--ranks: expected at most four ranks per core ({4 * (os.cpu_count() or 1)}), got {ranks}"
            )
        with tempfile.TemporaryDirectory(prefix="prophet-calibrate-") as scratch:
            folder = Path(scratch)
            run_ranks(
                _rank_body,
                (job, folder / "answer.json"),
                ranks=ranks or 2,
                folder=folder,
                limit_s=float(arguments.limit),
                timeout_s=_TIMEOUT_S,
                what="the calibration",
            )
            answer = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    if answer is None:  # another rank speaks
        return 0
    return _show(answer, job, arguments.json)


def _show(answer: dict[str, Any], job: Job, as_json: bool) -> int:
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        _print(answer, job)
    return 0


def _from_files(arguments: argparse.Namespace) -> int:
    """Fit to benchmarks' files, write the topology file, and print what was found."""
    from prophet.machine.benchmark_files import ExpertKind, calibrate_from

    if arguments.topology:
        raise UsageError("--from reads what was measured, --topology measures what was fitted: expected one of them")
    job, ranks = _job(arguments)
    kind = ExpertKind(
        dim=arguments.dim, hidden=arguments.hidden, activation=arguments.activation, dtype=arguments.dtype
    )
    found = calibrate_from(
        arguments.files,
        kind=kind,
        ranks=ranks,
        ranks_per_node=job.ranks_per_node,
        free_bytes=job.free_bytes,
        held_out=job.held_out,
        name=job.name,
    )
    own = found.kind
    job = replace(
        job,
        dim=own.dim or job.dim,
        hidden=own.hidden or job.hidden,
        activation=own.activation or job.activation,
        dtype=own.dtype or job.dtype,
        repeats=found.repeats,
    )
    answer: dict[str, Any] = {"ranks": found.calibration.topology.ranks, "device": found.device, "file": None}
    answer |= {k: getattr(job, k) for k in ("dim", "hidden", "activation", "repeats")}
    answer["from"] = [str(f) for f in arguments.files]
    return _show(_fitted(found.calibration, job, answer, write=True), job, arguments.json)


def _job(arguments: argparse.Namespace) -> tuple[Job, int | None]:
    """The job that the arguments ask for, and the number of ranks it needs; None where any will do."""
    from prophet.machine.calibrate import model_lines, shape_of
    from prophet.machine.topology import read_fits, read_topology

    dim, hidden = arguments.dim or 256, arguments.hidden or 512
    activation: Literal["gelu", "swiglu"] = arguments.activation or "gelu"
    ranks, per_node, lines = arguments.ranks, arguments.ranks_per_node, None
    for name in ("rows", "tokens"):
        low, high = getattr(arguments, name)
        if low >= high:
            raise UsageError(f"--{name}: expected the smaller number first, got {low} {high}")
    if arguments.topology:
        if not arguments.check or arguments.out:
            raise UsageError("--topology goes with --check, and without --out: the file is checked, nothing is fitted")
        topology, fits = read_topology(arguments.topology), read_fits(arguments.topology)
        if ranks not in (None, topology.ranks):
            raise UsageError(f"--ranks {ranks}: {arguments.topology} is for {topology.ranks} ranks")
        ranks, per_node = topology.ranks, topology.ranks_per_node
        layer = fits.get("expert_forward", {})
        dim = arguments.dim or int(layer.get("dim", dim))
        hidden = arguments.hidden or int(layer.get("hidden", hidden))
        activation = arguments.activation or ("swiglu" if layer.get("swiglu") else "gelu")
        found = model_lines(topology, shape_of(dim, hidden, activation, _dtype(arguments.dtype or "float32")))
        lines = {o: (line.fixed_s, line.unit_s, line.count_s) for o, line in found.items()}
        for operation, figures in fits.items():
            if {"fixed_s", "unit_s"} <= figures.keys():
                lines[operation] = (figures["fixed_s"], figures["unit_s"], figures.get("count_s", 0.0))
    elif not arguments.out and not arguments.check and not arguments.json:
        raise UsageError("expected --out FILE, --check or --json: nothing would come of the measurements")
    if not (1 <= dim <= _MOST and 1 <= hidden <= _MOST):
        raise UsageError(f"expected dimensions of an expert from 1 to {_MOST}, got {dim} x {hidden}")
    job = Job(
        out=arguments.out.absolute() if arguments.out else None,
        lines=lines,
        held_out=arguments.check,
        dim=dim,
        hidden=hidden,
        activation=activation,
        dtype=arguments.dtype or "float32",
        ranks_per_node=per_node,
        free_bytes=arguments.free_bytes,
        rows=tuple(arguments.rows),
        tokens=tuple(arguments.tokens),
        repeats=arguments.repeats,
        name=arguments.name,
    )
    return job, ranks


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _join(launch: Launch, job: Job, ranks: int | None) -> dict[str, Any] | None:
    """Take part in the group that torchrun has prepared; rank 0 gets the answer."""
    from prophet.ranks.launch import joined_group
    from prophet.ranks.process_group import collective_for

    if ranks not in (None, launch.ranks):
        raise UsageError(f"--ranks {ranks}: this process is one of {launch.ranks} that were started already")
    if launch.ranks == 1:
        return _measure(job, collective_for(None), launch.device)
    if job.ranks_per_node is None and launch.local_ranks is not None:
        job = replace(job, ranks_per_node=launch.local_ranks)
    with joined_group(launch, timeout_s=_TIMEOUT_S) as collective:
        answer = _measure(job, collective, launch.device)
        collective.close()
    return answer if collective.rank == 0 else None


def _rank_body(rank: int, job: Job, answer: Path) -> None:
    """What every rank does that this command has started."""
    from prophet.ranks.process_group import collective_for

    found = _measure(job, collective_for(None, timeout_s=_TIMEOUT_S), "cpu")
    if rank == 0:
        answer.write_text(json.dumps(found), encoding="utf-8")


def _measure(job: Job, collective: Any, device: str) -> dict[str, Any]:
    """Calibrate or check; rank 0 writes the topology file. The answer is what `--json` prints."""
    from prophet.machine.calibrate import calibrate, check
    from prophet.machine.fit import Line
    from prophet.machine.measure import Ranges
    from prophet.machine.memory import keep_memory

    if device == "cpu":
        keep_memory()
    ranges = Ranges(rows=job.rows, tokens=job.tokens)
    layer: dict[str, Any] = {
        "dim": job.dim,
        "hidden": job.hidden,
        "activation": job.activation,
        "dtype": _dtype(job.dtype),
        "device": device,
        "ranks_per_node": job.ranks_per_node,
        "ranges": ranges,
        "repeats": job.repeats,
    }
    answer: dict[str, Any] = {"ranks": collective.size, "device": device.partition(":")[0], "file": None}
    answer |= {k: layer[k] for k in ("dim", "hidden", "activation", "repeats")}
    if job.lines is not None:
        lines = {o: Line(*figures) for o, figures in job.lines.items()}
        return answer | {"operations": _rows(check(collective, lines, **layer)), "model": []}
    found = calibrate(collective, **layer, free_bytes=job.free_bytes, held_out=job.held_out, name=job.name)
    return _fitted(found, job, answer, write=collective.rank == 0)


def _fitted(found: Any, job: Job, answer: dict[str, Any], *, write: bool) -> dict[str, Any]:
    """The answer with a calibration's figures in it; writes the topology file if one is wanted."""
    from prophet.machine.topology import write_topology

    topology = found.topology

    def recorded(fit: Any) -> dict[str, float]:
        sizes = [p.size for p in fit.fitted]
        figures = {
            "fixed_s": fit.line.fixed_s,
            "unit_s": fit.line.unit_s,
            "smallest": min(sizes),
            "largest": max(sizes),
        }
        if fit.unit == "token":
            figures |= {"count_s": fit.line.count_s, "dim": job.dim, "hidden": job.hidden}
            figures["swiglu"] = float(job.activation == "swiglu")
        if fit.held_out:
            figures |= {"mean_error": fit.mean_error, "max_error": fit.max_error}
        return figures

    if job.out and write:
        write_topology(job.out, topology, fits={f.operation: recorded(f) for f in found.fits})
        answer["file"] = str(job.out)
    answer["topology"] = {
        "intra": {"bytes_per_s": topology.intra.bytes_per_s, "latency_s": topology.intra.latency_s},
        "inter": {"bytes_per_s": topology.inter.bytes_per_s, "latency_s": topology.inter.latency_s},
        "flops_per_s": list(topology.flops_per_s),
        "expert_overhead_s": topology.expert_overhead_s,
        "call_overhead_s": topology.call_overhead_s,
        "trans_rate": topology.trans_rate,
        "agg_rate": topology.agg_rate,
        "overlap_cost": topology.overlap_cost,
    }
    return answer | {"operations": _rows(found.fits), "model": _rows(found.model)}


def _rows(fits: Iterable[Any]) -> list[dict[str, Any]]:
    return [
        {
            "operation": f.operation,
            "unit": f.unit,
            "fixed_s": f.line.fixed_s,
            "count_s": f.line.count_s,
            "unit_s": f.line.unit_s,
            "mean_error": f.mean_error if f.held_out else None,
            "max_error": f.max_error if f.held_out else None,
            "points": [
                {"size": p.size, "experts": p.count, "seconds": p.seconds, "spread": p.spread, "held_out": held}
                for points, held in ((f.fitted, False), (f.held_out, True))
                for p in points
            ],
        }
        for f in fits
    ]


def _print(answer: dict[str, Any], job: Job) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    device = {"cpu": "processes of this machine's CPU", "cuda": "GPUs"}.get(answer["device"], answer["device"])
    if "from" in answer:
        console.print(f"Read, not measured: {', '.join(answer['from'])}", highlight=False, soft_wrap=True)
    console.print(
        f"{answer['ranks']} ranks ({device}), an expert of {answer['dim']} x {answer['hidden']} "
        f"({answer['activation']}, {job.dtype}), at least {answer['repeats']} samples per size.",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("operation", no_wrap=True)
    for column in ("fixed\nms", "per expert\nms", "rate", "error\nmean", "\nmax", "planners'\nmean"):
        table.add_column(column, justify="right", no_wrap=True)
    model = {row["operation"]: row for row in answer["model"]}
    for row in answer["operations"]:
        rate = 1.0 / row["unit_s"] if row["unit_s"] > 0 else float("inf")
        token = row["unit"] == "token"
        table.add_row(
            row["operation"],
            f"{1e3 * row['fixed_s']:.3f}",
            f"{1e3 * row['count_s']:.3f}" if token else "",
            f"{rate / 1e3:.0f} tokens/ms" if token else f"{rate / 1e9:.3f} GB/s",
            *(_percent(row[key]) for key in ("mean_error", "max_error")),
            _percent(model.get(row["operation"], {}).get("mean_error")),
        )
    console.print(table)
    if cost := answer.get("topology", {}).get("overlap_cost"):
        console.print(
            f"A transfer lengthens the products that hide it by {_percent(cost)} of its own time.", highlight=False
        )
    if any(row["mean_error"] is not None for row in answer["operations"]):
        console.print(
            "Errors are |predicted - measured| / measured on sizes that the fit has not seen."
            + (
                " The last column is what planners assume: one latency for all-to-all, Trans and Agg, and a backward "
                "pass of twice the forward one."
                if model
                else ""
            ),
            highlight=False,
        )
    if (spread := _spread(answer)) > _NOISY:
        console.print(
            f"Something else used this machine: the median sample lies {_percent(spread)} above the lower quartile. "
            "Measure again when it is idle.",
            highlight=False,
        )
    if answer["file"]:
        console.print(f"Written: {answer['file']}", highlight=False, soft_wrap=True)


def _spread(answer: dict[str, Any]) -> float:
    """The typical spread of the samples of one size."""
    return statistics.median(float(p["spread"]) for row in answer["operations"] for p in row["points"])


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
