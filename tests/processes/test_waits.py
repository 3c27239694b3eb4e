"""Waits for a rank that saves or compiles: no time limit ends them, and the end of that rank does."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import prophet
from prophet import checkpoint
from prophet.errors import PeerLost
from prophet.ranks.process_group import collective_for
from prophet.state.checkpoint.folder import Folder
from tests.helpers.launch import on_processes, process_outcomes
from tests.helpers.moe_models import hugging_face
from tests.helpers.support import TinyModel

LIMIT_S = 2.0
WORK_S = 2.25 * LIMIT_S
NOTICED_S = 4.0


def slow_save(folder: str) -> str:
    model = TinyModel(group=collective_for(None, timeout_s=LIMIT_S))
    commit = Folder.commit

    def slow(*args: Any) -> None:
        time.sleep(WORK_S)
        commit(*args)

    Folder.commit = slow  # type: ignore[method-assign]
    checkpoint.save(folder, model, extra={"step": 1})
    return str(checkpoint.load(folder, model))


def slow_export(folder: str, fate: str) -> str:
    """Process 0 writes for long, or is killed while it does."""
    model: Any = hugging_face("mixtral")
    prophet.convert(model, timeout_s=LIMIT_S)
    write = type(model).save_pretrained

    def slow(*args: Any, **options: Any) -> None:
        time.sleep(WORK_S)
        if fate == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        write(*args, **options)

    type(model).save_pretrained = slow
    began = time.monotonic()
    try:
        model.save_pretrained(folder)
    except PeerLost as error:
        return f"{time.monotonic() - began - WORK_S} {error}"
    return "saved"


def test_a_write_of_two_limits(tmp_path: Path) -> None:
    assert on_processes(2, slow_save, str(tmp_path), timeout_s=90) == ["{'step': 1}"] * 2


@pytest.mark.slow
def test_an_export_of_two_limits(tmp_path: Path) -> None:
    assert on_processes(2, slow_export, str(tmp_path), "goes on", timeout_s=90) == ["saved"] * 2


@pytest.mark.slow
def test_the_process_that_exports_is_killed(tmp_path: Path) -> None:
    killed, survivor = process_outcomes(2, slow_export, str(tmp_path), "is killed", timeout_s=90)
    assert killed.exit_code == -signal.SIGKILL
    took, _, text = str(survivor.result).partition(" ")
    assert float(took) < NOTICED_S
    assert "rank 1: end of save_pretrained failed: rank(s) [0] are gone" in text
    assert "rank 0 was at work: writing" in text
