"""What `prophet_accelerate.balance` refuses, by the name of the setting, before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import prophet_accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn

import prophet
from tests.helpers.moe_models import hugging_face

STATIC = prophet.EngineConfig(planner="static")


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    for state in (AcceleratorState, GradientState, PartialState):
        monkeypatch.setattr(state, "_shared_state", {})
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):  # plugins set them
        monkeypatch.setenv(name, "false")
    return Accelerator(cpu=True)


def of_type(kind: DistributedType) -> Callable[[Any], None]:
    def change(accelerator: Any) -> None:
        accelerator.state.distributed_type = kind

    return change


def with_fsdp(**options: Any) -> Callable[[Any], None]:
    def change(accelerator: Any) -> None:
        of_type(DistributedType.FSDP)(accelerator)
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(**options)

    return change


def changed(**attributes: Any) -> Callable[[Any], None]:
    def change(accelerator: Any) -> None:
        for name, value in attributes.items():
            owner = accelerator if name in vars(accelerator) else accelerator.state
            setattr(owner, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_type(DistributedType.DEEPSPEED), "`import prophet_deepspeed`"),
        (of_type(DistributedType.MEGATRON_LM), "megatron_lm_plugin"),
        (of_type(DistributedType.XLA), "not by XLA"),
        (with_fsdp(fsdp_version=1), r"fsdp_plugin\.fsdp_version: expected 2, got 1"),
        (with_fsdp(fsdp_version=2, cpu_ram_efficient_loading=True), r"fsdp_plugin\.cpu_ram_efficient_loading"),
        (with_fsdp(fsdp_version=2, cpu_offload=True), r"fsdp_plugin\.cpu_offload"),
        (with_fsdp(fsdp_version=2, activation_checkpointing=True), "gradient_checkpointing_enable"),
        (changed(_mixed_precision="fp8"), "mixed_precision='fp8'"),
        (changed(scaler=object()), "scales the loss by a object"),
        (changed(dynamo_plugin=SimpleNamespace(use_regional_compilation=True)), "use_regional_compilation"),
        (changed(parallelism_config=SimpleNamespace(tp_enabled=True, tp_size=2)), r"parallelism_config\.tp_size=2"),
        (lambda a: setattr(a.state, "num_processes", 2), "torch.distributed of 1"),
        (lambda a: a.prepare(nn.Linear(2, 2)), "right after Accelerator"),
        (lambda a: setattr(a, "clip_grad_norm_", print), "replaced already, by balance.. or ProphetCallback"),
    ],
)
def test_a_setting_is_refused_by_its_name(
    accelerator: Accelerator, change: Callable[[Any], None], message: str
) -> None:
    change(accelerator)
    before = set(vars(accelerator))
    with pytest.raises(ValueError, match=message):
        prophet_accelerate.balance(accelerator)
    assert set(vars(accelerator)) == before


def test_arguments_are_refused_by_their_name(accelerator: Accelerator) -> None:
    with pytest.raises(TypeError, match=r"expected an accelerate\.Accelerator, got Linear"):
        prophet_accelerate.balance(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"EngineConfig\.accumulation_steps: expected 1, got 2"):
        prophet_accelerate.balance(accelerator, config=prophet.EngineConfig(accumulation_steps=2))
    prophet_accelerate.balance(accelerator, config=STATIC)
    with pytest.raises(ValueError, match="replaced already, by balance"):
        prophet_accelerate.balance(accelerator, config=STATIC)


def test_a_model_that_cannot_be_balanced_is_refused(accelerator: Accelerator) -> None:
    balanced = prophet_accelerate.balance(accelerator, config=STATIC)
    model = hugging_face("mixtral")
    with pytest.raises(ValueError, match="no MoE block found"):
        accelerator.prepare(nn.Linear(2, 2))
    shell: Any = nn.Module()
    shell.__class__ = type("DeepSpeedEngine", (nn.Module,), {})
    shell.module = model
    with pytest.raises(ValueError, match="the model is wrapped already, in DeepSpeedEngine"):
        accelerator.prepare(shell)
    with pytest.raises(ValueError, match="a second model with experts"):
        accelerator.prepare(model, copy.deepcopy(model))
    halves = [[p for n, p in model.named_parameters() if part in n] for part in ("layers.0", "layers.1")]
    with pytest.raises(ValueError, match="2 optimizers hold experts"):
        accelerator.prepare(model, *(torch.optim.SGD(half, lr=0.1) for half in halves))
    assert balanced.engine is None
    assert balanced.report is None


def test_a_model_with_an_engine_is_refused_until_that_is_closed(accelerator: Accelerator) -> None:
    balanced = prophet_accelerate.balance(accelerator, config=STATIC)
    model = hugging_face("mixtral")
    prophet.convert(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = prophet.attach(model, optimizer, config=STATIC)
    with pytest.raises(ValueError, match="the model has an engine already, by prophet"):
        accelerator.prepare(model, optimizer)
    assert accelerator._models == []
    engine.close()
    accelerator.prepare(model, optimizer)
    assert balanced.engine is not None
    accelerator.free_memory()


def test_optimizers_that_fsdp2_cannot_have_are_refused(accelerator: Accelerator) -> None:
    with_fsdp(fsdp_version=2)(accelerator)
    balanced = prophet_accelerate.balance(accelerator, config=STATIC)
    model = hugging_face("mixtral")
    used = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(8).view(1, 8)).logits.sum().backward()
    used.step()
    used.zero_grad()
    for optimizers, message in (
        ([], "expected model and one optimizer, got 0"),
        ([torch.optim.AdamW(model.parameters(), foreach=True)], "foreach=True cannot step group 0"),
        ([torch.optim.AdamW(model.parameters(), fused=True)], "fused=True cannot step group 0"),
        ([used], "it has taken steps"),
    ):
        with pytest.raises(ValueError, match=message):
            accelerator.prepare(model, *optimizers)
    assert balanced.report is None


def test_preparing_again_is_harmless(accelerator: Accelerator) -> None:
    """In parts, with a model that is evaluated only, and after `free_memory`."""
    balanced = prophet_accelerate.balance(accelerator, config=STATIC)
    model, teacher = hugging_face("mixtral"), hugging_face("mixtral").requires_grad_(False)
    kept = copy.deepcopy(teacher.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    model, dense = accelerator.prepare(model, optimizer)[0], accelerator.prepare(teacher)
    assert balanced.engine is not None
    engine = balanced.engine
    data = accelerator.prepare(torch.utils.data.DataLoader([1, 2, 3]))
    again = accelerator.prepare(model)
    assert again is model
    assert balanced.engine is engine
    assert len(data) == 3
    assert all(torch.equal(value, kept[name]) for name, value in dense.state_dict().items())
    with pytest.raises(ValueError, match="a second model with experts"):
        accelerator.prepare(hugging_face("mixtral"))
    for call, message in (
        (lambda: accelerator.join_uneven_inputs([model]), "join_uneven_inputs: a rank without batches"),
        (lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=0), "norm_type: expected a positive"),
        (lambda: [accelerator.reduce(p.data, "mean") for p in model.parameters()], "LocalSGD does not work"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    accelerator.free_memory()
    assert balanced.engine is None
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert balanced.engine is not None
    assert balanced.engine is not engine
    accelerator.end_training()
    assert balanced.engine is None


def test_parts_may_come_one_by_one(accelerator: Accelerator) -> None:
    balanced = prophet_accelerate.balance(accelerator, config=STATIC)
    model = accelerator.prepare_model(hugging_face("mixtral"))
    assert balanced.engine is None
    accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert balanced.engine is not None
    loss = model(input_ids=torch.arange(8).view(1, 8), labels=torch.arange(8).view(1, 8)).loss
    accelerator.backward(loss)
    accelerator._optimizers[0].step()
    assert balanced.engine.last_step is not None
    accelerator.free_memory()


def test_preparing_that_failed_is_tried_again(accelerator: Accelerator) -> None:
    """With the model and the optimizer of the first attempt; nothing is there twice."""
    balanced = prophet_accelerate.balance(accelerator, config=STATIC)
    model = hugging_face("mixtral")
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    experts = {id(p) for n, p in model.named_parameters() if ".experts." in n}
    with pytest.raises(ValueError, match="device_placement"):
        accelerator.prepare(model, optimizer, device_placement=[True])
    assert balanced.report is not None
    assert balanced.engine is None
    held = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert not held & experts
    assert held == {id(p) for p in model.parameters()}

    def broken(*_: Any) -> None:
        raise RuntimeError("a broken scheduler")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "prepare_scheduler", broken)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        with pytest.raises(RuntimeError, match="a broken scheduler"):
            accelerator.prepare(model, optimizer, schedule)
    assert (accelerator._models, accelerator._optimizers) == ([], [])
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    assert balanced.engine is not None
    assert len(accelerator._models) == len(accelerator._optimizers) == len(accelerator._schedulers) == 1
    loss = model(input_ids=torch.arange(8).view(1, 8), labels=torch.arange(8).view(1, 8)).loss
    accelerator.backward(loss)
    optimizer.step()
    assert balanced.engine.last_step is not None
    accelerator.free_memory()


def test_replaced_methods_are_those_of_accelerate() -> None:
    """The versions that we replace methods of have them all, with the arguments that we pass on."""
    import inspect

    for name, wanted in {
        "prepare_model": ["model", "device_placement", "evaluation_mode"],
        "prepare_optimizer": ["optimizer", "device_placement"],
        "clip_grad_norm_": ["parameters", "max_norm", "norm_type"],
        "get_state_dict": ["model", "unwrap"],
        "join_uneven_inputs": ["joinables", "even_batches"],
    }.items():
        assert list(inspect.signature(getattr(Accelerator, name)).parameters) == ["self", *wanted]
