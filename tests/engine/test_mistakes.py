"""The mistakes that a user is most likely to make: each has a clear error or warning, or is no mistake at all.

`ELSEWHERE` names the tests of those that are tested with the part of the library they concern; the others are here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.fx

import prophet
from prophet.errors import CollectiveError, GradientMismatch, PlanMismatch
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld
from tests.helpers.support import FixedPlanner, TinyModel, everywhere, on_threads
from tests.helpers.training import Case, Run, Step, compare, expected

ROOT = Path(__file__).resolve().parents[2]
CASE = Case(ranks=2, steps=4, blocks=2, seed=8)
STATIC = prophet.EngineConfig(planner="static")

ELSEWHERE = {
    "experts do not divide by the group": "convert/test_convert.py::test_wrong_group_size",
    "a layer for an impossible group": "layer/test_moe.py::test_impossible_layers",
    "processes do not divide into groups": "processes/test_expert_replicas.py::test_groups_that_do_not_fit",
    "converted after the optimizer was built": "convert/test_convert.py::test_after_the_optimizer_was_built",
    "converted twice": "convert/test_convert.py::test_converting_twice",
    "experts of several dtypes": "convert/test_convert.py::test_mixed_dtypes",
    "input of another dtype than the layer": "layer/test_moe.py::test_another_dtype",
    "tied experts in a model to convert": "convert/test_convert.py::test_tied_experts",
    "two engines on one model": "engine/test_steps.py::test_two_engines_on_one_model",
    "wrapped in DDP too early": "processes/test_ddp.py::test_ddp_and_repeatability",
    "fully_shard takes the experts, too": "processes/test_fsdp.py::test_experts_that_were_cut_are_refused",
    "accumulation that was not announced": (
        "engine/test_steps.py::test_unannounced_accumulation_is_correct_and_costs_one_agg_each"
    ),
    "fewer backward passes than announced": (
        "engine/test_steps.py::test_an_early_optimizer_step_warns_and_is_still_complete"
    ),
    "evaluation in training mode": "engine/test_steps.py::test_a_forward_without_gradients_in_training_mode",
    "evaluation on one rank only": "engine/test_agreement.py::test_one_rank_evaluates_while_the_others_train",
    "evaluation on one rank while the others wait": (
        "processes/test_alone.py::test_a_forward_pass_on_one_rank_is_named_soon"
    ),
    "an average of the model": "processes/test_copied_and_compiled.py::test_averages_and_copies",
    "an auxiliary loss that nobody adds": "layer/test_moe.py::test_auxiliary_losses_that_nobody_collects",
    "another configuration on one rank": "engine/test_agreement.py::test_another_engine_configuration",
    "a step that nobody ends": "engine/test_steps.py::test_a_step_that_nobody_ends",
    "one rank's state dict alone": "layer/test_state_dict.py::test_one_ranks_own_entries_are_not_enough_elsewhere",
    "a GradScaler that one rank leaves out": "processes/test_grad_scaler.py::test_a_rank_that_leaves_the_scaler_out",
    "model.apply(init) after building": (
        "engine/test_identical_experts.py::test_init_after_building_is_refused_with_the_line_to_write"
    ),
    "no MoE layer in the model": "engine/test_steps.py::test_a_model_without_moe_layers",
}


@pytest.mark.parametrize("mistake", ELSEWHERE)
def test_is_tested_elsewhere(mistake: str) -> None:
    path, name = ELSEWHERE[mistake].split("::")
    assert f"def {name}(" in (ROOT / "tests" / path).read_text(encoding="utf-8")


def alone() -> Collective:
    return ThreadWorld(1).collective(0)


def warned(body: Callable[[], Any]) -> list[str]:
    """The warnings of `body`, which may run on threads."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        body()
    return [str(w.message) for w in found]


# --- set-up ---


def test_a_list_of_ranks_as_the_group() -> None:
    with pytest.raises(TypeError, match="group must be a process group, a Collective or None, got list"):
        prophet.MoE(4, 4, 4, group=[0, 1])  # type: ignore[arg-type]


