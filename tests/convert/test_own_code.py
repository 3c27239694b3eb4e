"""Blocks that nobody announced: ten that are found, or named, and six that only look like one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prophet
from prophet.convert import converted, load_original_state_dict, original_state_dict
from prophet.convert.trials.discover import discover
from prophet.errors import ConversionError
from prophet.ranks.process_group import collective_for
from tests.helpers.hand_written import (
    DIM,
    EXPERTS,
    FOUND,
    NAMED,
    NOISY,
    ExpertChoice,
    FloatSoftmax,
    HandWritten,
    NoisyDropout,
    TokenByToken,
    TopKThenSoftmaxLora,
    feed_forward,
)
from tests.helpers.launch import on_processes
from tests.helpers.look_alikes import LOOK_ALIKES
from tests.helpers.moe_models import Seen, alone, compare, together
from tests.helpers.support import on_threads

SLOW = pytest.mark.slow
STEPS, LEARNING_RATE = 20, 0.01
TOLERANCE = 1e-10
NAMES = "blocks.*.experts"


def options_of(kind: type[nn.Module]) -> dict[str, Any]:
    """The line that a block needs, if it needs one."""
    return {"experts": NAMES} if kind in NAMED else {}


def tokens(ranks: int, step: int) -> list[Tensor]:
    """One [2, 6, D] batch per rank."""
    generator = torch.Generator().manual_seed(100 + step)
    return list(torch.randn(ranks, 2, 6, DIM, generator=generator, dtype=torch.float64))


def loss_of(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """A loss that everything which the blocks hand out has a share in, and all of that."""
    y, extra = model(x)
    return (y - 1).square().mean() + 0.1 * extra, torch.cat([y.flatten(), extra.view(1)])


def without_dropout(kind: type[nn.Module]) -> HandWritten:
    """The model, its experts' own randomness off."""
    model = HandWritten(kind)
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    return model


# --- what is found ---


@pytest.mark.parametrize("kind", [*FOUND, *NAMED])
def test_experts_are_found_or_named(kind: type[nn.Module]) -> None:
    model = HandWritten(kind)
    found, left = discover(model, ())
    names = [f.name for f in found]
    if kind in FOUND:
        assert names == ["blocks.0.experts", "blocks.1.experts"]
        assert [f.block for f in found] == ["blocks.0", "blocks.1"]
    else:
        assert names == []
        assert "prophet.convert(model, experts='blocks.0.experts')" in {x.name: x.why for x in left}["blocks.0.experts"]
        assert [f.name for f in discover(model, (), [NAMES])[0]] == ["blocks.0.experts", "blocks.1.experts"]
    assert "mixes" in {x.name for x in left}


@pytest.mark.parametrize("kind", LOOK_ALIKES)
def test_look_alikes_are_left_alone(kind: type[nn.Module]) -> None:
    model = kind()
    state = {n: t.clone() for n, t in model.state_dict().items()}
    found, left = discover(model, ())
    assert not found
    assert len(left) == 1
    with pytest.raises(ConversionError, match=f"{left[0].name} was left alone: "):
        prophet.convert(model)
    assert type(model) is kind
    assert all(torch.equal(model.state_dict()[n], t) for n, t in state.items())


# --- what they compute ---


@pytest.mark.parametrize(
    ("ranks", "steps"), [(2, 4), pytest.param(2, STEPS, marks=SLOW), pytest.param(4, STEPS, marks=SLOW)]
)
@pytest.mark.parametrize("kind", [k for k in (*FOUND, *NAMED) if k not in NOISY])
def test_training_is_that_of_the_block_as_written(kind: type[nn.Module], ranks: int, steps: int) -> None:
    model = HandWritten(kind)
    batches = [tokens(ranks, s) for s in range(steps)]
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    found = on_threads(
        ranks,
        lambda group: together(copies[group.rank], batches, group, loss_of, lr=LEARNING_RATE, **options_of(kind)),
    )
    compare(alone(model, batches, loss_of, LEARNING_RATE), found, TOLERANCE)
    assert all(seen.extra > 0 for seen in found)  # replicas were in force


def train_noisy(ranks: int, steps: int) -> dict[str, Seen]:
    """On one rank: all blocks that draw random numbers."""
    group = collective_for(None)
    seen = {}
    for kind in NOISY:
        torch.manual_seed(group.rank)
        batches = [tokens(ranks, s) for s in range(steps)]
        seen[kind.__name__] = together(without_dropout(kind), batches, group, loss_of, lr=LEARNING_RATE).mapped(
            Tensor.numpy
        )
    return seen


