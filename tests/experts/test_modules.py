"""Experts that are anybody's modules, with replicas, against a loop over the same modules written by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import prophet
from prophet.engine.config import Experiment
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld
from prophet.spec import IntArray, Placement, PlanContext, Split
from tests.helpers.expert_kinds import KINDS, Checkpointed, D, Reference, Stack
from tests.helpers.support import FixedPlanner, RandomPlanner, on_threads

TOKENS, STEPS, LR = 6, 3, 0.1
Grads = dict[str, Tensor | None]


def batch(ranks: int, step: int, microbatch: int = 0) -> list[Tensor]:
    """Rows by rank; the last of several ranks has none in the first step."""
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    rows = [torch.randn(TOKENS, D, dtype=torch.float64, generator=generator) for _ in range(ranks)]
    return [r[:0] if step == 0 and 0 < at == ranks - 1 else r for at, r in enumerate(rows)]


def loss_of(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 1, D, dtype=out.dtype)).sum() / 7


def train(
    make: Callable[[], nn.Module], group: Collective, *, microbatches: int = 1, refetch: bool = False
) -> list[tuple[Grads, list[Tensor]]]:
    """By step: every home expert's gradient under its name, and the gradients of the rows."""
    model = Stack(make, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    config = prophet.EngineConfig(
        planner=RandomPlanner(1, 0.7), slots_per_rank=4, accumulation_steps=microbatches, refetch=refetch
    )
    engine = prophet.attach(model, optimizer, config=config, experiment=Experiment(check_every=1))
    seen, replicas = [], 0
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = [batch(group.size, step, m)[group.rank].requires_grad_() for m in range(microbatches)]
        for x in rows:
            loss_of(model(x)).backward()
        gates = [p.grad for n, p in model.named_parameters() if "gate" in n and p.grad is not None]
        group.all_reduce_mean_(gates)
        replicas += sum(block.placement.replicas().__len__() for block in engine.runtime.step.blocks)  # type: ignore[union-attr]
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        seen.append((grads, [x.grad for x in rows if x.grad is not None]))
        optimizer.step()
    assert replicas or group.size == 1
    engine.close()
    return seen


def expected(
    make: Callable[[], nn.Module], ranks: int, microbatches: int = 1
) -> list[tuple[Grads, list[list[Tensor]]]]:
    """The same of the reference on all rows: gradients as means over the ranks."""
    whole = Stack(make, ThreadWorld(1).collective(0))
    layers: list[prophet.MoE] = list(whole.layers)  # type: ignore[arg-type]
    model = Reference([m.gate.weight for m in layers], [m.experts.home_experts() for m in layers])  # type: ignore[operator, misc]
    seen = []
    for step in range(STEPS):
        model.zero_grad()
        rows = [[x.requires_grad_() for x in batch(ranks, step, m)] for m in range(microbatches)]
        for xs in rows:
            loss_of(model(torch.cat(xs))).backward()
        grads: Grads = {}
        for name, p in model.named_parameters():
            kind, layer, *rest = name.split(".")
            at = "gate.weight" if kind == "gates" else ".".join(["experts", *rest])
            grads[f"layers.{layer}.{at}"] = None if p.grad is None else p.grad / ranks
        seen.append((grads, [[xs[r].grad for xs in rows] for r in range(ranks)]))
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(LR * p.grad / ranks)
    return seen  # type: ignore[return-value]


def check(make: Callable[[], nn.Module], ranks: int, **options: object) -> None:
    microbatches = int(options.get("microbatches", 1))  # type: ignore[call-overload]
    by_rank = on_threads(ranks, lambda group: train(make, group, **options))  # type: ignore[arg-type]
    for step, (wanted, rows) in enumerate(expected(make, ranks, microbatches)):
        names = {n for rank in by_rank for n in rank[step][0]}
        assert names == set(wanted), "every expert has its own name, whichever rank it is on"
        for rank, steps in enumerate(by_rank):
            grads, of_rows = steps[step]
            for name, grad in grads.items():
                want = wanted[name]
                assert (grad is None) == (want is None), f"{name}, step {step}, rank {rank}"
                if grad is not None and want is not None:
                    torch.testing.assert_close(grad, want, rtol=0, atol=1e-10, msg=f"{name}, step {step}")
            for got, x in zip(of_rows, rows[rank], strict=True):
                torch.testing.assert_close(got, x, rtol=0, atol=1e-10)


# every kind on two ranks; one of plain tensors, one of wrappers and one that recomputes on others
QUICK = {*((kind, 2) for kind in KINDS), ("linear", 8), ("lora", 1), ("lora", 4), ("checkpointed", 4)}
ON_RANKS = [
    pytest.param(kind, ranks, marks=[] if (kind, ranks) in QUICK else pytest.mark.slow)
    for kind in KINDS
    for ranks in (1, 2, 4, 8)
]


@pytest.mark.parametrize(("kind", "ranks"), ON_RANKS)
def test_gradients_are_those_of_a_loop_over_the_experts(kind: str, ranks: int) -> None:
    check(KINDS[kind], ranks)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dropout fixed", {"microbatches": 2}),
        ("lora", {"refetch": True}),
        ("checkpointed", {"microbatches": 2, "refetch": True}),
        pytest.param("lora", {"microbatches": 2}, marks=pytest.mark.slow),
        pytest.param("dropout fixed", {"refetch": True}, marks=pytest.mark.slow),
    ],
)
def test_with_gradient_accumulation_and_parameters_that_are_fetched_again(
    kind: str, options: dict[str, object]
) -> None:
    check(KINDS[kind], 4, **options)


