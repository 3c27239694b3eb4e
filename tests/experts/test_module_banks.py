"""A bank of modules: names, marks, precision, randomness, how experts start, and what is refused."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prophet
from prophet.experts.elsewhere import Elsewhere
from prophet.experts.modules import ModulesBank
from prophet.experts.replica import ReplicaPool
from prophet.ranks.collective import Collective
from prophet.ranks.process_group import collective_for
from prophet.ranks.threads import ThreadWorld
from tests.helpers.expert_kinds import KINDS, Checkpointed, D, LoRA, Stack
from tests.helpers.launch import on_processes
from tests.helpers.support import FixedPlanner, everywhere, on_threads


def bank(make: Callable[[], nn.Module] = KINDS["silu"], **options: Any) -> ModulesBank:
    """Experts 2 and 3 of four, on rank 1 of two."""
    torch.manual_seed(0)
    return ModulesBank([make() for _ in range(4)], dim=D, first_expert=2, ep_size=2, **options)


# --- replicas ---


@pytest.mark.parametrize("kind", [*KINDS, "reentrant"])
def test_a_replica_gives_its_homes_answer_and_gradients_bit_for_bit(kind: str) -> None:
    make = KINDS.get(kind, lambda: Checkpointed(use_reentrant=True))
    torch.manual_seed(1)
    experts = [make() for _ in range(4)]
    home = ModulesBank([copy.deepcopy(e) for e in experts], dim=D, ep_size=2)
    away = ModulesBank([copy.deepcopy(e) for e in experts], dim=D, first_expert=2, ep_size=2)
    home.grad_scale = away.grad_scale = 1.0
    replica = away.replica(1, ReplicaPool())
    with torch.no_grad():
        replica.params.copy_(torch.cat(home.flat_views(1, 0, home.expert_numel)))
        for p in away.parameters():
            p.fill_(7.0)  # its own experts' are others
    x = torch.randn(5, D)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = home.run(one, [0, 5])
    z = away.run(other, [0, 0, 5], [replica])
    assert torch.equal(y, z)
    for out in (y, z):
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
    assert one.grad is not None
    assert other.grad is not None
    assert torch.equal(one.grad, other.grad)
    replica.collect_grads()
    back = ModulesBank([copy.deepcopy(e) for e in experts], dim=D, ep_size=2)
    back.grad_scale = 1.0
    back.add_flat_grads([(1, 0, 3, replica.grads[:3])])
    back.add_flat_grads([(1, 3, back.grad_numel, replica.grads[3:])])
    wanted = dict(home.home_experts()[1].named_parameters())
    for name, p in back.home_experts()[1].named_parameters():
        grad = wanted[name].grad
        assert (p.grad is None) == (grad is None)
        assert grad is None or torch.equal(p.grad, grad)  # type: ignore[arg-type]
    assert all(p.grad is None for p in away.parameters()), "nothing has leaked into its own experts"
    replica.vanish()
    assert all(isinstance(p, Elsewhere) for p in away.let_go()[1].parameters())


class MixedLoRA(nn.Module):
    """Sixteen bits where nothing trains, 32 where something does; the norm trains in 16."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(D, D).requires_grad_(False).bfloat16()
        self.scale = nn.Parameter(torch.randn(1).bfloat16())
        self.a, self.b = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x.bfloat16() * self.scale).float() + self.b(self.a(x))
        return out


def test_several_dtypes_travel_and_only_what_trains_comes_back() -> None:
    made = bank(MixedLoRA)
    assert (made.flat_dtype, made.grad_dtype) == (torch.uint8, torch.float32)
    assert made.expert_numel == 2 * (D * D + D + 1) + 4 * (2 * D + 2 * D)  # bytes
    assert made.grad_numel == 1 + 2 * D + 2 * D
    shape = made.shape()
    assert (shape.expert_bytes, shape.expert_grad_bytes) == (made.expert_numel, 4 * made.grad_numel)

    def body(group: Collective) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}
        for planner in (FixedPlanner(everywhere(4, 2)), "static"):
            model = Stack(MixedLoRA, group, experts=4, blocks=1, double=False)
            engine = prophet.attach(model, config=prophet.EngineConfig(planner=planner, slots_per_rank=4))
            for _ in range(2):
                model(torch.linspace(-1, 1, 6 * D).view(6, D)).square().sum().backward()
                engine.finish_step()
            grads = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
            for name, grad in grads.items():
                if name in seen:
                    limit = 0.05 if name.endswith("scale") else 1e-5  # sums in another order, sixteen bits
                    torch.testing.assert_close(seen[name], grad, rtol=0, atol=limit * float(grad.abs().max()))
            seen |= grads
            engine.close()
        return seen

    for found in on_threads(2, body):
        assert any(n.endswith("scale") for n in found)


