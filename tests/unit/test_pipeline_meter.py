"""The meter's clocks, windows and what counts for which layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline_balance.measure import Meter, PipelineLayer, local_costs


class _Clock:
    """Goes on by one at every reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def _train(meter: Meter, microbatches: int) -> dict[int, PipelineLayer]:
    layers = {i: PipelineLayer(nn.Linear(2, 2), i, meter, seed=None) for i in range(2)}
    loss_fn = meter.timed_loss(nn.functional.mse_loss)
    for _ in range(microbatches):
        x = torch.ones(1, 2)
        for layer in layers.values():
            x = layer(x)
        value = loss_fn(x, torch.zeros(1, 2))
        meter.run_action("B", 0, value.backward)
    return layers


def test_layers_are_timed_by_the_work_clock() -> None:
    meter = Meter(work_clock=_Clock())
    layers = _train(meter, 3)
    costs = local_costs(layers, {0: range(2)}, meter, None)
    assert costs[0].forward_s == 1.0
    assert costs[1].forward_s == 2.0  # its own, and the loss
    # from the start of the action, over the gradient's arrival, to the next one
    assert costs[1].backward_s == 2.0
    assert costs[0].backward_s == 1.0
    assert meter.times().compute_s > 0


def test_old_samples_are_forgotten() -> None:
    meter = Meter(work_clock=_Clock(), max_samples=4)
    _train(meter, 9)
    assert len(meter.forward[0]) == len(meter.backward[1]) == len(meter.loss) == 4
    meter.reset()
    assert not meter.forward
    assert not meter.loss


@pytest.mark.parametrize("enabled", [False, True])
def test_the_first_backward_is_announced_once(enabled: bool) -> None:
    meter = Meter(enabled=enabled)
    called: list[int] = []
    meter.on_backward = lambda: called.append(len(called))
    _train(meter, 2)
    assert called == [0]
    assert meter.on_backward is None
