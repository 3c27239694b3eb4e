"""The life of a step: accumulation, evaluation, skipped and failed steps. Gradients stay the oracle's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import prophet
from prophet.ranks.collective import Collective
from prophet.scheduler.schedules import block_wise
from tests.helpers.support import FixedPlanner, everywhere, on_threads
from tests.helpers.training import Case, Run, Step, average, check_on_threads, compare, expected, measure

CASE = Case(ranks=2, shapes=((2, 3), (4,)), seed=7)
ALL = FixedPlanner(everywhere(4, 2))


def check(case: Case, body: Callable[[Run], list[Step]], **options: Any) -> list[list[Step]]:
    """Run `body` on thread ranks with replicas of everything everywhere, and compare what it returns."""
    planner = FixedPlanner(everywhere(case.num_experts, case.ranks))

    def rank(group: Collective) -> list[Step]:
        run = Run(case, group, planner, **{"slots_per_rank": 8, **options})
        steps = body(run)
        run.close()
        return steps

    by_rank = on_threads(case.ranks, rank)
    compare(expected(case)[: len(by_rank[0])], by_rank)
    return by_rank


def launched(step: Step) -> list[str]:
    assert step.report is not None
    return [str(a) for a in step.report.actions]


ONCE = [str(a) for a in block_wise(2)]


# --- gradient accumulation ------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["block-wise", "blocking"])
def test_announced_accumulation_moves_everything_once(schedule: str) -> None:
    case = replace(CASE, microbatches=3, schedule=schedule)
    for steps in check(case, lambda run: [run.whole_step(s) for s in range(3)]):
        assert launched(steps[0]) == []
        for step in steps[1:]:
            actions = launched(step)
            assert sorted(actions) == sorted(set(actions))
            assert len(actions) == 8
            assert [a[:5] for a in actions] == ["TRANS"] * 4 + ["AGG(1"] * 2 + ["AGG(0"] * 2


def test_no_sync_moves_everything_once() -> None:
    case = replace(CASE, microbatches=3)

    def body(run: Run) -> list[Step]:
        steps = []
        for s in range(3):
            run.zero_grad()
            with run.engine.no_sync():
                run.backward(s, 0)
                run.backward(s, 1)
            run.backward(s, 2)
            steps.append(run.step())
        return steps

    for steps in check(case, body, accumulation_steps=1):
        assert launched(steps[1]) == launched(steps[2]) == ONCE


def test_no_sync_together_with_announced_accumulation() -> None:
    def body(run: Run) -> list[Step]:
        steps = []
        for s in range(3):
            run.zero_grad()
            with run.engine.no_sync():
                run.backward(s, 0)
            run.backward(s, 1)
            steps.append(run.step())
        return steps

    for steps in check(replace(CASE, microbatches=2), body):
        assert launched(steps[2]) == ONCE


def test_unannounced_accumulation_is_correct_and_costs_one_agg_each() -> None:
    case = replace(CASE, microbatches=3, announced=False)
    for steps in check(case, lambda run: [run.whole_step(s) for s in range(3)]):
        actions = launched(steps[2])
        assert sum(a.startswith("TRANS") for a in actions) == 4
        assert sum(a.startswith("AGG") for a in actions) == 4 * 3


def test_more_backward_passes_than_announced() -> None:
    case = replace(CASE, microbatches=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the third pass's part comes home with the optimizer's step
        states = on_threads(2, lambda group: final_state(case, group, accumulation_steps=2))
    assert_stepped(case, states)


def final_state(case: Case, group: Collective, **options: Any) -> dict[str, Tensor]:
    run = Run(case, group, ALL, slots_per_rank=8, **options)
    for s in range(case.steps):
        run.zero_grad()
        for m in range(case.microbatches):
            run.backward(s, m)
        run.step()
    run.close()
    return run.model.state_dict()


def assert_stepped(case: Case, states: list[dict[str, Tensor]]) -> None:
    """The experts after `case.steps` SGD steps are where the oracle's are."""
    wanted = case.state()
    for _, grads in expected(case):
        for name, grad in grads.items():
            wanted[name] = wanted[name] - case.lr * torch.from_numpy(grad)
    for state in states:
        for name, value in state.items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-10, msg=name)


def test_an_early_optimizer_step_warns_and_is_still_complete() -> None:
    case = replace(CASE, steps=3, microbatches=1)

    def body(group: Collective) -> dict[str, Tensor]:
        run = Run(case, group, ALL, slots_per_rank=8, accumulation_steps=2)
        for s in range(3):
            run.zero_grad()
            run.backward(s)
            run.step()
        run.close()
        return run.model.state_dict()

    with pytest.warns(UserWarning, match="came before 2 backward passes had run"):
        states = on_threads(2, body)
    assert_stepped(case, states)


