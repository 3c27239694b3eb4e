"""Modules that stand in several places of a model: kept where that can be, refused with both names elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prophet
from prophet.convert import load_original_state_dict, original_state_dict
from prophet.errors import ConversionError
from prophet.ranks.collective import Collective
from prophet.sharing import held_by_several, places_of
from tests.helpers.hand_written import DIM, EXPERTS, FloatSoftmax, TokenByToken, feed_forward
from tests.helpers.moe_models import alone, compare, hugging_face, together
from tests.helpers.support import on_threads, seeded


class Wrapped(nn.Module):
    """A layer with a block in it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.mix, self.block = nn.Linear(DIM, DIM), block

    def forward(self, x: Tensor) -> Tensor:
        y: Any = self.block(self.mix(x))
        return x + (y[0] if isinstance(y, tuple) else y)


class Holder(nn.Module):
    """Holds a list of experts, and calls them for a block around it."""

    def __init__(self, experts: nn.ModuleList) -> None:
        super().__init__()
        self.experts = experts


class Inner(nn.Module):
    """A block whose experts are held by a module inside; `index` decides which expert a row goes to."""

    def __init__(self, holder: Holder) -> None:
        super().__init__()
        self.gate, self.holder = nn.Linear(DIM, EXPERTS), holder

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.holder.experts):
            at, place = (chosen == number).nonzero(as_tuple=True)
            if len(at):
                y = y.index_add(0, at, expert(x[at]) * weights[at, place, None])
        return x + y


def experts() -> nn.ModuleList:
    return nn.ModuleList(feed_forward() for _ in range(EXPERTS))


def one_block() -> nn.Module:
    """Three layers with one block, which trains."""
    block = TokenByToken()
    return nn.Sequential(*(Wrapped(block) for _ in range(3)))


# --- refused, with both places ---


def lists_of_two_blocks() -> nn.Module:
    shared = Holder(experts())
    first, second = (Inner(Holder(shared.experts)) for _ in range(2))
    return nn.Sequential(first, second)


def holder_of_two_blocks() -> nn.Module:
    shared = Holder(experts())
    return nn.Sequential(Inner(shared), Inner(shared))


def expert_in_two_lists() -> nn.Module:
    first, second = experts(), experts()
    second[3] = first[5]
    return nn.Sequential(Inner(Holder(first)), Inner(Holder(second)))


def expert_twice_in_a_list() -> nn.Module:
    held = experts()
    held[3] = held[5]
    return nn.Sequential(Inner(Holder(held)), nn.Linear(DIM, 3))


def norm_of_all_experts() -> nn.Module:
    norm = nn.LayerNorm(DIM)
    held = nn.ModuleList(nn.Sequential(norm, *feed_forward()) for _ in range(EXPERTS))
    return nn.Sequential(Inner(Holder(held)), nn.Linear(DIM, 3))


def list_registered_twice() -> nn.Module:
    """The model keeps all experts together as well, under a name that comes first."""
    held = experts()
    return nn.ModuleDict({"all": nn.ModuleList([held]), "block": Inner(Holder(held))})


def expert_used_elsewhere() -> nn.Module:
    held = experts()
    return nn.Sequential(Inner(Holder(held)), held[0])


def matrix_used_elsewhere() -> nn.Module:
    held, last = experts(), nn.Linear(DIM, DIM)
    last.weight = nn.Parameter(torch.zeros(12, DIM))
    held[0][0].weight = last.weight  # type: ignore[union-attr]
    return nn.Sequential(Inner(Holder(held)), last)


def mixtral_experts_of_two_layers() -> nn.Module:
    model: Any = hugging_face("mixtral")
    model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts
    return model  # type: ignore[no-any-return]


REFUSED: dict[Callable[[], nn.Module], tuple[str, str]] = {
    lists_of_two_blocks: ("0.holder.experts", "1.holder.experts"),
    holder_of_two_blocks: ("0.holder", "1.holder"),
    expert_in_two_lists: ("0.holder.experts.5", "1.holder.experts.3"),
    expert_twice_in_a_list: ("0.holder.experts.3", "0.holder.experts.5"),
    norm_of_all_experts: ("0.holder.experts.0.0", "0.holder.experts.1.0"),
    list_registered_twice: ("all.0", "block.holder.experts"),
    expert_used_elsewhere: ("1", "0.holder.experts.0"),
    matrix_used_elsewhere: ("0.holder.experts.0.0.weight", "1.weight"),
    mixtral_experts_of_two_layers: ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts"),
}


