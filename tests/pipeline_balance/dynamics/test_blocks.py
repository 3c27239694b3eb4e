"""The dynamic blocks compute what they say, and a small GPT made of them learns."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pipeline_balance.dynamics.depths import MixtureOfDepths
from pipeline_balance.dynamics.early_exit import ConfidentExit, EarlyExit
from pipeline_balance.dynamics.gpt import Attention, Block, Embed, GPTShape, builder, loss, modules
from pipeline_balance.dynamics.pruning import prune_globally
from pipeline_balance.dynamics.sparse_attention import HashAttention
from pipeline_balance.pipeline.model.added_loss import added_losses
from pipeline_balance.pipeline.model.layers import ModuleChain
from prophet.errors import SpecError
from prophet.ranks.threads import ThreadWorld
from tests.helpers.pipeline_blocks import CASES, DIM, HEADS, TOKENS, block
from tests.helpers.pipeline_naive import hash_attention_naive


def test_attention_for_some_tokens_equals_a_part_of_all() -> None:
    torch.manual_seed(0)
    whole = block().double()
    x = torch.randn(1, TOKENS, DIM, dtype=torch.float64)
    rows = torch.tensor([0, 3, 4, 11])
    torch.testing.assert_close(whole.at(x[0], rows), whole(x)[0, rows], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bits", [0, 2, 5])
@pytest.mark.parametrize("tile", [1, 5, 64])
def test_hash_attention_equals_its_naive_twin(bits: int, tile: int) -> None:
    torch.manual_seed(bits)
    layer = HashAttention(DIM, HEADS, bits=bits, tile=tile).double()
    grads = []
    for run in (layer, partial(hash_attention_naive, layer)):
        x = torch.randn(2, 13, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
        out = run(x)
        layer.zero_grad()
        out.pow(2).sum().backward()
        assert layer.qkv.weight.grad is not None
        grads.append([out.detach(), x.grad, layer.qkv.weight.grad.clone()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_more_buckets_compute_fewer_tiles() -> None:
    density = []
    for bits in (0, 2, 4):
        torch.manual_seed(0)
        layer = HashAttention(DIM, HEADS, bits=bits, tile=4)
        layer(torch.randn(2, 64, DIM))
        density.append(layer.density)
    assert density[0] == pytest.approx(1.0, abs=0.1)
    assert density[0] > density[1] > density[2]


def test_mixture_of_depths_leaves_the_others_alone() -> None:
    torch.manual_seed(0)
    inner = block()
    layer = MixtureOfDepths(inner, DIM, 0.25)
    x = torch.randn(2, TOKENS, DIM)
    y = layer(x)
    weights = layer.router(x).squeeze(-1)
    for b in range(2):
        rows = weights[b].topk(3).indices.sort().values
        others = [t for t in range(TOKENS) if t not in rows.tolist()]
        assert torch.equal(y[b, others], x[b, others])
        part = x[b : b + 1, rows]
        expected = part + torch.sigmoid(weights[b, rows])[None, :, None] * (inner(part) - part)
        torch.testing.assert_close(y[b, rows], expected[0])
    assert layer.routed == 0.25


def test_the_predictor_learns_what_the_router_chooses() -> None:
    torch.manual_seed(0)
    layer = MixtureOfDepths(block(), DIM, 0.25, predictor_weight=1.0)
    optimizer = torch.optim.Adam(layer.predictor.parameters(), lr=1e-2)
    x = torch.randn(16, TOKENS, DIM)
    before = [p.detach().clone() for p in layer.router.parameters()]
    for _ in range(150):
        optimizer.zero_grad()
        (layer(x) * 0).sum().backward()  # only the predictor's own loss has a gradient
        optimizer.step()
    chosen = torch.zeros(16, TOKENS).scatter_(1, layer.router(x).squeeze(-1).topk(3).indices, 1.0) > 0
    guessed = layer.predictor(x).squeeze(-1) > 0
    assert float((chosen == guessed).float().mean()) > 0.9
    layer.causal = True
    y = layer.eval()(x)
    assert torch.equal(y[~guessed], x[~guessed])
    assert not torch.equal(y[guessed], x[guessed])
    assert layer.routed == pytest.approx(float(guessed.float().mean()))
    assert all(torch.equal(a, b) for a, b in zip(before, layer.router.parameters(), strict=True))


def test_exited_tokens_keep_their_state_and_stay_out() -> None:
    torch.manual_seed(0)
    layer = EarlyExit(block(), 0.9)
    state = torch.cat([torch.randn(2, TOKENS, DIM), torch.ones(2, TOKENS, 1)], dim=-1)
    state[0, ::2, -1] = 0.0
    state[1, :, -1] = 0.0
    y = layer(state)
    assert layer.alive == pytest.approx(0.25)
    assert torch.equal(y[0, ::2], state[0, ::2])
    assert torch.equal(y[1], state[1])
    torch.testing.assert_close(y[0, 1::2, :-1], layer.block(state[..., :-1])[0, 1::2])
    # who leaves is decided by how much the block changed them
    cosine = nn.functional.cosine_similarity(state[0, 1::2, :-1], y[0, 1::2, :-1], dim=-1)
    assert torch.equal(y[0, 1::2, -1] > 0.5, cosine <= 0.9)


def test_tokens_leave_where_an_exit_is_sure_and_it_learns_from_living_ones() -> None:
    """ADP-C's rule, token by token: the most probable class of the exit's own prediction, against a threshold."""
    torch.manual_seed(0)
    vocabulary = 7
    layer = ConfidentExit(block(), DIM, vocabulary, 0.25, exit_weight=0.5)
    ids = torch.randint(vocabulary, (2, TOKENS))
    living = torch.rand(2, TOKENS) < 0.7
    state = torch.cat([torch.randn(2, TOKENS, DIM), living[..., None].float(), ids[..., None].float()], dim=-1)
    assert layer.exit is not None
    with added_losses(1.0) as added:
        y = layer(state)
    (y.sum() * 0).backward()
    expected, losses = living.clone(), []
    for b in range(2):
        for t in range(TOKENS):
            if not living[b, t]:
                assert torch.equal(y[b, t], state[b, t])
                continue
            shares = layer.exit(y[b, t, :DIM]).softmax(dim=-1)
            expected[b, t] = max(shares.tolist()) <= 0.25
            if t + 1 < TOKENS:
                losses.append(-math.log(float(shares[ids[b, t + 1]])))
    assert torch.equal(y[..., DIM] > 0.5, expected)
    assert 0 < int(expected.sum()) < int(living.sum())
    assert torch.equal(y[..., DIM + 1], ids.float())
    # what is added is half of the mean over living tokens whose next token is known; nothing else has a gradient here
    assert [float(v) for v in added.values] == [pytest.approx(0.5 * sum(losses) / len(losses), rel=1e-5)]
    assert all(p.grad is not None and bool(p.grad.any()) for p in layer.exit.parameters())
    # whom nobody follows leaves gradients of zero, as every parameter has one in every step
    state[..., DIM] = 0.0
    layer.zero_grad()
    (layer(state).sum() * 0).backward()
    assert all(p.grad is not None and not bool(p.grad.any()) for p in layer.exit.parameters())
    assert ConfidentExit(block(), DIM, vocabulary, first=True).exit is None


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 257), (torch.float16, 2049)])
def test_numbers_of_tokens_travel_exactly_or_not_at_all(dtype: torch.dtype, most: int) -> None:
    def state(vocabulary: int) -> Tensor:
        shape = GPTShape(vocabulary=vocabulary, dim=DIM, heads=HEADS, blocks=1, context=2, channels=2)
        out: Tensor = Embed(shape).to(dtype)(torch.tensor([[vocabulary - 2, vocabulary - 1]]))
        return out[0, :, -1]

    assert state(most).tolist() == [most - 2, most - 1]
    with pytest.raises(SpecError, match=f"exact for {most} tokens"):
        state(most + 1)


def test_buckets_sharpen_from_dense_attention_on() -> None:
    torch.manual_seed(0)
    layer = HashAttention(DIM, HEADS, bits=3, tile=4)
    x = torch.randn(2, TOKENS, DIM)
    density = []
    for bits in range(4):
        layer.bits = bits
        torch.testing.assert_close(layer(x), hash_attention_naive(layer, x))
        density.append(layer.density)
    assert density[0] == 1.0
    assert density[3] < density[1] < 1.0


@pytest.mark.parametrize("case", CASES)
def test_a_small_gpt_learns(case: str) -> None:
    make_block, channels = CASES[case]
    shape = GPTShape(vocabulary=7, dim=DIM, heads=HEADS, blocks=2, context=TOKENS, channels=channels)
    build = builder(shape, make_block, seed=1)
    model = nn.Sequential(*(build(i) for i in range(shape.layers)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    value = math.inf
    for step in range(60):
        # the next token follows from the last one
        ids = (torch.randint(7, (4, 1), generator=generator) + 3 * torch.arange(TOKENS + 1)) % 7
        optimizer.zero_grad()
        out: Tensor = loss(model(ids[:, :-1]), ids[:, 1:])
        out.backward()
        optimizer.step()
        if case == "pruning" and step == 20:
            blocks = list(model)
            ThreadWorld(1).run(lambda c: prune_globally(blocks, 0.5, c))  # noqa: B023
        value = float(out.detach())
    assert value < 0.5 * math.log(shape.vocabulary)  # what guessing gives


def test_shapes_without_data_are_what_the_layers_pass() -> None:
    shape = GPTShape(vocabulary=7, dim=DIM, heads=HEADS, blocks=2, context=TOKENS, channels=1)
    chain = ModuleChain(modules(shape, CASES["early exit"][0]), loss)
    ids = torch.zeros(3, TOKENS, dtype=torch.int64)
    (part,) = chain.cut(ids, ids, 1)
    passed: tuple[Tensor, ...] = ()
    for i, expected in enumerate(chain.activations(part)[1:]):
        passed = chain.run(i, passed, part)
        assert [(x.shape, x.dtype, x.requires_grad) for x in passed] == [
            (x.shape, x.dtype, x.requires_grad) for x in expected
        ]
    build = builder(shape, CASES["early exit"][0])
    again = [build(1).state_dict(), build(1).state_dict()]
    assert all(torch.equal(a, again[1][n]) for n, a in again[0].items())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: GPTShape(vocabulary=3, dim=5, heads=2), "no multiple"),
        (lambda: GPTShape(vocabulary=0), "at least 1"),
        (lambda: MixtureOfDepths(block(), DIM, 0.0), "capacity"),
        (lambda: EarlyExit(block(), 0.0), "threshold"),
        (lambda: HashAttention(DIM, 3), "multiple of heads"),
        (
            lambda: Block(DIM, HEADS, attention=HashAttention(DIM, HEADS)).at(torch.zeros(2, DIM), torch.tensor([0])),
            "plain",
        ),
    ],
)
def test_wrong_sizes_are_refused(make, text) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SpecError, match=text):
        make()
    assert Attention(DIM, HEADS).heads == HEADS
