"""Blocks that run twice: what their passes may leave behind, and what is around them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import prophet
from prophet.convert import converted
from prophet.errors import ConversionError, ReplayError
from tests.helpers.hand_written import (
    DIM,
    EXPERTS,
    TOP_K,
    ExpertChoice,
    FloatSoftmax,
    HandWritten,
    NoisyDropout,
    Swiglu,
    SwitchCapacity,
    TwoPaths,
    feed_forward,
)
from tests.helpers.moe_models import alone, compare, together
from tests.helpers.support import on_threads

TOLERANCE = 1e-10
LOSSES: list[float] = []


class Plain(nn.Module):
    """Softmax of the top k. `begin` and `route` are what the blocks below change."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleList(feed_forward() for _ in range(EXPERTS))

    def begin(self, tokens: Tensor) -> Tensor:
        return tokens

    def scores(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.gate(tokens)
        return y

    def rows_of(self, tokens: Tensor, weights: Tensor) -> Tensor:
        return tokens

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.begin(x.reshape(-1, DIM))
        top, ids = self.scores(tokens).topk(TOP_K, dim=-1)
        weights, y = top.softmax(dim=-1), torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            at, place = torch.where(ids == e)
            if len(at):
                share = weights[at, place, None]
                y[at] += share * expert(self.rows_of(tokens[at], share))
        return y.view(x.shape)


# --- state that is put back, or draws nothing ---


class Balanced(Plain):
    """A selection bias that follows the load, in a buffer that every pass replaces; another that it adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("seen", torch.zeros(EXPERTS))

    def scores(self, tokens: Tensor) -> Tensor:
        scores = super().scores(tokens) + self.get_buffer("bias")
        with torch.no_grad():
            load = torch.zeros_like(self.get_buffer("bias")).index_add(
                0, scores.topk(TOP_K, dim=-1)[1].flatten(), scores.new_ones(TOP_K * len(tokens))
            )
            self.get_buffer("seen").add_(load)
            self.bias = 0.9 * self.get_buffer("bias") - 0.01 * (load - load.mean()).sign()
        return scores


class Jitter(Plain):
    """Writes noise into its input."""

    def begin(self, tokens: Tensor) -> Tensor:
        return tokens.mul_(torch.linspace(0.9, 1.1, DIM, dtype=tokens.dtype))


class ScaledInputs(Plain):
    """The router's weight is part of what an expert gets, so the router learns through the experts' rows."""

    def rows_of(self, tokens: Tensor, weights: Tensor) -> Tensor:
        return tokens * (1 + weights)


class FirstCall(Plain):
    """Makes something when it first runs, and keeps it."""

    table: Tensor | None = None

    def begin(self, tokens: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(DIM, dtype=tokens.dtype)
        return tokens * self.table


class InPlace(Plain):
    """Writes the weights into the experts' answers."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, DIM)
        top, ids = self.gate(tokens).topk(TOP_K, dim=-1)
        weights, y = top.softmax(dim=-1), torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            at, place = torch.where(ids == e)
            rows = expert(tokens[at])
            rows *= weights[at, place, None]
            y.index_add_(0, at, rows)
        return y.view(x.shape)


class Container(nn.Module):
    """Holds the experts, and is told by the block around it which ones to run."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(Swiglu() for _ in range(EXPERTS))

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(tokens)
        for e in range(len(self.members)):
            at, place = torch.where(ids == e)
            y.index_add_(0, at, weights[at, place, None] * self.members[e](tokens[at]))
        return y


class Nested(nn.Module):
    """A block whose experts are in a module of their own."""

    def __init__(self, inner: Callable[[], nn.Module] = Container) -> None:
        super().__init__()
        self.router, self.inner = nn.Linear(DIM, EXPERTS), inner()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, DIM)
        top, ids = self.router(tokens).topk(TOP_K, dim=-1)
        y: Tensor = self.inner(tokens, ids, top.softmax(dim=-1)).view(x.shape)
        return y


class ListWithForward(nn.ModuleList):
    """After transformers 4.57: the list runs its experts itself, and knows more than a list does."""

    def __init__(self) -> None:
        super().__init__(Swiglu() for _ in range(EXPERTS))
        self.num_experts = EXPERTS

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(tokens)
        for e in range(self.num_experts):
            at, place = torch.where(ids == e)
            y.index_add_(0, at, weights[at, place, None] * self[e](tokens[at]))
        return y


class InAList(Nested):
    def __init__(self) -> None:
        super().__init__(ListWithForward)


def tokens_of(ranks: int, step: int, rows: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return list(torch.randn(ranks, 2, rows, DIM, generator=generator, dtype=torch.float64))


def loss_of(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y, extra = model(x.clone())
    return (y - 1).square().mean() + 0.1 * extra, y


@pytest.mark.parametrize("kind", [Jitter, ScaledInputs, FirstCall, InPlace, Nested, InAList])
def test_two_passes_are_one(kind: type[nn.Module]) -> None:
    ranks, model = 2, HandWritten(kind)
    steps = [tokens_of(ranks, s) for s in range(2)]
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    found = on_threads(ranks, lambda group: together(copies[group.rank], steps, group, loss_of))
    compare(alone(model, steps, loss_of), found, TOLERANCE)


def test_buffers_are_put_back_between_the_passes() -> None:
    model = HandWritten(Balanced)
    twin = copy.deepcopy(model)
    prophet.convert(twin)
    for step in range(3):
        x = tokens_of(1, step)[0]
        (a, _), (b, _) = model(x), twin(x)
        torch.testing.assert_close(b, a, rtol=0, atol=TOLERANCE)
        for name in ("blocks.0.bias", "blocks.0.seen", "blocks.1.bias"):
            assert torch.equal(twin.get_buffer(name), model.get_buffer(name))
    assert bool(model.get_buffer("blocks.0.seen").any())


def test_the_innermost_module_runs_twice() -> None:
    model = HandWritten(Nested)
    calls: list[int] = []
    report = prophet.convert(model)
    assert [(r.name, r.block) for r in report.replaced] == [
        (f"blocks.{i}.inner.members", "Container") for i in range(2)
    ]
    model.blocks[0].router.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr, operator]
    model(tokens_of(1, 0)[0])
    assert len(calls) == 1
    prophet.revert(model)
    assert type(model.get_submodule("blocks.0.inner")) is Container
    assert type(model.get_submodule("blocks.0.inner.members")) is nn.ModuleList


def test_random_numbers_go_on_where_the_block_would_have_left_them() -> None:
    model = HandWritten(SwitchCapacity)
    twin = copy.deepcopy(model)
    prophet.convert(twin)
    x, drawn = tokens_of(1, 0)[0], []
    for one in (model, twin):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            one(x)
            drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


def test_what_experts_have_drawn_is_not_drawn_again() -> None:
    x, states = tokens_of(1, 0)[0], []
    for p in (0.0, 0.1):
        model = HandWritten(NoisyDropout)
        for m in model.modules():
            if isinstance(m, nn.Dropout):
                m.p = p
        prophet.convert(model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model(x)
            states.append(torch.get_rng_state())
    assert not torch.equal(*states)


# --- state that two passes would change otherwise ---


class Counts(Plain):
    calls = 0

    def begin(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return tokens


class Appends(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def scores(self, tokens: Tensor) -> Tensor:
        scores = super().scores(tokens)
        self.losses.append(scores.logsumexp(dim=-1).square().mean())
        return scores


class AppendsElsewhere(Plain):
    def begin(self, tokens: Tensor) -> Tensor:
        LOSSES.append(0.0)
        return tokens


class Remembers(Plain):
    """An average that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Any = 0.0

    def scores(self, tokens: Tensor) -> Tensor:
        scores = super().scores(tokens)
        self.mean = 0.9 * self.mean + 0.1 * scores.detach().mean(dim=0)
        return scores - self.mean


class OtherRandomNumbers(Plain):
    def scores(self, tokens: Tensor) -> Tensor:
        return super().scores(tokens) + torch.tensor([random.random() for _ in range(EXPERTS)])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Counts, r"calls: it was 1 and is 2. A pass may not read .*register_buffer"),
        (Appends, "losses: it had 1 values and has 2. A pass may not read"),
        (AppendsElsewhere, "test_replay.LOSSES: it was 1.0 and is 2.0. A pass may not change what its file holds"),
        (Remembers, "state that a pass changes.* A pass changes mean$"),
        (OtherRandomNumbers, "depends on another's answer, or on random numbers that are not torch's"),
    ],
)
def test_state_that_changes_is_refused(kind: type[nn.Module], text: str) -> None:
    model = HandWritten(kind)
    with pytest.raises(ConversionError, match=text):
        prophet.convert(model)
    assert type(model.blocks[0]) is kind
    assert type(model.get_submodule("blocks.0.experts")) is nn.ModuleList


