"""`prophet calibrate`: measures this machine and writes a topology file."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prophet.commands.arguments import (
    add_json,
    add_model,
    check_can_write,
    known_names,
    machine,
    model_sizes,
    needs_experts,
    positive,
    say_torch_is_imported,
)
from prophet.errors import UsageError

if TYPE_CHECKING:
    from prophet.machine.benchmark_files import ExpertKind
    from prophet.ranks.launch import Launch

# on ranks that the command starts itself, all together
_LIMIT_S = 3600.0
# spread of samples beyond which figures are not worth keeping
_NOISY = 0.08
# of an expert's dimensions
_MOST = 1 << 16
# samples per size
_REPEATS = 25
_RANKS = 2
_EXPERT: dict[str, Any] = {"dim": 256, "hidden": 512, "activation": "gelu", "dtype": "float32"}
_SIZES = ("--dim", "--hidden")
_ACTIVATIONS, _DTYPES = ("gelu", "swiglu"), ("float32", "bfloat16", "float16")
_DTYPE_OF_BYTES = {4: "float32", 2: "bfloat16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every rank does: picklable, and equal on all of them.

    Attributes:
        out: The topology file to write; None: none is written.
        lines: Seconds by operation, fixed, per unit and per expert, of a file that is checked; None: lines are fitted.
        held_out: Whether sizes are measured that the fit has not seen.
        expert: Width, inner width, activation and element type.
        ranks_per_node: Ranks of a node; None: all are on one.
        rows: The smallest and the largest number of token rows.
        repeats: Samples per size.
    """

    out: Path | None
    lines: dict[str, tuple[float, float, float]] | None
    held_out: bool
    expert: dict[str, Any]
    ranks_per_node: int | None
    rows: tuple[int, int]
    repeats: int


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "calibrate",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Measure the all-to-all, the experts' forward and backward pass, Trans and Agg on all ranks at once, fit\n"
            "the performance model, and write a topology file for `prophet plan --machine` and\n"
            "EngineConfig(topology=...). The command starts the ranks as processes of this machine. Under torchrun it\n"
            "joins the ranks that are already running (NCCL where every rank has a GPU, else gloo)."
        ),
        epilog=(
            "Takes about half a minute on two cores. Measure while nothing else runs. The file is TOML that you can\n"
            "edit: replicas may use 1 GiB per rank (rank.free_bytes) unless you change it. The expert is that of\n"
            "--model, or one of 256 x 512.\n\n"
            f"{known_names('models')}"
        ),
    )
    add_argument = parser.add_argument
    add_argument("--ranks", type=positive, metavar="N", help=f"ranks to start (default: {_RANKS})")
    add_argument("--out", type=Path, metavar="FILE", help="write the topology file here (TOML)")
    add_argument("--check", action="store_true", help="also measure sizes that the fit has not seen; report the error")
    add_argument(
        "--machine", metavar="FILE", help="with --check: check this topology file instead of fitting a new one"
    )
    add_argument(
        "--from",
        dest="files",
        type=Path,
        action="append",
        metavar="FILE",
        help="fit to what benchmarks.a2a, .expert_compute or .trans_agg wrote with --json instead of measuring; "
        "may be repeated",
    )
    add_argument(
        "--rows",
        type=positive,
        nargs=2,
        default=(256, 2048),
        metavar=("MIN", "MAX"),
        help="token rows that a rank sends in one all-to-all and that its experts compute: about those of your layer "
        "(default: 256 2048)",
    )
    add_json(parser)
    model = add_model(parser, _SIZES)
    for option, known in (("--activation", _ACTIVATIONS), ("--dtype", _DTYPES)):
        what = f"of the expert: {', '.join(known)} (default: {_EXPERT[option.strip('-')]})"
        model.add_argument(option, choices=known, metavar=option.strip("-").upper(), help=what)
    parser.set_defaults(run=run)