def test_an_expert_that_recomputes_with_reentrant_checkpointing() -> None:
    check(lambda: Checkpointed(use_reentrant=True), 2)


class AllAway(FixedPlanner):
    """Every row of an expert that has a replica goes there."""

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        tokens = Split.to_homes(load, placement).tokens.copy()
        for expert, rank in placement.replicas():
            home = int(placement.home[expert])
            tokens[:, expert, rank] += tokens[:, expert, home]
            tokens[:, expert, home] = 0
        return Split(tokens)


@pytest.mark.parametrize("wanted", [False, True])
def test_a_rank_without_rows_takes_part_in_the_backward_pass(wanted: bool) -> None:
    """wanted: whether the rows have gradients, as they have in all layers but a first one."""

    def body(group: Collective) -> Tensor | None:
        model = Stack(KINDS["linear"], group, experts=4, blocks=1)
        with torch.no_grad():
            model.layers[0].gate.weight.zero_()  # type: ignore[union-attr, operator]
            model.layers[0].gate.weight[:2] = 1.0  # type: ignore[union-attr, index]
        x = torch.ones(2, D, dtype=torch.float64, requires_grad=wanted)
        loss_of(model(x)).backward()
        grads = [p.grad for n, p in model.named_parameters() if "experts" in n]
        assert [g is None for g in grads] == [group.rank == 1] * len(grads)
        return x.grad

    one, two = on_threads(2, body, timeout_s=10)
    assert (one is not None) == (two is not None) == wanted
    if one is not None and two is not None:
        torch.testing.assert_close(one, two)
        assert one.abs().sum() > 0


@pytest.mark.parametrize("passes", [(2, 2), (2, 1, 2)])
def test_gradients_accumulate_or_are_thrown_away_where_only_replicas_computed(passes: tuple[int, ...]) -> None:
    """Rank 1 computes both visited experts, which are rank 0's: neither rank's own experts have a gradient to see.

    The step of one backward pass is given up in the middle: zero_grad throws away what the replicas have not sent.
    """

    def favour(model: Stack) -> Stack:
        with torch.no_grad():
            for layer in model.layers:
                layer.gate.weight.zero_()  # type: ignore[union-attr, operator]
                layer.gate.weight[:2] = 1.0  # type: ignore[union-attr, index]
        return model

    x = torch.ones(2, D, dtype=torch.float64)

    def body(group: Collective) -> Grads:
        model = favour(Stack(KINDS["linear"], group, experts=4, blocks=1))
        config = prophet.EngineConfig(planner=AllAway([(0, 1), (1, 1), (2, 0)]), slots_per_rank=2, accumulation_steps=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine = prophet.attach(model, optimizer, config=config)
        for backward_passes in passes:
            model.zero_grad()
            for _ in range(backward_passes):
                loss_of(model(x)).backward()
            if backward_passes == 2:
                optimizer.step()
        engine.close()
        return {n: p.grad for n, p in model.named_parameters() if "experts" in n}

    alone = favour(Stack(KINDS["linear"], ThreadWorld(1).collective(0), experts=4, blocks=1))
    for _ in range(2):
        loss_of(alone(x)).backward()
    for found in on_threads(2, body):
        for name, grad in found.items():
            want = alone.get_parameter(name).grad
            assert (grad is None) == (want is None), name
            if grad is not None and want is not None:
                torch.testing.assert_close(grad, want, rtol=0, atol=1e-12)