def test_a_dictionary_as_the_configuration() -> None:
    with pytest.raises(TypeError, match=r"config must be a prophet\.EngineConfig, got dict"):
        prophet.attach(TinyModel(), config={"planner": "static"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: m.parameters(), r"optimizer must be a torch\.optim\.Optimizer, got generator"),
        (lambda m: STATIC, "got EngineConfig"),
        (
            lambda m: torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(m.parameters(), lr=0.1), lambda s: 1.0),
            r"got LambdaLR; it wraps one: pass its \.optimizer",
        ),
    ],
)
def test_something_else_as_the_optimizer(make: Callable[[Any], Any], message: str) -> None:
    model = TinyModel()
    with pytest.raises(TypeError, match=message):
        prophet.attach(model, make(model), config=STATIC)
    prophet.attach(model, config=STATIC).close()  # nothing was left attached


def test_the_optimizer_of_another_model() -> None:
    model = TinyModel()
    with pytest.raises(ValueError, match=r"holds none of the model's parameters: build it after prophet\.convert"):
        prophet.attach(model, torch.optim.SGD(TinyModel().parameters(), lr=0.1), config=STATIC)


def test_parameters_that_were_replaced_after_the_optimizer_was_built() -> None:
    """As by fully_shard(), which replaces the dense parameters and leaves the experts."""
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.head = torch.nn.Linear(8, 11)
    found = warned(lambda: prophet.attach(model, optimizer, config=STATIC).close())
    assert len(found) == 1
    assert "does not hold 2 trainable parameters (head.weight, ...), but 2 that are not in the model" in found[0]


def test_optimizers_of_parts_and_of_more_are_no_mistake() -> None:
    model, other = TinyModel(), torch.nn.Linear(2, 2)
    experts = [p for n, p in model.named_parameters() if ".experts." in n]
    for params in (experts, [*model.parameters(), *other.parameters()]):
        optimizer = torch.optim.SGD(params, lr=0.1)
        assert not warned(lambda o=optimizer: prophet.attach(model, o, config=STATIC).close())  # type: ignore[misc]


def test_built_before_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyModel(group=alone())
    monkeypatch.setattr("prophet.engine.attach.processes", lambda: 2)
    found = warned(lambda: prophet.attach(model, config=STATIC).close())
    assert len(found) == 1
    assert "built for a single rank, or before init_process_group" in found[0]


def test_a_group_smaller_than_the_world_without_averaging_over_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prophet.engine.attach.processes", lambda: 4)

    def body(group: Collective) -> None:
        prophet.attach(TinyModel(group=group), config=STATIC).close()

    found = warned(lambda: on_threads(2, body))
    assert found
    assert "4 processes, but an expert-parallel group of 2: the copies of one expert drift apart" in found[0]


def test_parameters_of_one_bank_in_several_dtypes() -> None:
    model = TinyModel()
    model.moe(1).experts.w_out.data = model.moe(1).experts.w_out.data.bfloat16()
    message = r"must have one dtype, got w_in torch\.float32, .* w_out torch\.bfloat16"
    with pytest.raises(ValueError, match=message):
        model(torch.arange(3))
    with pytest.raises(ValueError, match=message):
        prophet.attach(model, config=STATIC)


# --- ranks that drift apart ---


def drifting(change: Callable[[Run, int], None], *, averaged: bool = True) -> list[str]:
    """Warnings of two steps on two ranks in which `change(run, step)` comes before the optimizer's step."""

    def body(group: Collective) -> None:
        run = Run(CASE, group)
        change(run, -1)
        for step in range(3):
            run.zero_grad()
            run.backward(step)
            if averaged:
                run.averaged()
            change(run, step)
            run.optimizer.step()
        run.close()

    return [w for w in warned(lambda: on_threads(2, body)) if "differs from the other ranks'" in w]


