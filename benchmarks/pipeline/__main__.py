"""python -m benchmarks.pipeline --cases all --json out.json"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cluster.profiles import MIN_SHARE, ProfileError, uniform
from benchmarks.cluster.testbed import SharesExceedCores, Testbed, TestbedError, TestbedUnavailable, unwound_when_ended
from benchmarks.common import chosen, environment, write_json
from benchmarks.measure import rotated
from benchmarks.pacing import compute_cores
from benchmarks.pipeline import beside, moves, partitions, swing
from benchmarks.pipeline.alone import record, simulate_policy
from benchmarks.pipeline.cases import Case, cases
from benchmarks.pipeline.picture import REPACKING, draw
from benchmarks.pipeline.policies import DEFAULT_POLICIES, POLICIES, PolicyError, check_policies
from benchmarks.pipeline.rows import summarise, table, verdict, verdict_text
from benchmarks.pipeline.worker import CORPUS_BYTES
from benchmarks.tables import words
from pipeline_balance.spec import LayerCost

# four hosts keep one core busy for four fifths of the time, at most
SLOWDOWN = 5.0


def parser() -> argparse.ArgumentParser:
    names = ", ".join(cases(1))
    p = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    p.add_argument("--cases", default="all", help=f"all, or comma-separated, of {names}")
    p.add_argument("--policies", default=",".join(DEFAULT_POLICIES), help=f"comma-separated, of {', '.join(POLICIES)}")
    p.add_argument("--json", type=Path, help="file for the rows")
    p.add_argument("--hosts", type=int, default=4, help="one stage of one replica each")
    p.add_argument("--replicas", type=int, default=1, help="copies of the pipeline, which share the hosts")
    p.add_argument("--layers", type=int, default=24, help="of the model, embedding and head included")
    p.add_argument("--zero", type=int, default=0, choices=(0, 1), help="1: one replica updates each tensor")
    p.add_argument("--share-experts", action="store_true", help="the replicas of a stage share experts")
    p.add_argument("--steps", type=int, default=60, help="counted steps of every policy: the model's life")
    p.add_argument("--warm-up", type=int, default=6, help="steps before those, on equal numbers of layers")
    p.add_argument("--repetitions", type=int, default=3, help="lives of every case, each with another seed")
    p.add_argument("--slowdown", type=float, default=SLOWDOWN, help="how much slower a host is than the machine")
    p.add_argument("--link-mbit-per-s", type=float, default=1000.0)
    p.add_argument("--budget-bytes", type=int, default=64 << 20, help="buffers of a move on one rank")
    p.add_argument("--timeout-s", type=float, default=60.0, help="limit on every wait between hosts")
    p.add_argument("--limit-s", type=float, default=600.0, help="limit on each case")
    p.add_argument("--simulate", action="store_true", help="no hosts: the simulator only")
    p.add_argument(
        "--partition", action="store_true", help="only time the partitioner, beside DeepSpeed's if it is there"
    )
    p.add_argument("--picture", type=Path, help="file for the picture of policy partition-repack's stages and ranks")
    p.add_argument("--moves", action="store_true", help="only move state between the hosts; needs root")
    p.add_argument("--swing", action="store_true", help="only what a move adds, within its step and after it")
    p.add_argument("--former", type=Path, help="only move layers, in turns with the code of that checkout")
    return p


def chosen_cases(args: argparse.Namespace) -> list[Case]:
    every = cases(args.steps, layers=args.layers)
    if args.cases == "all":
        return list(every.values())
    names = [n for n in args.cases.split(",") if n]
    unknown = [n for n in names if n not in every]
    if unknown or not names:
        raise PolicyError(f"cases must be of {', '.join(every)}, got {', '.join(unknown) or 'none'}")
    return [every[n] for n in names]


def run_hosts(
    bed: Testbed, case: Case, policies: Sequence[str], args: argparse.Namespace, repetition: int = 0
) -> list[dict[str, Any]]:
    """What every host has found in one life of a case."""
    names = ("replicas", "layers", "zero", "share_experts", "steps", "warm_up", "budget_bytes", "timeout_s")
    job = {**chosen(args, *names), "case": case.name, "repetition": repetition}
    # another policy comes first in every repetition
    job["policies"] = rotated(policies, repetition)
    return bed.run("benchmarks.pipeline.worker:run_case", job, timeout_s=args.limit_s)


def on_hosts(
    bed: Testbed, case: Case, policies: Sequence[str], args: argparse.Namespace, repetition: int
) -> list[dict[str, Any]]:
    """Rows of one life of a case, measured."""
    results = run_hosts(bed, case, policies, args, repetition)
    first = results[0]
    rows = summarise(
        case,
        [r["policies"] for r in results],
        [[LayerCost(**cost) for cost in costs] for costs in first["costs"]],
        ranks=args.hosts // args.replicas,
        replicas=args.replicas,
        transfer_s=first["transfer_s"],
        optimizer_s_per_byte=first["optimizer_s_per_byte"],
        between_s=first["between_s"],
        metering_s=max(r["metering_s"] for r in results),
    )
    for row in rows:
        row["transfer_s"], row["between_s"] = first["transfer_s"], first["between_s"]
        row["reasons"] = first["policies"][row["policy"]]["reasons"]
        row["seed"], row["history"] = first["seed"], first["history"]
    return rows


def paced_hosts(name: str, hosts: int, args: argparse.Namespace) -> Testbed:
    """Hosts that pace themselves: a quota would stop a host's threads for its messages, too, once an action has used
    it up. Raises `ProfileError` where they would be slower than `--slowdown` says.
    """
    share = 1 / checked_slowdown(args)
    profile = uniform(name, hosts=hosts, link_mbit_per_s=args.link_mbit_per_s, share=share)
    try:
        return Testbed(profile, paced=True)
    except SharesExceedCores as error:
        least = f"{hosts} / {len(compute_cores())}"
        raise ProfileError(
            f"--slowdown must be at least {least} (hosts over cores to compute on), got {args.slowdown:g}"
        ) from error


def checked_slowdown(args: argparse.Namespace) -> float:
    slowdown: float = args.slowdown
    if not 1 <= slowdown <= 1 / MIN_SHARE:
        raise ProfileError(f"--slowdown must be from 1 to {1 / MIN_SHARE:g}, got {slowdown:g}")
    return slowdown


def by_simulator(
    case: Case, policies: Sequence[str], args: argparse.Namespace, repetition: int
) -> list[dict[str, Any]]:
    """Rows of one life of a case from one process's layer times; nothing is moved and nobody waits for a link."""
    from prophet.demo.text import load_corpus

    bytes_per_s = args.link_mbit_per_s * 1e6 / 8
    transfer_s = case.activation_bytes / bytes_per_s
    case = replace(case, seed=case.seed + repetition)
    corpus = load_corpus(max_bytes=CORPUS_BYTES)
    recording = record(case, corpus, args.steps, warm_up=args.warm_up, slowdown=checked_slowdown(args))
    # layers were timed on a few microbatches; a longer pipeline needs more of them to be filled
    case = replace(case, microbatches=max(case.microbatches, 2 * args.hosts))
    links = {"transfer_s": transfer_s, "bytes_per_s": bytes_per_s}
    figures = {
        p: simulate_policy(p, case, recording, ranks=args.hosts, warm_up=args.warm_up, **links) for p in policies
    }
    return summarise(
        case,
        [figures],
        recording.costs[args.warm_up :],
        ranks=args.hosts,
        transfer_s=transfer_s,
        optimizer_s_per_byte=recording.optimizer_s_per_byte,
        measured=False,
    )


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything; returns the document that `--json` writes."""
    policies = list(dict.fromkeys(n for n in args.policies.split(",") if n))
    check_policies(policies)
    todo = chosen_cases(args)
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    verdicts: list[dict[str, Any]] = []

    def lives(case: Case, live: Callable[[int], list[dict[str, Any]]]) -> None:
        found = []
        for repetition in range(args.repetitions):
            found.append([{**row, "repetition": repetition} for row in live(repetition)])
            print(table(found[-1]), flush=True)
        rows.extend(row for some in found for row in some)
        verdicts.append(verdict(case, found))
        print(verdict_text(verdicts[-1]), flush=True)

    reason = "asked for with --simulate" if args.simulate else ""
    if not reason:
        try:
            with paced_hosts("pipeline", args.hosts, args) as bed:
                for case in todo:
                    lives(case, partial(on_hosts, bed, case, policies, args))
        except TestbedUnavailable as error:
            if args.replicas > 1:
                raise  # the simulator has none
            reason = str(error)
    if reason:
        print(f"simulator only ({reason}): layer times of one process, no moves, no links", flush=True)
        for case in todo:
            lives(case, partial(by_simulator, case, policies, args))
    return {
        "measured": not reason,
        "simulator_only_because": reason or None,
        **chosen(args, "hosts", "replicas", "zero", "share_experts", "layers"),
        **chosen(args, "slowdown", "link_mbit_per_s", "steps", "warm_up"),
        "environment": environment(),
        "wall_s": time.monotonic() - began,
        "rows": rows,
        "verdicts": verdicts,
    }


def only_swing(args: argparse.Namespace) -> dict[str, Any]:
    """What a move adds to its step, in each of the chosen cases and repetitions."""
    rows = []
    with paced_hosts("swing", args.hosts, args) as bed:
        for case in chosen_cases(args):
            for repetition in range(args.repetitions):
                found = [r["policies"] for r in run_hosts(bed, case, swing.POLICIES, args, repetition)]
                rows.append({"case": case.name, "repetition": repetition, **swing.row_of(found)})
                print(words({k: v for k, v in rows[-1].items() if k != "added_s_by_step"}), flush=True)
    return {**chosen(args, "hosts", "layers", "slowdown", "steps"), "environment": environment(), "rows": rows}


def only_moves(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of state on its way against its bytes over the bandwidth."""
    # Nothing computes, so nothing is paced, whatever the share
    profile = uniform("moves", hosts=moves.RANKS, link_mbit_per_s=args.link_mbit_per_s, share=0.1)
    with Testbed(profile, paced=True) as bed:
        found = moves.compare(bed, timeout_s=args.timeout_s, limit_s=args.limit_s)
    return {"link_mbit_per_s": args.link_mbit_per_s, "environment": environment(), **found}


