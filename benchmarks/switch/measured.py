"""Switches measured on emulated hosts, or over loopback where hosts cannot be emulated.

One more host than ranks is the storage of checkpoints; its own port is unlimited.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster import kernel_objects as kernel
from benchmarks.cluster.profiles import Profile
from benchmarks.cluster.testbed import ROOT, Testbed, TestbedUnavailable
from benchmarks.common import TIMEOUT_S
from benchmarks.measure import seconds_of
from benchmarks.switch.cases import Case, cases
from benchmarks.switch.rows import Row, beside_rows, case_rows, job_rows, summary, table, targets, where
from benchmarks.switch.storage import PORT, Storage
from benchmarks.switch.universal import UNIVERSAL
from benchmarks.switch.universal import measured as universal_measured
from benchmarks.switch.ways import USUAL
from benchmarks.switch.worker import measured
from benchmarks.tables import words
from prophet.ranks.launch import run_ranks
from prophet.ranks.process_group import collective_for

UNLIMITED_MBIT_PER_S = 40_000.0
IMPORTS = (
    "torch.distributed.fsdp, torch.distributed.checkpoint, torch.distributed.pipelining, pipeline_balance.elastic.job"
)
SHM = Path("/dev/shm")  # the machine's tmpfs
TABLE_2 = {"addition": (1.91, 40.98), "removal": (3.05, 40.32)}  # DynaTran: seconds of interruption, and hidden
FIGURE_1 = "DynaTran's Figure 1, Megatron-LM: up to 6 s on 8 GPUs, near 30 s on 32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is measured. dim, layers: of the job's model; beside: preparations beside steps."""

    large_bytes: int = 32_000_000
    small_bytes: int = 4_000_000
    repetitions: int = 3
    dim: int = 1024
    layers: int = 12
    beside: int = 6


SMOKE = Sizes(large_bytes=60_000, small_bytes=30_000, repetitions=1, dim=32, layers=8, beside=1)


def imports_s(times: int) -> list[float]:
    """Seconds that a new process takes to start and to import what a training job needs; alone on the machine."""
    command = [sys.executable, "-c", f"import torch, {IMPORTS}"]
    return [seconds_of(lambda: subprocess.run(command, check=True, timeout=120, cwd=ROOT)) for _ in range(times)]


def measure(
    hosts: int,
    sizes: Sizes,
    *,
    names: Sequence[str] = (),
    ways: Sequence[str] = USUAL,
    jobs: bool = True,
    link_mbit_per_s: float = 200.0,
    loopback: bool = False,
    limit_s: float = 1500.0,
) -> dict[str, Any]:
    """Everything, as a document. names: cases whose names begin so (none: all). Prints what comes of it."""
    began = time.monotonic()
    wanted = cases(hosts, large_bytes=sizes.large_bytes, small_bytes=sizes.small_bytes)
    chosen = [c for c in wanted if not names or any(c.name.startswith(n) for n in names)]
    imported_s = imports_s(sizes.repetitions)
    args: dict[str, Any] = {
        "cases": [asdict(c) for c in chosen],
        "repetitions": sizes.repetitions,
        "ways": [w for w in ways if w != UNIVERSAL],
        "jobs": {"dim": sizes.dim, "layers": sizes.layers, "beside": sizes.beside} if jobs else None,
        "folder": str((SHM if SHM.is_dir() else Path(tempfile.gettempdir())) / f"switch-{os.getpid()}"),
        "timeout_s": TIMEOUT_S,
        "limit_s": limit_s,
    }
    links = f"{link_mbit_per_s:g} Mbit/s, emulated"
    try:
        results = None if loopback else _on_hosts(hosts, args, link_mbit_per_s, limit_s)
        if results is None:
            results, links = _over_loopback(hosts, args, limit_s), "loopback: the bound is of the measured rate"
        universal = None
        if UNIVERSAL in ways:
            universal = universal_measured(chosen, sizes.repetitions, Path(args["folder"]))
    finally:
        shutil.rmtree(args["folder"], ignore_errors=True)
    probe = {k: statistics.median(r["probe"][k] for r in results) for k in results[0]["probe"]}
    rate = probe["bytes_per_s"] if "loopback" in links else link_mbit_per_s * 1e6 / 8
    cold = {"imports_s": imported_s, "process_group_s": max(r["group_s"] for r in results)}
    found = _rows(chosen, results, universal, rate, probe, cold)
    return {"hosts": hosts, "links": links, "sizes": asdict(sizes), **found, "wall_s": time.monotonic() - began}


