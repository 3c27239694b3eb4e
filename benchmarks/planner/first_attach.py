"""`python -m benchmarks.planner.first_attach`: what the planner costs a run that begins, over `planner="static"`.

Every figure is of fresh processes whose home and cache folders are empty, as in a new environment; the planners take
turns, and who begins rotates. Two questions:

- *attach*: two ranks train a few steps with small experts and one hot expert. Seconds from importing prophet to the
  end of `attach`, and to the end of the third step, whose replicas the first plan has placed; memory of a rank.
  `cpu` is processor time, which other work on the machine does not lengthen as much.
- *size*: one process plans for a large group, without training. Memory that this adds to importing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

PLANNERS = ("static", "prophet")
RANKS, STEPS, CALLS = 2, 3, 20
_LIMIT_S = 300.0
_COMMAND = ("-m", "benchmarks.planner.first_attach")

Row = dict[str, float]


# --- in a fresh process ---


def memory_mb() -> float:
    """Megabytes (10^6 bytes) of this process that no other one shares."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024 / 1e6


def attach_and_train(planner: str, rank: int, meet: str) -> Row:
    """One rank's figures. meet: the file in which the ranks find each other."""
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=RANKS)
    dist.barrier()
    began, began_cpu = time.perf_counter(), time.process_time()
    import prophet

    torch.manual_seed(0)
    layer = prophet.MoE(dim=16, hidden=32, num_experts=16, top_k=2)
    with torch.no_grad():
        layer.gate.weight[:2] += 0.5  # hot ones, at home on one rank
    model = nn.Sequential(nn.Linear(8, 16), layer, nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    topology = prophet.Topology.uniform(RANKS, flops_per_s=1e8)  # slow products: replicas pay
    engine = prophet.attach(model, optimizer, config=prophet.EngineConfig(planner=planner, topology=topology))
    attached_s, attached_cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    copies = 0
    for _ in range(STEPS):
        model(torch.rand(512, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        copies = int(engine.last_step.copies.sum()) if engine.last_step is not None else 0
    trained_s, trained_cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    memory = memory_mb()
    engine.close()
    dist.destroy_process_group()
    return {
        "attach_s": attached_s,
        "attach_cpu_s": attached_cpu_s,
        "steps_s": trained_s,
        "steps_cpu_s": trained_cpu_s,
        "memory_mb": memory,
        "copies": float(copies),
    }


def plan_alone(planner: str, ranks: int, experts: int) -> Row:
    """Memory that calls for `ranks` ranks add."""
    import numpy as np

    from prophet.machine.presets import get_preset
    from prophet.planner import get_planner

    rng = np.random.default_rng(0)
    popularity = rng.permutation(np.arange(1, experts + 1) ** -0.5)
    popularity /= popularity.sum()
    load = rng.multinomial(8192, popularity, size=ranks).astype(np.int64)
    context = get_preset("h100-ib:Mixtral-8x7B").context(ranks, experts, routed_per_rank=8192, top_k=2)
    before = memory_mb()
    chosen, placement = get_planner(planner), None
    for _ in range(CALLS):
        placement = chosen.place(load, replace(context, previous=placement))
    return {"memory_mb": memory_mb() - before, "copies": float(placement.copies_per_rank().sum())}  # type: ignore[union-attr]


# --- the process that starts them ---


def fresh(*arguments: str, processes: int = 1) -> Row:
    """Run this file in fresh processes that find no cache; the mean of their figures."""
    with tempfile.TemporaryDirectory(prefix="first-attach-") as folder:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("XDG_")}
        environment |= {"HOME": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *_COMMAND, "--here", folder, *arguments]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(processes)
        ]
        try:
            said = [rank.communicate(timeout=_LIMIT_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        left = sorted(p.name for p in Path(folder).iterdir() if p.name != "meet")
    if left:
        raise RuntimeError(f"{' '.join(arguments)} left files in a home folder: {', '.join(left)}")
    rows = [json.loads(text) for text in said]
    return {name: statistics.mean(row[name] for row in rows) for name in rows[0]}


def compare(name: str, repeats: int, *arguments: str, processes: int = 1) -> list[dict[str, Any]]:
    """What `prophet` takes more than `static`: a row per figure, with both medians and the differences' spread."""
    found: dict[str, list[Row]] = {planner: [] for planner in PLANNERS}
    for turn in range(repeats):
        for planner in PLANNERS if turn % 2 == 0 else reversed(PLANNERS):
            found[planner].append(fresh("--planner", planner, *arguments, processes=processes))
    rows = []
    for figure in found["static"][0]:
        static, ours = ([row[figure] for row in found[planner]] for planner in PLANNERS)
        more = sorted(b - a for a, b in zip(static, ours, strict=True))
        rows.append(
            {
                "case": name,
                "figure": figure,
                "static": statistics.median(static),
                "prophet": statistics.median(ours),
                "more": statistics.median(more),
                "low": more[0],
                "high": more[-1],
            }
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner.first_attach", description=__doc__)
    parser.add_argument("--repeats", type=int, default=6, help="pairs of fresh runs (default: %(default)s)")
    parser.add_argument("--size", action="append", metavar="RxE", help="ranks and experts to plan for alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    for hidden in ("--here", "--planner", "--rank", "--alone"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.here is not None:
        if options.alone:
            row = plan_alone(options.planner, *(int(n) for n in options.alone.split("x")))
        else:
            row = attach_and_train(options.planner, int(options.rank), str(Path(options.here, "meet")))
        print(json.dumps(row))
        return 0
    from benchmarks.common import write_json  # not in a fresh process: it imports torch and prophet
    from benchmarks.tables import columns

    rows = compare("attach", options.repeats, processes=RANKS)
    for size in options.size or ():
        rows += compare(size, options.repeats, "--alone", size)
    lines = [
        (r["case"], r["figure"], *(f"{r[k]:.3f}" for k in (*PLANNERS, "more")), f"{r['low']:.3f} to {r['high']:.3f}")
        for r in rows
    ]
    print(columns(("case", "figure", *PLANNERS, "more", f"least to most of {options.repeats}"), lines))
    if options.json:
        write_json(options.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
