"""`prophet doctor`: what is installed, what works on this machine or between a job's ranks, and what mends the rest."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prophet.commands.arguments import add_json

if TYPE_CHECKING:
    from prophet.doctor.check import Check
    from prophet.ranks.launch import Launch

# Limit on the checks of one rank alone
_ALONE_S = 8.0
# Limit on each wait of two ranks that are started here
_PAIR_S = 10.0
# Limit from the start of this process, and the most that imports count of it: a slow disk must leave time for checks
_ALL_S, _IMPORTS_S = 27.0, 12.0


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "doctor",
        description=(
            "Check what is installed, the planner's core, GPUs and backend, folders, and one exchange between ranks. "
            "Started alone it starts two ranks; under torchrun it joins those that are there, and rank 0 reports. It "
            "takes half a minute at most. The exit code is 1 where there are findings; each comes with what mends it."
        ),
    )
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="the job's (default: nccl with GPUs, else gloo)")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="where the job will write its checkpoints")
    parser.add_argument("--machine", type=Path, metavar="FILE", help="the topology file of the job")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the checks, print one report for all ranks, and return 1 where there are findings."""
    from prophet.doctor.check import unseen
    from prophet.doctor.installed import versions
    from prophet.doctor.launcher import launcher, port
    from prophet.doctor.pair import Pair

    deadline = time.monotonic() + _ALL_S - min(_age_s(), _IMPORTS_S)
    environment, pair = dict(os.environ), None
    meeting = launcher(environment)
    alone = "RANK" not in environment and not _findings(meeting)
    why = "what is wrong with launcher or port comes first" if _findings(meeting) else "one rank has no other"
    try:
        if alone:
            # Started before torch is imported here, so that all three processes import it at the same time
            pair = Pair(environment, _PAIR_S)
    except OSError as error:
        why = f"two ranks need a folder to meet in: {error}"
    try:
        from prophet.doctor.alone import Asked, look_alone
        from prophet.ranks.launch import launched

        installed, launch = versions(), None if _findings(meeting) else launched()
        asked = Asked(backend=arguments.backend, checkpoints=arguments.checkpoints, topology=arguments.machine)
        local_ranks = launch.local_ranks or 1 if launch else 1
        checks, backend = look_alone(asked, environment, installed, local_ranks, _ALONE_S)
        meeting += port(environment)
        checks += meeting
        left_s = max(1.0, deadline - time.monotonic())
        if launch is not None and launch.ranks > 1 and not _findings(meeting):
            return _with_others(arguments, launch, installed, checks, backend, left_s)
        checks += [unseen("exchange", why)] if pair is None else pair.checks(left_s)
    finally:
        if pair is not None:
            pair.close()
    if backend == "nccl":
        checks.append(unseen("NCCL", "needs `torchrun --standalone --nproc-per-node N -m prophet doctor`"))
    _show(checks, [installed], as_json=arguments.json)
    return int(bool(_findings(checks)))


def _with_others(
    arguments: argparse.Namespace,
    launch: Launch,
    installed: Mapping[str, str],
    checks: list[Check],
    backend: str,
    left_s: float,
) -> int:
    """Join the other ranks of a launcher; rank 0 prints what all of them find.

    Returns:
        The exit code.
    """
    from prophet.doctor.check import Look, look
    from prophet.doctor.launcher import INTERFACE
    from prophet.doctor.ranks import compare_ranks
    from prophet.ranks.launch import leave

    first, ended = os.environ["RANK"] == "0", False

    def show(found: Sequence[Check], versions: Sequence[Mapping[str, str]]) -> None:
        nonlocal ended
        ended = True
        if first:
            _show(found, versions, as_json=arguments.json)

    def compare() -> list[Check]:
        compare_ranks(launch, installed, backend, checks, left_s, show)
        return []

    failed = look(left_s + 1, [Look("exchange", compare, INTERFACE)])
    if ended:
        return int(bool(_findings(checks)))
    if first:
        _show([*checks, *failed], [installed], as_json=arguments.json)
        leave(1)
    print(f"prophet: rank {os.environ['RANK']}: exchange: {failed[0].message}", file=sys.stderr)
    # Rank 0 reports. A launcher would end it, were this rank to end with an error before
    leave(0)


def _age_s() -> float:
    """Seconds since this process was started; 0 where the system does not say."""
    try:
        # The name of the program, in brackets, may hold spaces and brackets. Behind it, the start time is the 20th
        # field
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0


def _findings(checks: Sequence[Check]) -> list[Check]:
    return [check for check in checks if check.state == "finding"]


def _show(checks: Sequence[Check], by_rank: Sequence[Mapping[str, str]], *, as_json: bool) -> None:
    """Print the report; `by_rank` has versions by name, of one rank at least."""
    found = _findings(checks)
    if as_json:
        answer = {
            "sound": not found,
            "versions": by_rank[0],
            "ranks": len(by_rank),
            "checks": [asdict(check) for check in checks],
        }
        print(json.dumps(answer, indent=2), flush=True)
        return
    from prophet.doctor.check import MARKS
    from prophet.terminal import Column, console, print_table

    to = console()
    print_table([Column("package", align="left"), Column("version", align="left")], list(by_rank[0].items()), to)
    to.print()
    for check in checks:
        if check.state != "finding":
            to.print(f"{MARKS[check.state]} {check.name}: {check.message}", markup=False, highlight=False)
    # Findings come last, next to the prompt
    for check in found:
        line = f"{MARKS[check.state]} {check.name}: {check.message}"
        to.print(line, markup=False, highlight=False, style="bold red")
        # As one line, to be copied whatever the terminal's width
        to.print(f"   mend: {check.mend}", markup=False, highlight=False, soft_wrap=True)
    total = f"{len(found)} finding{'s' * (len(found) != 1)}" if found else "No findings"
    not_seen = sum(check.state == "not checked" for check in checks)
    to.print(f"\n{total}, {not_seen} not checked.", highlight=False)
    # `leave` ends a process without flushing
    sys.stdout.flush()