def test_gradients_that_nobody_averages() -> None:
    found = drifting(lambda run, step: None, averaged=False)
    assert len(found) == 2, "once on each rank, not in every step"
    assert re.search(r"step 0 used on rank\(s\) \[[01]\] differs .* averaged \(DistributedDataParallel or", found[0])
    assert not drifting(lambda run, step: None)


def test_torchs_own_clipping() -> None:
    def clip(run: Run, step: int) -> None:
        if step >= 0:
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)

    with pytest.raises(GradientMismatch, match=r"step 0: rank\(s\) \[[01]\] .*engine\.clip_grad_norm_"):
        drifting(clip)

    def right(run: Run, step: int) -> None:
        if step >= 0:
            run.engine.clip_grad_norm_(run.model.parameters(), 0.1)

    assert not drifting(right)


def test_ranks_that_start_differently() -> None:
    def start(run: Run, step: int) -> None:
        if step < 0 and run.group.rank == 1:
            run.model.head.bias.data += 1.0

    found = drifting(start)
    assert re.search(r"rank\(s\) \[[01]\] differs", found[0])
    assert "start alike" in found[0]


# --- in the loop ---


def losses(case: Case, body: Callable[[Run], list[float]], *, balanced: bool = True) -> list[list[float]]:
    def rank(group: Collective) -> list[float]:
        run = Run(case, group, FixedPlanner(everywhere(4, 2)), balanced=balanced, slots_per_rank=8)
        found = body(run)
        run.close()
        return found

    return on_threads(2, rank)


def test_layers_that_some_steps_skip() -> None:
    """As stochastic depth does, drawn alike on all ranks."""

    def body(run: Run) -> list[float]:
        found, forwards = [], [moe.forward for moe in run.model.moes]
        for step in range(CASE.steps):
            for at, moe in enumerate(run.model.moes):
                moe.forward = forwards[at] if step % 3 != at + 1 else (lambda x: x)
            found.append(run.whole_step(step).loss)
        return found

    balanced, plain = losses(CASE, body), losses(CASE, body, balanced=False)
    assert balanced[0] == pytest.approx(plain[0], abs=1e-10)
    assert plain[0] != pytest.approx(losses(CASE, lambda run: [run.whole_step(s).loss for s in range(4)])[0], abs=1e-6)


def test_a_layer_that_one_rank_skips() -> None:
    def body(group: Collective) -> None:
        run = Run(CASE, group)
        if group.rank == 1:
            run.model.moe(1).forward = lambda x: x  # type: ignore[method-assign]
        run.whole_step(0)

    # either of the two may notice first
    here, there = "exchange of counts of layer 1", "combine backward of layer 0"
    with pytest.raises(
        CollectiveError,
        match=f"{here} failed: rank 1 is in {there} instead|{there} failed: rank 0 is in {here} instead",
    ):
        on_threads(2, body, timeout_s=5)


def test_steps_with_different_numbers_of_microbatches() -> None:
    def body(run: Run) -> list[float]:
        found = []
        for step, microbatches in enumerate((1, 3, 2, 1)):
            run.zero_grad()
            for microbatch in range(microbatches):
                run.backward(step, microbatch)
            found.append(run.step().loss)
        return found

    plain = losses(CASE, body, balanced=False)
    assert losses(CASE, body)[0] == pytest.approx(plain[0], abs=1e-10)
    with pytest.warns(UserWarning, match="came before 2 backward passes"):
        # announced as two, which is complete all the same
        assert losses(replace(CASE, microbatches=2), body)[0] == pytest.approx(plain[0], abs=1e-10)


def test_one_rank_with_fewer_microbatches() -> None:
    def body(group: Collective) -> None:
        run = Run(CASE, group)
        for step in range(2):
            for microbatch in range(2 - group.rank):
                run.backward(step, microbatch)
            run.optimizer.step()

    with pytest.raises((CollectiveError, PlanMismatch), match=r"rank 1 is in|rank\(s\) \[1\]|no answer"):
        on_threads(2, body, timeout_s=5)


