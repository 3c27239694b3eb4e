"""All-to-alls on emulated hosts: gloo's own, and ours that posts its receives first, at even and at uneven traffic.

    python -m benchmarks.cluster.links --profile four-hosts

Shape legend: R ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cluster.calibrate import PROBE_BYTES, probe_pairs
from benchmarks.cluster.host import Host
from benchmarks.cluster.profiles import ProfileError, load_profile
from benchmarks.cluster.testbed import Testbed, TestbedError, TestbedUnavailable, unwound_when_ended
from benchmarks.common import write_json
from benchmarks.tables import markdown
from prophet.machine.measure import Probe, discard
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import ProcessGroupCollective

POPULAR = 3.0  # how many times as much as another rank a popular one is sent
WAYS = {"gloo's own": False, "receives first": True}


def measure(host: Host, args: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per traffic, size and way, the ways in turn; the slowest rank's seconds, the same on all ranks."""
    with host.process_group(timeout_s=args["timeout_s"]), host.paced():
        groups = {
            way: ProcessGroupCollective(timeout_s=args["timeout_s"], receive_first=first) for way, first in WAYS.items()
        }
        ranks, rank = host.hosts, host.rank
        others = ~np.eye(ranks, dtype=np.bool_)
        op = Operation("probe of links")
        rows, runs = [], []
        for n_bytes in PROBE_BYTES:
            for traffic, popular in (("even", 1.0), ("one rank popular", POPULAR)):
                wanted = np.ones(ranks)
                wanted[0] = popular
                pairs = probe_pairs(others, n_bytes, wanted)
                send, recv = pairs[rank].tolist(), pairs[:, rank].tolist()
                x = torch.zeros(sum(send), dtype=torch.uint8)
                for way, group in groups.items():
                    rows.append({"traffic": traffic, "bytes": n_bytes, "way": way})
                    runs.append(lambda g=group, x=x, s=send, r=recv: discard(g.all_to_all(x, s, r, op=op).wait()))
        samples = Probe(next(iter(groups.values())), torch.device("cpu"), args["repeats"]).samples(runs)
        for row, found in zip(rows, samples, strict=True):
            low, middle, high = np.quantile(found.max(axis=1), (0.1, 0.5, 0.9)).tolist()
            row |= {"seconds_p10": low, "seconds_median": middle, "seconds_p90": high}
        return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: one line per traffic and size, the ways side by side."""
    lines = []
    for own, ours in zip(rows[::2], rows[1::2], strict=True):
        cells = [
            f"{1e3 * r['seconds_median']:.0f} ({1e3 * r['seconds_p10']:.0f} to {1e3 * r['seconds_p90']:.0f})"
            for r in (own, ours)
        ]
        ratio = own["seconds_median"] / ours["seconds_median"]
        lines.append((own["traffic"], f"{own['bytes']}", *cells, f"{ratio:.2f}"))
    head = ("traffic", "bytes to the busiest rank", "gloo's own, ms (p10 to p90)", "receives first", "ratio")
    return markdown(head, lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster.links", description=__doc__.split("\n")[0])
    parser.add_argument("--profile", default="four-hosts", help="a built-in profile or a TOML file")
    parser.add_argument("--repeats", type=int, default=12, help="turns of every exchange (default 12)")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="limit of one operation")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the rows to this file")
    args = parser.parse_args(argv)
    if args.repeats < 1 or not args.timeout_s > 0:
        parser.error(
            f"expected repeats of at least 1 and a positive limit, got {args.repeats} and {args.timeout_s:g} s"
        )
    try:
        profile = load_profile(args.profile)
        with unwound_when_ended(), Testbed(profile, paced=True) as bed:
            job = {"repeats": args.repeats, "timeout_s": args.timeout_s}
            rows = bed.run("benchmarks.cluster.links:measure", job, timeout_s=600)[0]
    except (ProfileError, TestbedUnavailable, TestbedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(rows))
    if args.json:
        write_json(args.json, {"profile": profile.name, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
