"""One of four ranks fails: the others say who and where, in time, nobody aborts, and the last checkpoint is whole."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import prophet
from benchmarks.faults.program import FAULTS, GRACE_S, RANKS, Said, run, whole
from tests.helpers.launch import process_outcomes

LIMIT_S = 4.0
WHOLE_RUN_S = 90.0
QUICK = ("kill two", "drop after forward", "outside DDP", "skip layer")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FAULTS])
def test_a_fault_on_one_rank(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    outcomes = process_outcomes(RANKS, run, name, str(tmp_path), LIMIT_S, timeout_s=WHOLE_RUN_S)
    for rank, outcome in enumerate(outcomes):
        said, odd = Said.read(tmp_path, rank), rank in fault.ranks
        if odd and not fault.survives:
            assert outcome.exit_code == -signal.SIGKILL
            continue
        assert outcome.exit_code in (0, 3), f"rank {rank} was aborted: {outcome}"
        assert said is not None
        if not odd:
            assert said.kind in fault.says, f"rank {rank}: {said}"
            assert fault.named in said.text, f"rank {rank}: {said}"
            assert said.seconds < (LIMIT_S if fault.waits else 0.0) + GRACE_S, f"rank {rank}: {said}"
        elif name not in ("exception", "drop before forward"):  # a mistake has its own error, or none
            assert hasattr(prophet.errors, said.kind), f"rank {rank}: {said}"
    assert whole(tmp_path)
