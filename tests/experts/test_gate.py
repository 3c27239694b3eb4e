"""The gate against definitions written out token by token."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from scipy.optimize import linear_sum_assignment

from prophet.experts.gate import SINKHORN_ROUNDS, Gate, GateConfig, expert_prices, within_capacity
from prophet.kernels.route import tally
from tests.helpers import oracle


def make(top_k: int = 2, **options: object) -> tuple[Gate, torch.Tensor]:
    torch.manual_seed(0)
    gate = Gate(6, 5, top_k, GateConfig(**options))  # type: ignore[arg-type]
    return gate.double(), torch.randn(9, 6, dtype=torch.float64)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_choices_and_weights(score: str, normalize: bool, top_k: int) -> None:
    gate, x = make(top_k, score=score, normalize=normalize, scale=1.5)
    routing = gate(x)
    for n in range(x.shape[0]):
        logits = [sum(w * v for w, v in zip(row, x[n].tolist(), strict=True)) for row in gate.weight.tolist()]
        if score == "softmax":
            total = sum(math.exp(v) for v in logits)
            scores = [math.exp(v) / total for v in logits]
        else:
            scores = [1 / (1 + math.exp(-v)) for v in logits]
        best = sorted(range(5), key=lambda e: -scores[e])[:top_k]
        assert routing.ids[n].tolist() == best
        share = sum(scores[e] for e in best) if normalize else 1.0
        assert routing.weights[n].tolist() == pytest.approx([1.5 * scores[e] / share for e in best], rel=1e-12)
    assert routing.counts().sum() == 9 * top_k
    assert routing.dropped() == 0


def test_gate_keeps_float32_under_autocast() -> None:
    gate = Gate(6, 5, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = gate(torch.randn(4, 6, dtype=torch.bfloat16))
    assert routing.logits.dtype == routing.weights.dtype == torch.float32


def test_switch_loss_is_one_times_weight_when_balanced_and_grows_with_skew() -> None:
    gate, x = make(1, aux_loss="switch", aux_loss_weight=1.0)
    with torch.no_grad():
        gate.weight.zero_()
    routing = gate(x)
    even = gate.losses(routing, torch.full((5,), 9), tokens=9, ranks=1)["aux"]
    assert float(even.detach()) == pytest.approx(1.0)
    gate, x = make(1, aux_loss="switch", aux_loss_weight=1.0)
    routing = gate(x)
    counts = routing.counts()
    by_hand = 5 * sum(float(counts[e]) / 9 * float(routing.probs[:, e].mean()) for e in range(5))
    assert gate.losses(routing, counts, 9, 1)["aux"].item() == pytest.approx(by_hand)


def test_losses_of_ranks_average_to_the_loss_of_the_whole_batch() -> None:
    gate, x = make(2, aux_loss="gshard", z_loss_weight=0.1)
    whole = gate(x)
    counts = whole.first_choice_counts()
    expected = gate.losses(whole, counts, tokens=9, ranks=1)
    parts = [gate.losses(gate(rows), counts, tokens=9, ranks=3) for rows in (x[:2], x[2:9], x[9:])]
    for name, value in expected.items():
        assert float(sum(p[name] for p in parts) / 3) == pytest.approx(float(value))  # type: ignore[arg-type]
    z = 0.1 * sum(math.log(sum(math.exp(v) for v in row.tolist())) ** 2 for row in whole.logits) / 9
    assert float(expected["z"]) == pytest.approx(z)


def test_auxiliary_losses_reach_the_gate_weights() -> None:
    gate, x = make(2, aux_loss="switch", z_loss_weight=0.1)
    routing = gate(x)
    sum(gate.losses(routing, routing.counts(), 9, 1).values()).backward()  # type: ignore[union-attr]
    assert gate.weight.grad is not None
    assert gate.weight.grad.abs().sum() > 0


def test_bias_shifts_selection_but_not_weights_and_moves_towards_balance() -> None:
    gate, x = make(1, bias_update_rate=0.25, normalize=False)
    plain = gate(x)
    assert gate.bias is not None
    gate.bias[3] = 10.0
    routing = gate(x)
    assert routing.ids.flatten().tolist() == [3] * 9
    assert torch.equal(routing.weights[:, 0], plain.probs[:, 3])
    gate.bias.zero_()
    gate.update_bias(torch.tensor([9, 0, 3, 3, 0]))
    assert gate.bias.tolist() == [-0.25, 0.25, 0.0, 0.0, 0.25]
    assert "bias" in gate.state_dict()
    assert "bias" not in Gate(6, 5, 2).state_dict()


def test_capacity_serves_first_choices_first_then_earlier_tokens() -> None:
    # capacity = ceil(1.0 * 4 * 2 / 4) = 2
    ids = torch.tensor([[1, 0], [0, 1], [0, 2], [0, 3]])
    kept = within_capacity(ids, 4, 1.0)
    # expert 0: first choices of tokens 1, 2 fit; token 3 and the second choice of token 0 do not
    assert kept.tolist() == [[True, False], [True, True], [True, True], [False, True]]


def test_dropped_choices_are_counted_and_weigh_nothing() -> None:
    gate, x = make(2, capacity_factor=0.5)
    with torch.no_grad():
        gate.weight.zero_()  # all tokens prefer the same experts
    routing = gate(x)
    assert routing.kept is not None
    assert int(routing.dropped()) == 18 - int(routing.counts().sum()) > 0
    assert routing.weights[~routing.kept].abs().sum() == 0
    assert int(routing.counts().max()) <= math.ceil(0.5 * 18 / 5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_scores_are_flagged(poison: float) -> None:
    gate, x = make()
    assert bool(gate(x).finite)
    x[3, 1] = poison
    assert not bool(gate(x).finite)


def test_no_tokens() -> None:
    gate, x = make(2, capacity_factor=1.0, aux_loss="switch")
    routing = gate(x[:0])
    assert routing.ids.shape == (0, 2)
    assert bool(routing.finite)
    assert float(gate.losses(routing, torch.zeros(5, dtype=torch.int64), 0, 1)["aux"]) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "tanh"}, "score must be"),
        ({"aux_loss": "gini"}, "aux_loss must be"),
        ({"z_loss_weight": -1.0}, "z_loss_weight must be finite and not negative"),
        ({"bias_update_rate": float("nan")}, "bias_update_rate must be finite"),
        ({"capacity_factor": 0.0}, "capacity_factor must be positive"),
    ],
)
def test_bad_configurations(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GateConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("top_k", [0, 6])
def test_top_k_out_of_range(top_k: int) -> None:
    with pytest.raises(ValueError, match="top_k must be between 1 and num_experts"):
        Gate(6, 5, top_k)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_the_gate_gives_what_the_definition_of_its_op_gives_bit_by_bit(
    score: str, normalize: bool, rate: float
) -> None:
    """In float32, with scores that are equal: whole experts, and scores that are too small to be told from zero."""
    config = GateConfig(score=score, normalize=normalize, scale=1.5, bias_update_rate=rate)  # type: ignore[arg-type]
    torch.manual_seed(0)
    fused, plain = Gate(6, 9, 4, config), Gate(6, 9, 4, config, impl="naive")
    with torch.no_grad():
        fused.weight[2] = fused.weight[5] = fused.weight[7]
        fused.weight[0] *= 1000
    plain.load_state_dict(fused.state_dict())
    x = torch.randn(50, 6)
    found, wanted = fused(x), plain(x)
    assert torch.equal(found.ids, wanted.ids)
    assert torch.equal(found.weights, wanted.weights)
    assert torch.equal(found.counts(), wanted.counts())
    d_weights = torch.randn(50, 4)
    grads = [torch.autograd.grad(r.weights, g.weight, d_weights)[0] for r, g in ((found, fused), (wanted, plain))]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


def test_the_gate_runs_the_operator() -> None:
    gate, x = make()
    with torch.profiler.profile() as profile:
        gate(x).weights.sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"prophet::route", "prophet::route_backward"} <= names


@pytest.mark.parametrize("kept", [None, [[True, False], [True, True], [False, True]]])
def test_tally_counts_ids_that_are_kept(kept: list[list[bool]] | None) -> None:
    ids = torch.tensor([[0, 3], [3, 3], [1, 0]])
    flags = None if kept is None else torch.tensor(kept)
    assert tally(ids, 5, flags).tolist() == ([2, 1, 0, 3, 0] if kept is None else [2, 0, 0, 2, 0])


def test_counts_are_of_the_ids_that_a_routing_has() -> None:
    """A router that changes its ids afterwards, as one that forces them, must not leave the counts behind."""
    routing = Gate(4, 3, 1)(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    assert routing.counts().tolist() == torch.bincount(routing.ids.flatten(), minlength=3).tolist()
    forced = dataclasses.replace(routing, ids=torch.full_like(routing.ids, 2))
    assert forced.counts().tolist() == forced.choice_counts().tolist() == [0, 0, 8]


def wishes(seed: int, *, skew: float = 2.0) -> torch.Tensor:
    """Logits of 48 tokens for 6 experts, of which all tokens prefer the same ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(48, 6, generator=generator, dtype=torch.float64) + torch.linspace(0, skew, 6)


