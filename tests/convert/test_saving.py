"""Ways to write a converted model: in the original layout from all ranks, or not at all."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import prophet
from prophet.convert import converted, original_state_dict
from prophet.errors import CheckpointError, ConversionError, PartialStateError
from tests.helpers.moe_models import batches, hugging_face, loss_of
from tests.helpers.support import on_threads


def pair(family: str = "mixtral") -> list[Any]:
    """Two equal models, for two ranks."""
    model = hugging_face(family)
    return [model, copy.deepcopy(model)]


def same(model: nn.Module, state: dict[str, torch.Tensor]) -> bool:
    found = model.state_dict()
    return found.keys() == state.keys() and all(torch.equal(found[n], t) for n, t in state.items())


def test_save_pretrained_writes_the_original_layout(tmp_path: Path) -> None:
    models = pair()
    state = {n: t.clone() for n, t in models[0].state_dict().items()}
    import prophet_transformers  # noqa: F401 (two threads importing at once may see half of a module)

    def body(group: Any) -> None:
        model = models[group.rank]
        prophet.convert(model, group=group)
        model.save_pretrained(tmp_path / "plain")
        # as accelerate's examples call it
        model.save_pretrained(
            tmp_path / "idiom", is_main_process=group.rank == 0, state_dict=model.state_dict(), max_shard_size="20KB"
        )
        copied = copy.deepcopy(model) if group.rank else model
        assert copied.save_pretrained.model is copied

    on_threads(2, body)
    for name in ("plain", "idiom"):
        assert same(type(models[0]).from_pretrained(tmp_path / name), state)
    assert len(list((tmp_path / "idiom").glob("*.safetensors"))) > 1

    def back(group: Any) -> None:
        prophet.revert(models[group.rank])

    on_threads(2, back)
    for model in models:
        assert "save_pretrained" not in vars(model)
        assert "push_to_hub" not in vars(model)
        model.save_pretrained(tmp_path / "after")
        assert same(type(model).from_pretrained(tmp_path / "after"), state)


def test_a_state_dict_in_the_original_layout_is_written_as_it_is(tmp_path: Path) -> None:
    models = pair()
    state = {n: t.clone() for n, t in models[0].state_dict().items()}

    def body(group: Any) -> dict[str, torch.Tensor]:
        prophet.convert(models[group.rank], group=group)
        return original_state_dict(models[group.rank])

    found, _ = on_threads(2, body)
    models[0].save_pretrained(tmp_path, state_dict=found)  # on one rank
    assert same(type(models[0]).from_pretrained(tmp_path), state)


def test_one_rank_that_holds_everything_may_save_alone(tmp_path: Path) -> None:
    model: Any = hugging_face("mixtral")
    state = {n: t.clone() for n, t in model.state_dict().items()}
    prophet.convert(model)
    model.save_pretrained(tmp_path)
    assert same(type(model).from_pretrained(tmp_path), state)
    torch.save(model.state_dict(), tmp_path / "all.pt")
    again: Any = hugging_face("mixtral")
    prophet.convert(again)
    again.load_state_dict(torch.load(tmp_path / "all.pt", weights_only=True))
    prophet.revert(again)
    assert same(again, state)


def test_a_part_inside_of_a_model_is_known_too(tmp_path: Path) -> None:
    """`model.model` is a model of transformers as well."""
    models = pair()
    state = {n: t.clone() for n, t in models[0].model.state_dict().items()}
    kind = type(models[0].model)

    def body(group: Any) -> None:
        prophet.convert(models[group.rank], group=group)
        models[group.rank].model.save_pretrained(tmp_path)

    on_threads(2, body)
    assert same(kind.from_pretrained(tmp_path), state)


def test_what_would_write_one_ranks_experts_is_refused(tmp_path: Path) -> None:
    models = pair()
    safetensors = pytest.importorskip("safetensors.torch")
    accelerate = pytest.importorskip("accelerate")
    lock = threading.Lock()  # torch.save and accelerate are used by one process, not by threads

    def body(group: Any) -> list[str]:
        model = models[group.rank]
        prophet.convert(model, group=group)
        state = model.state_dict()
        tries: list[Any] = [
            lambda: torch.save(model.state_dict(), tmp_path / "whole.pt"),
            lambda: torch.save({"step": 1, "model": state}, tmp_path / "nested.pt"),
            lambda: torch.save(copy.deepcopy(state), tmp_path / "copied.pt"),
            lambda: pickle.dump(state, io.BytesIO()),
            lambda: safetensors.save_file(state, tmp_path / "file.safetensors"),
            lambda: safetensors.save_model(model, str(tmp_path / "model.safetensors")),
            lambda: accelerate.utils.save(
                accelerate.utils.other.clean_state_dict_for_safetensors(dict(state)),
                tmp_path / "accelerate.safetensors",
                safe_serialization=True,
            ),
            lambda: model.push_to_hub("nobody/nothing"),
        ]
        found = []
        with lock:
            for attempt in tries:
                with pytest.raises(PartialStateError) as caught:
                    attempt()
                found.append(str(caught.value))
        return found

    for said in on_threads(2, body):
        assert all("every rank" in text for text in said)
        assert "model.layers.0.mlp.experts.experts.w_in." in said[0]
        assert "of 2" in said[0]
        assert "original_state_dict(model)" in said[0]


def test_a_model_of_which_a_part_was_converted(tmp_path: Path) -> None:
    """The outer model's own `save_pretrained` is not ours, and its state dict is."""
    models = pair()
    lock = threading.Lock()

    def body(group: Any) -> None:
        prophet.convert(models[group.rank].model, group=group)
        with lock, pytest.raises(PartialStateError, match="every rank"):
            models[group.rank].save_pretrained(tmp_path)

    on_threads(2, body)