def test_an_optimizer_step_after_no_sync_alone_says_so() -> None:
    def body(group: Collective) -> None:
        run = Run(CASE, group, ALL, slots_per_rank=8)
        run.whole_step(0)
        with run.engine.no_sync():
            run.backward(1)
        run.step()

    with pytest.warns(UserWarning, match="no_sync"):
        on_threads(2, body)


# --- evaluation -----------------------------------------------------------------------------------


def evaluate(run: Run, *, training: bool = False, mode: Callable[[], Any] = torch.no_grad) -> Tensor:
    run.model.train(training)
    with mode():
        loss = run.forward(99)
    run.model.train()
    return loss


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_evaluation_between_steps_and_microbatches(mode: Callable[[], Any]) -> None:
    def body(run: Run) -> list[Step]:
        steps = []
        for s in range(3):
            run.zero_grad()
            evaluate(run, mode=mode)
            run.backward(s, 0)
            evaluate(run, mode=mode)
            run.backward(s, 1)
            evaluate(run, mode=mode)
            steps.append(run.step())
        return steps

    case = replace(CASE, microbatches=2)
    for steps in check(case, body):
        report = steps[2].report
        assert report is not None
        assert report.counts.sum() == 2 * 2 * 10 * case.top_k, "evaluation is not part of the step's counts"
        assert launched(steps[2]) == ONCE


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients_in_training_mode(mode: Callable[[], Any]) -> None:
    def body(run: Run) -> list[Step]:
        steps = []
        for s in range(3):
            evaluate(run, training=True, mode=mode)
            run.zero_grad()
            run.backward(s)
            steps.append(run.step())
        return steps

    check(CASE, body)


def test_evaluation_holds_no_replicas_and_equals_the_unbalanced_model() -> None:
    def body(group: Collective) -> tuple[Tensor, Tensor]:
        run = Run(CASE, group, ALL, slots_per_rank=8)
        plain = Run(CASE, group, balanced=False)
        run.whole_step(0)
        plain.whole_step(0)
        losses = evaluate(run), evaluate(plain)
        assert run.engine.pool.held_bytes == 0
        assert not run.engine.runtime.running
        run.close()
        return losses

    for balanced, plain in on_threads(2, body):
        assert torch.equal(balanced, plain)


# --- steps that are skipped, repeated or fail -----------------------------------------------------


def test_a_skipped_optimizer_step() -> None:
    """As GradScaler does on overflow: the gradients are thrown away and optimizer.step() is not called."""

    def body(run: Run) -> list[Step]:
        first = run.whole_step(0)
        run.zero_grad()
        run.backward(50)
        run.zero_grad()
        run.backward(51)
        return [first, run.whole_step(1), run.whole_step(2)]

    check(CASE, body)


def test_grad_scaler_skips_and_goes_on() -> None:
    def body(run: Run) -> list[Step]:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        steps = []
        for s in range(3):
            for overflow in (True, False):
                run.zero_grad()
                loss = run.forward(s)
                scaler.scale(loss).backward()
                if overflow:
                    for p in run.model.parameters():
                        assert p.grad is not None
                        p.grad.fill_(torch.inf)
                run.loss += loss.detach()
                scaler.unscale_(run.optimizer)
                if not overflow:
                    prepared = run.averaged()
                scaler.step(run.optimizer)
                scaler.update()
            steps.append(prepared)
        return steps

    check(CASE, body)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_zeroed_in_the_middle_of_an_accumulation(set_to_none: bool) -> None:
    """Zeroed gradients are gone, those of the replicas too."""

    def body(run: Run) -> list[Step]:
        steps = [run.whole_step(0)]
        for s in (1, 2):
            run.backward(60)
            run.optimizer.zero_grad(set_to_none=set_to_none)
            run.loss.zero_()
            run.backward(s, 0)
            run.backward(s, 1)
            steps.append(run.step())
        return steps

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(replace(CASE, microbatches=2), body)


def test_a_backward_pass_that_fails_halfway_leaves_nothing_behind() -> None:
    class Failure(RuntimeError):
        pass

    def fail(_: Tensor) -> None:
        raise Failure

    def body(run: Run) -> list[Step]:
        steps = [run.whole_step(0)]
        for s in (1, 2):
            hook = run.model.mix(0).register_hook(fail)  # after both blocks' experts, before the end
            with pytest.raises(Failure):
                run.backward(70)
            hook.remove()
            steps.append(run.whole_step(s))
        return steps

    check(CASE, body)


