"""One check as a group of processes with a time limit; whatever becomes of them, an `Ending` is what comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

JOB, FAILURE, OUTPUT = "job.json", "failure.txt", "output.txt"
# What is kept of a check's output, from its end; and the most that is read of an answer
_TAIL_BYTES, _MOST_BYTES = 4096, 1 << 20
# For processes that were killed to be gone. A driver can hold them up for longer, and then they are left behind
_KILLED_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a check's own processes are told.

    Attributes:
        function: As in `Task`.
        ranks: How many to start; 1 runs in the check's first process.
        on_gpu: Whether every rank has the GPU of its number.
        until_s: When ranks have to be done, by `time.time`.
        timeout_s: Seconds for every wait for another rank.
        shared: A folder that the checks share.
        variables: As in `Place`.
        ends_at_once: As in `Task`.
    """

    function: str
    ranks: int
    on_gpu: bool
    until_s: float
    timeout_s: float
    shared: str
    variables: dict[str, str]
    ends_at_once: bool = False

    def write(self, folder: Path) -> None:
        """Write it into a check's folder."""
        (folder / JOB).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Job:
        """Read what `write` wrote."""
        return cls(**json.loads((folder / JOB).read_text(encoding="utf-8")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a check's processes ended, and what they left.

    Attributes:
        code: Exit code of the first one, negative for a signal; None: it was ended at the limit.
        seconds: How long it took.
        answers: What its ranks wrote, by rank, of those that did.
        failure: What it says of its own failure; empty without any.
        output: The end of what its processes printed, without control characters.
    """

    code: int | None
    seconds: float
    answers: Mapping[int, str]
    failure: str = ""
    output: str = ""


def run_job(job: Job, folder: Path, environment: Mapping[str, str], limit_s: float) -> Ending:
    """Run a check in `folder`, which is empty, and return within little more than `limit_s`; no process survives.

    Args:
        job: What is run.
        folder: A private folder.
        environment: Its processes' environment variables.
        limit_s: Seconds for all of it.
    """
    job.write(folder)
    # -P and not the user's folder, whose files may have the names of modules; what this process finds is found there
    command = [sys.executable, "-P", "-m", "prophet.gpu_check.child", str(folder)]
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    began = time.monotonic()
    with (folder / OUTPUT).open("wb") as output:
        # A session, so that ranks and their helpers can be ended with it
        process = subprocess.Popen(
            command,
            env={**environment, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
    return Ending(
        code=code,
        seconds=time.monotonic() - began,
        answers=_answers(folder),
        failure=_text(folder / FAILURE),
        output=_tail(folder / OUTPUT),
    )


def answer_file(folder: Path, rank: int) -> Path:
    """The file for a rank's answer."""
    return folder / f"answer-{rank}.json"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the whole session; also one whose first process is gone while others of it go on."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)


def _answers(folder: Path) -> dict[int, str]:
    found = {}
    for file in folder.glob("answer-*.json"):
        rank = file.stem.removeprefix("answer-")
        if rank.isdecimal():
            found[int(rank)] = _text(file)
    return dict(sorted(found.items()))


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(_MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _tail(file: Path) -> str:
    """The end of a file of anything, as lines that a terminal can show."""
    with file.open("rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = opened.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    return "\n".join("".join(c for c in line if c.isprintable()) for line in text.splitlines())
