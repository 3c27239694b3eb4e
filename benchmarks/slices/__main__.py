"""`python -m benchmarks.slices [--real | --simulate | --cluster | --paper] --json OUT`: pipelines with slices."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster.testbed import unwound_when_ended
from benchmarks.common import Row, rows_on_ranks, write_rows
from benchmarks.papers import slimpipe
from benchmarks.papers.rows import section
from benchmarks.slices import counts, simulated
from benchmarks.slices.cluster import emulated
from benchmarks.slices.contenders import TORCHS
from benchmarks.slices.floor import floor
from benchmarks.slices.steps import against_baseline, measure, with_slice_cost
from prophet.errors import RankFailed

LLAMA = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 4, "intermediate": 688}
SMALL = {"layers": 8, "hidden": 64, "heads": 4, "intermediate": 172, "microbatches": 4}
# of the speed that the case `floor` of the same run allows, where one process runs slices; of 0.95 if it did not run
WITHIN = 0.97
SLICES = 16
# sequences whose slices are long enough for the kernel's large blocks of rows, in one layer
LONG = {"layers": 1, "tokens": 16384}
# tokens of a sequence that takes hardly any arithmetic, and seconds that each of its slices may cost besides
SHORT, SLICE_S = 64, 0.008
REAL = ("bytes", "recompute", "longest", "floor", "floor-long", "one-process", "one-process-long", "one-process-short")
REAL += ("step-m1", "step-m2")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.slices", description=__doc__)
    which = p.add_mutually_exclusive_group()
    which.add_argument("--real", action="store_true", help="only what runs, on gloo processes of one thread each")
    which.add_argument("--simulate", action="store_true", help="only the simulator")
    which.add_argument("--cluster", action="store_true", help="only emulated hosts, as root; no part of the others")
    which.add_argument(
        "--paper", action="store_true", help="only SlimPipe's numbers beside ours; no part of the others"
    )
    p.add_argument("--share", type=float, default=0.25, help="of a core, for each emulated host (%(default)s)")
    p.add_argument("--link-mbit-per-s", type=float, default=1000.0, help="of each emulated host (%(default)s)")
    p.add_argument("--cases", nargs="+", choices=REAL, default=REAL, help="of those that run (default: all)")
    p.add_argument("--tokens", type=int, default=4096, help="T of the timed cases (%(default)s)")
    p.add_argument("--repeats", type=int, default=7, help="counted rounds of the timed cases (%(default)s)")
    p.add_argument("--limit-s", type=float, default=600.0, help="end the ranks of a case after so many seconds")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the environment to this file")
    return p


def simulate() -> list[Row]:
    work = {**SMALL, "kv_heads": 1, "tokens": 1024}
    exchange = simulated.exchanged() + simulated.exchange_bytes() + simulated.many_ranks()
    return simulated.bubbles() + exchange + counts.longest_simulated(work, ranks=4, slices=SLICES)


def _on_ranks(
    case: str, body: Callable[..., list[Row]], options: Mapping[str, Any], ranks: int, limit: float
) -> list[Row]:
    """Rows of one case; one row with the reason where it cannot run."""
    try:
        return rows_on_ranks(body, options, ranks=ranks, limit_s=limit) or []
    except RankFailed as error:
        return [{"case": case, "p": ranks, "reason": str(error)}]


def _alone(case: str, args: argparse.Namespace, before: Sequence[Row]) -> list[Row]:
    """A case of one process with its target; `before` has rows of this run."""
    work = {**LLAMA, "microbatches": 1, "tokens": args.tokens} | _SIZES.get(case, {})
    names = ("own-1f1b", *(f"minimal-n{n}" for n in _SLICES[case]))
    options = {"case": case, "work": work, "names": names, "repeats": args.repeats}
    rows = _on_ranks(case, measure, options, 1, args.limit_s)
    if case == "one-process-short":
        return against_baseline(with_slice_cost(rows, at_most=SLICE_S), target={})
    floors = [r for r in before if r["case"] == case.replace("one-process", "floor") and r.get("operations") == "all"]
    allowed = {r["n"]: WITHIN * r["speed_over_whole"] for r in floors}
    least = {n: WITHIN if case == "one-process-long" else allowed.get(n, 0.95) for n in _SLICES[case]}
    return against_baseline(rows, target={f"minimal-n{n}": least[n] for n in _SLICES[case]})


_SIZES = {"one-process-long": LONG, "floor-long": LONG, "one-process-short": {"tokens": SHORT}}
_SLICES = {"one-process": (8, SLICES), "one-process-long": (SLICES,), "one-process-short": (8, SLICES)}
_SLICES |= {"floor": (8, SLICES), "floor-long": (SLICES,)}


def _timed(case: str, args: argparse.Namespace) -> list[Row]:
    """A timed case of two ranks with its targets."""
    microbatches = 2 if case == "step-m2" else 1
    work = {**LLAMA, "microbatches": microbatches, "tokens": args.tokens}
    n, least = (16, 1.6) if microbatches == 1 else (8, 1.3)
    both = [f"{order}-n{n}" for order in ("minimal", "aligned")]
    target = dict.fromkeys([*both, *(f"{name}-uneven" for name in both)], least)
    names = ("own-1f1b", *target, f"minimal-n{n}-v2", *TORCHS)
    options = {"case": case, "work": work, "names": names, "repeats": args.repeats}
    return against_baseline(_on_ranks(case, measure, options, 2, args.limit_s), target=target)


def real(case: str, args: argparse.Namespace, before: Sequence[Row]) -> list[Row]:
    """Rows of a case; `before` has those of this run so far."""
    if case == "recompute":
        return counts.recomputed()
    if case == "bytes":
        options = {"work": {**SMALL, "kv_heads": 4, "tokens": 512}, "slices": SLICES}
        return _on_ranks(case, counts.ranks_beside_form, options, 4, args.limit_s)
    if case == "longest":
        options = {"work": {**SMALL, "kv_heads": 1, "tokens": 256}, "slices": SLICES}
        return _on_ranks(case, counts.longest_real, options, 4, args.limit_s)
    if case.startswith("floor"):
        work = {**LLAMA, "microbatches": 1, "tokens": args.tokens} | _SIZES.get(case, {})
        options = {"case": case, "work": work, "slices": _SLICES[case], "repeats": args.repeats}
        return _on_ranks(case, floor, options, 1, args.limit_s)
    return _alone(case, args, before) if case.startswith("one-process") else _timed(case, args)


def table(rows: Sequence[Row]) -> str:
    """One line per row: what it is, what was found, and the target."""
    lines = []
    for row in rows:
        named = [str(row[k]) for k in ("case", "schedule", "operations", "layer", "recompute", "costs") if k in row]
        found = [f"{k} {row[k]:.4g}" for k in _FIGURES if k in row]
        target = [f"target {row['target']}: {'met' if row['met'] else 'MISSED'}"] if "target" in row else []
        lines.append(
            "  ".join([*named, *found, *target, *([f"cannot run: {row['reason']}"] if "reason" in row else [])])
        )
    return "\n".join(lines)


_FIGURES = (
    *("simulated_s", "over_simulated", "over_equal", "over_equal_most", "over_uneven", "held_over_uneven"),
    *("step_s_median", "slice_cost_s", "speed_over_own_1f1b", "idle_over_work", "worst_gradient_error", "over_form"),
    *("uneven_idle_over_work", "peak_units", "uneven_peak_units", "volume", "kept_chunks", "plan_s", "p", "m", "v"),
    *("n", "whole_s", "sliced_s", "speed_over_whole", "longest_over_1f1b", "by_hand_bytes", "transfer_of_forward"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the rows; 1 where a target is missed or a case of ours cannot run."""
    args = parser().parse_args(argv)
    rows: list[Row] = []
    if args.cluster:
        share, link = args.share, args.link_mbit_per_s
        with unwound_when_ended():
            rows += emulated(share=share, link_mbit_per_s=link, repeats=args.repeats, limit_s=args.limit_s)
        print(table(rows), flush=True)
    if args.paper:
        rows += slimpipe.rows(done=lambda: print(".", end="", file=sys.stderr, flush=True))
        print(file=sys.stderr)
        print(section(slimpipe.PAPER, rows), flush=True)
    alone = args.cluster or args.paper
    for found in [] if args.real or alone else [simulate()]:
        rows += found
        print(table(found), flush=True)
    for case in () if args.simulate or alone else args.cases:
        found = real(case, args, rows)
        rows += found
        print(table(found), flush=True)
    if args.json:
        write_rows(args.json, "slices", rows)
    failed = [r for r in rows if not r.get("met", True) or ("reason" in r and "torch" not in r.get("schedule", ""))]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
