"""`save_state`, `load_state` and what writes the model alone: all ranks' experts, and no half of anything."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import prophet_accelerate
import pytest
import torch
import torch.distributed as dist

import prophet
from prophet.errors import CheckpointError, CollectiveTimeout, PartialStateError
from tests.helpers.accelerate_support import Loop, fresh_accelerator, microbatch, named
from tests.helpers.launch import on_processes
from tests.helpers.moe_models import hugging_face
from tests.helpers.support import RandomPlanner, TinyModel

FIRST, LAST = 3, 6


class Custom:
    """An object that a user registers."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def registered(loop: Loop) -> Custom:
    custom = Custom()
    loop.accelerator.register_for_checkpointing(custom)
    return custom


def saved(kind: str, folder: str) -> tuple[list[float], list[float], float]:
    loop = Loop(kind)
    registered(loop).value = 17
    loop.train(0, FIRST)
    loop.accelerator.save_state(folder)
    stream = float(torch.rand(1))
    loop.train(FIRST, LAST)
    loop.accelerator.free_memory()
    return loop.losses[FIRST:], loop.norms[FIRST:], stream


def resumed(kind: str, folder: str) -> tuple[list[float], list[float], float]:
    loop = Loop(kind)
    custom = registered(loop)
    loop.train(0, 1)  # what is loaded replaces this
    loop.accelerator.load_state(folder)
    stream = float(torch.rand(1))
    assert custom.value == 17
    assert loop.schedule.scheduler.last_epoch == FIRST
    loop.train(FIRST, LAST)
    assert loop.drift() == 0.0
    loop.accelerator.free_memory()
    return loop.losses[1:], loop.norms[1:], stream


def model_alone(folder: str, saved_by: Loop) -> dict[str, float]:
    """The largest differences of a plain model that was loaded from each way of writing `saved_by`."""
    a, ids = saved_by.accelerator, torch.arange(12).view(1, 12)
    model = saved_by.model.eval()
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    found = {}
    state = a.get_state_dict(model)
    a.save_model(model, f"{folder}/model")
    a.unwrap_model(model).save_pretrained(
        f"{folder}/pretrained", is_main_process=a.is_main_process, state_dict=state, save_function=a.save
    )
    dist.barrier()
    if not a.is_main_process:
        return {}
    from safetensors.torch import load_file

    for name, values in (
        ("get_state_dict", state),
        ("save_model", load_file(f"{folder}/model/model.safetensors")),
        ("save_pretrained", None),
    ):
        plain = hugging_face("mixtral", output_router_logits=False, intermediate_size=16)
        if values is None:
            plain = type(plain).from_pretrained(f"{folder}/pretrained")
        else:
            plain.load_state_dict(values)
        with torch.no_grad():
            found[name] = float((plain.eval()(input_ids=ids).logits - wanted).abs().max())
    return found


def refusals(folder: str) -> dict[str, str]:
    """What every wrong call says, and nothing has changed afterwards."""
    loop = Loop("ddp")
    loop.train(0, 1)
    a, said = loop.accelerator, {}
    before = loop.shared()

    def refused(name: str, error: type[Exception], call: Any) -> None:
        with pytest.raises(error) as caught:
            call()
        said[name] = str(caught.value)

    path = Path(folder, "prophet_accelerate.json")
    refused("custom", CheckpointError, lambda: a.load_state(folder))
    registered(loop)
    text = path.read_text()
    dist.barrier()
    for name, changed in (
        ("missing", None),
        ("another", {"training": "0" * 64}),
        ("scaler", {"scalers": 1}),
        ("field", {"ranks": "two"}),
    ):
        if dist.get_rank() == 0:
            path.unlink(missing_ok=True)
            if changed is not None:
                path.write_text(json.dumps({**json.loads(text), **changed}))
        dist.barrier()
        refused(name, CheckpointError, lambda: a.load_state(folder))
        dist.barrier()
    assert torch.equal(before, loop.shared())
    refused("pickle", PartialStateError, lambda: pickle.dumps(loop.bare.state_dict()))
    loss = loop.model(input_ids=torch.zeros(2, 4, dtype=torch.long)).logits.sum()
    refused("step", RuntimeError, lambda: a.save_state(folder))
    loss.backward()
    loop.optimizer.step()
    if dist.get_rank() == 0:  # under `if accelerator.is_main_process:`
        refused("alone", CollectiveTimeout, lambda: a.save_state(folder))
    dist.barrier()
    a.free_memory()
    return said


def built_of_our_layers(folder: str) -> tuple[list[float], list[float], str]:
    """A model with `prophet.MoE` layers: losses after saving and after loading, and what is refused."""
    runs: list[list[float]] = []
    for path in ("", folder):
        accelerator = fresh_accelerator("ddp")
        balanced = prophet_accelerate.balance(accelerator, config=prophet.EngineConfig(planner=RandomPlanner(3, 0.6)))
        model: Any = TinyModel(vocab=32)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        if path:
            accelerator.load_state(path)
        losses: list[float] = []
        for step in range(2 if path else 0, 4):
            if step == 2 and not path:
                accelerator.save_state(folder)
            ids = microbatch(step, 0)
            loss = torch.nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert balanced.report is None
        runs.append(losses[-2:])
        with pytest.raises(PartialStateError) as caught:
            accelerator.get_state_dict(model)
        accelerator.free_memory()
    return runs[0], runs[1], str(caught.value)