# --- precision and randomness ---


def test_rows_keep_their_precision_under_autocast() -> None:
    layer = prophet.MoE(D, num_experts=2, top_k=1, expert=KINDS["norm first"], group=ThreadWorld(1).collective(0))
    x = torch.randn(64, D) * 3 + 5
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        routing = layer.gate(x)
        for e, expert in enumerate(layer.experts.home_experts()):  # type: ignore[operator]
            rows = (routing.ids == e).nonzero()[:, 0]
            assert torch.equal(y[rows], expert(x[rows]) * routing.weights[rows].to(torch.bfloat16))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(D, 400), nn.Dropout(0.1)
        nn.init.constant_(self.up.weight, 0.0)
        nn.init.constant_(self.up.bias, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.up(x))
        return out


def two_runs() -> list[tuple[list[Tensor], float, float]]:
    """Answers and gradients of two runs with replicas, the share of zeros among the answers, and their mean."""
    group = collective_for(None)
    found = []
    for _ in range(2):
        torch.manual_seed(4)
        layer = prophet.MoE(D, num_experts=4, top_k=1, expert=Dropping)
        config = prophet.EngineConfig(planner=FixedPlanner(everywhere(4, 2)), slots_per_rank=4)
        engine = prophet.attach(layer, config=config)
        torch.manual_seed(5 + group.rank)
        for _ in range(2):
            y = layer(torch.randn(50, D))
            y.square().sum().backward()
            engine.finish_step()
        engine.close()
        tensors = [y.detach(), *(p.grad for p in layer.parameters() if p.grad is not None)]
        found.append((tensors, float((y == 0).float().mean()), float(y.mean())))
    return found


def test_dropout_is_the_experts_and_two_runs_are_bitwise_equal() -> None:
    for first, second in on_processes(2, two_runs):
        assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
        assert first[1] == pytest.approx(0.1, abs=0.01)
        assert first[2] == pytest.approx(1.0, abs=0.01)


# --- how they start ---


def test_experts_start_alike_at_any_number_of_ranks() -> None:
    def body(group: Collective) -> dict[str, Tensor]:
        return dict(Stack(KINDS["dropout fixed"], group).state_dict())

    whole = body(ThreadWorld(1).collective(0))
    assert not torch.equal(whole["layers.0.experts.0.up.weight"], whole["layers.0.experts.1.up.weight"])
    assert not torch.equal(whole["layers.0.experts.0.up.weight"], whole["layers.1.experts.0.up.weight"])
    for ranks in (2, 4):
        parts = on_threads(ranks, body)
        assert {key for part in parts for key in part} == set(whole)
        for part in parts:
            assert all(torch.equal(value, whole[key]) for key, value in part.items())


def test_the_random_state_is_left_as_it_was() -> None:
    def after(**options: Any) -> Tensor:
        torch.manual_seed(3)
        prophet.MoE(D, num_experts=4, group=ThreadWorld(1).collective(0), **options)
        return torch.rand(4)

    def gate_alone() -> Tensor:
        torch.manual_seed(3)
        prophet.experts.gate.Gate(D, 4, 2)  # type: ignore[attr-defined]
        return torch.rand(4)

    assert torch.equal(after(expert=KINDS["silu"]), gate_alone())
    assert torch.equal(after(expert=KINDS["lstm"]), gate_alone())


# --- names and marks ---