# --- what is around a block ---


class Checkpointed(HandWritten):
    """Recomputes its blocks in the backward pass."""

    reentrant = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for mix, block in zip(self.mixes, self.blocks, strict=True):
            out = checkpoint(block, mix(x), use_reentrant=self.reentrant)
            x = x + (out[0] if isinstance(out, tuple) else out)
        return x, x.new_zeros(())


class Reentrant(Checkpointed):
    reentrant = True


@pytest.mark.parametrize(
    ("around", "kind"),
    [
        (Checkpointed, TwoPaths),
        (Checkpointed, ExpertChoice),
        (Reentrant, FloatSoftmax),
        pytest.param(Checkpointed, FloatSoftmax, marks=pytest.mark.slow),
        pytest.param(Reentrant, TwoPaths, marks=pytest.mark.slow),
        pytest.param(Reentrant, ExpertChoice, marks=pytest.mark.slow),
    ],
)
def test_checkpointing(around: type[Checkpointed], kind: type[nn.Module]) -> None:
    ranks, model = 2, around(kind)
    steps = [tokens_of(ranks, s) for s in range(2)]
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    found = on_threads(
        ranks, lambda group: together(copies[group.rank], steps, group, loss_of, experts="blocks.*.experts")
    )
    compare(alone(model, steps, loss_of), found, TOLERANCE)


