"""python -m benchmarks.cluster --profile four-hosts --policies static,prophet,forced-balance --json out.json

What balancing gains on emulated hosts, against published policies, DeepSpeed, Tutel and perfectly even routing. The
routing is that of the model's own router, or with --routing that of a recorded trace.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster.policies import DEFAULT_POLICIES, POLICY_NAMES, PolicyError, planner_of, policy
from benchmarks.cluster.profiles import BUILT_IN, Profile, ProfileError, load_profile
from benchmarks.cluster.routing import read_replay
from benchmarks.cluster.rows import against, summarise, table
from benchmarks.cluster.testbed import Running, Testbed, TestbedError, TestbedUnavailable, unwound_when_ended
from benchmarks.cluster.worker import steps_of_repetition
from benchmarks.cluster.workload import Workload
from benchmarks.common import chosen, environment, write_json
from prophet.errors import SpecError, TraceError
from prophet.report.picture import draw_step, middle_blocks
from prophet.scheduler.timeline import Span
from prophet.scheduler.timeline import write_trace as write_timeline
from prophet.traces import write_trace

FULL_RATE_MBIT_PER_S = 4000.0  # while the checkpoint is made, which is not measured
PICTURED = ["prophet", "prophet-blocking"]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    p.add_argument("--profile", default="four-hosts", help=f"{', '.join(BUILT_IN)}, or a TOML file")
    p.add_argument(
        "--policies", default=",".join(DEFAULT_POLICIES), help=f"comma-separated, of {', '.join(POLICY_NAMES)}"
    )
    p.add_argument(
        "--against", default="", help="of the policies, comma-separated: the others' steps over those of the fastest"
    )
    p.add_argument(
        "--routing",
        type=Path,
        metavar="FILE",
        help="replay the routing of this trace instead of the router's: every rank's choices have its counts of that "
        "step and layer, the same for all policies but those of even routing",
    )
    p.add_argument("--json", type=Path, help="file for the rows")
    p.add_argument("--record", type=Path, help="file for `python -m benchmarks.cluster.replay`, see there")
    p.add_argument("--picture", type=Path, help="file for a picture of two blocks of that step, with prophet (PNG)")
    p.add_argument("--trace", type=Path, help="file for a trace of one step of every policy (Chrome, Perfetto)")
    p.add_argument("--repetitions", type=int, default=3)
    p.add_argument("--steps", type=int, default=8, help="counted steps of one repetition")
    p.add_argument("--skip", type=int, default=2, help="steps of one repetition before those")
    p.add_argument("--warm-up-steps", type=int, default=80, help="training steps before the common checkpoint")
    p.add_argument("--checkpoints", type=Path, help="folder that keeps common checkpoints for later runs")
    p.add_argument("--slots-per-rank", type=int, default=4)
    p.add_argument("--timeout-s", type=float, default=60.0, help="limit on every wait between hosts")
    p.add_argument("--limit-s", type=float, default=7200.0, help="limit on each phase (%(default)g)")
    p.add_argument("--python", help="interpreter of the hosts (one that has the peers)")
    defaults = Workload()
    for field in dataclasses.fields(Workload):
        kind = float if field.name == "learning_rate" else int
        p.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=getattr(defaults, field.name))
    return p


def runnable(names: Sequence[str], python: str) -> tuple[list[str], dict[str, str]]:
    """(policies that can run, why the others cannot). Raises `PolicyError` for names that do not exist."""
    able, skipped = [], {}
    for name in dict.fromkeys(names):
        p = policy(name)
        try:
            planner_of(p)
        except SpecError as error:
            skipped[name] = str(error)
            continue
        code = f"from benchmarks.cluster.peers import missing; print(missing({p.system!r}) or '')"
        if p.system != "prophet":
            done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120, check=False)
            reason = done.stdout.strip() or (done.stderr.strip()[-300:] if done.returncode else "")
            if reason:
                skipped[name] = reason
                continue
        able.append(name)
    return able, skipped


def make_checkpoint(bed: Testbed, workload: Workload, args: argparse.Namespace, folder: Path) -> None:
    """Train the common checkpoint at the machine's full speed, unless it is there already."""
    hosts = bed.profile.hosts
    if all((folder / f"rank{r}.pt").exists() for r in range(hosts)):
        return
    bed.set_rates([FULL_RATE_MBIT_PER_S] * hosts, FULL_RATE_MBIT_PER_S)
    job = chosen(args, "warm_up_steps", "timeout_s")
    job |= {"workload": dataclasses.asdict(workload), "folder": str(folder)}
    losses = bed.run("benchmarks.cluster.worker:prepare", job, timeout_s=args.limit_s)[0]
    say(f"checkpoint after {args.warm_up_steps} steps: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    bed.set_rates(bed.profile.link_mbit_per_s, bed.profile.uplink_mbit_per_s)


def follow(running: Running) -> None:
    """Show what host 0 says while the policies run."""
    running.follow(0, lambda line: say(line) if line.startswith(("repetition", "calibrated")) else None)


def benchmark(profile: Profile, workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Run everything; returns the document that `--json` writes."""
    python = args.python or sys.executable
    names, skipped = runnable([n for n in args.policies.split(",") if n], python)
    for name, reason in skipped.items():
        say(f"{name} is left out: {reason}")
    if not names:
        raise PolicyError("no policy is left to run")
    others = [n for n in args.against.split(",") if n]
    if not set(others) <= set(names):
        raise PolicyError(f"--against: expected some of the policies that run ({', '.join(names)}), got {args.against}")
    if workload.experts % profile.hosts:
        raise PolicyError(f"{workload.experts} experts cannot be divided among {profile.hosts} hosts")
    replay = None
    if args.routing is not None:
        window = steps_of_repetition(args.steps, args.skip)
        replay = read_replay(args.routing, workload, ranks=profile.hosts, repetitions=args.repetitions, window=window)
        say(str(replay))
    key_of = json.dumps([dataclasses.asdict(workload), profile.hosts, args.warm_up_steps])
    key = hashlib.blake2b(key_of.encode(), digest_size=6).hexdigest()
    began = time.monotonic()
    with Testbed(profile, python=python, paced=True) as bed:
        folder = (args.checkpoints or bed.scratch).resolve() / key
        make_checkpoint(bed, workload, args, folder)
        routing = None
        if replay is not None:
            routing = str(bed.scratch / "routing.npz")
            write_trace(routing, replay.trace)
        job = {
            **chosen(args, "repetitions", "steps", "skip", "warm_up_steps", "slots_per_rank", "timeout_s"),
            "workload": dataclasses.asdict(workload),
            "policies": names,
            "ranks_per_node": profile.hosts_per_node,
            "folder": str(folder),
            "routing": routing,
            "trace": names if args.trace else PICTURED if args.picture else [],
        }
        results = bed.run(
            "benchmarks.cluster.worker:measure",
            job,
            timeout_s=args.limit_s,
            imports=sorted({policy(n).system for n in names}),
            while_running=follow,
        )
    rows = summarise(
        results,
        tokens_per_step=workload.tokens_per_host() * profile.hosts,
        policies=names,
        replayed=None if replay is None else replay.file,
    )
    if args.record:
        write_json(args.record, recorded(results))
    if args.trace or args.picture:
        groups = traced_steps(results)
        if args.trace:
            write_timeline(args.trace, groups)
        if args.picture:
            draw(args.picture, groups)
    return {
        "profile": dataclasses.asdict(profile),
        "workload": dataclasses.asdict(workload),
        "routing": None if replay is None else replay.as_dict(),
        "repetitions": args.repetitions,
        "steps": args.steps,
        "environment": environment(),
        "calibration": results[0]["calibration"],
        "skipped": skipped,
        "wall_s": time.monotonic() - began,
        "rows": rows,
        "against": against(rows, others) if others else [],
    }


def recorded(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `--record` writes: what calibration saw, and the steps of every policy that the simulator can play."""
    first = results[0]
    runs = [
        {
            **{key: run[key] for key in ("policy", "repetition", "schedule", "steps", "seconds")},
            # as in `rows`: the mean over ranks
            "step_s": np.mean([r["runs"][i]["step_s"] for r in results], axis=0).tolist(),
        }
        for i, run in enumerate(first["runs"])
        if "steps" in run
    ]
    return {"observed": first["observed"], "layers": first["layers"], "runs": runs}


def traced_steps(results: Sequence[dict[str, Any]]) -> dict[str, list[Span]]:
    """Every policy's traced step, of all hosts, from the start of the first of them: they share a clock."""
    groups: dict[str, list[Span]] = {}
    for name in {name: None for result in results for name in result["spans"]}:
        spans = [Span(*values) for result in results for values in result["spans"].get(name, ())]
        zero = min(s.start_s for s in spans)
        groups[name] = [dataclasses.replace(s, start_s=s.start_s - zero, end_s=s.end_s - zero) for s in spans]
    return groups


def draw(path: Path, groups: Mapping[str, Sequence[Span]]) -> None:
    """Two neighbouring blocks in the middle of the model, with transfers split block-wise and, beside it, blocking."""
    shown = {name: groups[name] for name in PICTURED if name in groups}
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_step(shown, blocks=middle_blocks(s for spans in shown.values() for s in spans)).savefig(path, dpi=130)


def say(text: str) -> None:
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        for name in ("repetitions", "steps", "warm_up_steps"):
            if getattr(args, name) < 1:
                raise PolicyError(f"--{name.replace('_', '-')} must be at least 1")
        profile = load_profile(args.profile)
        workload = Workload(**chosen(args, *(f.name for f in dataclasses.fields(Workload))))
        with unwound_when_ended():
            document = benchmark(profile, workload, args)
    except (ProfileError, PolicyError, TraceError, TestbedUnavailable, TestbedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    say(table(document["rows"]))
    for row in document["against"]:
        ends = "too few repetitions" if row["interval"] is None else "{:.3f} to {:.3f}".format(*row["interval"])
        say(f"{row['policy']} over {row['over']}: {row['ratio_median']:.3f} ({ends})")
    if args.json:
        write_json(args.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