class RanksInTurn:
    """The loss on one rank after the other, each with random numbers of its own."""

    def __init__(self, ranks: int) -> None:
        self.turn = 0
        self.states = [torch.Generator().manual_seed(rank).get_state() for rank in range(ranks)]

    def __call__(self, model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        rank = self.turn % len(self.states)
        self.turn += 1
        torch.set_rng_state(self.states[rank])
        result = loss_of(model, x)
        self.states[rank] = torch.get_rng_state()
        return result


@pytest.mark.parametrize(
    ("ranks", "steps"), [(2, 4), pytest.param(2, STEPS, marks=SLOW), pytest.param(4, STEPS, marks=SLOW)]
)
def test_random_numbers_are_those_of_the_block_as_written(ranks: int, steps: int) -> None:
    found = on_processes(ranks, train_noisy, ranks, steps, timeout_s=240)
    for kind in NOISY:
        with torch.random.fork_rng(devices=[]):
            batches = [tokens(ranks, s) for s in range(steps)]
            want = alone(without_dropout(kind), batches, RanksInTurn(ranks), LEARNING_RATE)
        compare(want, [by_kind[kind.__name__].mapped(torch.from_numpy) for by_kind in found], TOLERANCE)


# --- and back ---


@pytest.mark.parametrize(
    "kind",
    [NoisyDropout, TopKThenSoftmaxLora, *(pytest.param(kind, marks=SLOW) for kind in (FloatSoftmax, ExpertChoice))],
)
def test_there_and_back_is_exact(kind: type[nn.Module]) -> None:
    model = HandWritten(kind)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    trains = {n: p.requires_grad for n, p in model.named_parameters()}
    copies = [copy.deepcopy(model) for _ in range(2)]

    def body(group: Any) -> None:
        mine = copies[group.rank]
        kinds = [type(m) for m in mine.modules()]
        prophet.convert(mine, group=group, verify=kind is not NoisyDropout, **options_of(kind))
        here = range(group.rank * EXPERTS // 2, (group.rank + 1) * EXPERTS // 2)
        elsewhere = tuple(f"blocks.{b}.experts.{e}." for b in range(2) for e in range(EXPERTS) if e not in here)
        assert set(mine.state_dict()) == {n for n in state if not n.startswith(elsewhere)}
        with torch.no_grad():
            for p in mine.parameters():
                p.add_(1.0)
        load_original_state_dict(mine, state)
        found = original_state_dict(mine)
        assert list(found) == list(state)
        assert all(torch.equal(found[n], t) for n, t in state.items())
        twin = copy.deepcopy(mine)
        for one in (mine, twin):
            prophet.revert(one)
            assert [type(m) for m in one.modules()] == kinds
            assert all(torch.equal(one.state_dict()[n], t) for n, t in state.items())
            assert {n: p.requires_grad for n, p in one.named_parameters()} == trains
            assert not any(vars(p) or p._backward_hooks for p in one.parameters())

    on_threads(2, body)
    x = tokens(1, 0)[0]
    for mine in copies:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            want = model(x)[0]
            torch.manual_seed(1)
            assert torch.equal(mine(x)[0], want)


def test_dropout_in_experts_drops_as_many_as_it_says_and_repeats() -> None:
    model = HandWritten(NoisyDropout)
    prophet.convert(model)
    layer: Any = next(layer for *_, layer in converted(model))
    seen: list[Tensor] = []
    for expert in layer.experts.home_experts():
        expert[3].register_forward_hook(lambda _, rows, y: seen.append(y.detach()))
    runs = []
    for _ in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            runs.append(model(torch.randn(1, 2000, DIM, dtype=torch.float64))[0])
    assert torch.equal(*runs)
    dropped = torch.cat([(y == 0).double().flatten() for y in seen])
    assert abs(float(dropped.mean()) - 0.1) < 0.01
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens(1, 0)[0])[0].isnan(), torch.zeros(2, 6, DIM, dtype=torch.bool))


# --- what the report says ---


def test_the_report_says_which_bank_why_and_what_it_costs() -> None:
    mixed = nn.ModuleDict({"lora": HandWritten(TopKThenSoftmaxLora), "plain": HandWritten(FloatSoftmax)})
    report = prophet.convert(mixed)
    text = str(report)
    assert [r.spec.bank for r in report.replaced] == ["modules", "modules", "feed-forward", "feed-forward"]
    assert "plain.blocks.0.experts · own code (modules) · 8 · 0-7 · 8 x 12 · feed-forward: swiglu · 576 FLOP" in text
    assert "lora.blocks.0.experts run one by one: Sequential: expected an expert of two linear layers" in text
    assert "lora.mixes was left alone: " in text
    assert text.count("run one by one") == 1
    assert "(and 1 like it)" in text
    one = report.replaced[0]
    assert one.expert_bytes == 8 * sum(p.numel() for p in TopKThenSoftmaxLora().experts[0].parameters())  # type: ignore[union-attr]