def one_run(folder: str) -> dict[str, Any]:
    stale = Path(folder, "random_states_7.pkl")
    stale.touch()
    dist.barrier()
    went_on = saved("ddp", folder)
    assert not stale.exists()
    again = resumed("ddp", folder)
    loop = Loop("ddp", options=named(Path(folder, "named"), limit=1))
    seen: list[int] = []
    loop.accelerator.register_save_state_pre_hook(lambda models, weights, _: seen.append(len(models) + len(weights)))
    loop.train(0, 1)
    for _ in range(2):
        loop.accelerator.save_state()
    loop.accelerator.load_state()
    left = sorted(p.name for p in Path(folder, "named", "checkpoints").iterdir())
    gaps = model_alone(folder, loop)
    loop.accelerator.free_memory()
    built = built_of_our_layers(f"{folder}/built")
    return {
        "runs": (went_on, again),
        "built": built,
        "seen": seen,
        "left": left,
        "gaps": gaps,
        "said": refusals(folder),
    }


def test_a_run_goes_on_bit_by_bit_and_every_file_has_all_experts(tmp_path: Path) -> None:
    by_rank = on_processes(2, one_run, str(tmp_path), timeout_s=200)
    for found in by_rank:
        went_on, again = found["runs"]
        assert again == went_on
        assert found["seen"] == [2, 2]
        assert found["built"][0] == found["built"][1]
        assert "Call accelerator.save_state(folder), or prophet.checkpoint.save" in found["built"][2]
        assert found["left"] == ["checkpoint_1"]
        assert all(gap < 1e-5 for gap in found["gaps"].values())
        said = found["said"]
        assert "custom_objects: the folder has 1, this run 0" in said["custom"]
        assert "prophet_accelerate.json is missing" in said["missing"]
        assert "of another save" in said["another"]
        assert "scalers: the folder has 1, this run 0; expected as many: mixed_precision='fp16'" in said["scaler"]
        assert "ranks: expected an integer" in said["field"]
        assert "of rank" in said["pickle"]
        assert "save_state() belongs between two steps" in said["step"]
    assert "every rank must call it" in by_rank[0]["said"]["alone"]
    assert set(by_rank[0]["gaps"]) == {"get_state_dict", "save_model", "save_pretrained"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "ranks"),
    [
        (("ddp", "ddp"), (2, 4)),
        (("ddp", "ddp"), (4, 2)),
        (("fsdp2", "fsdp2"), (2, 2)),
        (("fsdp2", "fsdp2"), (2, 4)),
        (("fsdp2", "fsdp2"), (4, 2)),
        (("fsdp2", "ddp"), (4, 4)),
        (("ddp", "fsdp2"), (2, 4)),
    ],
    ids=str,
)
def test_a_run_goes_on_at_another_number_of_ranks(
    kinds: tuple[str, str], ranks: tuple[int, int], tmp_path: Path
) -> None:
    went_on = on_processes(ranks[0], saved, kinds[0], str(tmp_path), timeout_s=200)[0]
    for again in on_processes(ranks[1], resumed, kinds[1], str(tmp_path), timeout_s=200):
        if kinds[0] == kinds[1] and ranks[0] == ranks[1]:
            assert again == went_on
        assert again[0] == pytest.approx(went_on[0], rel=1e-6)
        assert again[1] == pytest.approx(went_on[1], rel=1e-5)


def saved_without_an_engine(folder: str) -> tuple[bool, str]:
    """Plain expert parallelism, by `close()` before `prepare()`; whether loading gives back this rank's moments."""

    def moments() -> list[torch.Tensor]:
        experts = [p for p in loop.bare.parameters() if getattr(p, "prophet_expert", False)]
        return [loop.optimizer.state[p]["exp_avg"].clone() for p in experts]

    loop = Loop("ddp", prepared=lambda loop: loop.balanced.close())  # type: ignore[union-attr]
    loop.train(0, 2)
    before = moments()
    loop.accelerator.save_state(folder)
    loop.train(2, 3)
    loop.accelerator.load_state(folder)
    return all(map(torch.equal, before, moments())), prepared_after_another()


def prepared_after_another() -> str:
    """What is said of experts' optimizer that comes after one of the other parameters."""
    a = fresh_accelerator("ddp")
    prophet_accelerate.balance(a)
    model = a.prepare(hugging_face("mixtral", output_router_logits=False))
    held = {
        kind: [p for p in model.parameters() if getattr(p, "prophet_expert", False) is kind] for kind in (False, True)
    }
    a.prepare(torch.optim.SGD(held[False], lr=0.1))
    try:
        a.prepare(torch.optim.SGD(held[True], lr=0.1))
    except ValueError as error:
        return str(error)
    return ""


def test_every_ranks_moments_come_back_without_an_engine(tmp_path: Path) -> None:
    for same, said in on_processes(2, saved_without_an_engine, str(tmp_path / "state"), timeout_s=120):
        assert same
        assert "the optimizer that holds the experts came after another one" in said
