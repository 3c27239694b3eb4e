"""What the host does in a step, counted: arrays of [R, E, R], digests, and the length of messages."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import prophet
from prophet.layer.moe import MoE
from prophet.ranks.collective import Collective
from prophet.ranks.messages import COUNTS, HEAD
from prophet.ranks.operation import Operation
from prophet.ranks.threads import ThreadCollective
from prophet.spec import Flows, Split
from tests.helpers.support import FixedPlanner, everywhere, on_threads

RANKS, DIM, TOKENS = 4, 4, 64
# Experts of every layer
EVEN, UNEVEN = (16,) * 3, (8, 64, 16)


class Trained:
    """MoE layers of these numbers of experts under an engine, whose first experts are hot."""

    def __init__(self, group: Collective, experts: tuple[int, ...] = EVEN, **config: Any) -> None:
        torch.manual_seed(group.rank)
        layers = [MoE(DIM, DIM, e, 2, activation="relu", bias=False, group=group) for e in experts]
        for layer in layers:
            with torch.no_grad():
                layer.gate.weight.zero_()
                layer.gate.weight[:2] += 1.0
            # Nobody averages its gradients here
            layer.gate.weight.requires_grad_(False)
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        # Slow products, so that replicas pay
        topology = prophet.Topology.uniform(group.size, flops_per_s=1e6)
        self.engine = prophet.attach(
            self.model, self.optimizer, config=prophet.EngineConfig(topology=topology, slots_per_rank=4, **config)
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.rand(TOKENS, DIM)).sum().backward()
        self.optimizer.step()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(torch.rand(TOKENS, DIM))
        self.model.train()


def test_no_step_makes_an_array_by_source_expert_and_destination(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a dense split")

    monkeypatch.setattr(Flows, "tokens", property(refuse))
    monkeypatch.setattr(Split, "__init__", refuse)
    monkeypatch.setattr(Split, "trusted", refuse)

    def body(group: ThreadCollective) -> int:
        run = Trained(group)
        copies = 0
        for _ in range(4):
            run.step()
            run.evaluate()
            assert run.engine.last_step is not None
            copies += int(run.engine.last_step.copies.sum())
        run.engine.close()
        return copies

    assert min(on_threads(RANKS, body)) > 0


@pytest.mark.parametrize("planner", ["prophet", "llep"])
def test_a_split_is_hashed_and_counted_once(planner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: Counter[str] = Counter()

    def counted(owner: type, name: str) -> None:
        inner = getattr(owner, name)

        def call(self: Any) -> Any:
            done[name] += 1
            return inner(self)

        monkeypatch.setattr(owner, name, call)

    for owner in (Split, Flows):
        counted(owner, "digest")
        counted(owner, "_counted")

    def body(group: ThreadCollective) -> None:
        run = Trained(group, planner=planner)
        for _ in range(5):
            run.step()
        run.engine.close()

    on_threads(1, body)
    on_threads(RANKS, body)
    splits = len(EVEN) * 5 * (RANKS + 1)
    assert 0 < done["digest"] <= splits
    assert done["_counted"] <= splits


def test_the_digest_is_made_once_the_rows_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """On rank 0: after both exchanges of the layer, and before the next layer's counts."""
    order: list[str] = []
    digest = Flows.digest

    def body(group: ThreadCollective) -> None:
        move, gather = group.all_to_all, group.gather_messages

        def moved(*given: Any, op: Operation, **named: Any) -> Any:
            order.append(op.name)
            return move(*given, op=op, **named)

        def gathered(x: torch.Tensor, *, op: Operation) -> torch.Tensor:
            order.append(op.name)
            return gather(x, op=op)

        run = Trained(group)
        # Splits are compared at once in the first two steps
        for _ in range(3):
            run.step()
        if group.rank == 0:
            monkeypatch.setattr(group, "all_to_all", moved)
            monkeypatch.setattr(group, "gather_messages", gathered)
            monkeypatch.setattr(Flows, "digest", lambda self: order.append("digest") or digest(self))
        run.model(torch.rand(TOKENS, DIM)).sum().backward()
        run.engine.close()

    on_threads(RANKS, body)
    wanted = [COUNTS, "dispatch", "combine", "digest"]
    seen = [name for name in order if name in wanted]
    assert seen[:4] == wanted


class Messages:
    """The messages of counts that a rank sends, by pass: their numbers, and those that are needed."""

    def __init__(self, group: ThreadCollective) -> None:
        self.counts: list[list[tuple[int, int]]] = []
        self._gather = group.gather_messages
        group.gather_messages = self._note  # type: ignore[method-assign]

    def _note(self, x: torch.Tensor, *, op: Operation) -> torch.Tensor:
        if op.name == COUNTS:
            self.counts[-1].append((x.numel(), HEAD + int(x[0])))
        return self._gather(x, op=op)

    def next_pass(self) -> None:
        self.counts.append([])


@pytest.mark.parametrize("experts", [EVEN, UNEVEN, (32,) * 12])
def test_messages_of_counts_are_as_long_as_their_layer_needs(experts: tuple[int, ...]) -> None:
    """Each from the second step on, and none is announced by another one."""

    def body(group: ThreadCollective) -> list[list[tuple[int, int]]]:
        messages, run = Messages(group), Trained(group, experts)
        for _ in range(4):
            messages.next_pass()
            run.step()
        run.engine.close()
        return messages.counts

    for sent in on_threads(RANKS, body):
        assert [len(of_step) for of_step in sent[1:]] == [len(experts)] * 3
        assert max(width / needed for of_step in sent[1:] for width, needed in of_step) <= 1.3


@pytest.mark.parametrize("experts", [EVEN, UNEVEN])
def test_evaluation_now_and_then_neither_lengthens_messages_nor_adds_any(experts: tuple[int, ...]) -> None:
    def body(group: ThreadCollective) -> list[list[tuple[int, int]]]:
        messages, run = Messages(group), Trained(group, experts)
        for step in range(9):
            messages.next_pass()
            run.step()
            if step % 3 == 2:
                messages.next_pass()
                run.evaluate()
        run.engine.close()
        return messages.counts

    for sent in on_threads(RANKS, body):
        widths, needed = np.array([number for of_pass in sent[1:] for number in of_pass]).sum(axis=0)
        assert widths <= 1.3 * needed
        # From the second evaluation on
        assert [len(of_pass) for of_pass in sent[7:]] == [len(experts)] * 5


def test_a_resumed_run_has_short_messages_from_its_second_step_on() -> None:
    def body(group: ThreadCollective) -> float:
        run = Trained(group)
        for _ in range(2):
            run.step()
        state = run.engine.state_dict()
        run.engine.close()
        other = Trained(group)
        other.engine.load_state_dict(state)
        other.step()
        messages = Messages(group)
        messages.next_pass()
        other.step()
        other.engine.close()
        return max(width / needed for width, needed in messages.counts[0])

    assert max(on_threads(RANKS, body)) <= 1.3


def test_a_planner_that_returns_dense_splits_trains_as_before() -> None:
    def body(group: ThreadCollective) -> list[int]:
        run = Trained(group, planner=FixedPlanner(everywhere(EVEN[0], RANKS)[:4]))
        for _ in range(3):
            run.step()
        assert run.engine.last_step is not None
        load = run.engine.last_step.rank_load
        run.engine.close()
        return load.sum(axis=1).tolist()  # type: ignore[no-any-return]

    assert on_threads(RANKS, body) == [[TOKENS * 2 * RANKS] * len(EVEN)] * RANKS
