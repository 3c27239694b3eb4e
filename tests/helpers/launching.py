"""Programs on several ranks, for the tests: started by torchrun, or told by hand what torchrun would tell them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


def torchrun(program: Path, *arguments: str, ranks: int, timeout_s: float = 240.0, **settings: str) -> str:
    """What a program prints on `ranks` processes that torchrun starts; AssertionError where it fails.

    It finds the packages of this repository, and no GPU. settings: more of its environment.
    """
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*start, str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env={**_environment(), **settings},
        check=False,
    )
    if done.returncode:
        raise AssertionError(done.stdout[-2000:] + done.stderr[-6000:])
    return done.stdout


def as_launched(module: str, *arguments: str, ranks: int, timeout_s: float = 120.0, **told: str) -> list[str]:
    """What each rank of `python -m module` prints where a launcher has set its variables; `told`: further ones."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**_environment(), **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank), **told},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [out for out, _ in ended_within(timeout_s, running)]
    codes = [p.returncode for p in running]
    if any(codes):
        raise AssertionError(f"exit codes {codes}")
    return said


def ended_within(timeout_s: float, running: Sequence[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """What processes printed, and their errors, when all have ended; each is killed that lives longer."""
    try:
        return [process.communicate(timeout=timeout_s) for process in running]
    finally:
        for process in running:
            process.kill()


def _environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
