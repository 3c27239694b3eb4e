"""Converted models are saved by all ranks, refused on one, and never waited for; with FSDP and accelerate too."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import prophet
from prophet.convert import load_original_state_dict, original_state_dict
from prophet.engine.parallel import expert_parameters
from prophet.errors import CollectiveTimeout, PartialStateError
from tests.helpers.launch import on_processes
from tests.helpers.moe_models import batches, hugging_face, loss_of

ALONE_S = 5.0


def alone(folder: str, lone: int) -> list[tuple[str, float]]:
    """One rank tries one way after the other by itself, the other goes on; then both save."""
    model: Any = hugging_face("mixtral")
    prophet.convert(model, timeout_s=30)
    found = []
    if dist.get_rank() == lone:
        tries: list[Any] = [
            lambda: model.save_pretrained(f"{folder}/alone"),
            lambda: original_state_dict(model),
            lambda: torch.save(model.state_dict(), f"{folder}/alone.pt"),
            lambda: model.push_to_hub("nobody/nothing"),
        ]
        for attempt in tries:
            started = time.monotonic()
            with pytest.raises((CollectiveTimeout, PartialStateError)) as caught:
                attempt()
            found.append((str(caught.value), time.monotonic() - started))
    elif lone == 0:
        time.sleep(ALONE_S - 0.5)  # rank 1 says nothing for as long as rank 0 waits for it
    loss_of(model, batches(2)[dist.get_rank()])[0].backward()  # nothing is broken
    model.save_pretrained(f"{folder}/together")
    if dist.get_rank() == lone == 0:
        time.sleep(ALONE_S + 1)  # a file that rank 0 writes alone: the other waits for it
    model.save_pretrained(f"{folder}/late")
    return found


@pytest.mark.parametrize("lone", [0, 1])
def test_one_rank_alone_is_refused_soon(lone: int, tmp_path: Path) -> None:
    state = hugging_face("mixtral").state_dict()
    by_rank = on_processes(2, alone, str(tmp_path), lone, timeout_s=90)
    said = by_rank[lone]
    assert not by_rank[1 - lone]
    for text, took in said:
        assert "every rank" in text
        assert took < ALONE_S
    if lone == 0:
        assert "rank 0: save_pretrained failed: rank 0 waited 4 s for rank(s) [1]" in said[0][0]
    else:
        wanted = "rank 1: save_pretrained failed: rank(s) [0] went on without this call, while rank 1 waited; rank 0"
        assert f"{wanted} was in exchange of counts, forward pass" in said[0][0]
    for name in ("together", "late"):
        loaded: Any = type(hugging_face("mixtral"))
        found = loaded.from_pretrained(tmp_path / name).state_dict()
        assert all(torch.equal(found[n], t) for n, t in state.items())
    assert not (tmp_path / "alone").exists()


def sharded(folder: str) -> dict[str, bool]:
    """`fully_shard` after the conversion: save, load, and the state dict."""
    model: Any = hugging_face("mixtral")
    state = {n: t.clone() for n, t in model.state_dict().items()}
    prophet.convert(model)
    experts = {p for _, p in expert_parameters(model)}
    for layer in model.model.layers:
        fully_shard(layer, ignored_params=experts)
    fully_shard(model, ignored_params=experts)
    loss_of(model, batches(2)[dist.get_rank()])[0].backward()
    model.save_pretrained(f"{folder}/saved")
    found = original_state_dict(model)
    same = {"state dict": all(torch.equal(found[n], t) and type(found[n]) is torch.Tensor for n, t in state.items())}
    same["names"] = found.keys() == state.keys()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    if dist.get_rank() == 0:
        started = time.monotonic()
        with pytest.raises(CollectiveTimeout, match="original_state_dict"):
            original_state_dict(model)
        same["soon"] = time.monotonic() - started < ALONE_S
    dist.barrier()
    from prophet_transformers import load_pretrained

    load_pretrained(model, f"{folder}/saved")
    found = original_state_dict(model)
    same["loaded"] = all(torch.equal(found[n], t) for n, t in state.items())
    load_original_state_dict(model, {n: t + 1 for n, t in state.items()})
    found = original_state_dict(model)
    same["loaded again"] = all(torch.equal(found[n], t + 1) for n, t in state.items())
    return same


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_fully_sharded(tmp_path: Path) -> None:
    for same in on_processes(2, sharded, str(tmp_path), timeout_s=90):
        assert all(same.values()), same
    model: Any = hugging_face("mixtral")
    loaded = type(model).from_pretrained(tmp_path / "saved")
    assert all(torch.equal(loaded.state_dict()[n], t) for n, t in model.state_dict().items())
    assert loaded.config.architectures == ["MixtralForCausalLM"]


def accelerated(folder: str) -> list[str]:
    """A loop with accelerate: what saves with it, and what refuses to."""
    rank = dist.get_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # it asks, though there is a process group
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    model: Any = hugging_face("mixtral")
    prophet.convert(model)
    wrapped, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    said = []
    for safe in (True, False):
        if accelerator.is_main_process:
            with pytest.raises(PartialStateError) as caught:
                accelerator.save_state(f"{folder}/{safe}", safe_serialization=safe)
            said.append(str(caught.value))
        else:
            accelerator.get_state_dict(wrapped, unwrap=False)  # what the other ranks do in `save_state`
    accelerator.unwrap_model(wrapped).save_pretrained(
        f"{folder}/saved",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(wrapped),
    )
    return said


def test_accelerate(tmp_path: Path) -> None:
    said, nothing = on_processes(2, accelerated, str(tmp_path), timeout_s=90)
    assert not nothing
    assert len(said) == 2
    assert all("prophet.checkpoint.save(folder, model, optimizer)" in text for text in said)
    model: Any = hugging_face("mixtral")
    found = type(model).from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(found[n], t) for n, t in model.state_dict().items())
