"""GradScaler over thread ranks: what one rank finds in its experts' gradients, all ranks act upon."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import prophet
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from tests.helpers.expert_lists import DIM, MixtralSparseMoeBlock
from tests.helpers.support import FixedPlanner, everywhere, on_threads, seeded
from tests.helpers.training import Case, Run, Step, compare, expected

CASE = Case(ranks=2, shapes=((2, 3), (4,)), seed=7)
ALL = FixedPlanner(everywhere(4, 2))
SCALE = 1024.0


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE)


def spoil(run: Run) -> None:
    """Rank 1 finds an infinite gradient in an expert of its own; nobody else does."""
    if run.group.rank == 1:
        grad = run.model.moe(1).experts.w_out.grad
        assert grad is not None
        grad[0, 0, 0] = torch.nan


def parameters(run: Run) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in run.model.named_parameters()}


def unchanged(run: Run, before: dict[str, Tensor], part: str = "") -> bool:
    return all(torch.equal(p, before[n]) for n, p in run.model.named_parameters() if part in n)


def test_the_engine_ends_a_skipped_step() -> None:
    """With two microbatches per step, and with clipping between unscale_ and step; later steps are the oracle's."""
    case = replace(CASE, microbatches=2)

    def body(group: Collective) -> list[Step]:
        run, amp, steps = Run(case, group, ALL, slots_per_rank=8), scaler(), []
        for s in (0, 50, 1, 2):
            run.zero_grad()
            for m in range(2):
                loss = run.forward(s, m)
                amp.scale(loss).backward()
                run.loss += loss.detach()
            before, ended = parameters(run), run.engine.step
            if s == 50:
                spoil(run)
            amp.unscale_(run.optimizer)
            seen = run.averaged()
            run.engine.clip_grad_norm_(run.model.parameters(), 1e9)
            amp.step(run.optimizer)
            amp.update()
            assert run.engine.step == ended + 1
            assert not run.engine.runtime.running
            assert unchanged(run, before) == (s == 50)
            assert amp.get_scale() == (SCALE if s == 0 else SCALE / 2)
            if s != 50:
                steps.append(replace(seen, report=run.engine.last_step))
        run.close()
        return steps

    by_rank = on_threads(2, body)
    compare(expected(case), by_rank)
    for step in by_rank[0][1:]:
        assert step.report is not None
        assert len(step.report.actions) == 8, "Trans once and Agg once, after a skipped step too"


def test_a_step_that_comes_early_is_complete_before_it_is_unscaled() -> None:
    """Gradients that came home within optimizer.step() would keep the loss's scale."""
    case = replace(CASE, steps=3)

    def body(group: Collective) -> list[Step]:
        run, amp, steps = Run(case, group, ALL, slots_per_rank=8, accumulation_steps=2), scaler(), []
        for s in range(3):
            run.zero_grad()
            loss = run.forward(s)
            amp.scale(loss).backward()
            run.loss += loss.detach()
            amp.unscale_(run.optimizer)
            steps.append(run.averaged())
            amp.step(run.optimizer)
            amp.update()
        run.close()
        return steps

    with pytest.warns(UserWarning, match="came before 2 backward passes had run"):
        by_rank = on_threads(2, body)
    compare(expected(case), by_rank)


def test_several_optimizers() -> None:
    """The experts' optimizer is not the one that was attached; each is skipped, or not, by all ranks."""

    def body(group: Collective) -> None:
        run, amp = Run(CASE, group, ALL, hooked=False, slots_per_rank=8), scaler()
        run.engine.close()
        experts = [p for n, p in run.model.named_parameters() if ".experts." in n]
        shared = [p for n, p in run.model.named_parameters() if ".experts." not in n]
        of_experts, of_shared = torch.optim.SGD(experts, lr=0.1), torch.optim.SGD(shared, lr=0.1)
        engine = prophet.attach(run.model, of_shared, config=CASE.engine_config(ALL, slots_per_rank=8))
        for s in range(4):
            amp.scale(run.forward(s)).backward()
            run.averaged()
            before = parameters(run)
            if s == 2:
                spoil(run)
            amp.step(of_experts)
            assert unchanged(run, before, ".experts.") == (s == 2)
            amp.step(of_shared)
            amp.update()
            assert not unchanged(run, before, "mixes")
            assert engine.step == s + 1
            assert amp.get_scale() == (SCALE / 2 if s >= 2 else SCALE)
            of_experts.zero_grad()
            of_shared.zero_grad()
        engine.close()

    on_threads(2, body)


