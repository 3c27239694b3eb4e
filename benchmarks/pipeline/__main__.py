"""python -m benchmarks.pipeline --cases all --json out.json"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.cluster.kernel_objects import Quotas
from benchmarks.cluster.profiles import ProfileError, uniform
from benchmarks.cluster.testbed import Testbed, TestbedError, TestbedUnavailable, unwound_when_ended
from benchmarks.common import chosen, environment, write_json
from benchmarks.pipeline import beside, moves, partitions
from benchmarks.pipeline.alone import record, simulate_policy
from benchmarks.pipeline.cases import Case, cases
from benchmarks.pipeline.picture import REPACKING, draw
from benchmarks.pipeline.policies import DEFAULT_POLICIES, POLICIES, PolicyError, check_policies
from benchmarks.pipeline.rows import summarise, table
from benchmarks.pipeline.worker import CORPUS_BYTES
from pipeline_balance.spec import LayerCost


def parser() -> argparse.ArgumentParser:
    names = ", ".join(cases(1))
    p = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    p.add_argument("--cases", default="all", help=f"all, or comma-separated, of {names}")
    p.add_argument("--policies", default=",".join(DEFAULT_POLICIES), help=f"comma-separated, of {', '.join(POLICIES)}")
    p.add_argument("--json", type=Path, help="file for the rows")
    p.add_argument("--hosts", type=int, default=4, help="one stage of one replica each")
    p.add_argument("--replicas", type=int, default=1, help="copies of the pipeline, which share the hosts")
    p.add_argument("--steps", type=int, default=20, help="counted steps of every policy")
    p.add_argument("--warm-up", type=int, default=5, help="steps before those, on equal numbers of layers")
    p.add_argument("--slowdown", type=float, default=2.5, help="how much slower a host is than the machine")
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
    p.add_argument("--former", type=Path, help="only move layers, in turns with the code of that checkout")
    return p


def chosen_cases(args: argparse.Namespace) -> list[Case]:
    every = cases(args.steps)
    if args.cases == "all":
        return list(every.values())
    names = [n for n in args.cases.split(",") if n]
    unknown = [n for n in names if n not in every]
    if unknown or not names:
        raise PolicyError(f"cases must be of {', '.join(every)}, got {', '.join(unknown) or 'none'}")
    return [every[n] for n in names]


def on_hosts(bed: Testbed, case: Case, policies: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one case, measured."""
    job = chosen(args, "replicas", "steps", "warm_up", "slowdown", "budget_bytes", "timeout_s")
    job |= {"case": case.name, "policies": list(policies)}
    results = bed.run("benchmarks.pipeline.worker:run_case", job, timeout_s=args.limit_s)
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
    return rows


@contextmanager
def preferred(name: str, hosts: int, args: argparse.Namespace) -> Iterator[Testbed]:
    """Hosts that go before whatever else runs on the machine. They pace themselves: a quota would stop a host's
    threads for its messages, too, once an action has used it up.
    """
    cores = os.cpu_count() or 1
    with Testbed(uniform(name, hosts=hosts, link_mbit_per_s=args.link_mbit_per_s, share=cores / hosts)) as bed:
        quotas = Quotas.find()
        file, most = ("cpu.shares", 1 << 18) if quotas.version == 1 else ("cpu.weight", 10_000)
        for host in range(hosts):
            bed.set_share(host, float(cores))
            (quotas.folder(bed.prefix, host) / file).write_text(str(most))
        yield bed


def by_simulator(case: Case, policies: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one case from one process's layer times; nothing is moved and nobody waits for a link."""
    from prophet.demo.text import load_corpus

    bytes_per_s = args.link_mbit_per_s * 1e6 / 8
    transfer_s = case.activation_bytes / bytes_per_s
    recording = record(case, load_corpus(max_bytes=CORPUS_BYTES), args.warm_up + args.steps, slowdown=args.slowdown)
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
    reason = "asked for with --simulate" if args.simulate else ""
    if not reason:
        try:
            with preferred("pipeline", args.hosts, args) as bed:
                for case in todo:
                    rows += shown(on_hosts(bed, case, policies, args))
        except TestbedUnavailable as error:
            if args.replicas > 1:
                raise  # the simulator has none
            reason = str(error)
    if reason:
        print(f"simulator only ({reason}): layer times of one process, no moves, no links", flush=True)
        for case in todo:
            rows += shown(by_simulator(case, policies, args))
    return {
        "measured": not reason,
        "simulator_only_because": reason or None,
        **chosen(args, "hosts", "replicas", "slowdown", "link_mbit_per_s", "steps", "warm_up"),
        "environment": environment(),
        "wall_s": time.monotonic() - began,
        "rows": rows,
    }


def only_moves(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of state on its way against its bytes over the bandwidth."""
    with preferred("moves", moves.RANKS, args) as bed:
        found = moves.compare(bed, timeout_s=args.timeout_s, limit_s=args.limit_s)
    return {"link_mbit_per_s": args.link_mbit_per_s, "environment": environment(), **found}


_ALONE: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "partition": lambda args: partitions.compare(),
    "moves": only_moves,
    "former": lambda args: beside.compare(args.former, timeout_s=args.timeout_s),
}


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    print(table(rows), flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.slowdown < 1:
            raise PolicyError("--slowdown must be at least 1")
        for name in ("hosts", "steps", "warm_up"):
            if getattr(args, name) < 1:
                raise PolicyError(f"--{name.replace('_', '-')} must be at least 1")
        if args.replicas < 1 or args.hosts % args.replicas:
            raise PolicyError(f"--replicas must divide --hosts, got {args.replicas} and {args.hosts}")
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
