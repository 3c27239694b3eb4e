"""`deepspeed.initialize` itself: who heeds the section, what is refused, frozen experts, other ways to average."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import prophet_deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

import prophet
from tests.helpers.deepspeed_support import Case, Model, batch, differences, moved, parameters, prepare, start, train
from tests.helpers.launch import on_processes

BASE = Case(optimizer="SGD", lr=0.5, scheduler=False, experts=4)
AVERAGED: dict[str, dict[str, Any]] = {
    "sum": {"gradient_allreduce_op": "sum"},
    "predivided": {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
}


def averaged(case: Case) -> Any:
    engine = start(case)
    losses = train(engine, 3)
    return losses, 0 if case.plain else moved(engine), parameters(engine)


def unsynced(case: Case) -> Any:
    """Two microbatches by `no_sync` and then one with, without DeepSpeed's own accumulation."""
    engine = start(replace(case, microbatches=1))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(2):
        for micro in range(3):
            inside = contextlib.nullcontext() if micro == 2 else engine.no_sync()
            with inside:
                engine.backward(engine(batch(step, micro).chunk(ranks)[rank]))
        engine.step()
    return [], 0 if case.plain else moved(engine), parameters(engine)


def frozen(case: Case, layers: int) -> Any:
    """The experts of the first `layers` blocks do not train."""
    deepspeed = prepare()
    model: Any = Model(case, 1 if not case.plain else dist.get_world_size())
    for moe in model.moes[:layers]:
        moe.deepspeed_moe.experts.requires_grad_(False)
    params = [p for p in model.parameters() if p.requires_grad or not case.plain]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=case.deepspeed_config())
    return train(engine, 3), 0, parameters(engine)


def twice(case: Case) -> dict[str, Any]:
    """One engine after the other for the same model, and what is said where the first one is still there."""
    deepspeed, found = prepare(), {}
    whole = train(start(case), 4)
    model = Model(case, 1)

    def engine(config: dict[str, Any]) -> Any:
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    first = engine(case.deepspeed_config())
    losses = train(first, 2)
    for name, made in (("with", case), ("without", case.plainly())):
        try:
            engine(made.deepspeed_config())
        except ValueError as error:
            found[name] = str(error)
    first.prophet.close()
    second = engine(case.deepspeed_config())
    second.prophet.planner = first.prophet.planner
    second.global_steps = 2  # which data follow
    return found | {"losses": losses + train(second, 2), "whole": whole, "copies": moved(second)}


def resumed_without(case: Case, folder: Path) -> str:
    """What DeepSpeed's own engine says of a folder that a balanced one has written."""
    start(case).save_checkpoint(folder)
    try:
        start(case.plainly()).load_checkpoint(folder)
    except ValueError as error:
        return str(error)
    return ""


def by_default(case: Case) -> dict[str, Any]:
    """`install` gives models with experts a section where the configuration has none; the latest call counts."""
    deepspeed, found = prepare(), {"function": prepare().initialize.__module__}
    plain = replace(case, plain=True)
    try:
        prophet_deepspeed.install(section={"planner": "top2"})
        engine = start(plain)
        dense, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 2})
        found |= {"experts": engine.prophet.planner.name, "dense": hasattr(dense, "prophet")}
        found |= {"losses": train(engine, 3), "copies": moved(engine)}
        with pytest.raises(ValueError) as error:
            prophet_deepspeed.install(section={"planers": "top2"})
        found["wrong"] = str(error.value)
    finally:
        prophet_deepspeed.install()
    engine = start(plain)
    return found | {"without": hasattr(engine, "prophet"), "plain losses": train(engine, 3)}


def adafactor(groups: Any) -> torch.optim.Optimizer:
    """It sums squares of gradients over the rows of a tensor."""
    return torch.optim.Adafactor(groups)


