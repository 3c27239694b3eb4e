"""Plays recorded steps again by the present simulator: how far off it is, without a cluster.

    python -m benchmarks.cluster --profile four-hosts --record four-record.json
    python -m benchmarks.cluster.replay four-record.json

The file holds what calibration saw, and of every counted step its counts, placements and forms. So the figures that are
fitted and the simulator may change afterwards, and are compared with the same measured steps.

Shape legend: R ranks, L blocks, E experts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster.calibrate import Calibration, Observed, calibration_of
from benchmarks.cluster.policies import planner_of, policy
from benchmarks.tables import columns
from prophet.engine.step_report import StepReport
from prophet.planner.model.cost import transfers_of
from prophet.planner.model.withdraw import all_hidden
from prophet.scheduler.actions import Action
from prophet.scheduler.pieces import Form
from prophet.scheduler.simulate import predicted_durations, simulate
from prophet.spec import LayerShape, Placement, PlanContext, Route, Split

PARTS = ("compute", "slowed", "a2a", "shared", "exposed_trans", "exposed_agg", "exposed_plan", "idle")


def layers_of(contexts: Sequence[PlanContext]) -> dict[str, Any]:
    """What the simulator needs to know of the layers, as JSON."""
    first = contexts[0]
    return {
        "shape": dataclasses.asdict(first.shape),
        "home": list(first.home),
        "slots_per_rank": first.slots_per_rank,
        "experts": [x.windows.experts for x in contexts],
    }


def step_of(report: StepReport, placements: Sequence[Placement], forms: Sequence[Form]) -> dict[str, Any]:
    """What was done in one step, as JSON."""
    return {
        "counts": report.counts.tolist(),
        "replicas": [[list(x) for x in p.replicas()] for p in placements],
        "forms": [dataclasses.asdict(f) for f in forms],
    }


def form_of(fields: Mapping[str, Any]) -> Form:
    """The form that `dataclasses.asdict` took apart, from JSON or not: its routes have experts' numbers as keys."""
    read: dict[str, Any] = {k: tuple(v) for k, v in fields.items() if isinstance(v, list | tuple)}
    for name in ("trans_routes", "agg_routes"):
        read[name] = {int(e): _route_of(*route) for e, route in fields.get(name, {}).items()}
    return Form(**{**fields, **read})


def _route_of(groups: Sequence[Any], relays: Sequence[int], carriers: Sequence[Any]) -> Route:
    return Route(tuple(map(tuple, groups)), tuple(relays), tuple(map(tuple, carriers)))


def simulated(
    name: str,
    calibration: Calibration,
    layers: Mapping[str, Any],
    schedule: Sequence[Action],
    steps: Sequence[Mapping[str, Any]],
) -> list[dict[str, float]]:
    """Seconds by part that the simulator says of a policy's steps, from the calibration alone."""
    c, planner, shape = calibration, planner_of(policy(name)), LayerShape(**layers["shape"])
    contexts = [
        PlanContext(
            topology=c.topology,
            shape=shape,
            home=tuple(layers["home"]),
            windows=dataclasses.replace(c.windows, experts=experts),
            slots_per_rank=layers["slots_per_rank"],
        )
        for experts in layers["experts"]
    ]
    found = []
    for step in steps:
        counts = np.array(step["counts"], dtype=np.int64)
        placed = [
            Placement.with_replicas(tuple(layers["home"]), c.topology.ranks, [tuple(x) for x in replicas])
            for replicas in step["replicas"]
        ]
        splits = [
            Split.to_homes(load, placement) if placement.is_static else planner.split(load, placement, context)
            for load, placement, context in zip(counts, placed, contexts, strict=True)
        ]
        durations = predicted_durations(
            placed,
            splits,
            contexts,
            forms=[form_of(f) for f in step["forms"]],
            start_s=c.start_s,
            end_s=c.end_s,
            update_s=c.update_s,
            counts_s=c.counts_s,
            counts_behind_s=c.counts_behind_s,
            apart=[
                planner.withdraws and not p.is_static and not all_hidden(load, context, *transfers_of(p, context))
                for load, p, context in zip(counts, placed, contexts, strict=True)
            ],
        )
        s = simulate(schedule, durations)
        found.append({"step": s.makespan_s, **{p: float(getattr(s, f"{p}_s").mean()) for p in PARTS}})
    return found


def biases(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per policy: the median measured and simulated step, simulated / measured - 1, and simulated parts."""
    shape = LayerShape(**record["layers"]["shape"])
    calibration = calibration_of(Observed(**record["observed"]), shape)
    rows = []
    for name in dict.fromkeys(run["policy"] for run in record["runs"]):
        runs = [run for run in record["runs"] if run["policy"] == name]
        steps = [
            s
            for run in runs
            for s in simulated(
                name, calibration, record["layers"], [Action.parse(a) for a in run["schedule"]], run["steps"]
            )
        ]
        measured_s = float(np.median([s for run in runs for s in run["step_s"]]))
        median = {part: float(np.median([s[part] for s in steps])) for part in steps[0]}
        rows.append(
            {"policy": name, "step_s": measured_s, "simulated_s": median, "bias": median["step"] / measured_s - 1.0}
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text, with the common offset and what is left of every bias without it."""
    offset = float(np.median([r["bias"] for r in rows]))
    head = ["policy", "step s", "simulated", "bias", "less offset", *PARTS]
    lines = [
        [
            r["policy"],
            *(f"{s:.3f}" for s in (r["step_s"], r["simulated_s"]["step"])),
            *(f"{b:+.3f}" for b in (r["bias"], r["bias"] - offset)),
            *(f"{r['simulated_s'][p]:.3f}" for p in PARTS),
        ]
        for r in rows
    ]
    spread = max(r["bias"] for r in rows) - min(r["bias"] for r in rows)
    return f"{columns(head, lines)}\ncommon offset {offset:+.3f}, spread {spread:.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster.replay", description=__doc__.split("\n")[0])
    parser.add_argument("record", type=Path, help="what `python -m benchmarks.cluster --record` wrote")
    args = parser.parse_args(argv)
    try:
        record = json.loads(args.record.read_text(encoding="utf-8"))
        rows = biases(record)
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {args.record}: {error}", file=sys.stderr)
        return 2
    calibration = calibration_of(Observed(**record["observed"]), LayerShape(**record["layers"]["shape"]))
    print(calibration)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