@pytest.mark.parametrize("build", REFUSED)
def test_experts_in_several_places_are_refused_with_both_and_nothing_changes(build: Callable[[], nn.Module]) -> None:
    model = build()
    before = [(n, m, dict(vars(m))) for n, m in model.named_modules(remove_duplicate=False)]
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    first, second = REFUSED[build]
    with pytest.raises(ConversionError, match=rf"^{first} and {second} are one (module|parameter)"):
        prophet.convert(model)
    for (name, module, attributes), (n, m) in zip(before, model.named_modules(remove_duplicate=False), strict=True):
        assert (name, module, set(attributes)) == (n, m, set(vars(m)))
    assert all(torch.equal(p, values[n]) for n, p in model.named_parameters())


# --- kept ---


def test_what_experts_have_in_common_without_parameters_is_no_sharing() -> None:
    activation = nn.GELU()
    held = nn.ModuleList(
        nn.Sequential(nn.Linear(DIM, 12), activation, nn.Linear(12, DIM), activation) for _ in range(EXPERTS)
    )
    report = prophet.convert(nn.Sequential(Inner(Holder(held)), nn.Linear(DIM, 3)))
    assert "0.holder.experts" in str(report)


def test_an_expert_may_use_one_of_its_modules_twice() -> None:
    def expert() -> nn.Module:
        square = nn.Linear(DIM, DIM)
        return nn.Sequential(square, nn.Tanh(), square)

    model = nn.Sequential(Inner(Holder(nn.ModuleList(expert() for _ in range(EXPERTS)))), nn.Linear(DIM, 3))
    plain, x = copy.deepcopy(model), torch.randn(5, DIM)
    prophet.convert(model)
    torch.testing.assert_close(model(x), plain(x))


def loss_of(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y = model(x)
    return (y - 1).square().mean(), y


@pytest.mark.parametrize("kind", [TokenByToken, FloatSoftmax])
def test_a_block_in_three_layers_trains_is_exported_loaded_and_reverted(kind: type[nn.Module]) -> None:
    with seeded(4):
        block = kind()
        model = nn.Sequential(*(Wrapped(block) for _ in range(3))).double()
    steps = [list(torch.randn(2, 6, DIM, dtype=torch.float64)[:, None]) for _ in range(3)]
    plain, copies = copy.deepcopy(model), [copy.deepcopy(model) for _ in range(2)]
    wanted = alone(copy.deepcopy(model), steps, loss_of)

    def body(group: Collective) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
        mine = copies[group.rank]
        seen = together(mine, steps, group, loss_of)
        exported = original_state_dict(mine)
        load_original_state_dict(mine, plain.state_dict())
        back = {n: t.clone() for n, t in original_state_dict(mine).items()}
        load_original_state_dict(mine, exported)
        prophet.revert(mine)
        assert mine[0].block is mine[2].block
        assert all(torch.equal(t, exported[n]) for n, t in mine.state_dict().items())
        return seen, exported, back

    found = on_threads(2, body)
    compare(wanted, [seen for seen, *_ in found], 1e-10)
    for _, exported, back in found:
        assert list(exported) == list(plain.state_dict())
        copy.deepcopy(plain).load_state_dict(exported, strict=True)
        assert all(torch.equal(t, back[n]) for n, t in plain.state_dict().items())


def test_one_walk_finds_every_place() -> None:
    model = one_block()
    places = places_of(model)
    block: Any = model[0].block  # type: ignore[union-attr]
    weight = block.experts[0][0].weight
    assert [p.name for p in places[id(block)]] == ["0.block", "1.block", "2.block"]
    assert [p.name for p in held_by_several(places[id(block)])] == ["0.block", "1.block", "2.block"]
    assert [p.name for p in places[id(weight)]] == [f"{i}.block.experts.0.0.weight" for i in range(3)]
    assert [p.name for p in held_by_several(places[id(weight)])] == ["0.block.experts.0.0.weight"]