def test_state_dicts_stay_usable(tmp_path: Path) -> None:
    """For loading, copying, averaging, comparing, and torch's distributed checkpoints."""
    models = pair()

    def body(group: Any) -> dict[str, Any]:
        model = models[group.rank]
        prophet.convert(model, group=group)
        return dict(model.state_dict())

    states = on_threads(2, body)
    for rank, (model, state) in enumerate(zip(models, states, strict=True)):
        key = f"model.layers.1.mlp.experts.experts.w_out.{4 * rank}"
        kept = copy.deepcopy(state)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        assert torch.equal(state[key], kept[key] + 1.0)
        assert type(state[key] * 0.9) is torch.Tensor
        assert type(state[key].cpu().clone()) is torch.Tensor
        assert "PartOfExperts" in repr(state[key])
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / str(rank), no_dist=True)
        model.load_state_dict(kept)
        assert torch.equal(state[key], kept[key])
        dcp.load(model.state_dict(), checkpoint_id=tmp_path / str(rank), no_dist=True)
        assert torch.equal(state[key], kept[key] + 1.0)
        torch.save({k: v.detach() for k, v in state.items()}, tmp_path / f"{rank}.pt")  # one file per rank: on purpose
        model.load_state_dict(torch.load(tmp_path / f"{rank}.pt", weights_only=True))


def test_a_disk_that_is_full_is_told_to_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = pair()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(models[0]), "save_pretrained", full)

    def body(group: Any) -> None:
        prophet.convert(models[group.rank], group=group)
        with pytest.raises((OSError, CheckpointError), match=r"No space left|rank 0 could not write the model"):
            models[group.rank].save_pretrained(tmp_path)

    on_threads(2, body)


# --- PEFT ---


def peft() -> Any:
    """The library, or a skip."""
    return pytest.importorskip("peft", reason="needs peft: pip install peft")


ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.parametrize(
    "targets",
    [
        {"target_modules": ATTENTION, "modules_to_save": ["experts"]},
        {"target_modules": ATTENTION, "modules_to_save": ["mlp"]},
    ],
)
@pytest.mark.parametrize("family", ["mixtral", "qwen3"])
def test_second_experts_of_peft_are_refused_when_converting(family: str, targets: dict[str, Any]) -> None:
    library = peft()
    model = library.get_peft_model(hugging_face(family), library.LoraConfig(**targets))
    with pytest.raises(ConversionError, match=r"PEFT .*keep LoRA off the experts \(target_modules="):
        prophet.convert(model)