def test_a_rank_without_tokens_takes_part() -> None:
    ranks, model = 2, HandWritten(FloatSoftmax)
    x = tokens_of(1, 0)[0]
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def body(group: Any) -> Tensor:
        mine = copies[group.rank]
        prophet.convert(mine, group=group)
        y, _ = mine(x if group.rank else x[:0])
        y.sum().backward()
        return y.detach()

    empty, full = on_threads(ranks, body)
    assert empty.shape == (0, 7, DIM)
    torch.testing.assert_close(full, model(x)[0], rtol=0, atol=TOLERANCE)


class FloatOnly(Plain):
    """Makes tensors of torch's own dtype, so that it runs in no other."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, DIM)
        top, ids = self.gate(tokens).topk(TOP_K, dim=-1)
        y = torch.zeros(len(tokens), DIM)
        for e, expert in enumerate(self.experts):
            at, place = torch.where(ids == e)
            y.index_add_(0, at, expert(tokens[at]) * top[at, place, None])
        return y.view(x.shape)


def test_inference_mode_and_a_block_that_runs_in_one_dtype() -> None:
    for kind in (FloatOnly, Balanced):
        model = HandWritten(kind).float()
        twin = copy.deepcopy(model)
        prophet.convert(twin)
        for step in range(3):
            with torch.inference_mode():
                x = tokens_of(1, step)[0].float()
                torch.testing.assert_close(twin(x)[0], model(x)[0], rtol=1e-4, atol=1e-4)


class ToFloat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


class NormFirst(Plain):
    """Experts that begin with a norm and give float32, whatever they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), *feed_forward(), ToFloat()) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, DIM)
        top, ids = self.gate(tokens).topk(TOP_K, dim=-1)
        y = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            at, place = torch.where(ids == e)
            y.index_add_(0, at, (expert(tokens[at]) * top[at, place, None]).to(y.dtype))
        return y.view(x.shape)


@pytest.mark.parametrize(
    ("kind", "dtypes"), [(FloatSoftmax, ("bfloat16", "bfloat16")), (NormFirst, ("bfloat16", "float32"))]
)
def test_autocast_gives_what_the_block_gives(kind: type[nn.Module], dtypes: tuple[str, str]) -> None:
    model = HandWritten(kind).float()
    twin = copy.deepcopy(model)
    prophet.convert(twin)
    seen: list[tuple[torch.dtype, ...]] = []
    x = tokens_of(1, 0)[0].float()
    found = []
    for one in (model, twin):
        expert = one.get_submodule("blocks.0").experts[3]  # type: ignore[index]
        handle = expert.register_forward_hook(lambda _, rows, y: seen.append((rows[0].dtype, y.dtype)))
        with torch.autocast("cpu", torch.bfloat16):
            found.append(one(x)[0])
        handle.remove()
    assert {tuple(str(t).removeprefix("torch.") for t in pair) for pair in seen} == {dtypes}
    assert found[0].dtype == found[1].dtype
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=0.02)


def test_outside_of_its_block_an_expert_is_the_users() -> None:
    x = tokens_of(1, 0)[0]
    models = [HandWritten(FloatSoftmax) for _ in range(3)]  # before there are threads, which share the random state

    def body(group: Any) -> None:
        model = models[group.rank]
        own = model.blocks[0].experts[2]
        prophet.convert(model, group=group)
        layer: Any = next(layer for *_, layer in converted(model))
        assert len(layer) == EXPERTS
        assert layer[2] is own
        if group.rank == 0:
            assert torch.equal(layer[2](x), models[2].blocks[0].experts[2](x))
        else:
            with pytest.raises(ConversionError, match="this expert lives on another rank"):
                layer[2](x)

    on_threads(2, body)


def test_in_its_block_an_expert_is_called_with_rows() -> None:
    class Odd(FloatSoftmax):
        def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
            if self.training:
                self.experts[2](hidden_states[0, 0, :3], mode="fast")
            return super().forward(hidden_states)

    with pytest.raises(ConversionError, match=r"expert 2 was called with \(\[3\], str\); expected one tensor of rows"):
        prophet.convert(HandWritten(Odd))


class ChangesItsRows(Plain):
    """Gives its experts what others have answered, after it was converted."""

    odd = False

    def rows_of(self, tokens: Tensor, weights: Tensor) -> Tensor:
        return tokens + self.experts[0](tokens).mean() if self.odd else tokens


class ChangesItsMind(FloatSoftmax):
    """Calls its experts another way after it was converted."""

    odd = False

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        if self.odd:
            hidden_states = hidden_states + self.experts[0](hidden_states)
        return super().forward(hidden_states)


@pytest.mark.parametrize("kind", [ChangesItsMind, ChangesItsRows])
def test_rows_that_depend_on_answers_are_an_error_at_run_time(kind: type[nn.Module]) -> None:
    model: Any = HandWritten(kind)
    prophet.convert(model)
    x = tokens_of(1, 0)[0]
    model(x)
    model.blocks[0].odd = True
    with pytest.raises(ReplayError, match=r"blocks.0.experts: (an )?expert .* in the block's second pass than in the"):
        model(x)
    model.blocks[0].odd = False
    model(x)
