"""Two processes of this machine that exchange something over gloo, for a doctor that is started alone.

They are started first and asked last, so that they import torch while the rest is looked at. They meet as torchrun's
ranks do, by environment variables and a port that rank 0 opens, which `prophet.ranks.launch.run_ranks` does without.
`python -m prophet.doctor.pair FOLDER SECONDS` is one of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from prophet.doctor.check import Check, finding, unseen
from prophet.doctor.launcher import INTERFACE

_ANSWER = "answer.json"


class Pair:
    """The two processes; none outlives `close`.

    Args:
        environment: Environment variables for both.
        timeout_s: Limit in seconds on each of their waits.

    Raises:
        OSError: There is no folder for temporary files.
    """

    def __init__(self, environment: Mapping[str, str], timeout_s: float) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="prophet-doctor-")
        self._folder = Path(self._scratch.name)
        # Without GPUs: CUDA would take seconds to start, and the exchange is over gloo
        fixed = {"WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "prophet.doctor.pair", self._scratch.name, f"{timeout_s:.1f}"]
        self._processes = []
        for rank in ("0", "1"):
            with self._errors(rank).open("w") as errors:
                given = {**environment, **fixed, "RANK": rank, "LOCAL_RANK": rank}
                out = subprocess.DEVNULL
                self._processes.append(subprocess.Popen(command, env=given, stdin=out, stdout=out, stderr=errors))

    def _errors(self, rank: object) -> Path:
        return self._folder / f"rank-{rank}.txt"

    def checks(self, left_s: float) -> list[Check]:
        """What the two have found; a check that could not be done where they are not ready within `left_s` seconds."""
        deadline = time.monotonic() + left_s
        try:
            for rank, process in enumerate(self._processes):
                code = process.wait(max(0.0, deadline - time.monotonic()))
                if code:
                    lines = self._errors(rank).read_text(encoding="utf-8", errors="replace").split("\n")
                    # A traceback's last line names the error
                    last = next((line.strip() for line in reversed(lines) if line.strip()), "no words")
                    return [finding("exchange", f"one of two ranks ended with exit code {code}: {last}", INTERFACE)]
        except subprocess.TimeoutExpired:
            return [unseen("exchange", f"two ranks had not ended after {left_s:.0f} s more: is the machine busy?")]
        answer = json.loads((self._folder / _ANSWER).read_text(encoding="utf-8"))
        return [Check(**check) for check in answer]

    def close(self) -> None:
        """End both processes and remove their folder."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._scratch.cleanup()


def main(folder: str, seconds: str) -> None:
    """Run one of the two ranks; the first writes what it has found into `folder`."""
    from prophet.doctor.ranks import exchange
    from prophet.ranks.launch import joined_group, launched, open_store

    launch = launched()
    if launch is None:
        raise SystemExit("expected RANK and WORLD_SIZE in the environment")
    store = open_store(launch.local_rank, Path(folder), timeout_s=float(seconds))
    with joined_group(launch, timeout_s=float(seconds), backend="gloo") as collective:
        checks = exchange(collective, "cpu")
        if collective.rank == 0:
            (Path(folder) / _ANSWER).write_text(json.dumps([asdict(check) for check in checks]), encoding="utf-8")
        collective.close()
    del store


if __name__ == "__main__":
    main(*sys.argv[1:])
