"""Loops and optimizers that take experts for copies of one are errors within two steps, with and without `attach`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import prophet
from prophet.errors import ExpertsMixed, GradientMismatch
from prophet.parallel import ExpertReplicas, expert_groups, expert_parameters, leave_out_of_ddp
from tests.helpers.hand_written import DIM, FloatSoftmax, HandWritten
from tests.helpers.launch import on_processes

Params = list[nn.Parameter]


class LoRA(nn.Module):
    """A frozen matrix and two factors, of which the second begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.a, self.b = nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.base(x) + self.b(self.a(x)))
        return y


class Loop:
    """What people write around a model of ours; every part may be replaced by a wrong one."""

    def __init__(self, *, kind: str, attached: bool, ddp: bool = False, steps: int = 4, group: Any = None) -> None:
        self.attached, self.ddp, self.steps, self.step = attached, ddp, steps, -1
        torch.manual_seed(0)
        if kind == "converted":
            self.model: nn.Module = HandWritten(FloatSoftmax)
            prophet.convert(self.model, verify=False)
        else:
            options: dict[str, Any] = {"expert": LoRA} if kind == "LoRA" else {"hidden": 12}
            experts = prophet.MoE(DIM, num_experts=12, group=group, **options)
            self.model = nn.Sequential(nn.Linear(DIM, DIM), experts, nn.Linear(DIM, DIM)).double()
        leave_out_of_ddp(self.model)
        self.model.train()
        self.begin = self.before_step = self.after_step = lambda: None  # replaced
        self.make: Callable[[Params], torch.optim.Optimizer] = lambda params: torch.optim.AdamW(params, 0.01)

    def params(self) -> Params:
        return list(self.model.parameters())

    def shared(self) -> Params:
        experts = {p for _, p in expert_parameters(self.model)}
        return [p for p in self.model.parameters() if p not in experts]

    def average(self) -> None:
        for p in self.shared():
            if p.grad is not None and not self.ddp:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()

    def run(self) -> str:
        """The error and in which step it came, "0: ..." before the first update; what was warned of without one."""
        engine = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self.begin()
                optimizer = self.make(self.params())
                engine = prophet.attach(self.model, optimizer) if self.attached else None
                self.train(optimizer)
            except (ExpertsMixed, GradientMismatch, ValueError) as error:
                return f"{self.step}: {type(error).__name__}: {error}"
            finally:
                if engine is not None:
                    engine.close()
        return "; ".join(str(w.message) for w in caught if "rank(s)" in str(w.message))

    def train(self, optimizer: torch.optim.Optimizer) -> None:
        called = DistributedDataParallel(self.model) if self.ddp else self.model
        for step in range(self.steps):
            self.step = step
            seed = 10 * step + dist.get_rank()
            out = called(torch.randn(24, DIM, generator=torch.Generator().manual_seed(seed)).double())
            (out[0] if isinstance(out, tuple) else out).square().sum().backward()
            self.average()
            self.before_step()
            optimizer.step()
            self.after_step()
            optimizer.zero_grad()


# --- the mistakes ---


def broadcast(loop: Loop) -> None:
    def begin() -> None:
        for p in loop.params():
            dist.broadcast(p.data, 0)

    loop.begin = begin


def all_reduce(loop: Loop) -> None:
    def everything() -> None:
        for p in loop.params():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()

    loop.before_step = everything


def zero(loop: Loop) -> None:
    loop.make = lambda params: ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.01)


def lbfgs(loop: Loop) -> None:
    loop.make = torch.optim.LBFGS


class Muon(torch.optim.SGD):
    """As the package muon-optimizer has it: every rank updates some parameters, and the others take its values."""

    def step(self, closure: Any = None) -> None:
        params = [p for g in self.param_groups for p in g["params"]]
        super().step(closure)
        for i, p in enumerate(params):
            dist.broadcast(p.data, i % dist.get_world_size())


Muon.__module__ = "muon"


def muon(loop: Loop) -> None:
    loop.make = lambda params: Muon(params, 0.01)


def zero_by_hand(loop: Loop) -> None:
    """Every rank updates a part of all parameters, and the others take its values."""

    def after() -> None:
        for i, p in enumerate(loop.params()):
            dist.broadcast(p.data, i % dist.get_world_size())

    loop.after_step = after


