"""Experts are differentiated once: what asks for more is refused at that line; what needs one derivative is not."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import prophet
from prophet.kernels.grouped_ffn import ExpertWeights, grouped_ffn
from prophet.ranks.collective import Collective
from tests.helpers.hand_written import DIM, FloatSoftmax, TopKThenSoftmaxLora
from tests.helpers.moe_models import hugging_face
from tests.helpers.support import on_threads, seeded

KINDS = ("feed-forward", "modules", "hand-written", "hand-written modules", "mixtral")
REFUSED = r"experts are differentiated once. Call backward\(\)"


class Net(nn.Module):
    """One block between two linear layers, in float64."""

    def __init__(self, kind: str, group: Collective | None = None, *, plain: bool = False) -> None:
        super().__init__()
        mixtral: Any = hugging_face(kind, hidden_size=DIM) if kind == "mixtral" else None
        with seeded(3):
            self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 3)
            self.block: Any = nn.Identity()
            if kind == "feed-forward":
                self.block = prophet.MoE(DIM, 12, 8, group=group)
            elif kind == "modules":
                self.block = prophet.MoE(DIM, None, 8, expert=lambda: nn.Linear(DIM, DIM), group=group)
            elif kind == "mixtral":
                self.block = mixtral.model.layers[0].mlp
            else:
                self.block = FloatSoftmax() if kind == "hand-written" else TopKThenSoftmaxLora()
        if not plain and kind not in ("feed-forward", "modules"):
            prophet.convert(self, group=group)
        self.double()

    def hidden(self, x: Tensor) -> Tensor:
        y = self.block(self.first(x).unsqueeze(0))
        y = y[0] if isinstance(y, tuple) else y
        return y.squeeze(0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.hidden(x)).sin()
        return y

    def part(self, name: str) -> dict[str, nn.Parameter]:
        """Parameters of the experts, or of the block's router."""
        inside = {n: p for n, p in self.named_parameters() if n.startswith("block.") and p.requires_grad}
        experts = {n: p for n, p in inside.items() if ".experts." in n}
        return experts if name == "experts" else {n: p for n, p in inside.items() if n not in experts}


