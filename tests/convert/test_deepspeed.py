"""DeepSpeed's MoE layer after conversion: its gate, capacity, loss and residual as before; experts found by trying."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prophet
from prophet.errors import ConversionError
from prophet.ranks.process_group import collective_for
from tests.helpers.launch import on_processes
from tests.helpers.moe_models import VOCAB, LossFn, Seen, alone, batches, compare, layers_of, together
from tests.helpers.support import on_threads, seeded

deepspeed_layer = pytest.importorskip("deepspeed.moe.layer", reason="needs deepspeed: pip install '.[deepspeed]'")
DIM, HIDDEN, EXPERTS = 8, 12, 4


class Mlp(nn.Module):
    def __init__(self, act: Any, bias: bool = True, norm: bool = False) -> None:
        super().__init__()
        self.dense_4h = nn.Linear(DIM, HIDDEN, bias=bias)
        self.dense_h = nn.Linear(HIDDEN, DIM, bias=bias)
        self.act = act
        self.norm = nn.LayerNorm(DIM) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.dense_h(self.act(self.dense_4h(x))))
        return y


class GatedMlp(nn.Module):
    """Up is registered before gate: only trying tells them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM, bias=False)
        self.down = nn.Linear(DIM, DIM, bias=False)
        self.gate = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x)), None


class Net(nn.Module):
    def __init__(self, expert: nn.Module, **options: Any) -> None:
        super().__init__()
        with seeded(3):
            self.embed = nn.Embedding(VOCAB, DIM)
            layers = [deepspeed_layer.MoE(DIM, expert, num_experts=EXPERTS, **options) for _ in range(2)]
            self.layers = nn.ModuleList(layers)
            self.head = nn.Linear(DIM, VOCAB)
            for layer in layers:
                for p in layer.parameters():
                    nn.init.normal_(p, std=0.5)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, total = self.embed(ids), torch.zeros(())
        for layer in self.layers:
            y, loss, counts = layer(x)
            if int(counts.sum()) < ids.numel():
                raise RuntimeError("counts are those of all choices")
            x, total = x + y, total + loss
        return self.head(x), total


def net_loss(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    logits, aux = model(ids)
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()) + 0.1 * aux, logits


def drawn_loss(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Token selection and noise draw from the global generator, which only processes have to themselves."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(ids.sum()))
        return net_loss(model, ids)


LOSS: LossFn = drawn_loss
CASES: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "top1": (Mlp(nn.GELU()), {"k": 1, "capacity_factor": 0.7, "min_capacity": 1}),
    "top2": (Mlp(nn.ReLU(), bias=False), {"k": 2, "capacity_factor": 0.6, "min_capacity": 1}),
    "top3": (Mlp(nn.GELU("tanh")), {"k": 3, "capacity_factor": 0.8, "min_capacity": 1}),
    "dropless": (GatedMlp(), {"k": 2, "drop_tokens": False}),
    "linear": (
        nn.Sequential(nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM, bias=False)),
        {"k": 1, "capacity_factor": 0.7, "min_capacity": 1},
    ),
    "one layer": (nn.Linear(DIM, DIM), {"k": 1, "capacity_factor": 0.7, "min_capacity": 1, "use_residual": True}),
    "normed": (Mlp(nn.Tanh(), norm=True), {"k": 2, "capacity_factor": 0.6, "min_capacity": 1}),
    "residual": (Mlp(nn.GELU()), {"k": 1, "use_residual": True, "use_rts": False}),
    "noisy": (Mlp(nn.GELU()), {"k": 1, "noisy_gate_policy": "RSample", "min_capacity": 1}),
    "jitter": (Mlp(nn.GELU()), {"k": 1, "noisy_gate_policy": "Jitter", "min_capacity": 1}),
}


DRAWN = ("noisy", "jitter")


@pytest.mark.parametrize("case", CASES)
def test_outputs_losses_and_gradients(case: str) -> None:
    expert, options = CASES[case]
    model, steps = Net(copy.deepcopy(expert), **options), [batches(1, s) for s in range(2)]
    twin = copy.deepcopy(model)
    found = on_threads(1, lambda group: together(twin, steps, group, LOSS))
    compare(alone(model, steps, LOSS), found)