def _expert(arguments: argparse.Namespace) -> dict[str, Any]:
    """What is asked for of the expert, by field: options win over the model."""
    from prophet.spec.feed_forward import parts_of

    # What nobody asked for stays out, so that a checked file's expert can take its place
    found = {name: getattr(arguments, name) for name in _EXPERT}
    if arguments.model is not None:
        sizes = needs_experts(model_sizes(arguments, None))
        found["dim"], found["hidden"] = sizes.dim, sizes.hidden
        found["activation"] = found["activation"] or ("swiglu" if parts_of(sizes.activation).gated else "gelu")
        found["dtype"] = found["dtype"] or _DTYPE_OF_BYTES.get(sizes.element_bytes or 0)
    return {name: value for name, value in found.items() if value is not None}


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the file, and print what was found."""
    job, ranks = _job(arguments)
    say_torch_is_imported()
    from prophet.ranks.launch import launched

    launch = None if arguments.files else launched()
    # Under a launcher only rank 0 writes, so only it checks (in `_join`)
    if job.out and launch is None:
        check_can_write("--out", job.out)
    if arguments.files:
        answer: dict[str, Any] | None = _from_files(arguments.files, job, _expert(arguments), ranks)
    elif launch is not None:
        answer = _join(launch, job, ranks)
    else:
        answer = _start(job, ranks or _RANKS)
    # Under a launcher, rank 0 prints for all
    if answer is None:
        return 0
    if arguments.json:
        print(json.dumps(answer, indent=2))
    else:
        _print(answer)
    return 0


def _start(job: Job, ranks: int) -> dict[str, Any]:
    """Measure on ranks that are processes of this machine."""
    from prophet.ranks.collective import DEFAULT_TIMEOUT_S
    from prophet.ranks.launch import run_ranks
    from prophet.terminal import working

    # With more ranks than that, figures would show how they wait for a core
    most = 4 * (os.cpu_count() or ranks)
    if ranks > most:
        raise UsageError(f"--ranks: expected at most four ranks per core ({most}), got {ranks}")
    measuring = working(f"Measuring on {ranks} ranks, which takes about half a minute")
    with tempfile.TemporaryDirectory(prefix="prophet-calibrate-") as scratch, measuring:
        folder = Path(scratch)
        run_ranks(
            _rank_body,
            (job, folder / "answer.json"),
            ranks=ranks,
            folder=folder,
            limit_s=_LIMIT_S,
            timeout_s=DEFAULT_TIMEOUT_S,
            what="the calibration",
        )
        # A file, since processes that were started share no memory
        answer: dict[str, Any] = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    return answer


def _from_files(files: list[Path], job: Job, expert: dict[str, Any], ranks: int | None) -> dict[str, Any]:
    """Fit to benchmarks' files, and write the topology file."""
    from prophet.machine.benchmark_files import ExpertKind, calibrate_from

    found = calibrate_from(files, kind=ExpertKind(**expert), ranks=ranks, held_out=job.held_out, name=_name(job))
    job = replace(job, expert=_described(found.kind), repeats=found.repeats)
    answer = _about(job, found.calibration.topology.ranks, found.device)
    answer["from"] = [str(f) for f in files]
    return _fitted(found.calibration, job, answer, write=True)


def _described(kind: ExpertKind) -> dict[str, Any]:
    """An expert's fields; those that benchmarks' files leave open have their defaults."""
    return {name: getattr(kind, name) or usual for name, usual in _EXPERT.items()}


def _name(job: Job) -> str:
    """The topology's name."""
    return job.out.stem if job.out else "calibrated"


def _about(job: Job, ranks: int, device: str) -> dict[str, Any]:
    """The head of an answer, before its figures."""
    return {"ranks": ranks, "device": device, "file": None, "folders_made": [], **job.expert, "repeats": job.repeats}


def _job(arguments: argparse.Namespace) -> tuple[Job, int | None]:
    """The job that the arguments ask for, and the number of ranks it needs; None where any will do."""
    asked, ranks, per_node, lines = _expert(arguments), arguments.ranks, None, None
    expert = {**_EXPERT, **asked}
    low, high = arguments.rows
    if low >= high:
        raise UsageError(f"--rows: expected the smaller number first, got {low} {high}")
    # Refused before torch is imported and ranks are started: mistakes must not cost half a minute
    if arguments.machine and arguments.files:
        raise UsageError("--from reads measurements, --machine checks a file by new ones: expected one of them")
    if arguments.machine:
        if not arguments.check or arguments.out:
            raise UsageError("--machine goes with --check, and without --out: the file is checked, nothing is fitted")
        expert, ranks, per_node, lines = _checked(arguments.machine, asked, ranks)
    elif not arguments.out and not arguments.check and not arguments.json:
        raise UsageError("expected --out FILE, --check or --json: the measurements would be thrown away")
    if max(expert["dim"], expert["hidden"]) > _MOST:
        raise UsageError(
            f"--dim, --hidden: expected sizes of an expert up to {_MOST}, got {expert['dim']} x {expert['hidden']}"
        )
    job = Job(
        out=arguments.out.absolute() if arguments.out else None,
        lines=lines,
        held_out=arguments.check,
        expert=expert,
        ranks_per_node=per_node,
        rows=(low, high),
        repeats=_REPEATS,
    )
    return job, ranks