def _rows(
    chosen: Sequence[Case],
    results: Sequence[Mapping[str, Any]],
    universal: Sequence[Mapping[str, Any]] | None,
    rate: float,
    probe: Mapping[str, float],
    cold: dict[str, Any],
) -> dict[str, Any]:
    restart_s = statistics.median(cold["imports_s"]) + cold["process_group_s"]
    rows: list[Row] = []
    for k, case in enumerate(chosen):
        parts = [r["cases"][k] for r in results]
        other = universal[k] if universal is not None else None
        rows += case_rows(case, parts, bytes_per_s=rate, probe=probe, restart_s=restart_s, universal=other)
    cold["layout_groups_s"] = statistics.median(r["group_s"] for r in rows)
    cold["seconds"] = restart_s + cold["layout_groups_s"]
    found: dict[str, Any] = {"bytes_per_s": rate, "probe": dict(probe), "cold_start": cold, "rows": rows}
    made: list[Row] = []
    beside: list[Row] = []
    if results[0]["jobs"] is not None:
        jobs = [r["jobs"] for r in results]
        made, beside = job_rows(jobs, bytes_per_s=rate), beside_rows(jobs)
        for row in beside:
            moves = [r["blocked_s"] for r in made if r["case"].startswith(row["job"]) and r["wire_bytes"]]
            hidden_s = row["groups_s"] + row["routes_s"] - row["exposed_s"]
            row["table_2_here"] = hidden_s / (hidden_s + statistics.median(moves))
        found["table_2_paper"] = {name: hidden / (hidden + held) for name, (held, hidden) in TABLE_2.items()}
    return found | {"jobs": made, "beside": beside, "targets": targets(rows, made, beside)}


def show(document: Mapping[str, Any]) -> None:
    """Print the tables."""
    cold = document["cold_start"]
    print(table(document["rows"], document["jobs"]))
    print(
        f"one link: {document['bytes_per_s'] / 1e6:.1f} MB/s stated, {document['probe']['bytes_per_s'] / 1e6:.1f} seen"
    )
    imports_s = statistics.median(cold["imports_s"])
    print(f"cold start: {cold['seconds']:.2f} s (imports {imports_s:.2f} s); {FIGURE_1}")
    for beside in document["beside"]:
        print(words(beside))
    print(summary(document["targets"]))
    for t in document["targets"]:
        if not t["met"]:
            possible = f", possible {t['possible']:.3g}" if "possible" in t else ""
            print(f"missed: {t['what']}: {where(t)} {t['value']:.3g}, target {t['target']:.3g}{possible}")
    print(f"{document['wall_s']:.0f} s in all", flush=True)


# --- hosts ---


def _on_hosts(hosts: int, args: dict[str, Any], mbit_per_s: float, limit_s: float) -> list[dict[str, Any]] | None:
    """What the ranks found; None where hosts cannot be emulated."""
    rates = (mbit_per_s,) * hosts + (UNLIMITED_MBIT_PER_S,)
    # Nothing computes, so nothing is paced: no thread's time is stretched, and each may run on any core.
    share = (0.1,) * (hosts + 1)
    profile = Profile(
        name=f"{hosts} hosts and storage", nodes=1, hosts_per_node=hosts + 1, link_mbit_per_s=rates, share=share
    )
    try:
        bed = Testbed(profile, paced=True)
    except TestbedUnavailable as error:
        print(f"no hosts, loopback instead: {error}", flush=True)
        return None
    with bed:
        args |= {"storage": kernel.address(hosts), "storage_port": PORT}
        found = bed.run(
            "benchmarks.switch.worker:run_host",
            args,
            timeout_s=limit_s,
            imports=["scipy.optimize", "scipy.sparse"],
            while_running=lambda running: running.follow(0, lambda line: print(line, flush=True)),
        )
    return found[:hosts]


def _over_loopback(hosts: int, args: dict[str, Any], limit_s: float) -> list[dict[str, Any]]:
    with Storage("127.0.0.1", 0, limit_s) as storage, tempfile.TemporaryDirectory(prefix="prophet-switch-") as scratch:
        args |= {"storage": "127.0.0.1", "storage_port": storage.server_address[1]}
        run_ranks(
            _loopback_rank,
            (args, Path(scratch)),
            ranks=hosts,
            folder=Path(scratch),
            limit_s=limit_s,
            timeout_s=TIMEOUT_S,
            what="the benchmark of switches",
        )
        return [json.loads((Path(scratch) / f"{r}.json").read_text(encoding="utf-8")) for r in range(hosts)]


def _loopback_rank(rank: int, args: dict[str, Any], folder: Path) -> None:
    began = time.perf_counter()
    world = collective_for(None, timeout_s=args["timeout_s"])
    group_s = time.perf_counter() - began  # the world is there already: of its two channels alone
    found = {**measured(world, args, lambda text: print(text, flush=True)), "group_s": group_s}
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
