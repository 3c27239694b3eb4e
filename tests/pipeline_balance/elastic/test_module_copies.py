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

from pipeline_balance.elastic.shards.fully_sharded import check_weak
from pipeline_balance.elastic.shards.module_copies import Copy, check_copyable, found_in, without_memory
from pipeline_balance.pipeline.model.ownership import check_free
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


@pytest.mark.parametrize("compiled", [False, True])
def test_weak_references_are_named(compiled: bool) -> None:
    if compiled:  # once it was used, it has a weak reference to every module that is made
        torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
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
    copy = Copy(found_in(net, None), lambda p: nn.Parameter(2 * p.detach()))
    copy.update(None)
    copy.make()
    expected = nn.functional.linear(x, 2 * net[0].weight, 2 * net[0].bias)
    assert torch.allclose(copy.root[0](x), expected)  # type: ignore[index]


def _retyped(net: Any) -> None:
    net[1].__class__ = type("Other", (nn.Linear,), {})


def _wider(net: Any) -> None:
    net[1].weight.data = torch.zeros(2, 3)


def _in_halves(net: Any) -> None:
    net[0].bias.data = net[0].bias.data.half()


_CHANGES: dict[str, Callable[[Any], Any]] = {
    "a module": lambda net: net.__setitem__(1, nn.Linear(2, 2)),
    "one more": lambda net: net.append(nn.ReLU()),
    "one less": lambda net: net.pop(0),
    "another order": lambda net: net.insert(0, net.pop(1)),
    "a class": _retyped,
    "a parameter": lambda net: setattr(net[0], "bias", nn.Parameter(torch.zeros(2))),
    "no parameter": lambda net: setattr(net[0], "bias", None),
    "one more parameter": lambda net: net[0].register_parameter("more", nn.Parameter(torch.zeros(2))),
    "a tie": lambda net: setattr(net[0], "weight", net[1].weight),
    "a shape": _wider,
    "a type": _in_halves,
}


@pytest.mark.parametrize("change", _CHANGES)
def test_a_copy_knows_that_its_originals_are_others(change: str) -> None:
    net = _net()
    copy = Copy(found_in(net, None), without_memory)
    net.requires_grad_(False).eval()
    assert copy.stands()
    _CHANGES[change](net)
    assert not copy.stands()


def test_a_copy_keeps_nothing_of_its_originals_alive() -> None:
    net = _net()
    net[0].loss = net[1](torch.ones(1, 2)).sum()  # holds a graph
    copy = Copy([one.lasting() for one in found_in(net, None)], without_memory)
    del net[0].loss
    check_free(dict(net.named_parameters()))
    assert copy.stands()


def test_a_copy_takes_in_what_has_changed() -> None:
    net = _net()
    net[0].old, net[0].kept = 1, 2  # type: ignore[assignment]
    copy = Copy(found_in(net, None), without_memory)
    copy.sharded()
    del net[0].old
    net[0].kept, net[1].new = 3, 4  # type: ignore[assignment]
    net[1].register_buffer("sums", torch.ones(2))
    net[0].eval()
    copy.update(None)
    first, second = copy.root
    assert (hasattr(first, "old"), first.kept, second.new, first.training) == (False, 3, 4, False)
    assert second._buffers is net[1]._buffers
    assert copy.attributes(net[0])["kept"] == 3