def test_a_backward_pass_that_fails_between_the_blocks() -> None:
    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    def body(run: Run) -> list[Step]:
        first = run.whole_step(0)
        hook = run.model.mix(1).register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            run.backward(70)
        hook.remove()
        return [first, run.whole_step(1), run.whole_step(2)]

    check(CASE, body)


def test_a_forward_pass_that_fails_halfway() -> None:
    def body(run: Run) -> list[Step]:
        steps = [run.whole_step(0)]
        for s in (1, 2):
            run.model.moes[0](torch.zeros(1, 6, dtype=torch.float64))  # and then something raises
            steps.append(run.whole_step(s))
        return steps

    check(CASE, body)


def test_two_backward_passes_through_one_graph() -> None:
    def body(run: Run) -> list[Step]:
        return [run.step_in_two_passes(s) for s in range(3)]

    check(CASE, body)


# --- parameters that change under a step ----------------------------------------------------------


def test_a_checkpoint_loaded_after_a_forward_pass() -> None:
    """A warm-up forward pass has fetched replicas; those of the old parameters must not be used."""

    def body(run: Run) -> list[Step]:
        steps = [run.whole_step(0)]
        good = {k: v.clone() for k, v in run.model.state_dict().items()}
        with torch.no_grad():
            for p in run.model.parameters():
                p.mul_(3.0)
        run.backward(80)
        run.model.load_state_dict(good)
        return [*steps, run.whole_step(1), run.whole_step(2)]

    check(CASE, body)


def test_without_an_optimizer_the_caller_ends_the_step() -> None:
    def body(run: Run) -> list[Step]:
        steps = []
        for s in range(3):
            run.zero_grad()
            run.backward(s)
            run.engine.runtime.finish_gradients()
            step = run.step()
            run.engine.finish_step()
            steps.append(step)
        return steps

    check(CASE, body, hooked=False)


def test_a_step_that_nobody_ends() -> None:
    """Attached without the optimizer, and finish_step() forgotten: replicas must not become stale."""

    def rank(group: Collective) -> list[Step]:
        run = Run(CASE, group, ALL, slots_per_rank=8, hooked=False)
        steps = []
        for s in range(CASE.steps):
            steps.append(run.whole_step(s))
            if s == 0:
                run.engine.finish_step()  # step 1 has replicas, and nobody ends it
        assert run.engine.pool.in_use_bytes > 0
        run.engine.close()
        return steps

    case = replace(CASE, steps=4)
    compare(expected(case)[:3], on_threads(2, rank))


# --- layers in unusual places ---------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_a_layer_used_twice_per_forward(microbatches: int) -> None:
    case = replace(CASE, uses=2, microbatches=microbatches, gate={"aux_loss": "switch", "z_loss_weight": 0.1})
    check(case, lambda run: [run.whole_step(s) for s in range(3)])


@pytest.mark.parametrize("aux", [{}, {"aux_loss": "gshard", "aux_loss_weight": 0.5, "z_loss_weight": 0.2}])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_recomputed_layers(aux: dict[str, Any], microbatches: int) -> None:
    case = replace(CASE, checkpointing="non-reentrant", gate=aux, microbatches=microbatches)
    for steps in check(case, lambda run: [run.whole_step(s) for s in range(3)]):
        assert launched(steps[2]) == ONCE
        report = steps[2].report
        assert report is not None
        assert report.counts.sum() == 2 * 10 * case.top_k * microbatches, "recomputation is not counted twice"


def test_recomputed_layers_the_reentrant_way() -> None:
    case = replace(CASE, checkpointing="reentrant", microbatches=2)
    for steps in check(case, lambda run: [run.whole_step(s) for s in range(3)]):
        assert sum(a.startswith("AGG") for a in launched(steps[2])) == 4


def test_reentrant_recomputation_cannot_carry_auxiliary_losses() -> None:
    case = replace(CASE, checkpointing="reentrant", gate={"aux_loss": "switch"})

    def body(group: Collective) -> None:
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            Run(case, group, ALL, slots_per_rank=8).forward(0)

    on_threads(2, body)


def test_layers_that_run_in_another_order_than_they_were_registered() -> None:
    case = replace(CASE, steps=3)

    def rank(group: Collective) -> list[Step]:
        run = Run(case, group, ALL, slots_per_rank=8)
        run.model.moes = torch.nn.ModuleList(reversed(list(run.model.moes)))
        run.model.load_state_dict(case.state())
        steps = [run.whole_step(s) for s in range(case.steps)]
        run.close()
        return steps

    compare(expected(case), on_threads(2, rank))