def _checked(
    file: str, asked: dict[str, Any], ranks: int | None
) -> tuple[dict[str, Any], int, int, dict[str, tuple[float, float, float]]]:
    """The expert, ranks, ranks per node and lines of a topology file that is to be checked."""
    from prophet.machine.calibrate import model_lines, shape_of
    from prophet.machine.topology import read_fits
    from prophet.spec import Topology

    # A preset has no measured lines to check against
    topology = machine(file).source
    if not isinstance(topology, Topology):
        raise UsageError(f"--machine: expected a topology file, got {file}, whose figures were never measured")
    fits = read_fits(file)
    if ranks not in (None, topology.ranks):
        raise UsageError(f"--ranks {ranks}: {file} is for {topology.ranks} ranks")
    measured = fits.get("expert_forward", {})
    expert = dict(_EXPERT)
    if measured:
        expert |= {name: int(measured.get(name, expert[name])) for name in ("dim", "hidden")}
        expert["activation"] = "swiglu" if measured.get("swiglu") else "gelu"
    expert |= asked
    shape = shape_of(expert["dim"], expert["hidden"], expert["activation"], _dtype(expert["dtype"]))
    # Lines that follow from the planners' model come first. Those that were fitted to an operation alone replace them:
    # they are what the file claims
    found = model_lines(topology, shape)
    lines = {o: (line.fixed_s, line.unit_s, line.count_s) for o, line in found.items()}
    for operation, figures in fits.items():
        if {"fixed_s", "unit_s"} <= figures.keys():
            lines[operation] = (figures["fixed_s"], figures["unit_s"], figures.get("count_s", 0.0))
    return expert, topology.ranks, topology.ranks_per_node, lines


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _join(launch: Launch, job: Job, ranks: int | None) -> dict[str, Any] | None:
    """Take part in the group that torchrun has prepared; rank 0 gets the answer."""
    from prophet.ranks.collective import DEFAULT_TIMEOUT_S
    from prophet.ranks.launch import joined_group
    from prophet.ranks.process_group import collective_for
    from prophet.terminal import working

    if ranks not in (None, launch.ranks):
        raise UsageError(f"--ranks {ranks}: this process is one of {launch.ranks} that were started already")
    # One rank needs no process group, and no port to meet at
    if launch.ranks == 1:
        if job.out:
            check_can_write("--out", job.out)
        with working("Measuring"):
            return _measure(job, collective_for(None), launch.device)
    # torchrun starts as many ranks on every node
    if job.ranks_per_node is None and launch.local_ranks is not None:
        job = replace(job, ranks_per_node=launch.local_ranks)
    with joined_group(launch, timeout_s=DEFAULT_TIMEOUT_S) as collective:
        reports = collective.rank == 0
        if job.out and reports:
            check_can_write("--out", job.out)
        with working(f"Measuring on {launch.ranks} ranks") if reports else contextlib.nullcontext():
            answer = _measure(job, collective, launch.device)
        collective.close()
    return answer if reports else None


def _rank_body(rank: int, job: Job, answer: Path) -> None:
    """Run one rank that this command has started."""
    from prophet.ranks.process_group import collective_for

    found = _measure(job, collective_for(None), "cpu")
    if rank == 0:
        answer.write_text(json.dumps(found), encoding="utf-8")


def _measure(job: Job, collective: Any, device: str) -> dict[str, Any]:
    """Calibrate or check, collective; rank 0 writes the topology file. Returns what `--json` prints."""
    from prophet.machine.calibrate import calibrate, check
    from prophet.machine.fit import Line
    from prophet.machine.measure import Ranges
    from prophet.machine.memory import keep_memory

    # Fresh pages for every tensor would be measured along with the operations
    if device == "cpu":
        keep_memory()
    layer: dict[str, Any] = {
        **job.expert,
        "dtype": _dtype(job.expert["dtype"]),
        "device": device,
        "ranks_per_node": job.ranks_per_node,
        "ranges": Ranges(rows=job.rows, tokens=job.rows),
        "repeats": job.repeats,
    }
    answer = _about(job, collective.size, device.partition(":")[0])
    if job.lines is not None:
        lines = {o: Line(*figures) for o, figures in job.lines.items()}
        return answer | {"operations": _rows(check(collective, lines, **layer)), "model": []}
    found = calibrate(collective, **layer, held_out=job.held_out, name=_name(job))
    return _fitted(found, job, answer, write=collective.rank == 0)


