"""What one rank alone cannot write or read of a DeepSpeed checkpoint: every rank has an error, and nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.helpers.deepspeed_support import Case, raw_state, start, train
from tests.helpers.launch import on_processes

FULL = OSError(28, os.strerror(28))


def full_at(name: str) -> Any:
    """The disk is full for files of this name, on this rank."""
    from prophet_deepspeed import layout

    write = layout.write

    def failing(content: Any, path: Path) -> None:
        if path.name == name:
            raise FULL
        write(content, path)

    return mock.patch.object(layout, "write", failing)


def body(folder: Path) -> dict[str, Any]:
    rank, found = dist.get_rank(), {}
    engine: Any = start(Case(stage=1, microbatches=1, optimizer="SGD", lr=0.1, scheduler=False, blocks=1))
    train(engine, 1)
    engine.save_checkpoint(folder / "run")
    train(engine, 1)
    before = raw_state(engine)

    def said(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            found[name] = ""
        except Exception as error:  # any: its text is what is tested
            found[name] = f"{type(error).__name__}: {error}"

    # names of files that one rank writes, and every rank's
    for name in ("experts_1_of_2.pt", "dense.pt", "random_1_of_2.pt", "balancing_0_of_1.pt"):
        with full_at(name):
            said(name, lambda: engine.save_checkpoint(folder / "run", tag="next"))
    with mock.patch("prophet_deepspeed.layout.write_latest", side_effect=FULL):
        said("latest", lambda: engine.save_checkpoint(folder / "run", tag="next"))
    with mock.patch("pathlib.Path.mkdir", side_effect=FULL):
        said("folder", lambda: engine.save_checkpoint(folder / "run", tag="next"))
    note = {"note": print if rank else "text"}
    said("client state", lambda: engine.save_checkpoint(folder / "run", tag="never", client_state=note))
    with full_at("pytorch_model.bin"):
        said("model", lambda: engine.save_16bit_model(folder / "model"))
    found["latest is"] = (folder / "run" / "latest").read_text()
    found["never"] = (folder / "run" / "never").exists()
    # folders that differ by rank, as on disks that are not shared
    own = folder / f"of {rank}"
    own.mkdir()
    (own / "latest").write_text("first" if rank else "second")
    said("two names", lambda: engine.load_checkpoint(own))
    (own / "latest").unlink()
    if rank:
        (own / "latest").mkdir()  # which cannot be read
    said("unreadable", lambda: engine.load_checkpoint(own))
    said("one has none", lambda: engine.load_checkpoint(folder / ("run" if rank else "of 0")))
    after = raw_state(engine)
    found["changed"] = [k for k in before if repr(before[k]) != repr(after.get(k))]
    engine.save_checkpoint(folder / "run", tag="whole")
    found["in the end"] = engine.load_checkpoint(folder / "run")[0]
    return found


def test_what_one_rank_cannot_do_is_an_error_on_all(tmp_path: Path) -> None:
    by_rank = on_processes(2, body, tmp_path, timeout_s=200)
    failing = {"experts_1_of_2.pt": 1, "dense.pt": 0, "random_1_of_2.pt": 1, "balancing_0_of_1.pt": 0, "latest": 0}
    failing |= {"folder": 0, "client state": 1, "model": 0, "unreadable": 1}
    for name, rank in failing.items():
        own, other = by_rank[rank][name], by_rank[1 - rank][name]
        assert "client_state: expected numbers" in own or "Error: [Errno" in own, (name, own)
        assert other.startswith("CheckpointError: "), name
        assert f"rank(s) [{rank}]" in other, name
    for found in by_rank:
        assert "expected the same checkpoint on all ranks, found ['first', 'second']" in found["two names"]
        assert "expected the same checkpoint on all ranks, found ['', 'global_step1']" in found["one has none"]
        assert found["latest is"] == "global_step1"  # the one that is whole
        assert not found["never"]
        assert found["changed"] == []
        assert found["in the end"] == str(tmp_path / "run" / "whole")