@pytest.mark.parametrize("frozen", ["experts", "experts.w_in", "gate", "embed"])
def test_frozen_parts(frozen: str) -> None:
    """What is frozen gets no gradient, all else keeps the oracle's."""
    case = replace(CASE, lr=0.0)
    wanted = expected(case)

    def rank(group: Collective) -> list[Step]:
        run = Run(case, group, ALL, slots_per_rank=8)
        for name, p in run.model.named_parameters():
            p.requires_grad_(frozen not in name)
        steps = [run.whole_step(s) for s in range(3)]
        run.close()
        return steps

    by_rank = on_threads(2, rank)
    for at, (_, grads) in enumerate(wanted):
        for step in (steps[at] for steps in by_rank):
            for name, grad in {**step.dense, **step.experts}.items():
                want = 0.0 if frozen in name else grads[name]
                assert np.abs(grad - want).max() < 1e-10, name


# --- attaching and detaching ----------------------------------------------------------------------


def test_close_and_attach_again() -> None:
    def body(run: Run) -> list[Step]:
        steps = [run.whole_step(0)]
        first = run.engine
        first.close()
        unbalanced = run.whole_step(1)
        steps.append(Step(unbalanced.loss, unbalanced.dense, unbalanced.experts, None))
        again = prophet.attach(run.model, run.optimizer, config=first.config)
        steps.append(run.whole_step(2))
        assert again.step == 1
        assert first.step == 1
        again.close()
        return steps

    check(CASE, body)


def test_closing_twice_is_harmless() -> None:
    def body(group: Collective) -> None:
        run = Run(CASE, group, ALL)
        first = run.engine
        first.close()
        second = prophet.attach(run.model, run.optimizer, config=first.config)
        first.close()
        run.whole_step(0)
        run.whole_step(1)
        assert first.step == 0
        assert second.step == 2
        second.close()

    on_threads(2, body)


def test_two_engines_on_one_model() -> None:
    def body(group: Collective) -> None:
        run = Run(CASE, group, ALL)
        with pytest.raises(ValueError, match=r"already attached .* call close\(\) .* leaves converted experts"):
            prophet.attach(run.model, run.optimizer, config=run.engine.config)
        with pytest.raises(ValueError, match="already attached"):
            prophet.attach(run.model.moes[1], config=run.engine.config)
        run.whole_step(0)
        run.close()

    on_threads(2, body)


def test_a_model_without_moe_layers() -> None:
    with pytest.raises(ValueError, match=r"no prophet\.MoE layer"):
        prophet.attach(torch.nn.Linear(2, 2))


def test_a_plain_run_is_exact_too() -> None:
    by_rank = on_threads(2, lambda group: [Run(CASE, group, balanced=False).whole_step(0)])
    compare(expected(CASE)[:1], by_rank)


# --- gradient norm --------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.01, 1e9])
def test_clipping_uses_the_norm_of_the_whole_model(max_norm: float) -> None:
    case = replace(CASE, lr=0.0)

    def body(group: Collective) -> list[tuple[float, Step]]:
        run = Run(case, group, ALL, slots_per_rank=8)
        seen = []
        for s in range(3):
            run.zero_grad()
            run.backward(s)
            average(run.model, group, run.loss)
            norm = run.engine.clip_grad_norm_(run.model.parameters(), max_norm)
            seen.append((float(norm), Step(*measure(run.model, run.loss), None)))
            run.optimizer.step()
        run.close()
        return seen

    by_rank = on_threads(2, body)
    for at, (_, grads) in enumerate(expected(case)):
        leaves = [torch.from_numpy(g).requires_grad_() for g in grads.values()]
        for leaf, grad in zip(leaves, grads.values(), strict=True):
            leaf.grad = torch.from_numpy(grad.copy())
        norm = float(torch.nn.utils.clip_grad_norm_(leaves, max_norm))
        clipped = {n: leaf.grad.numpy() for n, leaf in zip(grads, leaves, strict=True) if leaf.grad is not None}
        for seen in by_rank:
            assert abs(seen[at][0] - norm) < 1e-10
            for name, grad in {**seen[at][1].dense, **seen[at][1].experts}.items():
                assert np.abs(grad - clipped[name]).max() < 1e-10, name


def test_check_on_threads_can_fail() -> None:
    """The comparison itself: another learning rate must not pass for the same run."""
    by_rank = check_on_threads(CASE)
    with pytest.raises(AssertionError):
        compare(expected(replace(CASE, lr=0.2)), by_rank)
