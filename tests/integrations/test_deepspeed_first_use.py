"""DeepSpeed's operations say that they will be compiled before they are, and which lock is in the way."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install '.[deepspeed]'")

from deepspeed.ops.op_builder.builder import OpBuilder
from prophet_deepspeed.first_use import announce

OP = types.SimpleNamespace(name="deepspeed_shm_comm")


@pytest.fixture
def loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of operations that were loaded, by a loader in the place of DeepSpeed's; extensions lie in `tmp_path`."""
    names: list[str] = []

    def jit_load(op: types.SimpleNamespace, verbose: bool = True) -> None:
        print("compiling", op.name)
        names.append(op.name)

    monkeypatch.setattr(OpBuilder, "jit_load", jit_load)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    announce()
    announce()  # once is enough
    return names


def test_it_is_said_before_it_is_done(loads: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    OpBuilder.jit_load(OP, verbose=False)
    said = capsys.readouterr()
    assert said.err.count("DeepSpeed compiles deepspeed_shm_comm now, at its first use") == 1
    assert said.out == "compiling deepspeed_shm_comm\n"
    assert loads == ["deepspeed_shm_comm"]


def test_a_lock_is_named_and_other_ranks_are_silent(
    loads: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    OpBuilder.jit_load(OP)
    assert f"run `rm {lock}`" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "1")
    OpBuilder.jit_load(OP)
    assert capsys.readouterr().err == ""
    assert len(loads) == 2


def test_what_was_built_needs_no_word(loads: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deepspeed_shm_comm").mkdir()
    (tmp_path / "deepspeed_shm_comm" / "deepspeed_shm_comm.so").touch()
    OpBuilder.jit_load(OP)
    assert capsys.readouterr().err == ""
    assert loads