def _fitted(found: Any, job: Job, answer: dict[str, Any], *, write: bool) -> dict[str, Any]:
    """Add a calibration's figures to an answer; with `write`, also write the topology file if one is wanted."""
    from prophet.machine.topology import write_topology

    topology = found.topology

    def figures_of(fit: Any) -> dict[str, float]:
        sizes = [p.size for p in fit.fitted]
        figures = {
            "fixed_s": fit.line.fixed_s,
            "unit_s": fit.line.unit_s,
            "smallest": min(sizes),
            "largest": max(sizes),
        }
        if fit.unit == "token":
            figures |= {"count_s": fit.line.count_s, "dim": job.expert["dim"], "hidden": job.expert["hidden"]}
            # Fits are tables of numbers in the topology file
            figures["swiglu"] = float(job.expert["activation"] == "swiglu")
        if fit.held_out:
            figures |= {"mean_error": fit.mean_error, "max_error": fit.max_error}
        return figures

    if job.out and write:
        # Listed before the file is written, which makes them
        folders = [str(folder) for folder in reversed(job.out.parents) if not folder.exists()]
        write_topology(job.out, topology, fits={f.operation: figures_of(f) for f in found.fits})
        answer |= {"file": str(job.out), "folders_made": folders}
    answer["topology"] = {
        "intra": {"bytes_per_s": topology.intra.bytes_per_s, "latency_s": topology.intra.latency_s},
        "inter": {"bytes_per_s": topology.inter.bytes_per_s, "latency_s": topology.inter.latency_s},
        "port_bytes_per_s": topology.port_bytes_per_s,
        "flops_per_s": list(topology.flops_per_s),
        "expert_overhead_s": topology.expert_overhead_s,
        "call_overhead_s": topology.call_overhead_s,
        "trans_rate": topology.trans_rate,
        "agg_rate": topology.agg_rate,
        "overlap_cost": topology.overlap_cost,
        "backward_ratio": topology.backward_ratio,
        "compute_noise": topology.compute_noise,
        "exchange_noise_s": topology.exchange_noise_s,
        "duplex_cost": topology.duplex_cost,
        "link_overlap_cost": topology.link_overlap_cost,
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


def _print(answer: dict[str, Any]) -> None:
    from prophet.terminal import Column, console, print_table

    to = console()
    device = {"cpu": "processes of this machine's CPU", "cuda": "GPUs"}.get(answer["device"], answer["device"])
    if "from" in answer:
        to.print(f"Read, not measured: {', '.join(answer['from'])}", soft_wrap=True)
    to.print(
        f"{answer['ranks']} ranks ({device}), an expert of {answer['dim']} x {answer['hidden']} "
        f"({answer['activation']}, {answer['dtype']}), at least {answer['repeats']} samples per size.",
    )
    columns = (
        Column("operation", align="left"),
        Column("fixed\nms", 1),
        Column("per expert\nms", 3),
        Column("rate"),
        Column("mean\nerror", 2),
        Column("max\nerror", 5),
        Column("planners'\nmean error", 4),
    )
    rows = []
    model = {row["operation"]: row for row in answer["model"]}
    for row in answer["operations"]:
        # On a fast link a fit may find no time per byte at all
        rate = 1.0 / row["unit_s"] if row["unit_s"] > 0 else float("inf")
        token = row["unit"] == "token"
        rows.append(
            (
                row["operation"],
                f"{1e3 * row['fixed_s']:.3f}",
                f"{1e3 * row['count_s']:.3f}" if token else "",
                f"{rate / 1e3:.0f} tokens/ms" if token else f"{rate / 1e9:.3f} GB/s",
                *(_percent(row[key]) for key in ("mean_error", "max_error")),
                _percent(model.get(row["operation"], {}).get("mean_error")),
            )
        )
    print_table(columns, rows, to)
    if cost := answer.get("topology", {}).get("overlap_cost"):
        to.print(f"A transfer lengthens the products that hide it by {_percent(cost)} of its own time.")
    if varies := [
        f"{name} by {_percent(share)}"
        for name in ("compute", "exchange")
        if (share := answer.get("topology", {}).get(f"{name}_noise"))
    ]:
        to.print(f"From one time to the next a rank's seconds vary: {', '.join(varies)} (standard deviation).")
    if port := answer.get("topology", {}).get("port_bytes_per_s"):
        alone = answer["topology"]["inter"]["bytes_per_s"]
        to.print(f"A node sends {port / 1e9:.3f} GB/s to others, and one of its ranks alone {alone / 1e9:.3f} GB/s.")
    if any(row["mean_error"] is not None for row in answer["operations"]):
        to.print(
            "Errors are |predicted - measured| / measured on sizes that the fit has not seen."
            + (
                " Planners assume one latency for all-to-all, Trans and Agg, and one ratio of backward to forward "
                "pass: theirs is the error of that."
                if model
                else ""
            ),
        )
    if (spread := _spread(answer)) > _NOISY:
        to.print(
            f"Something else used this machine: the median sample lies {_percent(spread)} above the lower quartile. "
            "Measure again when it is idle.",
        )
    if answer["file"]:
        to.print(f"Written: {answer['file']}", soft_wrap=True)
    if answer["folders_made"]:
        to.print(f"Folders made for it: {', '.join(answer['folders_made'])}", soft_wrap=True)


def _spread(answer: dict[str, Any]) -> float:
    """The typical spread of the samples of one size."""
    return statistics.median(float(p["spread"]) for row in answer["operations"] for p in row["points"])


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
