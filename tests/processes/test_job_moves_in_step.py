"""A job's layers move before a step's update, with the bits of the same run without moves."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prophet
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.spec import StageMap
from prophet.ranks.threads import ThreadWorld
from prophet.ranks.waiting import Waiter
from tests.helpers.elastic_jobs import DIM, MICROBATCHES, SEED, VOCABULARY, batches, check_held, make_optimizer
from tests.helpers.launch import run_gloo
from tests.helpers.pipeline_experts import random_placements
from tests.helpers.releases import needs_orders

UNITS, STEPS = 6, 6
# each goes to the next one, by the columns that the layout has
CUTS = (3, 5, 1, 4)


class _Block(nn.Module):
    """Residual, with dropout, a buffer that follows the data, and experts if asked for."""

    seen: Tensor

    def __init__(self, experts: bool) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM), nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        alone = ThreadWorld(1).collective(0)
        self.moe = prophet.MoE(DIM, 8, 4, 2, group=alone, impl="naive") if experts else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().mean()
        y: Tensor = x + self.moe(self.down(self.drop(torch.tanh(self.up(x)))))
        return y


def _build(experts: bool) -> nn.Sequential:
    """No tied weights: whose parts are added up on one rank or on two is another sum."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(VOCABULARY, DIM), *(_Block(experts and i in (0, 3)) for i in range(UNITS - 2)))
    made.append(nn.Linear(DIM, VOCABULARY))
    return made.double()


class _Setup:
    """A layout, how many processes there are, and what a step does."""

    def __init__(self, layout: str, size: int, *, scaled: bool = False, experts: bool = False) -> None:
        self.layout, self.size, self.scaled, self.experts = layout, size, scaled, experts


SETUPS = {
    "one process": _Setup("pp1", 1),
    "two stages": _Setup("pp2", 2),
    "scaled": _Setup("pp2", 2, scaled=True),
    "replicas": _Setup("pp2,dp2", 4),
    "owners": _Setup("pp2,dp2,zero1", 4),
    "in another order": _Setup("pp2,dp2,order3:1:0:2", 4),
    "spare processes": _Setup("pp2,order3:1", 4),
    "spare processes, owners": _Setup("pp2,dp2,zero1,order4:1:0:2", 5),
    "experts": _Setup("pp2,dp2,ep2", 4, experts=True),
    "experts, owners": _Setup("pp2,dp2,ep2,zero1", 4, experts=True),
    "copies of experts": _Setup("pp2,dp4,ep2", 8, experts=True),
}


def _all_of(job: Job) -> dict[str, Tensor]:
    """What this process holds: parameters, gradients, buffers, optimizer state."""
    found: dict[str, Tensor] = {}
    for name, p in job.model.named_parameters():
        if not p.is_meta:
            found[name] = p.detach().clone()
            if p.grad is not None:
                found[f"{name}#grad"] = p.grad.clone()
            state = job.optimizer.state.get(p, {})
            found |= {f"{name}@{key}": torch.as_tensor(value).clone() for key, value in state.items()}
    return found | {name: b.clone() for name, b in job.model.named_buffers() if not b.is_meta}


def _train(rank: int, size: int, setup: str, moves: str) -> tuple[list[Any], list[dict[str, Tensor]], dict[Any, Any]]:
    """Train with a move in every step: "within" it, "between" two of them, or none.

    Returns:
        Losses and norms, what is held after every step, and the placements of experts by step, layer and group.
    """
    how = SETUPS[setup]
    job = Job(
        lambda: _build(how.experts),
        make_optimizer,
        Parallelism.parse(how.layout),
        data=batches(),
        loss_fn=nn.functional.cross_entropy,
        timeout_s=60.0,
        microbatches=MICROBATCHES,
        seed=SEED,
        balance_experts=(lambda layout: random_placements()) if how.experts else None,
    )
    scaler = job.scaler(init_scale=2.0**10, growth_interval=3) if how.scaled else None
    stages, pipe, thread = job._switching.stages, job.pipeline, Waiter("prepares a move")
    side = pipe.side_collective()
    losses, found, seen = list[Any](), list[dict[str, Tensor]](), dict[Any, Any]()
    early: list[bool] = []

    def next_map(step: int) -> StageMap:
        cut = CUTS[step % len(CUTS)]
        return StageMap((0, cut, UNITS), (0, 1)) if job.layout.pp > 1 else StageMap((0, UNITS), (0,))

    def move_in_step(stage_map: StageMap) -> None:
        ahead: list[Future[Any]] = []

        def begin() -> None:
            ahead.append(thread.submit(lambda: stages.prepare(stage_map, side)))

        def move() -> None:
            pipe.before_update(lambda: None)
            done = stages.change(stage_map, None, ahead[0].result(60.0))  # type: ignore[arg-type]
            early.append(done.early_bytes > 0)

        pipe.before_pass(begin)
        pipe.before_update(move)

    for step in range(STEPS):
        if moves == "within":
            move_in_step(next_map(step + 1))
        elif moves == "between" and step:
            stages.change(next_map(step), None, None)  # type: ignore[arg-type]
        engine, units = job.engine, pipe.experts.shared(tuple(pipe.layers)) if how.experts else ()
        assert (engine is None) == (not units)
        losses += [job.step(max_norm=0.05, scaler=scaler), job.grad_norm]
        found.append(_all_of(job))
        check_held(job)
        assert job.layout.stage_map(UNITS) == pipe.stage_map
        assert job.engine is pipe.balancer
        if engine is not None and engine.last_step is not None:
            placements = engine.last_step.placements
            group = pipe.replica // pipe.groups.grid.ep
            seen |= {(step, unit, group): p.holds.tolist() for unit, p in zip(units, placements, strict=True)}
    if moves == "within" and job.layout.pp > 1:
        held = not pipe.groups.spare
        assert early == [held] * STEPS
    job.close()
    return losses, found, seen


def _marks(name: str) -> list[Any]:
    releases = [needs_orders] if "order" in SETUPS[name].layout else []
    return [*releases, pytest.mark.slow] if SETUPS[name].size > 4 or name == "experts, owners" else releases


@pytest.mark.parametrize("setup", [pytest.param(name, marks=_marks(name)) for name in SETUPS])
def test_a_move_in_every_step_of_a_job_changes_no_bit(setup: str) -> None:
    size = SETUPS[setup].size
    within, between, still = (run_gloo(_train, size, setup, moves) for moves in ("within", "between", "none"))
    for moved in (within, between):
        for (losses, *_), (wanted, *_) in zip(moved, still, strict=True):
            assert losses == wanted
    for step in range(STEPS):
        whole: dict[str, list[Tensor]] = {}
        for _, found, _ in still:
            for name, tensor in found[step].items():
                whole.setdefault(name, []).append(tensor)
        names = set()
        for _, found, _ in within:
            for name, tensor in found[step].items():
                names.add(name)
                assert any(torch.equal(tensor, one) for one in whole[name]), (step, name)
        assert names == whole.keys(), step
        assert any("#grad" in name for name in names)
    # balancing goes on with what was remembered, wherever a layer is
    placements = [{k: holds for *_, seen in runs for k, holds in seen.items()} for runs in (within, between, still)]
    assert placements[0] == placements[1] == placements[2]
    if SETUPS[setup].experts:
        assert len({str(holds) for holds in placements[0].values()}) > 4