def test_a_rank_without_gradients_follows_the_others() -> None:
    """torch refuses an optimizer that has no gradients at all; here other ranks have some, and wait."""

    def body(group: Collective) -> float:
        run, amp = Run(CASE, group, ALL, slots_per_rank=8), scaler()
        experts = torch.optim.SGD([p for n, p in run.model.named_parameters() if ".experts." in n], lr=0.1)
        amp.scale(run.forward(0)).backward()
        if group.rank == 0:
            experts.zero_grad()
        spoil(run)
        amp.step(experts)
        amp.update()
        experts.zero_grad()
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            amp.step(experts)
        return amp.get_scale()

    assert on_threads(2, body) == [SCALE / 2] * 2


@pytest.mark.parametrize("attached", ["never", "no longer"])
def test_without_an_engine(attached: str) -> None:
    """Of a model that was converted, or whose engine was closed, the ranks act alike as well."""

    with seeded(3):
        built = nn.Sequential(nn.Linear(DIM, DIM), MixtralSparseMoeBlock())
    models = [built, copy.deepcopy(built)]

    def body(group: Collective) -> float:
        model = models[group.rank]
        prophet.convert(model, group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if attached == "no longer":
            prophet.attach(model, optimizer).close()
        amp = scaler()
        amp.scale(model(torch.ones(3, DIM))[0].square().mean()).backward()
        p = next(p for p in model.parameters() if hasattr(p, "prophet_expert") and p.grad is not None)
        before = p.detach().clone()
        if group.rank == 1:
            assert p.grad is not None
            p.grad.fill_(torch.inf)
        amp.step(optimizer)
        amp.update()
        assert torch.equal(p, before)
        return amp.get_scale()

    assert on_threads(2, body) == [SCALE / 2] * 2


def test_a_scaler_that_is_off_sends_nothing() -> None:
    def body(group: Collective) -> list[str]:
        run = Run(CASE, group, ALL, slots_per_rank=8)
        sent: list[str] = []
        inner = group.gather_messages

        def gather_messages(x: Tensor, *, op: Operation) -> Tensor:
            sent.append(op.name)
            return inner(x, op=op)

        group.gather_messages = gather_messages  # type: ignore[method-assign]
        for amp in (torch.amp.GradScaler("cpu", enabled=False), scaler()):
            run.zero_grad()
            amp.scale(run.forward(0)).backward()
            run.averaged()
            amp.step(run.optimizer)
            amp.update()
            sent.append("|")
        run.close()
        return [s for s in sent if s == "|" or "GradScaler" in s]

    for sent in on_threads(2, body):
        assert sent[0] == "|"
        assert len(sent) == 3


def test_other_models_are_left_alone() -> None:
    """Optimizers that hold no experts: torch's own behaviour, on one rank alone, with and without an overflow."""

    def body(group: Collective) -> None:
        run = Run(CASE, group, ALL)
        if group.rank == 1:
            return
        layer = nn.Linear(3, 3)
        optimizer, amp = torch.optim.SGD(layer.parameters(), lr=0.1), scaler()
        for overflow in (False, True):
            before = layer.weight.detach().clone()
            amp.scale(layer(torch.ones(2, 3)).sum()).backward()
            if overflow:
                assert layer.weight.grad is not None
                layer.weight.grad[0, 0] = torch.inf
            amp.step(optimizer)
            amp.update()
            assert torch.equal(layer.weight, before) == overflow
        assert amp.get_scale() == SCALE / 2
        run.engine.close()

    on_threads(2, body)


def test_an_infinite_gradient_that_a_replica_sends_home() -> None:
    """Rank 0's tokens make it, in its replica of an expert of rank 1: it arrives there, and counts on both."""

    def body(group: Collective) -> tuple[float, list[bool]]:
        run, amp = Run(CASE, group, ALL, slots_per_rank=8), scaler()
        for s in range(2):
            run.zero_grad()
            loss = run.forward(s)
            if s == 1 and group.rank == 0:
                step = run.engine.runtime.step
                assert step is not None
                replica = step.blocks[0].arrived()[0]
                replica.grads.flatten()[0] = torch.inf
            amp.scale(loss).backward()
            before = parameters(run)
            run.averaged()
            infinite = [not bool(torch.isfinite(p.grad).all()) for p in run.model.parameters() if p.grad is not None]
            amp.step(run.optimizer)
            amp.update()
        assert unchanged(run, before)
        run.zero_grad()
        amp.scale(run.forward(2)).backward()
        assert all(bool(torch.isfinite(p.grad).all()) for p in run.model.parameters() if p.grad is not None)
        amp.step(run.optimizer)
        run.close()
        return amp.get_scale(), infinite

    here, home = on_threads(2, body)
    assert not any(here[1]), "the rank that made it has none"
    assert any(home[1])
    assert here[0] == home[0] == SCALE / 2