def test_names_are_the_modules_own_under_the_experts_number() -> None:
    made = bank()
    assert [n for n, _ in made.named_parameters()] == [f"{e}.w{i}.weight" for e in (2, 3) for i in (1, 2, 3)]
    assert made.all_keys() == {f"{e}.w{i}.weight" for e in range(4) for i in (1, 2, 3)}
    whole = {key: torch.randn(made.state_dict()[f"2.{key[2:]}"].shape) for key in made.all_keys()}
    made.load_state_dict(whole)  # those that live elsewhere are passed over
    assert torch.equal(made.get_parameter("3.w2.weight"), whole["3.w2.weight"])
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"4\.w1\.weight"'):
        made.load_state_dict({**whole, "4.w1.weight": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"0\.w4\.weight"'):
        made.load_state_dict({**whole, "0.w4.weight": torch.zeros(1)})
    del whole["3.w1.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"3\.w1\.weight"'):
        made.load_state_dict(whole)


@pytest.mark.parametrize(
    "moved", [copy.deepcopy, lambda b: b.to(torch.float64), lambda b: b.to("meta").to_empty(device="cpu")]
)
def test_marks_survive_a_copy_and_a_move(moved: Callable[[ModulesBank], ModulesBank]) -> None:
    made = moved(bank())
    made.check_parameters()
    with torch.no_grad():
        for p in made.parameters():
            p.fill_(0.1)
    assert all(p.prophet_expert and p.group_name == "ep_size_2" and not p.allreduce for p in made.parameters())  # type: ignore[attr-defined]
    made.run(torch.ones(1, D, dtype=made.dtype), [1, 0]).sum().backward()
    alone = copy.deepcopy(made.let_go()[2])
    alone.zero_grad()
    alone(torch.ones(1, D, dtype=made.dtype)).sum().backward()
    for p, q in zip(made.home_experts()[0].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad / 2)  # type: ignore[operator]  # the mean over two ranks


def test_what_is_thawed_later_is_scaled_and_travels() -> None:
    made = bank(LoRA)
    before = made.grad_numel
    for expert in made.home_experts():
        expert.base.requires_grad_(True)  # type: ignore[union-attr, operator]
    made.check_parameters()
    assert made.grad_numel == before + D * D + D
    made.run(torch.ones(1, D), [1, 0]).sum().backward()
    assert torch.equal(made.get_parameter("2.base.bias").grad, torch.full((D,), 0.5))  # type: ignore[arg-type]


def test_one_frozen_expert_takes_no_gradient_of_its_replicas() -> None:
    made = bank(LoRA)
    for expert in made.home_experts():
        expert.base.requires_grad_(True)  # type: ignore[union-attr, operator]
    made.check_parameters()
    before = made.grad_numel
    made.home_experts()[1].base.requires_grad_(False)  # type: ignore[union-attr, operator]
    made.check_parameters()
    assert made.grad_numel == before  # other ranks cannot see it, and lengths are the same on all
    for local in range(2):
        made.add_flat_grads([(local, 0, before, torch.ones(before))])
    grads = {name: p.grad for name, p in made.named_parameters()}
    assert all((grad is None) == name.startswith("3.base.") for name, grad in grads.items())
    made.settle(made.requires_grad())
    assert made.grad_numel == before  # one of the two trains still
    made.home_experts()[0].base.requires_grad_(False)  # type: ignore[union-attr, operator]
    made.settle(made.requires_grad())
    assert made.grad_numel == before - D * D - D


def test_a_parameter_that_is_put_in_later_is_refused() -> None:
    made = bank(KINDS["linear"])
    made.home_experts()[1].weight = nn.Parameter(torch.zeros(D, D))  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"expert 3: parameter weight is not one that was there"):
        made.check_parameters()


def test_adapters_of_peft_come_before_the_layer() -> None:
    """On experts that a layer is made of they train, and travel alone; put on later they are refused."""
    peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
    config = peft.LoraConfig(target_modules=["w1", "w2"], r=2)

    def adapted() -> nn.Module:
        expert: nn.Module = peft.inject_adapter_in_model(config, KINDS["silu"]())
        return expert

    made = bank(adapted)
    made.check_parameters()
    assert made.grad_numel == 2 * (D + 12) * 2
    made.run(torch.ones(1, D), [1, 0]).sum().backward()
    trained = [n for n, p in made.named_parameters() if p.grad is not None]
    assert trained == [f"2.w{i}.lora_{a}.default.weight" for i in (1, 2) for a in "AB"]
    layer = prophet.MoE(D, num_experts=2, expert=KINDS["silu"], group=ThreadWorld(1).collective(0))
    whole = nn.Sequential(OrderedDict(first=nn.Linear(D, D), moe=layer))
    model = peft.get_peft_model(whole, peft.LoraConfig(target_modules=["first"], r=2))
    model(torch.ones(2, D)).sum().backward()  # elsewhere they may be: the experts are frozen
    assert layer.experts.grad_numel == 0
    several = bank(KINDS["silu"])
    peft.inject_adapter_in_model(config, several)
    with pytest.raises(ValueError, match=r"expert 2: parameter w1\.lora_A.* put adapters, masks and norms"):
        several.check_parameters()
    late = peft.get_peft_model(nn.Sequential(layer), config)  # all experts are here: there are no replicas to lack them
    late(torch.ones(2, D)).sum().backward()
    assert {n.split(".")[-3] for n, p in late.named_parameters() if p.grad is not None} == {"lora_A", "lora_B"}


# --- refusals ---


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.used = [self.lin.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.used[0].t() + self.lin.bias


def closed() -> nn.Module:
    """Reads its parameter from a closure."""
    expert = nn.Linear(D, D)
    weight = expert.weight
    expert.forward = lambda x: x @ weight.t() + expert.bias  # type: ignore[method-assign, assignment]
    return expert


def hooked() -> nn.Module:
    expert = nn.Linear(D, D)
    expert.weight.register_post_accumulate_grad_hook(lambda _: None)
    return expert


def replaced(change: Callable[[nn.Module], Any]) -> list[nn.Module]:
    experts = [KINDS["silu"]() for _ in range(4)]
    change(experts[3])
    return experts


REFUSED: dict[str, tuple[Callable[[], list[nn.Module]], str]] = {
    "batch norm": (
        lambda: [nn.BatchNorm1d(D) for _ in range(4)],
        r"BatchNorm1d\): its buffer running_mean changes while it trains.*expected constant buffers",
    ),
    "TorchScript": (lambda: [torch.jit.script(nn.Linear(D, D)) for _ in range(4)], r"expert 0: TorchScript"),
    "a list": (
        lambda: [Aliased() for _ in range(4)],
        r"Aliased\): its parameter lin\.weight is also read from elsewhere",
    ),
    "a closure": (lambda: [closed() for _ in range(4)], r"its parameter weight is also read from elsewhere"),
    "a hook": (lambda: [hooked() for _ in range(4)], r"expert 0: parameter weight has a hook.*remove it"),
    "quantised": (
        lambda: replaced(lambda e: setattr(e.w1, "weight", nn.Parameter(torch.zeros(12, D, dtype=torch.int8), False))),
        r"w1\.weight: dtype is torch\.float32 in expert 0 and torch\.int8 in expert 3",
    ),
    "a name": (
        lambda: replaced(lambda e: e.register_parameter("extra", nn.Parameter(torch.zeros(2)))),
        r"expert 3 has a parameter extra, expert 0 has none",
    ),
    "a shape": (
        lambda: replaced(lambda e: setattr(e, "w2", nn.Linear(11, D, bias=False))),
        r"w2\.weight: shape is \[8, 12\] in expert 0 and \[8, 11\] in expert 3",
    ),
    "no tensor": (lambda: [nn.LSTM(D, D) for _ in range(4)], r"LSTM\): expected a tensor \[3, any\].*got tuple"),
    "other rows": (
        lambda: [nn.Sequential(nn.Linear(D, D), nn.Flatten(0)) for _ in range(4)],
        r"expected a tensor \[3, any\] for rows \[3, 8\], got \[24\]",
    ),
    "another input": (
        lambda: [nn.Linear(D + 1, D) for _ in range(4)],
        r"Linear\) fails on rows \[3, 8\] torch\.float32",
    ),
    "nothing to train": (lambda: [nn.Identity() for _ in range(4)], r"expert 0 \(Identity\) has no parameters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_lost_is_refused_and_nothing_is_changed(case: str) -> None:
    make, text = REFUSED[case]
    experts = make()
    before = [{n: t.clone() for n, t in e.state_dict().items()} for e in experts]
    random = torch.get_rng_state()
    with pytest.raises(ValueError, match=text):
        ModulesBank(experts, dim=D, ep_size=2)
    for expert, state in zip(experts, before, strict=True):
        assert all(torch.equal(t, state[n]) for n, t in expert.state_dict().items())
        assert all(p.grad is None and not hasattr(p, "prophet_expert") for p in expert.parameters())
    assert torch.equal(random, torch.get_rng_state())


def test_an_expert_that_answers_otherwise_later_is_named() -> None:
    made = bank(KINDS["linear"])
    made.home_experts()[1].forward = lambda x: x[:1]  # type: ignore[method-assign, assignment]
    with pytest.raises(ValueError, match=r"expert 3 \(Linear\): expected a tensor \[2, 8\].*, got \[1, 8\]"):
        made.run(torch.ones(2, D), [0, 2])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "expected either hidden, the size of feed-forward experts, or expert"),
        ({"hidden": 4, "expert": KINDS["silu"]}, "expected either hidden"),
        ({"expert": KINDS["silu"], "bias": False}, "belong to feed-forward experts: leave them out"),
        ({"expert": lambda: "x"}, "expected a function that makes a new torch.nn.Module every time, got str"),
    ],
)
def test_layers_say_what_they_expect(options: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        prophet.MoE(D, num_experts=2, group=ThreadWorld(1).collective(0), **options)


def test_one_module_for_all_experts_is_refused() -> None:
    one = KINDS["silu"]()
    with pytest.raises(TypeError, match="got the same one again"):
        prophet.MoE(D, num_experts=2, expert=lambda: one, group=ThreadWorld(1).collective(0))


def test_costs_are_counted_or_follow_from_the_parameters() -> None:
    wide = nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Linear(4, 4, bias=False), nn.Flatten())  # twice with one matrix
    assert ModulesBank([wide, copy.deepcopy(wide)], dim=D).shape().forward_flops_per_token == 2 * 2 * 16
    lstm = bank(KINDS["lstm"]).shape()  # the counter knows nothing of recurrent layers
    assert lstm.forward_flops_per_token >= 2 * lstm.expert_params
    assert bank(KINDS["output size"]).shape().token_bytes == (8 + 5) * 4 / 2
