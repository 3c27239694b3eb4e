"""The meter's clocks, windows and what counts for which layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.measure.meter import Meter, gather_costs, local_costs
from pipeline_balance.pipeline.measure.slice_costs import OfSlice
from pipeline_balance.spec import LayerCost
from prophet.ranks.collective import Collective
from prophet.ranks.device import clocks
from prophet.ranks.threads import ThreadWorld


class _Clock:
    """Goes on by one at every reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def _run(meter: Meter, index: int, module: nn.Module, x: Tensor) -> Tensor:
    (out,) = meter.run_unit(index, module, lambda: (module(x),), (x,))
    return out


def _train(meter: Meter, microbatches: int) -> dict[int, nn.Module]:
    layers: dict[int, nn.Module] = {i: nn.Linear(2, 2) for i in range(2)}
    for _ in range(microbatches):
        value = meter.run_action("F", 0, lambda: _forward(meter, layers))
        meter.run_action("B", 0, value.backward)
    return layers


def _forward(meter: Meter, layers: dict[int, nn.Module]) -> torch.Tensor:
    x = torch.ones(1, 2)
    for i, layer in layers.items():
        x = _run(meter, i, layer, x)
    return meter.timed(lambda: nn.functional.mse_loss(x, torch.zeros(1, 2)))


def test_layers_are_timed_by_the_work_clock() -> None:
    meter = Meter(work_clock=_Clock())
    layers = _train(meter, 3)
    costs = local_costs(layers, {0: range(2)}, meter, {})
    assert costs[0].forward_s == 1.0
    assert costs[1].forward_s == 2.0  # its own, and the loss
    # from the start of the action, over the gradient's arrival, to the next one
    assert costs[1].backward_s == 2.0
    assert costs[0].backward_s == 1.0
    assert meter.times().compute_s > 0


class _Device:
    """A device whose every piece of work takes 20 ms. It comes to a step's work in the next one."""

    def __init__(self) -> None:
        self.busy_ms, self.over_ms, self.early = 0.0, 0.0, 0

    def launch(self) -> None:
        self.busy_ms += 20

    def event(self, _: torch.device) -> _Event:
        return _Event(self, self.busy_ms)


class _Event:
    def __init__(self, device: _Device, at_ms: float) -> None:
        self.device, self.at_ms = device, at_ms

    def query(self) -> bool:
        return self.at_ms <= self.device.over_ms

    def synchronize(self) -> None:
        self.device.early += self.at_ms > self.device.over_ms

    def elapsed_time(self, later: _Event) -> float:
        return later.at_ms - self.at_ms