def test_a_closure() -> None:
    """The whole forward and backward pass inside `optimizer.step`."""

    def rank(group: Collective) -> list[Step]:
        run = Run(CASE, group, FixedPlanner(everywhere(4, 2)), slots_per_rank=8)
        steps: list[Step] = []

        def closure(step: int) -> float:
            run.zero_grad()
            run.backward(step)
            steps.append(run.averaged())
            return steps[-1].loss

        for step in range(CASE.steps):
            run.optimizer.step(lambda s=step: closure(s))  # type: ignore[misc]
        assert run.engine.step == CASE.steps
        run.close()
        return steps

    compare(expected(CASE), on_threads(2, rank))


def test_experts_shared_by_two_layers() -> None:
    """Two gates over one bank: its gradient is the sum of what the oracle has for two that are equal."""

    def rank(group: Collective) -> Step:
        run = Run(CASE, group, balanced=False)
        run.model.moe(1).experts = run.model.moe(0).experts
        engine = prophet.attach(run.model, config=CASE.engine_config(FixedPlanner(everywhere(4, 2)), slots_per_rank=8))
        run.backward(0)
        engine.finish_step()  # the next one has replicas
        run.zero_grad()
        run.backward(0)
        seen = run.averaged()
        assert engine.pool.in_use_bytes
        engine.close()
        return seen

    class Shared(Case):
        def state(self) -> dict[str, torch.Tensor]:
            state = super().state()
            return {n: state[n.replace("moes.1.experts", "moes.0.experts")] for n in state}

    loss, grads = expected(Shared(**{f: getattr(CASE, f) for f in CASE.__dataclass_fields__}))[0]
    for name in [n for n in grads if n.startswith("moes.0.experts")]:
        twin = name.replace("moes.0", "moes.1")
        grads[name] = grads[twin] = grads[name] + grads[twin]
    compare([(loss, grads)], [[step] for step in on_threads(2, rank)])


class Straight(torch.nn.Module):
    """Without a loop over its blocks, in which torch.compile gives up."""

    def __init__(self, group: Collective) -> None:
        super().__init__()
        self.first, self.moe, self.last = (
            torch.nn.Linear(4, 6),
            prophet.MoE(6, 8, 4, group=group),
            torch.nn.Linear(6, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.moe(torch.tanh(self.first(x))).relu())
        return y


@pytest.mark.parametrize("balanced", [False, True])
def test_compiling_the_model(balanced: bool) -> None:
    """No mistake: what is around the MoE layer is compiled, and the layer runs as it is."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return graph.forward

    model, found = Straight(alone()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = prophet.attach(model, optimizer, config=STATIC) if balanced else None
    for run in (model, torch.compile(model, backend=backend)):
        optimizer.zero_grad()
        y = run(torch.linspace(-1, 1, 20).view(5, 4))
        y.square().sum().backward()
        optimizer.step()
        found.append([y.detach(), *(p.grad for p in model.parameters())])
    assert len(graphs) == 2, "before the layer and after it"
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    if engine is not None:
        assert engine.step == 2
        engine.close()


def test_freezing_experts_in_the_middle() -> None:
    def body(run: Run) -> list[float]:
        found = []
        for step in range(CASE.steps):
            run.model.moe(0).experts.requires_grad_(step != 1)
            found.append(run.whole_step(step).loss)
        return found

    assert losses(CASE, body)[0] == pytest.approx(losses(CASE, body, balanced=False)[0], abs=1e-10)


def test_casting_the_model_after_it_was_attached() -> None:
    def body(run: Run) -> list[float]:
        found = [run.whole_step(0).loss]
        run.model.float()
        for step in (1, 2):
            run.optimizer.zero_grad()
            out = run.model(run.case.ids(step, 0)[run.group.rank])
            assert out.dtype == torch.float32
            loss = out.square().mean()
            loss.backward()
            run.optimizer.step()
            found.append(float(loss.detach()))
        return found

    balanced, plain = losses(CASE, body), losses(CASE, body, balanced=False)
    for rank in range(2):
        assert balanced[rank] == pytest.approx(plain[rank], rel=1e-5)