@pytest.mark.parametrize("targets", [{"target_parameters": EXPERTS}, {"modules_to_save": ["experts"]}])
@pytest.mark.filterwarnings("ignore:target_parameters=")
def test_lora_on_experts_that_were_converted_before_is_refused_before_training(targets: dict[str, Any]) -> None:
    library = peft()
    model = hugging_face("mixtral")
    prophet.convert(model)
    wrapped = library.get_peft_model(model, library.LoraConfig(target_modules=ATTENTION, **targets))
    for training in (True, False):
        wrapped.train(training)
        with pytest.raises(ConversionError, match=r"PEFT .*keep LoRA off the experts \(target_modules="):
            prophet.attach(wrapped, config=prophet.EngineConfig(planner="static"))
    wrapped.train()
    with pytest.raises(ConversionError, match=r"PEFT .*keep LoRA off the experts \(target_modules="):
        loss_of(wrapped, batches(1)[0])


@pytest.mark.filterwarnings("ignore:target_parameters=")
def test_lora_on_experts_between_attach_and_training() -> None:
    library = peft()
    model = hugging_face("mixtral")
    prophet.convert(model)
    engine = prophet.attach(model, config=prophet.EngineConfig(planner="static"))
    wrapped = library.get_peft_model(model, library.LoraConfig(target_parameters=EXPERTS, target_modules=ATTENTION))
    with pytest.raises(ConversionError, match=r"PEFT was told to adapt model.layers.0.mlp.experts.gate_up_proj"):
        loss_of(wrapped, batches(1)[0])
    engine.close()


def test_lora_on_old_lists_of_experts_that_were_converted_before() -> None:
    """There `target_modules` names experts, and other modules of the same name are adapted."""
    from prophet.convert.checks import check_adapters

    config = SimpleNamespace(target_modules={"w1", "q_proj"}, target_parameters=None)
    model = nn.Linear(2, 2)
    experts = nn.ModuleList([nn.ModuleDict({"w1": nn.Linear(2, 2), "w2": nn.Linear(2, 2)})])
    check_adapters(model, [("block.experts", experts)])
    model.peft_config = {"default": config}  # type: ignore[assignment]
    with pytest.raises(ConversionError, match=r"adapt block.experts.0.w1 \(target_modules\)"):
        check_adapters(model, [("block.experts", experts)])
    config.target_modules = r".*\.0\.w2"
    with pytest.raises(ConversionError, match=r"adapt block.experts.0.w2 \(target_modules\)"):
        check_adapters(model, [("block.experts", experts)])
    config.target_modules = {"q_proj"}
    check_adapters(model, [("block.experts", experts)])


@pytest.mark.parametrize("first", ["convert", "peft"])
def test_lora_on_attention_is_saved_by_one_rank(first: str, tmp_path: Path) -> None:
    """The adapters are all that PEFT writes, and every rank has them."""
    library = peft()
    models = pair()
    lock = threading.Lock()

    def adapted(model: Any) -> Any:
        with lock:
            return library.get_peft_model(model, library.LoraConfig(target_modules=ATTENTION))

    def body(group: Any) -> None:
        model = models[group.rank]
        if first == "peft":
            model = adapted(model)
        prophet.convert(model, group=group)
        if first == "convert":
            model = adapted(model)
        assert len(list(converted(model))) == 2
        loss_of(model, batches(2)[group.rank])
        if group.rank == 0:
            model.save_pretrained(tmp_path)
        base = model.get_base_model()
        assert "save_pretrained" in vars(base)

    on_threads(2, body)
    loaded = library.PeftModel.from_pretrained(hugging_face("mixtral"), tmp_path)
    assert sum("lora_A" in n for n, _ in loaded.named_parameters()) == 4
