"""A save that is killed, or that finds the disk full, at any of its operations: the checkpoint before it is whole."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from prophet.engine.checkpoint import training as checkpoint
from prophet.errors import CheckpointError
from prophet.ranks.process_group import collective_for
from prophet.ranks.threads import ThreadWorld
from tests.helpers.disk_faults import Disk
from tests.helpers.launch import on_processes, process_outcomes
from tests.helpers.support import TinyModel

LIMIT_S = 20.0

Trained = tuple[TinyModel, torch.optim.Optimizer]


def trained(value: float, group: Any = None, *, state: bool = True) -> Trained:
    """A model and Adam's state, all numbers made of `value`."""
    model = TinyModel(blocks=1, num_experts=2, bias=False, group=group or ThreadWorld(1).collective(0))
    optimizer = torch.optim.Adam(model.parameters())
    if state:
        for name, entry in model.state_dict().items():  # the same for an expert on any rank
            entry.copy_(torch.arange(entry.numel()).view(entry.shape) * 1e-3 + value + len(name) + ord(name[-1]))
        for p in model.parameters():
            p.grad = torch.full_like(p, value)
        optimizer.step()
    return model, optimizer


def tensors(run: Trained) -> list[torch.Tensor]:
    model, optimizer = run
    moments = [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
    return [*(v.detach() for v in model.state_dict().values()), *moments]


def holds(folder: Path, value: float, group: Any = None) -> bool:
    """Whether the checkpoint is, bit by bit, that of `value`."""
    found = trained(0.0, group, state=False)
    extra = checkpoint.load(folder, *found)
    wanted = tensors(trained(value, group))
    return extra == {"step": value} and all(torch.equal(a, b) for a, b in zip(tensors(found), wanted, strict=True))


def save(folder: Path, value: float, group: Any = None) -> None:
    checkpoint.save(folder, *trained(value, group), extra={"step": value})


def error_of_save(folder: Path, value: float, group: Any = None) -> str:
    try:
        save(folder, value, group)
    except CheckpointError as error:
        return str(error)
    return ""


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def operations(folder: Path) -> list[int]:
    """The numbers of a save's operations, of writes in a row the first, the last and every twentieth."""
    with Disk().inserted() as disk:
        save(folder, 1.0)
    kinds = disk.done
    alone = {n for n, kind in enumerate(kinds) if {kind, *kinds[n - 1 : n], *kinds[n + 1 : n + 2]} != {"write"}}
    return sorted(alone | set(range(0, len(kinds), 20)))


@pytest.mark.parametrize("stride", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_operation(stride: int, tmp_path: Path) -> None:
    save(tmp_path, 1.0)
    numbers = operations(tmp_path)
    assert len(numbers) >= 50
    numbers = numbers[:-16:stride] + numbers[-16:]  # the last of all, as there the new one takes the old one's place
    whole = len(files(tmp_path))
    became_new = []
    for number in numbers:
        child = os.fork()
        if child == 0:
            with Disk(number, kills=True).inserted():
                save(tmp_path, 2.0)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, number
        assert len(list(tmp_path.glob("tensors-*"))) <= 2, "leftovers of earlier kills"
        if not holds(tmp_path, 1.0):
            assert holds(tmp_path, 2.0)
            became_new.append(number)
            save(tmp_path, 1.0)
            assert len(files(tmp_path)) == whole
    # it is the new one only from the rename on: what comes then is clearing up
    assert 1 <= len(became_new) < 12
    assert became_new == numbers[-len(became_new) :]
    save(tmp_path, 3.0)
    assert holds(tmp_path, 3.0)
    assert len(files(tmp_path)) == whole


def test_the_first_save_is_killed(tmp_path: Path) -> None:
    for number in (0, 1, 5, 40):
        child = os.fork()
        if child == 0:
            with Disk(number, kills=True).inserted():
                save(tmp_path / "new", 2.0)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        with pytest.raises(CheckpointError, match="no checkpoint was finished here"):
            checkpoint.load(tmp_path / "new", *trained(0.0, state=False))
    save(tmp_path / "new", 2.0)
    assert holds(tmp_path / "new", 2.0)
    assert len(list((tmp_path / "new").glob("tensors-*"))) == 1


def test_the_disk_is_full_at_any_operation(tmp_path: Path) -> None:
    save(tmp_path, 1.0)
    numbers = operations(tmp_path)
    before = files(tmp_path)
    failed = 0
    for number in numbers:
        with Disk(number).inserted():
            said = error_of_save(tmp_path, 2.0)
        if not said:  # from here on it only clears up
            assert holds(tmp_path, 2.0)
            break
        assert "rank 0: OSError: [Errno 28] No space left" in said
        failed += 1
        assert holds(tmp_path, 1.0)
        assert files(tmp_path) == before, f"leftovers after {number}"
    assert failed >= 50


def test_torchs_own_functions_read_the_folder(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        save(tmp_path, value)
    model, _ = trained(0.0, state=False)
    state = {f"model.{n}": v for n, v in model.state_dict().items()}
    dcp.load(state, checkpoint_id=tmp_path)
    wanted = trained(2.0)[0].state_dict()
    assert all(torch.equal(state[f"model.{n}"], v) for n, v in wanted.items())


def test_between_the_two_renames(tmp_path: Path) -> None:
    """Torch's index is still the old one; the next save brings it up to date before it removes anything."""
    save(tmp_path, 1.0)
    save(tmp_path / "other", 2.0)
    old = (tmp_path / ".metadata").read_bytes()
    save(tmp_path, 2.0)
    (current,) = tmp_path.glob("tensors-*")
    (current / "from_outside").mkdir()
    (tmp_path / ".metadata").rename(current / "from_outside" / ".metadata")
    (tmp_path / ".metadata").write_bytes(old)
    with Disk(20).inserted(), pytest.raises(CheckpointError):
        save(tmp_path, 3.0)
    assert holds(tmp_path, 2.0)
    model, _ = trained(0.0, state=False)
    state = {f"model.{n}": v for n, v in model.state_dict().items()}
    dcp.load(state, checkpoint_id=tmp_path)
    assert torch.equal(state["model.head.bias"], trained(2.0)[0].head.bias)


# --- on two ranks ---


def full_on_one_rank(folder: str) -> list[tuple[str, float, bool, int]]:
    """Every fifth operation of either rank fails, one after the other."""
    path, rank, group = Path(folder), dist.get_rank(), collective_for(None)
    save(path, 1.0, group)
    found = []
    for full in (0, 1):
        for number in range(0, 60, 5):
            disk = Disk(number if rank == full else None)
            started = time.monotonic()
            with disk.inserted():
                said = error_of_save(path, 2.0, group)
            took = time.monotonic() - started
            there = 1.0 if said else 2.0
            dist.barrier()
            found.append((f"{full}: {said}", took, holds(path, there, group), len(files(path))))
            if not said:
                break
    return found


def test_the_disk_of_one_rank_is_full(tmp_path: Path) -> None:
    rows = on_processes(2, full_on_one_rank, str(tmp_path), timeout_s=120)
    assert len(rows[0]) >= 20
    for here, there in zip(*rows, strict=True):
        full, _, said = here[0].partition(": ")
        assert here[0] == there[0], "both ranks are told the same"
        if said:
            assert f"rank {full}: OSError: [Errno 28] No space left" in said
            assert str(tmp_path) in said
        for _, took, whole, left in (here, there):
            assert whole
            assert took < LIMIT_S
            assert left == rows[0][0][3], "leftovers"


def killed(folder: str, victim: int) -> str:
    path, rank, group = Path(folder), dist.get_rank(), collective_for(None, timeout_s=LIMIT_S)
    save(path, 1.0, group)
    with Disk(12 if rank == victim else None, kills=True).inserted():
        try:
            save(path, 2.0, group)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_killed(victim: int, tmp_path: Path) -> None:
    outcomes = process_outcomes(2, killed, str(tmp_path), victim, timeout_s=90)
    assert outcomes[victim].exit_code == 9
    survivor = outcomes[1 - victim]
    assert survivor.seconds < 60
    said = survivor.result or survivor.error
    assert said is not None
    assert "PeerLost" in said
    assert f"rank {1 - victim}" in said
    assert holds(tmp_path, 1.0)