def averager(loop: Loop) -> None:
    """As torch's recipe for local SGD has it."""
    averages = PeriodicModelAverager(period=2)
    loop.after_step = lambda: averages.average_parameters(loop.model.parameters())


def own_clip(loop: Loop) -> None:
    loop.before_step = lambda: nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)


def clip_of_zero(loop: Loop) -> None:
    """The optimizer that ZeroRedundancyOptimizer has inside holds other parameters on every rank."""
    own_clip(loop)
    clip, beside = loop.before_step, ZeroRedundancyOptimizer(loop.shared(), torch.optim.AdamW, lr=0.01)
    loop.make = lambda params: torch.optim.AdamW([p for _, p in expert_parameters(loop.model)], 0.01)
    loop.before_step = lambda: (clip(), beside.step(), None)[-1]
    loop.after_step = beside.zero_grad


class OneRate(torch.optim.SGD):
    """Finds its rate from all gradients, as Prodigy and D-Adaptation do."""

    def step(self, closure: Any = None) -> None:
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        rate = 0.01 / float(sum(p.grad.square().sum() for p in params))
        with torch.no_grad():
            for p in params:
                p.sub_(p.grad, alpha=rate)


def one_rate(loop: Loop) -> None:
    loop.make = lambda params: OneRate(params, 0.1)


EQUAL, USED = "ExpertsMixed: .*have become equal bit for bit", "ExpertsMixed: .*has used the same gradients"
LAYERS, CONVERTED = {"kind": "layers"}, {"kind": "converted"}
ATTACHED, PLAIN = {"attached": True}, {"attached": False}
FAULTS: list[tuple[Callable[[Loop], None], dict[str, Any], str]] = [
    (broadcast, CONVERTED | ATTACHED, f"0: {EQUAL}"),
    (broadcast, LAYERS | PLAIN, f"0: {EQUAL}"),
    (all_reduce, LAYERS | ATTACHED, f"1: {USED}"),
    (all_reduce, LAYERS | PLAIN, f"1: {USED}"),
    (zero, LAYERS | ATTACHED, "-1: ValueError: the optimizer holds experts, and ZeroRedundancyOptimizer keeps"),
    (zero, CONVERTED | PLAIN, f"1: {EQUAL}"),
    (lbfgs, LAYERS | ATTACHED, "-1: ValueError: the optimizer holds experts, and LBFGS keeps one flat history"),
    (muon, LAYERS | ATTACHED, "-1: ValueError: the optimizer holds experts, and muon.Muon keeps each state on"),
    (muon, LAYERS | PLAIN, f"1: {EQUAL}"),
    (zero_by_hand, LAYERS | ATTACHED, f"1: {EQUAL}"),
    (averager, LAYERS | ATTACHED, f"1: {EQUAL}"),
    (own_clip, LAYERS | ATTACHED, r"1: GradientMismatch: step 0: .*Clip by engine\.clip_grad_norm_"),
    (own_clip, LAYERS | PLAIN, "1: GradientMismatch: step 0: .*of parameter 0 of group 0 .*prophet.attach"),
    (own_clip, CONVERTED | PLAIN | {"ddp": True}, "1: GradientMismatch: step 0: .*of mixes.0.weight .*prophet.attach"),
    (clip_of_zero, LAYERS | PLAIN | {"ddp": True}, "1: GradientMismatch: step 0"),
    (one_rate, LAYERS | PLAIN, "has used the same gradients.* treat each parameter by itself"),
]


def faults() -> list[str]:
    found = []
    for spoil, how, _ in FAULTS:
        loop = Loop(**how)
        spoil(loop)
        found.append(loop.run())
    return found


def test_what_takes_experts_for_copies_is_an_error_within_two_steps() -> None:
    for found in on_processes(2, faults, timeout_s=150):
        for (spoil, how, text), said in zip(FAULTS, found, strict=True):
            assert re.search(text, said), (spoil.__name__, how, said)


# --- what looks like one of them, and is right ---


def zero_of_dense(loop: Loop) -> None:
    """ZeroRedundancyOptimizer of what ranks share, stepped beside the experts' own optimizer."""
    beside = ZeroRedundancyOptimizer(loop.shared(), torch.optim.AdamW, lr=0.01)
    loop.make = lambda params: torch.optim.AdamW([p for _, p in expert_parameters(loop.model)], 0.01)
    loop.before_step = beside.step
    loop.after_step = beside.zero_grad


