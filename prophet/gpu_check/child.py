"""A check's own processes: `python -m prophet.gpu_check.child FOLDER` is the first, and starts the ranks."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from prophet.errors import RankFailed
from prophet.gpu_check.checks import Answer, Place
from prophet.gpu_check.process import FAILURE, Job, answer_file
from prophet.ranks.launch import leave, run_ranks


def main(name: str) -> None:
    """Run the check that `FOLDER` describes, and leave its answers there."""
    folder = Path(name)
    job = Job.read(folder)
    try:
        if job.ranks == 1:
            _answer(0, job, folder)
        else:
            meeting = folder / "ranks"
            meeting.mkdir()
            run_ranks(
                _on_rank,
                (job, folder),
                ranks=job.ranks,
                folder=meeting,
                limit_s=max(1.0, job.until_s - time.time()),
                timeout_s=job.timeout_s,
                what="the check",
                traces=folder,
                on_gpus=job.on_gpu,
            )
    except BaseException as error:
        # Into the output, whose end comes with the finding
        traceback.print_exc()
        for file in sorted(folder.glob("error-rank-*.txt")):
            print(file.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
        text = " ".join(str(error).split())
        kind = "" if isinstance(error, RankFailed) else f"{type(error).__name__}: "
        (folder / FAILURE).write_text(f"{kind}{text}".removesuffix(": "), encoding="utf-8")
        leave(1)
    leave()


def _answer(rank: int, job: Job, folder: Path) -> None:
    place = Place(
        rank=rank,
        ranks=job.ranks,
        on_gpu=job.on_gpu,
        timeout_s=job.timeout_s,
        shared=Path(job.shared),
        variables=job.variables,
    )
    module, _, function = job.function.partition(":")
    check: Callable[[Place], Answer] = getattr(import_module(module), function)
    answer_file(folder, rank).write_text(check(place).to_json(), encoding="utf-8")


def _on_rank(rank: int, job: Job, folder: Path) -> None:
    _answer(rank, job, folder)
    if job.ends_at_once:
        leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