def test_prices_are_those_of_sinkhorns_algorithm() -> None:
    for rounds in (1, SINKHORN_ROUNDS, 2000):
        shares = (wishes(0) + expert_prices(wishes(0), rounds)).softmax(dim=-1)
        other = oracle.transport(wishes(0), rounds)
        # its rows still have the scale of the last round's
        torch.testing.assert_close(shares, other / other.sum(dim=1, keepdim=True), rtol=1e-9, atol=1e-12)
    # the limit is doubly stochastic: every token has a share of 1, every expert N / E
    assert shares.sum(dim=0).tolist() == pytest.approx([8.0] * 6, rel=1e-9)
    assert expert_prices(torch.zeros(0, 6)).tolist() == [0.0] * 6
    # experts that underflow without logarithms
    far = wishes(0).float() * torch.tensor([1.0] * 5 + [300.0])
    assert bool(expert_prices(far).isfinite().all())


@pytest.mark.parametrize("seed", range(4))
def test_the_transport_is_bounded_by_the_best_balanced_assignment(seed: int) -> None:
    """BASE solves the assignment itself (Lewis et al. 2021): at most N log E of entropy lie between the two."""
    logits = wishes(seed)
    rows, slots = linear_sum_assignment(logits.repeat_interleave(8, dim=1).numpy(), maximize=True)
    best = float(logits[torch.from_numpy(rows), torch.from_numpy(slots // 8)].sum())
    shares = (logits + expert_prices(logits, 2000)).softmax(dim=-1)
    reached, entropy = float((shares * logits).sum()), float(-(shares * shares.log()).sum())
    assert best - entropy - 1e-6 <= reached <= best + 1e-6
    # without entropy, as the weights of logits grow, the transport is the assignment
    sharp = 400 * logits
    prices = expert_prices(sharp, 20_000)
    chosen = (sharp + prices).argmax(dim=-1)
    assert float(logits[torch.arange(48), chosen].sum()) == pytest.approx(best, rel=0.01)


def test_tokens_spread_over_experts_while_training_and_choose_freely_in_evaluation() -> None:
    torch.manual_seed(1)
    plain = Gate(6, 8, 2)
    balanced = Gate(6, 8, 2, GateConfig(assignment="sinkhorn"))
    balanced.load_state_dict(plain.state_dict())
    # all tokens lie on one side, so a router that is free prefers some experts
    x = torch.randn(512, 6) + 1.0
    free, spread = plain(x), balanced(x)
    mean = 512 * 2 / 8
    assert int(free.counts().max()) > 1.7 * mean
    assert int(spread.counts().max()) < 1.25 * mean
    assert torch.equal(spread.counts(), tally(spread.ids, 8))
    chosen = spread.logits.softmax(dim=-1).gather(1, spread.ids)
    torch.testing.assert_close(spread.weights, chosen / chosen.sum(dim=1, keepdim=True))
    balanced.eval()
    assert torch.equal(balanced(x).ids, plain(x).ids)
    # as many tokens in other company: in evaluation nobody depends on the others
    assert torch.equal(balanced(x[:7]).ids, plain(x).ids[:7])
    # tokens that are all alike would have equal shares everywhere: scores decide, as with a single one
    balanced.train()
    assert torch.equal(balanced(x[:1].repeat(9, 1)).ids, plain(x[:1].repeat(9, 1)).ids)
    assert torch.equal(balanced(x[:1]).ids, plain(x[:1]).ids)
    with pytest.raises(ValueError, match="leave out bias_update_rate"):
        GateConfig(assignment="sinkhorn", bias_update_rate=0.1)
    with pytest.raises((ValueError, TypeError), match="assignment"):
        GateConfig(assignment="luck")  # type: ignore[arg-type]