_ALONE: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "partition": lambda args: partitions.compare(),
    "moves": only_moves,
    "swing": only_swing,
    "former": lambda args: beside.compare(args.former, timeout_s=args.timeout_s),
}


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        for name in ("hosts", "steps", "warm_up", "repetitions"):
            if getattr(args, name) < 1:
                raise PolicyError(f"--{name.replace('_', '-')} must be at least 1")
        if args.replicas < 1 or args.hosts % args.replicas:
            raise PolicyError(f"--replicas must divide --hosts, got {args.replicas} and {args.hosts}")
        if args.layers < max(3, args.hosts // args.replicas):
            raise PolicyError(f"--layers must be at least 3 and fill every host, got {args.layers}")
        if args.share_experts and args.replicas == 1:
            raise PolicyError("--share-experts needs --replicas of 2 or more")
        if args.replicas > 1 and args.simulate:
            raise PolicyError("--simulate has no replicas: leave one of the two out")
        if args.picture and REPACKING not in args.policies.split(","):
            raise PolicyError(f"--picture shows the policy {REPACKING}: name it in --policies")
        run = next((run for chosen, run in _ALONE.items() if getattr(args, chosen)), benchmark)
        with unwound_when_ended():
            document = run(args)
    except (ProfileError, PolicyError, TestbedUnavailable, TestbedError, beside.MoverError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.picture and draw(document.get("rows", []), args.picture):
        print(f"wrote {args.picture}")
    if args.json:
        write_json(args.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