# `test_on_processes` has every case on two ranks
SEVERAL = [
    pytest.param(case, ranks, marks=[] if ranks == 4 and case in ("top1", "dropless", "residual") else pytest.mark.slow)
    for case in CASES
    if case not in DRAWN
    for ranks in (2, 4)
]


@pytest.mark.parametrize(("case", "ranks"), SEVERAL)
def test_on_several_ranks(case: str, ranks: int) -> None:
    """Threads share one random generator, so nothing may draw from it here."""
    expert, options = CASES[case]
    model = Net(copy.deepcopy(expert), **{**options, "use_rts": False, "top2_2nd_expert_sampling": False})
    steps = [batches(ranks, s) for s in range(2)]
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    found = on_threads(ranks, lambda group: together(copies[group.rank], steps, group, net_loss))
    compare(alone(model, steps, net_loss), found)


def in_processes() -> dict[str, Seen]:
    found = {}
    for case, (expert, options) in CASES.items():
        model, steps = Net(copy.deepcopy(expert), **options), [batches(2, s) for s in range(2)]
        found[case] = together(model, steps, collective_for(None), LOSS).mapped(Tensor.numpy)
    return found


def test_on_processes() -> None:
    by_rank = on_processes(2, in_processes, timeout_s=120)
    for case, (expert, options) in CASES.items():
        model, steps = Net(copy.deepcopy(expert), **options), [batches(2, s) for s in range(2)]
        compare(alone(model, steps, LOSS), [r[case].mapped(torch.from_numpy) for r in by_rank])


def test_tokens_are_dropped_in_that_comparison() -> None:
    model = Net(Mlp(nn.GELU()), k=1, capacity_factor=0.7, min_capacity=1)
    prophet.convert(model)
    model(batches(1)[0])
    assert all(layer.stats is not None and layer.stats.dropped > 0 for layer in layers_of(model))


@pytest.mark.parametrize("case", CASES)
def test_revert_is_exact(case: str) -> None:
    model = Net(copy.deepcopy(CASES[case][0]), **CASES[case][1])
    state = {n: t.clone() for n, t in model.state_dict().items()}
    marks = {n: vars(p) for n, p in model.named_parameters()}
    prophet.convert(model)
    prophet.revert(model)
    assert all(torch.equal(model.state_dict()[n], t) for n, t in state.items())
    assert {n: vars(p) for n, p in model.named_parameters()} == marks
    assert type(model.layers[0].deepspeed_moe).__name__ == "MOELayer"


@pytest.mark.parametrize(
    ("expert", "why"),
    [
        (Mlp(nn.Tanh()), "not that of a feed-forward network with one of the activations"),
        (Mlp(nn.GELU(), norm=True), "expected an expert of two linear layers"),
        (nn.Linear(DIM, DIM), "expected an expert of two linear layers"),
        (nn.Sequential(nn.Linear(DIM, HIDDEN), nn.ReLU(), nn.Dropout(0.5), nn.Linear(HIDDEN, DIM)), "not that of a"),
    ],
)
def test_other_experts_stay_the_modules_that_they_are(expert: nn.Module, why: str) -> None:
    model = Net(expert)
    held: Any = model.layers[0].deepspeed_moe.experts.deepspeed_experts  # type: ignore[union-attr]
    report = prophet.convert(model)
    spec = report.replaced[0].spec
    assert spec.bank == "modules"
    assert why in spec.why
    kept: Any = model.layers[0].deepspeed_moe.experts.deepspeed_experts  # type: ignore[union-attr]
    assert [id(e) for e in kept] == [id(e) for e in held]


def test_experts_with_a_second_answer_are_refused() -> None:
    class Two(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), None

    with pytest.raises(ConversionError, match=r"deepspeed_moe \(DeepSpeed\): an expert \(Two\)"):
        prophet.convert(Net(Two(DIM, DIM)))


def test_a_model_built_for_other_ranks_is_refused() -> None:
    model = Net(Mlp(nn.GELU()), ep_size=2)
    with pytest.raises(ConversionError, match=r"built for 2 expert-parallel ranks; the group has 1"):
        prophet.convert(model)
