"""Experts that few tokens choose, or none, under weight decay: they end where the model as written has them.

AdamW passes over a gradient of None, and decays and moves a parameter whose gradient is zero. A loop that skips experts
leaves None; one that calls them with no rows gives zeros, and so do the stacked experts of transformers.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import prophet
from prophet.convert import original_state_dict
from prophet.engine.config import Experiment
from tests.helpers.hand_written import DIM, EXPERTS, Swiglu
from tests.helpers.launch import on_processes
from tests.helpers.moe_models import batches, hugging_face, loss_of
from tests.helpers.support import RandomPlanner, seeded

RANKS, STEPS, NEVER, RARELY = 2, 30, 5, 2


class Loop(nn.Module):
    """Its router hardly ever chooses one expert, and never another. skips: leaves out experts without tokens."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.gate, self.skips = nn.Linear(DIM, EXPERTS), skips
        self.experts = nn.ModuleList(Swiglu() for _ in range(EXPERTS))
        with torch.no_grad():
            self.gate.bias[NEVER], self.gate.bias[RARELY] = -100.0, -1.5

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(dim=-1).topk(2, dim=-1)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            row, choice = (ids == e).nonzero(as_tuple=True)
            if len(row) or not self.skips:
                y = y.index_add(0, row, expert(x[row]) * weights[row, choice, None])
        return x + y


def model_of(kind: str) -> nn.Module:
    if kind == "transformers":  # grouped products have no float64
        return hugging_face("qwen3", num_experts=16, experts_implementation="eager").double()
    with seeded(3):
        return nn.Sequential(Loop(kind == "skips"), Loop(kind == "skips"), nn.Linear(DIM, 1)).double()


def loss(kind: str, model: nn.Module, step: int, rank: int) -> Tensor:
    if kind == "transformers":
        return loss_of(model, batches(RANKS, step % 7)[rank])[0]
    x = torch.randn(RANKS, 6, DIM, generator=torch.Generator().manual_seed(step), dtype=torch.float64)[rank]
    return (model(x) - x.sum(dim=1, keepdim=True)).square().mean()


def train(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: range) -> list[set[str]]:
    """Which of the experts' parameters had no gradient, by step."""
    without = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.stack([loss(kind, model, step, rank) for rank in ranks]).mean()
        total.backward()
        named = {n.removeprefix("module."): p for n, p in model.named_parameters() if "experts" in n}
        without.append({n for n, p in named.items() if p.grad is None})
        optimizer.step()
    return without


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.2)


def on_a_rank(kind: str) -> tuple[dict[str, Tensor], list[set[str]], set[str], int]:
    """The state afterwards, what had no gradient, the names of the experts here, and how many copies there were."""
    model = model_of(kind)
    prophet.convert(model)
    optimizer = adamw(model)
    config = prophet.EngineConfig(planner=RandomPlanner(0, 0.7), slots_per_rank=4)
    engine = prophet.attach(model, optimizer, config=config, experiment=Experiment(check_every=1))
    copies = 0

    def count(*_: object) -> None:
        nonlocal copies
        copies += 0 if engine.last_step is None else int(engine.last_step.copies.sum())

    optimizer.register_step_post_hook(count)
    rank = torch.distributed.get_rank()
    without = train(kind, DistributedDataParallel(model), optimizer, range(rank, rank + 1))
    here = {n for n, p in model.named_parameters() if getattr(p, "prophet_expert", False)}
    return original_state_dict(model), without, here, copies


@pytest.mark.parametrize("kind", ["skips", pytest.param("calls all", marks=pytest.mark.slow), "transformers"])
def test_idle_experts_end_where_the_model_as_written_has_them(kind: str) -> None:
    plain = model_of(kind)
    wanted = train(kind, plain, adamw(plain), range(RANKS))
    if kind == "skips":
        never = {f"{at}.experts.{NEVER}.{name}.weight" for at in (0, 1) for name in ("w1", "w2", "w3")}
        assert all(never <= names for names in wanted)
        assert len({frozenset(names) for names in wanted}) > 2  # others come and go
    for state, without, here, copies in on_processes(RANKS, on_a_rank, kind, timeout_s=240):
        assert copies > 0
        if kind == "skips":
            assert without == [names & here for names in wanted]
        else:
            assert not any(without)
        for name, p in plain.named_parameters():
            torch.testing.assert_close(state[name], p.detach(), rtol=0, atol=1e-9, msg=lambda t, n=name: f"{n}: {t}")
