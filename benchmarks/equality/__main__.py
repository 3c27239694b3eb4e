"""`python -m benchmarks.equality BEFORE [PLANNER ...]`: losses, placements and splits of two checkouts, bit by bit."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.equality.worker import MODES

WORKER = Path(__file__).with_name("worker.py")
HERE = Path(__file__).resolve().parents[2]
PLANNERS = ("prophet", "pro-prophet")
Rows = dict[str, list[dict[str, Any]]]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.equality", description=__doc__)
    p.add_argument("before", type=Path, help="folder of the checkout to compare with, as `git worktree add` makes it")
    p.add_argument("planners", nargs="*", default=list(PLANNERS), help=f"({' '.join(PLANNERS)})")
    p.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="(all)")
    p.add_argument("--ranks", type=int, default=4, help="processes (%(default)s)")
    p.add_argument("--steps", type=int, default=20, help="(%(default)s)")
    p.add_argument("--limit-s", type=float, default=900.0, help="for each checkout (%(default)s)")
    return p


def rows_of(checkout: Path, a: argparse.Namespace) -> list[Rows]:
    """What every rank wrote when the sources of `checkout` trained, by rank."""
    with tempfile.TemporaryDirectory(prefix="prophet-equality-") as folder:
        path = os.pathsep.join([str(checkout), str(checkout / "integrations")])
        subprocess.run(
            [sys.executable, str(WORKER), folder, str(a.ranks), str(a.steps), ",".join(a.planners), ",".join(a.modes)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            cwd=folder,
            timeout=a.limit_s,
            check=True,
        )
        return [json.loads((Path(folder) / f"rank{r}.json").read_text(encoding="utf-8")) for r in range(a.ranks)]


def differences(before: list[Rows], after: list[Rows]) -> dict[str, list[str]]:
    """By case: the first step and field that differ on each rank."""
    found: dict[str, list[str]] = {case: [] for case in before[0]}
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        for case, steps in old.items():
            for step, (was, now) in enumerate(zip(steps, new[case], strict=True)):
                fields = [name for name in was if was[name] != now.get(name)]
                if fields:
                    found[case].append(f"rank {rank}, step {step}: {', '.join(fields)}")
                    break
    return found


def main(argv: list[str] | None = None) -> int:
    """Print a row for each case; 1 where one differs, 2 where a case had no replicas and so shows little."""
    a = parser().parse_args(argv)
    if not (a.before / "prophet" / "__init__.py").is_file():
        parser().error(f"{a.before} is no checkout: it has no prophet/__init__.py")
    before, after = rows_of(a.before.resolve(), a), rows_of(HERE, a)
    code = 0
    print(f"{a.steps} steps on {a.ranks} gloo ranks: losses, norms, placements, splits, parameters")
    for case, found in differences(before, after).items():
        replicas = sum(row.get("replicas", 0) for row in before[0][case])
        if found:
            code = 1
        elif not replicas:
            code = code or 2
        print(f"{case:32} {replicas:6} replicas  {'DIFFERENT: ' + found[0] if found else 'bit-equal'}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
