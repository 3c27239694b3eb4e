"""`python -m benchmarks.faults [FAULT ...]`: a table of what four ranks say when one fails, in how many seconds."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.faults.processes import outcome
from benchmarks.faults.program import FAULTS, GRACE_S, Fault

_SHOWN = 270  # characters of an error
_SCRATCH = re.compile(r"/\S*/prophet-faults-\w+/")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    p.add_argument("faults", nargs="*", metavar="FAULT", help=f"({', '.join(FAULTS)})")
    p.add_argument("--limit-s", type=float, default=5.0, help="the engine's time limit (%(default)s)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write whole messages to this file")
    return p


def failures(fault: Fault, found: dict[str, Any], limit_s: float) -> list[str]:
    """What is not as it should be."""
    wrong = [] if found["whole"] else ["the checkpoint is not whole"]
    for rank, (code, said) in enumerate(zip(found["exit codes"], found["said"], strict=True)):
        if rank in fault.ranks and not fault.survives:
            continue
        if code not in (0, 1):
            wrong.append(f"rank {rank} ended with {code}")
        if rank in fault.ranks:
            continue
        if said is None or said["kind"] not in fault.says or fault.named not in said["text"]:
            wrong.append(f"rank {rank} said {said}")
        elif said["seconds"] > (limit_s if fault.waits else 0.0) + GRACE_S:
            wrong.append(f"rank {rank} took {said['seconds']:.1f} s")
    return wrong


def row(fault: Fault, found: dict[str, Any], limit_s: float) -> str:
    """One line of the table, in Markdown."""
    by_text: dict[str, list[int]] = {}
    others = {r: said for r, said in enumerate(found["said"]) if said is not None and r not in fault.ranks}
    for rank, said in others.items():
        text = said["text"].replace(f"rank {rank}: ", "").replace(f"rank {rank} has: ", "this one has: ")
        text = _SCRATCH.sub("", text.replace("\n", " ").partition(" ([")[0])
        by_text.setdefault(f"`{said['kind']}`: {text}", []).append(rank)
    cells = []
    for text, ranks in by_text.items():
        short = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        cells.append(f"{', '.join(map(str, ranks))}: {short}".replace("|", "/"))
    seconds = [said["seconds"] for said in others.values()]
    limit = f"{limit_s:g}" if fault.waits else "0"
    took = f"{min(seconds):.1f} to {max(seconds):.1f}" if seconds else "none"
    codes = ", ".join(str(code) for code in found["exit codes"])
    return f"| {fault.text} | {'<br>'.join(cells)} | {took} | {limit} | {codes} | {'yes' if found['whole'] else 'NO'} |"


def main(argv: list[str] | None = None) -> int:
    """Print the table; 1 where an error is not as it should be."""
    a = parser().parse_args(argv)
    unknown = sorted(set(a.faults) - set(FAULTS))
    if unknown:
        parser().error(f"no such fault: {', '.join(unknown)}")
    wrong: dict[str, list[str]] = {}
    every = []
    print("| fault of rank 2 | the others, by rank | seconds | limit | exit codes | checkpoint whole |")
    print("|---|---|---|---|---|---|")
    for name in a.faults or FAULTS:
        with tempfile.TemporaryDirectory(prefix="prophet-faults-") as scratch:
            found = outcome(name, Path(scratch), a.limit_s)
        print(row(FAULTS[name], found, a.limit_s), flush=True)
        every.append(found)
        bad = failures(FAULTS[name], found, a.limit_s)
        if bad:
            wrong[name] = bad
    if a.json is not None:
        a.json.write_text(json.dumps(every, indent=1), encoding="utf-8")
    for name, bad in wrong.items():
        print(f"{name}: {'; '.join(bad)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