def attached_to_zero(loop: Loop) -> None:
    """The engine follows the one of what ranks share."""
    beside = torch.optim.AdamW([p for _, p in expert_parameters(loop.model)], 0.01)
    loop.make = lambda params: ZeroRedundancyOptimizer(loop.shared(), torch.optim.AdamW, lr=0.01)
    loop.before_step = beside.step
    loop.after_step = beside.zero_grad


def equal_experts(loop: Loop) -> None:
    """Upcycled: every expert begins as the same one, and a router of zeros sends each token to the first ones."""

    def begin() -> None:
        state = loop.model.state_dict()
        for name, value in state.items():
            if "experts" in name:
                same = torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel()))
                value.copy_(same)
            elif "gate" in name or "router" in name:
                value.zero_()
        loop.model.load_state_dict(state)

    loop.begin = begin


def frozen_experts(loop: Loop) -> None:
    for _, p in expert_parameters(loop.model):
        p.requires_grad_(False)


def local_sgd(loop: Loop) -> None:
    """What ranks share is averaged as parameters, every other step."""
    averages = PeriodicModelAverager(period=2)
    loop.average = lambda: None  # type: ignore[method-assign]
    loop.after_step = lambda: averages.average_parameters(iter(loop.shared()))


def loading(loop: Loop) -> None:
    """In mid-run, what had other values, and what makes all experts equal."""
    first = {name: value.clone() for name, value in loop.model.state_dict().items()}

    def after() -> None:
        if loop.step % 4 == 1:
            loop.model.load_state_dict(first)
        if loop.step % 4 == 3:
            loop.model.load_state_dict({n: v.sign() if "experts" in n else v for n, v in first.items()})
            loop.model.load_state_dict({n: v.fill_(0.1) for n, v in loop.model.state_dict().items()})

    loop.after_step = after


def zeros(loop: Loop) -> None:
    def before() -> None:
        for p in loop.params():
            if p.grad is not None:
                p.grad.fill_(-0.0)

    loop.before_step = before


RIGHT: list[tuple[Callable[[Loop], None], dict[str, Any]]] = [
    (lambda loop: None, CONVERTED | PLAIN | {"ddp": True}),
    (zero_of_dense, LAYERS | PLAIN),
    (zero_of_dense, LAYERS | ATTACHED),
    (attached_to_zero, LAYERS | ATTACHED),
    (equal_experts, LAYERS | PLAIN),
    (equal_experts, LAYERS | ATTACHED),
    (frozen_experts, LAYERS | ATTACHED),
    (frozen_experts, LAYERS | PLAIN),
    (local_sgd, LAYERS | ATTACHED),
    (loading, LAYERS | PLAIN),
    (loading, CONVERTED | ATTACHED),
    (zeros, LAYERS | PLAIN),
    (lambda loop: None, {"kind": "LoRA"} | PLAIN),
    (lambda loop: None, {"kind": "LoRA"} | ATTACHED),
]


def right(steps: int) -> list[str]:
    found = []
    for what, how in RIGHT:
        loop = Loop(**how, steps=steps)
        what(loop)
        found.append(loop.run())
    return found


@pytest.mark.parametrize("steps", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_no_false_alarms(steps: int) -> None:
    for found in on_processes(2, right, steps, timeout_s=280):
        for (what, how), said in zip(RIGHT, found, strict=True):
            local = what is local_sgd  # where ranks' gradients of what they share differ, one warning says so
            assert not said or (local and "Are gradients averaged" in said and ";" not in said), (
                what.__name__,
                how,
                said,
            )


def right_in_groups(steps: int) -> list[str]:
    """Two groups of two ranks; the experts of both are averaged."""
    ep, replicas = expert_groups(2)
    found = []
    for attached in (True, False):
        loop = Loop(kind="layers", attached=attached, steps=steps, group=ep)
        ExpertReplicas(loop.model, replicas)
        found.append(loop.run())
    return found


@pytest.mark.parametrize("steps", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_no_false_alarms_in_groups_smaller_than_the_world(steps: int) -> None:
    assert on_processes(4, right_in_groups, steps, timeout_s=280) == [["", ""]] * 4