def rows(rank: int = 0) -> Tensor:
    return torch.randn(6, DIM, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def penalty(net: Net, x: Tensor) -> None:
    """Of the gradient by the input."""
    x = x.requires_grad_()
    (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    g.square().sum().backward()


def forward_mode(net: Net, x: Tensor, part: str) -> None:
    with forward_ad.dual_level():
        if part == "x":
            net(forward_ad.make_dual(x, x))
            return
        duals = {n: forward_ad.make_dual(p.detach(), torch.ones_like(p)) for n, p in net.part(part).items()}
        torch.func.functional_call(net, {n: p.detach() for n, p in net.named_parameters()} | duals, (x,))


def loss_by(net: Net, x: Tensor) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda p: torch.func.functional_call(net, p, (x,)).sum()


ASKING: dict[str, Callable[[Net, Tensor], object]] = {
    "penalty": penalty,
    "backward": lambda net, x: net(x).sum().backward(create_graph=True),
    "by experts": lambda net, x: torch.autograd.grad(
        net(x).sum(), list(net.part("experts").values()), create_graph=True
    ),
    "hvp": lambda net, x: torch.autograd.functional.hvp(lambda x: net(x).sum(), x, x),
    "is_grads_batched": lambda net, x: torch.autograd.functional.jacobian(net, x, vectorize=True),
    "func.grad": lambda net, x: torch.func.grad(loss_by(net, x))(dict(net.named_parameters())),
    "func.vjp": torch.func.vjp,
    "func.jvp": lambda net, x: torch.func.jvp(net, (x,), (x,)),
    "func.vmap": lambda net, x: torch.func.vmap(net)(torch.stack([x, x])),
    "forward-mode x": lambda net, x: forward_mode(net, x, "x"),
    "forward-mode experts": lambda net, x: forward_mode(net, x, "experts"),
}


def said_to(ask: Callable[[Net, Tensor], object], net: Net) -> str:
    """What the error says; nothing where there is none."""
    try:
        ask(net, rows())
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_more_than_one_derivative_is_refused_where_it_is_asked_for(kind: str) -> None:
    net = Net(kind)
    for what, ask in ASKING.items():
        for training in (True, False):
            if what == "func.vmap" and kind == "mixtral":
                continue  # torch refuses the router's own code before it calls experts
            assert re.search(REFUSED, said_to(ask, net.train(training))), what


@pytest.mark.parametrize("kind", ["feed-forward", "modules", "mixtral"])
def test_a_router_whose_weights_the_layer_applies_is_differentiated_once(kind: str) -> None:
    net = Net(kind)
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.grad(net(rows()).sum(), list(net.part("router").values()), create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSED):
        forward_mode(net, rows(), "router")


@pytest.mark.parametrize("kind", ["hand-written", "hand-written modules"])
def test_a_router_in_code_that_runs_twice_is_differentiated_as_often_as_needed(kind: str) -> None:
    """Its weights are applied by the block's own code, so no expert is differentiated twice."""
    nets = Net(kind, plain=True), Net(kind)
    for net in nets:
        grads = torch.autograd.grad(net(rows()).sum(), list(net.part("router").values()), create_graph=True)
        sum((g.square().sum() for g in grads), torch.zeros(())).backward()
    for name in ("first.weight", "last.weight", *nets[0].part("router")):
        want, got = (net.get_parameter(name).grad for net in nets)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["feed-forward", "hand-written"])
def test_two_ranks_with_replicas_refuse_and_go_on(kind: str) -> None:
    unconverted = [Net(kind, plain=True) for _ in range(2)]

    def body(group: Collective) -> list[float]:
        net = unconverted[group.rank]
        if kind == "feed-forward":
            net = Net(kind, group)
        else:
            prophet.convert(net, group=group)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        engine = prophet.attach(net, optimizer)
        losses = []
        for step in range(4):
            if step == 2:
                with pytest.raises(RuntimeError, match=REFUSED):
                    penalty(net, rows(group.rank))
                optimizer.zero_grad()
            loss = net(rows(group.rank)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        engine.close()
        return losses

    for losses in on_threads(2, body):
        assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_what_needs_one_derivative_of_the_experts_goes_on(kind: str) -> None:
    net = Net(kind)
    x = rows()
    # a penalty behind the block, and beside it
    h = net.hidden(x)
    (g,) = torch.autograd.grad(net.last(h).sin().sum(), h, create_graph=True)
    beside = x.clone().requires_grad_()
    (other,) = torch.autograd.grad((net(x).sum() + beside.sin().sum()), beside, create_graph=True)
    (g.square().sum() + other.square().sum()).backward()
    assert net.first.weight.grad is not None
    # sharpness-aware minimisation: two gradients, one after the other
    trained = [p for p in net.parameters() if p.requires_grad]
    first = torch.autograd.grad(net(x).sum(), trained, allow_unused=True)
    with torch.no_grad():
        for p, d in zip(trained, first, strict=True):
            p.add_(0 if d is None else 0.05 * d)
    net(x).sum().backward()
    # several ways to write one derivative
    assert torch.autograd.functional.jacobian(lambda x: net(x).sum(0), x).shape == (3, 6, DIM)
    loss_by(net, x)(dict(net.named_parameters())).backward()
    for reentrant in (True, False):
        checkpoint(net, x.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()
        for p in (*net.part("experts").values(), net.first.weight):
            p.grad = None
        checkpoint(net, x.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()
        want = torch.autograd.grad(net(x).sum(), net.first.weight)[0]
        torch.testing.assert_close(net.first.weight.grad, want)


def test_the_operator_alone_refuses_what_it_would_leave_out() -> None:
    x = rows().requires_grad_()
    weights = [torch.randn(2, a, b, dtype=torch.float64, requires_grad=True) for a, b in ((5, DIM), (DIM, 5))]
    for impl in ("auto", "naive"):
        y = grouped_ffn(x, [3, 3], ExpertWeights(*weights, None, None), "gelu", impl=impl) + x
        if impl == "auto":
            with pytest.raises(RuntimeError, match="impl='naive'"):
                torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        else:
            (g,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
            g.square().sum().backward()


def test_a_copy_of_a_model_refuses_too() -> None:
    with pytest.raises(RuntimeError, match=REFUSED):
        penalty(copy.deepcopy(Net("hand-written")), rows())