def _step_on(device: _Device, meter: Meter, wait: Callable[[], None] = lambda: None) -> None:
    """Two layers forward, each with a wait inside, and backward."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        device.launch()
        with meter.waiting():
            wait()
        return x * 2

    before_ms = device.busy_ms
    meter.begin_step()
    x = torch.ones(1, requires_grad=True)
    for i in range(2):
        x = meter.run_unit(i, nn.Identity(), lambda x=x: (layer(x),), (x,))[0]  # type: ignore[misc]
        # its backward is launched as the gradient passes
        x.register_hook(lambda _: device.launch())
    meter.run_action("B", 0, x.backward)
    device.over_ms = before_ms
    meter.end_step()


def test_layers_on_a_device_are_timed_by_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device()
    monkeypatch.setattr(clocks, "timed_event", device.event)
    meter = Meter(clock=clocks.clock_on(torch.device("cuda")), enabled=False)
    _step_on(device, meter)
    assert not meter._marked.stretches, "a step that is not measured marks nothing"
    meter.enabled = True
    for _ in range(3):
        # a wait that takes as long as a layer's work, as for tokens of other ranks, is no work
        _step_on(device, meter, device.launch)
    assert not device.early, "nothing is read before the device has come there"
    assert meter.behind
    assert meter.times().steps == 3
    assert not meter.behind
    assert device.early, "whoever asks for all steps waits for the last one"
    for i in range(2):
        assert meter.forward[i] == pytest.approx([0.02] * len(meter.forward[i]))
        # layer 0's begins as the gradient of its output is there
        assert meter.backward[i] == pytest.approx([0.02] * 3)
    # forward passes ran outside of an action here
    assert meter.times().compute_s == pytest.approx(0.04)
    assert meter.times().step_s == pytest.approx(0.12)
    meter.reset()
    assert meter.times().steps == 0


def test_what_a_reset_forgets_does_not_come_back_later(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device()
    monkeypatch.setattr(clocks, "timed_event", device.event)
    meter = Meter(clock=clocks.clock_on(torch.device("cuda")))
    _step_on(device, meter)
    _step_on(device, meter)
    meter.reset()
    _step_on(device, meter)
    _step_on(device, meter)
    assert meter.times().steps == 2
    assert len(meter.backward[0]) == 2


def test_old_samples_are_forgotten() -> None:
    meter = Meter(work_clock=_Clock(), max_samples=4)
    _train(meter, 9)
    assert len(meter.forward[0]) == len(meter.loss) == 4
    assert len(meter.backward[1]) == 2, "of a third of the microbatches, as forward: the last ones"
    meter.max_samples = 2  # as balancing sets it when it begins
    _train(meter, 3)
    assert len(meter.forward[0]) == len(meter.loss) == 2
    assert len(meter.backward[1]) == 1
    meter.reset()
    assert not meter.forward
    assert not meter.loss


def test_every_third_microbatch_has_hooks_and_the_first_of_a_period() -> None:
    meter = Meter(work_clock=_Clock())
    timed = []
    for _ in range(9):
        _train(meter, 1)
        timed.append(len(meter.backward[0]))
    assert timed == [1, 2, 2, 2, 3, 3, 3, 4, 4]
    meter.reset()
    _train(meter, 1)
    assert len(meter.backward[0]) == len(meter.backward[1]) == 1, "a new period has times at once"


def test_steps_that_are_measured_anew_have_times_at_once() -> None:
    """Without a reset, as where decisions are made beside steps: else a decision may see times long past."""
    meter = Meter(work_clock=_Clock())
    for steps in (2, 2):
        before = len(meter.backward[0])
        for enabled in (*[True] * steps, False):
            meter.enabled = enabled
            meter.begin_step()
            _train(meter, 1)
            meter.end_step()
        assert len(meter.backward[0]) > before


def test_all_slices_of_a_microbatch_have_hooks_or_none() -> None:
    """Also where the first backward comes between two of its slices, as in a pipeline's first microbatches."""
    meter, slices = Meter(work_clock=_Clock()), 2
    layers: dict[int, nn.Module] = {i: nn.Linear(2, 2) for i in range(2)}
    passed: dict[tuple[int, int], Tensor] = {}
    order = [*("F00", "F01", "F10", "F11"), *("F20", "B01", "F21", "B00"), *("B11", "B10", "B21", "B20")]
    for action in order:
        unit = int(action[1]), int(action[2])
        meter.working_on = unit[1], slices, 1 / slices
        if action[0] == "F":
            passed[unit] = meter.run_action("F", 0, lambda: _forward(meter, layers))
        else:
            meter.run_action("B", 0, passed.pop(unit).backward)
    # the first two, however many have gone forward before the first backward
    for i in layers:
        assert [x.slice for x in meter.backward[i] if isinstance(x, OfSlice)] == [1, 0] * 2


def test_one_disturbed_microbatch_does_not_count_and_uneven_ones_do() -> None:
    meter = Meter()
    layer = nn.Linear(2, 2)
    meter.forward[0] = [1.0, 1.0, 1.0, 1.8, 90.0]
    assert local_costs({0: layer}, {0: [0]}, meter, {})[0].forward_s == pytest.approx(1.2)


def test_bytes_are_counted_once_in_a_period_and_stay_known() -> None:
    meter = Meter()
    layer = nn.Sequential(nn.Linear(2, 4), nn.Tanh())
    counted = []
    for rows in (1, 2, 3, 4):
        _run(meter, 0, layer, torch.ones(rows, 2, requires_grad=True))
        counted.append(meter.activation_bytes[0])
        if rows == 2:
            meter.reset()
    # the first microbatch ever, then the second one of the next period
    assert counted == [counted[0], counted[0], counted[0], 4 * counted[0]]
    assert len(meter.forward[0]) == 1


def test_pauses_between_actions_are_told() -> None:
    clock = _Clock()
    meter = Meter(clock=clock)
    meter.begin_step()
    for pause in (40.0, 3.0, 3.0, 50.0):
        clock.now += pause
        meter.run_action("F", 0, lambda: None)
    # what comes before the first action of a step is no pause between two; both readings take one each
    assert meter.times().between_s == 5.0


def test_a_layer_is_as_slow_as_its_slowest_replica() -> None:
    def run(world: Collective) -> list[LayerCost]:
        # two replicas of two ranks, a layer each
        mine = {world.rank % 2: LayerCost(forward_s=1.0 + world.rank)}
        return gather_costs(mine, 2, world, rows=((0, 1), (2, 3)))

    for costs in ThreadWorld(4).run(run):
        assert [c.forward_s for c in costs] == [3.0, 4.0]


def test_what_a_layer_logs_and_never_uses_leaves_no_graph() -> None:
    """A norm saves its own output: where it has no backward pass, counting its bytes must not keep all before it."""
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    logged = []

    def forward() -> tuple[Tensor, ...]:
        y = layer(x)
        logged.append(y.norm().item())
        return (y.exp(),)

    for meter in (Meter(enabled=False), Meter()):
        (out,) = meter.run_unit(0, layer, forward, [x])
        out.sum().backward()
        del out
        assert layer.weight._use_count() == 1
    # the layer's input and output, the norm, and the exponential
    assert meter.activation_bytes[0] == 4 * (12 + 12 + 1 + 12)
    assert logged[0] == logged[1]
