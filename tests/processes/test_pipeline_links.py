"""Links are measured while a pipeline trains, and the controller's maps follow them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeline_balance
from pipeline_balance.control.controller import ControllerConfig, MoveCost
from pipeline_balance.pipeline.measure.links import LinkTimes
from pipeline_balance.pipeline.trainer import ElasticPipeline
from tests.helpers.launch import run_gloo
from tests.helpers.slow_links import SlowLinks

DIM, MICROBATCHES = 6, 6


class _Sleeps(nn.Module):
    """A layer whose forward takes a known time; sleeping does not need a core."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.linear = nn.Linear(DIM, DIM)
        self.seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return torch.tanh(self.linear(x))


def _pipeline(layers: int, late_s: dict[int, float], **options: Any) -> tuple[ElasticPipeline, SlowLinks]:
    pipe = ElasticPipeline.from_modules(
        [_Sleeps(i) for i in range(layers)],
        nn.functional.mse_loss,
        make_optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
        microbatches=MICROBATCHES,
        timeout_s=60.0,
        **options,
    )
    # what stages send goes over them, what ranks agree by does not
    links = SlowLinks(pipe.groups.collective, late_s)
    pipe.groups.collective = links
    return pipe, links


def _batch(replicas: int = 1) -> tuple[Tensor, Tensor]:
    x = torch.randn(2 * MICROBATCHES * replicas, DIM, generator=torch.Generator().manual_seed(0))
    return x, x.flip(0)


LATE_S, LINK_S = 0.15, 0.04


def _late(rank: int, size: int, late: int, link_s: float, frozen: bool) -> tuple[LinkTimes, float]:
    """One rank's layers are late with everything; with `frozen` no gradient comes back."""
    pipe, _ = _pipeline(4, {1 - rank: link_s})
    for layer in pipe.layers.values():
        layer.seconds = LATE_S / 2 if rank == late else 0.0  # type: ignore[assignment]
    for i in (0, 1) if frozen else ():
        pipe.model.units[i].requires_grad_(False)
    pipe.step(*_batch())
    pipe.step(*_batch())
    waited_s = pipe.times().wait_forward_s + pipe.times().wait_backward_s
    return pipe.measure_links(), waited_s


@pytest.mark.parametrize(
    ("late", "link_s", "frozen"), [(0, 0.0, False), (1, LINK_S, False), (0, LINK_S, True), (1, 0.0, True)]
)
def test_a_links_time_has_no_wait_for_a_late_sender(late: int, link_s: float, frozen: bool) -> None:
    (links, _), (others, _) = found = run_gloo(_late, 2, late, link_s, frozen)
    if not (frozen and late == 1):
        # without gradients nobody waits for the last stage
        assert max(waited for _, waited in found) > LATE_S
    assert links.transfer_s.tolist()[0][1] == others.transfer_s.tolist()[1][0]
    assert link_s <= links.transfer_s[0, 1] < link_s + LATE_S / 3


def _measured_or_not(rank: int, size: int, enabled: bool) -> list[float]:
    pipe, _ = _pipeline(4, {})
    pipe.meter.enabled = enabled
    losses = [pipe.step(*_batch()) for _ in range(3)]
    assert bool(pipe.meter.noted.updates) == enabled
    return losses


def test_measuring_changes_no_number_and_notes_nothing_where_it_is_off() -> None:
    assert run_gloo(_measured_or_not, 2, True) == run_gloo(_measured_or_not, 2, False)


LAYERS, STEPS, SLOW_AT = 16, 14, 6


def _follows(rank: int, size: int, policy: str, move: bool) -> dict[str, Any]:
    """In mid-run the link between the last two ranks takes four times as long."""
    near = {rank - 1: 0.005, rank + 1: 0.005}
    pipe, links = _pipeline(LAYERS, near)
    config = ControllerConfig(
        every_steps=2,
        measure_steps=2,
        policy=policy,  # type: ignore[arg-type]
        min_gain=0.01,
        horizon_steps=100,
        move_cost=MoveCost(fixed_s=0.0 if move else 1e9),
    )
    balanced = pipeline_balance.attach(pipe, config=config)
    losses, maps = [], []
    for step in range(STEPS):
        for layer in pipe.layers.values():
            layer.seconds = 5e-3  # type: ignore[assignment]
        if step == SLOW_AT:
            for peer in {2: [3], 3: [2]}.get(rank, []):
                links.late_s[peer] = 0.02
        losses.append(balanced.step(*_batch()))
        maps.append(pipe.stage_map.boundaries)
    return {"losses": losses, "maps": maps, "links": balanced.learner.transfer_s}


@pytest.mark.parametrize("policy", ["partition", "diffusion"])
def test_layers_leave_both_ends_of_a_link_that_gets_slow(policy: str) -> None:
    found = run_gloo(_follows, 4, policy, True)
    assert all(one["maps"] == found[0]["maps"] for one in found)
    before, after = found[0]["maps"][SLOW_AT], found[0]["maps"][-1]
    # three layers or four at the end in place of four
    assert LAYERS - after[2] < LAYERS - before[2], (before, after)
    # two decisions at most: the first sees two steps with the slow link
    assert found[0]["maps"][SLOW_AT + 4] == after
    links = found[0]["links"]
    assert links[2, 3] > 2 * max(links[0, 1], links[1, 2])
    still = run_gloo(_follows, 4, policy, False)
    assert found[0]["losses"] == pytest.approx(still[0]["losses"], rel=1e-6)