# --- bad input: one error that says what was expected, before anything changes ---


class Tuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = feed_forward()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y: Tensor = self.inner(x)
        return y, y


class Pools(Tuple):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y: Tensor = self.inner(x).mean(dim=0, keepdim=True)
        return y


class Mixes(Tuple):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y: Tensor = self.inner(x) - x.mean(dim=0)
        return y


class Greedy(TokenByToken):
    """Asks for more experts than there are."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.gate(x).topk(EXPERTS + 1, dim=-1)[0]
        return y


def quantised(expert: nn.Module) -> nn.Module:
    """As a four-bit linear layer keeps its weight: half as many bytes, in one column."""
    for linear in (m for m in expert.modules() if isinstance(m, nn.Linear)):
        packed = torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8)
        linear.weight = nn.Parameter(packed, requires_grad=False)
    return expert


def with_experts(*experts: nn.Module) -> HandWritten:
    model: Any = HandWritten(FloatSoftmax)
    for e, expert in enumerate(experts):
        model.blocks[0].experts[e] = expert.double()
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: with_experts(feed_forward()), "expert 0 has this parameter, expert 1 has not; expected alike experts"),
        (
            lambda: with_experts(*[feed_forward(bias=e != 3) for e in range(EXPERTS)]),
            "0.bias: expert 0 .*3 has not",
        ),
        (
            lambda: with_experts(*[nn.Linear(DIM, DIM + (e == 5)) for e in range(EXPERTS)]),
            r"5.weight: expected the shape \[8, 8\], as of expert 0, got \[9, 8\]",
        ),
        (
            lambda: with_experts(*[Tuple() for _ in range(EXPERTS)]),
            "answer with a tuple, expected one tensor",
        ),
        (lambda: with_experts(*[Pools() for _ in range(EXPERTS)]), r"answer to rows \[12, 8\] with \[1, 8\], expected"),
        (
            lambda: with_experts(*[Mixes() for _ in range(EXPERTS)]),
            "an answer's row depends on other rows",
        ),
        (
            lambda: with_experts(*[quantised(feed_forward()) for _ in range(EXPERTS)]),
            r"0.0.weight has dtype torch.uint8: quantised .* without quantization_config",
        ),
        (lambda: HandWritten(Greedy), r"index k out of range \(there are 8 modules in the list\)"),
    ],
)
def test_experts_that_cannot_be_are_an_error(make: Any, text: str) -> None:
    model = make()
    kinds = [type(m) for m in model.modules()]
    state = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(ConversionError, match=rf"^blocks.0.experts: .*{text}"):
        prophet.convert(model, experts=NAMES)
    assert [type(m) for m in model.modules()] == kinds
    assert all(torch.equal(model.state_dict()[n], t) for n, t in state.items())


def test_where_nothing_is_found_lists_of_experts_come_first() -> None:
    model: Any = HandWritten(FloatSoftmax)
    for block in model.blocks:
        for expert in block.experts:
            quantised(expert)
    with pytest.raises(ConversionError, match=r"a list of experts; blocks.0.experts was left alone: 0.w1.weight has"):
        prophet.convert(model)


def test_names_that_fit_nothing() -> None:
    with pytest.raises(ConversionError, match=r"experts='blocks.experts' names no list .*: mixes, blocks"):
        prophet.convert(HandWritten(FloatSoftmax), experts="blocks.experts")


def test_named_lists_are_the_only_ones() -> None:
    model = HandWritten(FloatSoftmax)
    report = prophet.convert(model, experts=["blocks.1.*"])
    assert [r.name for r in report.replaced] == ["blocks.1.experts"]
    assert {x.name: x.why for x in report.left}["blocks.0.experts"] == "experts= does not name it"


def test_a_blocks_own_method_that_was_left_on_it_does_not_hide_the_new_one() -> None:
    """As transformers 4.57 leaves it, having recorded router logits."""
    model = HandWritten(FloatSoftmax)
    for block in model.blocks:
        block.forward = block.forward
    steps = [tokens(2, s) for s in range(2)]
    copies = [copy.deepcopy(model) for _ in range(2)]
    found = on_threads(2, lambda group: together(copies[group.rank], steps, group, loss_of))
    compare(alone(model, steps, loss_of), found)
