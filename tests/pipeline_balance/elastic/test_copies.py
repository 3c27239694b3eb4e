"""What a copy of modules cannot stand for is found before it is in force."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from pipeline_balance.elastic.copies import Copy, check_copyable
from pipeline_balance.elastic.fully_sharded import check_weak
from pipeline_balance.pipeline.ownership import check_free
from prophet.errors import SpecError


class _Counter:
    def count(self, *_: Any) -> None:
        """A hook of an object that is none of the model's."""


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def _hook(*_: Any, **__: Any) -> None:
    """Does nothing."""


def _closure(net: nn.Module) -> Callable[..., None]:
    kept = {"layers": [net[0].weight]}  # type: ignore[index]
    return lambda *_: kept.update(seen=[])


_REFER: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "a method of a module": lambda net: net[0].extra_repr,
    "a function in a function": _closure,
    "a partial": lambda net: partial(_hook, of=net[0].bias),
    "a default": lambda net: lambda *_, of=net: None,
}


@pytest.mark.parametrize("kind", _REFER)
@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_pre_hook"])
def test_hooks_that_refer_to_the_model_are_refused(kind: str, register: str) -> None:
    net = _net()
    handle = getattr(net[1], register)(_REFER[kind](net))
    with pytest.raises(SpecError, match=r"1\._\w+_hooks refers to a module or parameter"):
        check_copyable(net, None)
    handle.remove()
    check_copyable(net, None)


def test_other_hooks_and_attributes_go_over() -> None:
    net, seen = _net(), [torch.ones(2)]
    net[0].register_forward_hook(_Counter().count)
    net[1].register_forward_pre_hook(lambda *_: seen.append(torch.ones(1)))
    net[1].act = partial(torch.nn.functional.gelu, approximate="tanh")
    check_copyable(net, None)


def test_weak_references_are_named() -> None:
    net = _net()
    check_weak(net, dict(net.named_parameters()))
    for held, name in ((net[1].bias, "1.bias"), (net[0], "0"), (net, "the model")):
        weak = weakref.ref(held)
        with pytest.raises(SpecError, match=f"a weak reference to {name}, and would"):
            check_weak(net, dict(net.named_parameters()))
        del weak
    check_weak(net, dict(net.named_parameters()))


def test_graphs_that_are_alive_are_named_until_they_end() -> None:
    net = _net()
    named = dict(net.named_parameters())
    loss = net(torch.ones(1, 2)).sum()
    for _ in range(2):
        with pytest.raises(SpecError, match=r"^0\.weight is held by an autograd graph"):
            check_free(named)
        if loss.grad_fn is not None:
            loss.backward(retain_graph=True)
    value = loss.detach()
    del loss
    kept = [net[0].weight.detach(), list(net.parameters()), value]  # they hold no graph
    check_free(named)
    view = net[1].weight.view(-1)
    with pytest.raises(SpecError, match=r"^1\.weight is held"):
        check_free(named)
    del view, kept


def test_a_parametrized_module_is_copied_with_its_parametrization() -> None:
    net, x = _net(), torch.ones(1, 2)
    parametrizations.weight_norm(net[0])
    check_copyable(net, None)
    copy = Copy(net, None, lambda p: nn.Parameter(2 * p.detach()))
    copy.make()
    expected = nn.functional.linear(x, 2 * net[0].weight, 2 * net[0].bias)
    assert torch.allclose(copy.root[0](x), expected)  # type: ignore[index]
