"""Which checks run on a machine's GPUs, as what, and for how long; the processes are left out."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from prophet.doctor.check import finding, sound
from prophet.errors import UsageError
from prophet.gpu_check import run
from prophet.gpu_check.checks import TASKS, Answer
from prophet.gpu_check.process import Ending, Job
from prophet.gpu_check.verdict import Verdict

Ran = list[tuple[Job, dict[str, str], float]]


def on_gpus(
    folder: Path, monkeypatch: pytest.MonkeyPatch, first: Ending, limit_s: float = 600.0
) -> tuple[list[Verdict], Ran]:
    """The verdicts, and what was run; the first check ends as `first`, all others well."""
    ran: Ran = []

    def run_job(job: Job, at: Path, environment: dict[str, str], own_s: float) -> Ending:
        ran.append((job, environment, own_s))
        answers = {rank: Answer(checks=[sound(at.name, "fine")]).to_json() for rank in range(job.ranks)}
        return first if len(ran) == 1 else Ending(code=0, seconds=1.0, answers=answers)

    monkeypatch.setattr(run, "run_job", run_job)
    options: dict[str, Any] = {"on_gpus": True, "scratch": folder, "limit_s": limit_s}
    found = run.run_all(TASKS, {"NCCL_DEBUG": "INFO", "HOME": "/"}, {"A": "b"}, **options, working=_quiet)
    return found, ran


def _quiet(_: str) -> Any:
    return nullcontext()


def seen(gpus: int) -> Ending:
    check = (
        sound("GPUs", str(gpus)) if gpus else finding("GPUs", "1 is here, and torch was built for the CPU", "install")
    )
    answer = Answer(checks=[check], figures={"gpus": [{"name": "H100"}] * gpus})
    return Ending(code=0, seconds=1.0, answers={0: answer.to_json()})


def test_every_check_runs_on_the_gpus_that_were_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, ran = on_gpus(tmp_path, monkeypatch, seen(4))
    assert [one.state for one in found] == ["sound"] * len(TASKS)
    assert [job.ranks for job, _, _ in ran] == [1, 1, 4, 4, 4, 4, 2, 4, 4, 4, 4]
    job, environment, own_s = ran[4]
    assert job.on_gpu
    assert job.ends_at_once
    assert environment == {"NCCL_DEBUG": "INFO", "HOME": "/", "A": "b"}
    assert job.variables == {"NCCL_DEBUG": "INFO"}
    assert 0 < job.timeout_s < own_s == TASKS[4].limit_s


def test_one_gpu_leaves_out_what_needs_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, ran = on_gpus(tmp_path, monkeypatch, seen(1))
    assert {one.name for one in found if one.state == "not checked"} == {t.name for t in TASKS if min(t.ranks) > 1}
    assert len(ran) == 5
    assert all(job.ranks == 1 for job, _, _ in ran)


def test_no_gpu_is_one_sentence_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"no GPU that torch can use: 1 is here, and torch was built .* \(install\); "):
        on_gpus(tmp_path, monkeypatch, seen(0))


def test_checks_go_on_where_the_first_one_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, ran = on_gpus(tmp_path, monkeypatch, Ending(code=None, seconds=60.0, answers={}))
    assert found[0].state == "finding"
    assert len(ran) > 1


@pytest.mark.parametrize(("told", "ranks"), [("0,3", 2), ("GPU-5f", 1), ("", 1)])
def test_where_the_first_check_says_nothing_ranks_follow_what_cuda_is_told(told: str, ranks: int) -> None:
    first = Verdict(name="environment", checks=[finding("environment", "ended by SIGSEGV", "run it alone")])
    assert run._gpus(first, {"CUDA_VISIBLE_DEVICES": told}) == ranks


def test_what_there_is_no_time_for_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, ran = on_gpus(tmp_path, monkeypatch, seen(4), limit_s=14.0)
    assert not ran
    assert {check.message for one in found for check in one.checks} == {"the 14 s for all checks are over"}
    (tmp_path / "more").mkdir()
    _, ran = on_gpus(tmp_path / "more", monkeypatch, seen(4), limit_s=40.0)
    assert all(own_s <= 40.0 for _, _, own_s in ran)