def refusals() -> dict[str, str]:
    deepspeed, found = prepare(), {}

    def said(name: str, model: nn.Module, config: dict[str, Any], **options: Any) -> None:
        try:
            deepspeed.initialize(model=model, config={"train_batch_size": 2, **config}, **options)
        except Exception as error:  # any: its text is what is tested
            found[name] = f"{type(error).__name__}: {error}"

    def ours() -> nn.Module:
        return nn.Sequential(prophet.MoE(4, 6, 4, 2, group=dist.group.WORLD))

    said("plain", ours(), {})
    said("dense", nn.Linear(2, 2), {"prophet": {}})
    said("wrapped", nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), {"prophet": {}})
    attached = ours()
    prophet.attach(attached)
    said("attached", attached, {"prophet": {}})
    said("mpu", ours(), {"prophet": {}}, mpu=Any)
    section = {"prophet": {"ep_size": 2}}
    model = ours()
    said("function", model, section, model_parameters=model.parameters(), optimizer=adafactor)
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 2})
    found["without a section"] = str(hasattr(engine, "prophet"))
    only, *_ = deepspeed.initialize(model=ours(), config={"train_batch_size": 2, "bf16": {"enabled": True}, **section})
    found["no optimizer"] = str(only(torch.ones(2, 4, dtype=torch.bfloat16)).shape)
    return found


def body(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"refused": refusals(), "without": resumed_without(BASE, folder)}
    found["by default"] = by_default(BASE)
    for stage in (0, 2):
        found["twice", stage] = twice(replace(BASE, stage=stage))
    for kind in (False, True):
        case = replace(BASE, plain=kind)
        for name, config in AVERAGED.items():
            found[name, kind] = averaged(replace(case, lr=0.1, config=config))
        found["no_sync", kind] = unsynced(case)
        found["one layer frozen", kind] = frozen(replace(case, stage=2), 1)
    for stage in (0, 1, 2):
        found[f"all frozen, ZeRO-{stage}", False] = frozen(replace(BASE, stage=stage), 2)
        # plain DeepSpeed's ZeRO has no group of experts then, and refuses
        found[f"all frozen, ZeRO-{stage}", True] = frozen(replace(BASE, plain=True), 2)
    return found


NAMES = [*AVERAGED, "no_sync", "one layer frozen", *(f"all frozen, ZeRO-{stage}" for stage in (0, 1, 2))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    return on_processes(2, body, tmp_path_factory.mktemp("checkpoint"), timeout_s=300)[0]  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", NAMES)
def test_losses_and_parameters_are_those_of_plain_deepspeed(name: str, runs: dict[Any, Any]) -> None:
    (ours, replicas, mine), (plain, _, wanted) = runs[name, False], runs[name, True]
    assert ours == pytest.approx(plain, abs=1e-6)
    assert differences(mine, wanted) < 2e-6
    assert replicas > 0 or "frozen" in name


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_clear_error(runs: dict[Any, Any]) -> None:
    found = runs["refused"]
    assert "DeepSpeed alone would average its experts" in found["plain"]
    assert "no MoE block found" in found["dense"]
    assert "prophet: the model is wrapped in DistributedDataParallel already" in found["wrapped"]
    assert "prophet: the model has an engine already" in found["attached"]
    assert found["mpu"].startswith("ConfigError: mpu")
    assert found["without a section"] == "False"
    assert "optimizer: Adafactor treats experts that share a tensor as a whole" in found["function"]
    assert found["no optimizer"] == "torch.Size([2, 4])"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_second_engine_goes_on_once_the_first_is_closed(stage: int, runs: dict[Any, Any]) -> None:
    found = runs["twice", stage]
    assert found["losses"] == pytest.approx(found["whole"], abs=1e-6)
    assert found["copies"] > 0
    assert "call its close() first (engine.prophet.close())" in found["with"]
    assert "prophet: the model's experts are converted, and the configuration has no such section" in found["without"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_configuration_that_has_lost_the_section_does_not_resume(runs: dict[Any, Any]) -> None:
    assert runs["without"].startswith("prophet: ")
    assert "was written with this section, and the configuration has none" in runs["without"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_default_section_serves_scripts_without_one(runs: dict[Any, Any]) -> None:
    found = runs["by default"]
    assert found["function"] == "deepspeed"  # a script may have imported it before
    assert found["experts"] == "top2"
    assert found["losses"] == pytest.approx(found["plain losses"], abs=1e-6)
    assert found["copies"] > 0
    assert (found["dense"], found["without"]) == (False, False)
    assert "prophet.planers: unknown key; did you mean 'planner'" in found["wrong"]
