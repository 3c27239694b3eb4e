"""Tutel's layer after conversion: its gates, capacity, priorities and losses as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import prophet
from prophet.convert import load_original_state_dict, original_state_dict
from prophet.errors import ConversionError
from prophet.traces import read_trace
from tests.helpers.launch import on_processes
from tests.helpers.moe_models import VOCAB, alone, batches, compare, together
from tests.helpers.support import on_threads, seeded

WHY = "needs tutel: make test-peers PEERS_TUTEL=folder"
pytest.importorskip("tutel.moe", reason=WHY)
DIM, HIDDEN, EXPERTS = 8, 12, 4


class Stacked(nn.Module):
    """Custom experts with a matrix and an offset each, as Tutel's documentation has them."""

    def __init__(self, model_dim: int, num_experts_per_device: int, **_: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(num_experts_per_device, model_dim, 6))
        self.inner = nn.Module()
        self.inner.b = nn.Parameter(torch.empty(num_experts_per_device, 1, 6))

    def forward(self, x: Tensor, ctx: Any) -> Tensor:
        assert ctx.sharded_count == 1
        assert x.shape[-1] == ctx.model_dim
        return torch.tanh(x @ self.w + self.inner.b)


class Flat(nn.Module):
    """Custom experts whose matrices are one vector, and which know how many they are."""

    def __init__(self, model_dim: int, num_experts_per_device: int, **_: Any) -> None:
        super().__init__()
        self.shape = num_experts_per_device, model_dim, model_dim
        self.w = nn.Parameter(torch.empty(num_experts_per_device * model_dim * model_dim))
        self.scale = nn.Parameter(torch.empty(num_experts_per_device))

    def forward(self, x: Tensor, ctx: Any) -> Tensor:
        return (x @ self.w.view(self.shape)).sin() * self.scale.view(-1, 1, 1)


class Gate(nn.Module):
    """A custom gate."""

    def __init__(self, model_dim: int, num_global_experts: int, **options: Any) -> None:
        super().__init__()
        self.top_k = options.get("top_k")
        self.wg = nn.Linear(model_dim, num_global_experts + options.get("more", 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.wg(x).tanh()


class Net(nn.Module):
    def __init__(self, gate: dict[str, Any], experts: dict[str, Any], **options: Any) -> None:
        super().__init__()
        from tutel.moe import moe_layer

        def layer() -> nn.Module:
            made: nn.Module = moe_layer(
                gate_type={"type": "top"} | gate,
                model_dim=DIM,
                experts={"type": "ffn", "count_per_node": EXPERTS, "hidden_size_per_expert": HIDDEN, **experts},
                **options,
            )
            return made

        with seeded(3):
            self.embed = nn.Embedding(VOCAB, DIM)
            self.layers = nn.ModuleList(layer() for _ in range(2))
            self.head = nn.Linear(DIM, VOCAB)
            for p in self.layers.parameters():
                nn.init.normal_(p, std=0.5)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, total = self.embed(ids), torch.zeros(())
        for layer in self.layers:
            y = layer(x)
            x, total = x + F.pad(y, (0, DIM - y.shape[-1])), total + y.l_aux
        return self.head(x), total


def net_loss(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(ids.sum()))
        logits, aux = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten()) + 0.1 * aux, logits


NO_BIAS = {"has_fc1_bias": False, "has_fc2_bias": False}
# Tutel's own default activation fails where its sources are used with a recent PyTorch, so all name one
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "top1": ({"k": 1, "capacity_factor": 0.8}, {"activation_fn": F.gelu}, {}),
    "top2": ({"k": 2, "capacity_factor": 0.7}, {"activation_fn": F.relu}, {"batch_prioritized_routing": True}),
    "dropless": (
        {"k": 2, "capacity_factor": 0},
        {"activation_fn": F.relu, "has_fc1_bias": False, "has_fc2_bias": False},
        {},
    ),
    "noise": ({"k": 2, "gate_noise": 1.0}, {"activation_fn": F.relu}, {"is_gshard_loss": False}),
    "plain": ({"k": 3}, {"activation_fn": F.gelu}, {"normalize_gate": False}),
    "another activation": ({"k": 2, "capacity_factor": 0.8}, {"activation_fn": torch.tanh, "output_dim": 6}, {}),
    "gated": ({"k": 2}, {"type": "llama_ffn"}, {}),
    "gated, another activation": ({"k": 1}, {"type": "llama_ffn", "activation_fn": torch.tanh}, {}),
    "custom": ({"type": "custom", "module": Gate, "top_k": 2}, {"type": "custom", "module": Stacked}, {}),
    "custom, flat": ({"type": "cosine_top", "k": 2, "proj_dim": 4}, {"type": "custom", "module": Flat}, {}),
    "output": ({"k": 2}, {"activation_fn": F.silu, "output_dim": 6, "has_fc1_bias": False}, {}),
}


def made(case: str) -> Net:
    gate, experts, options = CASES[case]
    return Net(dict(gate), dict(experts), **options)


def answers() -> list[str]:
    """In a process of its own, because Tutel needs a process group."""
    failed = []
    for case in CASES:
        model = made(case)
        state = {n: t.clone() for n, t in model.state_dict().items()}
        steps = [batches(1, s) for s in range(2)]
        twin, back = made(case), made(case)  # the same seed; its process group cannot be copied
        try:
            compare(
                alone(model, steps, net_loss), on_threads(1, lambda g, m=twin, s=steps: together(m, s, g, net_loss))
            )
            if not all(layer.l_aux is not None for layer in twin.layers):
                raise AssertionError("l_aux is missing")
            prophet.convert(back)
            prophet.revert(back)
            if not all(torch.equal(back.state_dict()[n], t) for n, t in state.items()):
                raise AssertionError("revert is not exact")
        except Exception as error:
            failed.append(f"{case}: {type(error).__name__}: {error}")
    return failed


def shared_between_two() -> list[str]:
    """Built for two ranks, each of which holds its own experts before and after."""
    failed = []
    for case, (gate, experts, options) in CASES.items():
        model, twin = (Net(dict(gate), {**experts, "count_per_node": 2}, **options) for _ in range(2))
        with torch.no_grad():
            for m in (model, twin):
                for layer in m.layers:
                    for p in layer.experts.parameters():
                        p.mul_(1 + torch.distributed.get_rank())
        if any(layer.num_global_experts != 4 for layer in model.layers):
            raise RuntimeError("expected two experts on each of two ranks")
        report = prophet.convert(twin)
        if report.params != report.params_before:
            raise RuntimeError("each rank keeps the experts it has")
        ids = batches(2)[torch.distributed.get_rank()]
        before, after = net_loss(model, ids)[1], net_loss(twin, ids)[1]
        if not torch.allclose(before, after, rtol=1e-4, atol=1e-4):
            failed.append(case)
        prophet.revert(twin)
        if not all(torch.equal(twin.state_dict()[n], t) for n, t in model.state_dict().items()):
            failed.append(f"{case} reverted")
    return failed


def state_dicts() -> list[str]:
    """A converted model loads its own state dict, and that of the model it was."""
    model = made("top2")
    original = {n: 2 * t if t.is_floating_point() else t for n, t in model.state_dict().items()}
    prophet.convert(model)
    own = {n: 3 * t if t.is_floating_point() else t for n, t in model.state_dict().items()}
    failed = []
    model.load_state_dict(own)
    failed += [n for n, t in model.state_dict().items() if not torch.equal(t, own[n])]
    load_original_state_dict(model, original)
    failed += [n for n, t in original_state_dict(model).items() if not torch.equal(t, original[n])]
    try:
        model.load_state_dict({**own, "layers.0._num_global_experts": torch.tensor(9)})
        failed.append("another number of experts")
    except ValueError as error:
        if "has 9 experts, this layer 4" not in str(error):
            failed.append(str(error))
    return failed


def test_state_dicts() -> None:
    assert on_processes(1, state_dicts) == [[]]


def test_outputs_losses_and_gradients() -> None:
    assert on_processes(1, answers, timeout_s=120) == [[]]


def test_a_model_that_is_expert_parallel_already() -> None:
    assert on_processes(2, shared_between_two, timeout_s=120) == [[], []]


class Custom(Stacked):
    """Custom experts that cannot be cut."""

    def __init__(self, what: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.what = what
        if what == "buffer":
            self.register_buffer("seen", torch.zeros(4))
        if what == "shape":
            self.odd = nn.Parameter(torch.zeros(3, 2))

    def forward(self, x: Tensor, ctx: Any) -> Tensor:
        if self.what == "fails":
            raise RuntimeError("no such luck")
        if self.what == "rows":
            x = x - x.mean(dim=1, keepdim=True)
        if self.what == "neighbours":
            x = x.flip(0)
        y = super().forward(x, ctx)
        return y[0] if self.what == "answer" else y


CUSTOM = {"type": "custom", "module": Custom}
REFUSALS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ({"k": 1}, {"activation_fn": F.relu}, {"is_postscore": False}, "is_postscore: only True is kept"),
    (
        {"k": 1},
        {"activation_fn": lambda x: x.softmax(dim=1)},
        {},
        "activation_fn: a row of its answer depends on other",
    ),
    ({"k": 1}, {"activation_fn": lambda x: x @ x}, {}, "activation_fn: it fails on [1, 64, 12]"),
    ({"type": "custom", "module": Gate}, {"activation_fn": F.relu}, {}, "Gate.top_k: expected a positive integer"),
    ({"k": 1}, {**CUSTOM, "what": "buffer"}, {}, "Custom.seen: a buffer"),
    ({"k": 1}, {**CUSTOM, "what": "shape"}, {}, "Custom.odd: expected those of 4 experts one after the other"),
    ({"k": 1}, {**CUSTOM, "what": "fails"}, {}, "Custom fails on [4, 5, 8]: RuntimeError: no such luck"),
    ({"k": 1}, {**CUSTOM, "what": "answer"}, {}, "Custom: expected a tensor [4, 5, 'any'] for [4, 5, 8], got [5, 6]"),
    ({"k": 1}, {**CUSTOM, "what": "rows"}, {}, "Custom: cut into 4 experts, a row of its answer depends on other rows"),
    ({"k": 1}, {**CUSTOM, "what": "neighbours"}, {}, "Custom: cut into 4 experts, its answer is another"),
]


def refusals() -> list[str]:
    failed = []
    for gate, experts, options, words in REFUSALS:
        model = Net(dict(gate), dict(experts), **options)
        try:
            prophet.convert(model)
            failed.append(f"converted: {words}")
        except ConversionError as error:
            if words not in str(error):
                failed.append(f"{error}")
    wrong = Net({"type": "custom", "module": Gate, "top_k": 1, "more": 1}, {"activation_fn": F.relu})
    prophet.convert(wrong, verify=False)
    try:
        wrong(batches(1)[0])
        failed.append("more logits than experts")
    except ValueError as error:
        if "Gate: expected logits" not in str(error):
            failed.append(str(error))
    return failed


def test_what_is_not_kept_is_refused() -> None:
    assert on_processes(1, refusals) == [[]]


def dropout_that_hides() -> list[str]:
    """Dropout in an activation is seen whatever mode the model is in, and draws once converted."""
    failed = []
    drop = nn.Dropout(0.5)
    for name, function in {
        "closure": lambda x: drop(F.relu(x)),
        "only in training": lambda x: F.dropout(F.relu(x), 0.5, torch.is_grad_enabled()),
    }.items():
        model = Net({"k": 1, "capacity_factor": 0}, {"activation_fn": function}).eval()
        drop.eval()
        (first, _) = prophet.convert(model, verify=name == "closure").replaced
        failed += [] if first.spec.bank == "modules" else [name]
        drop.train()
        a, b = (model(batches(1)[0])[0] for _ in range(2))
        failed += [] if not torch.equal(a, b) else [f"{name}: no dropout"]
    return failed


def test_dropout_in_an_activation() -> None:
    assert on_processes(1, dropout_that_hides) == [[]]


def carried_optimizer() -> list[str]:
    """Adam goes on with its moments, cut by expert; one expert never gets a row and moves by its momentum alone."""
    gate, experts = {"k": 1, "capacity_factor": 0}, {"type": "custom", "module": Stacked}
    plain, model = Net(dict(gate), dict(experts)), Net(dict(gate), dict(experts))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (plain, model)]

    def step(number: int) -> list[float]:
        losses = []
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss = net_loss(m, batches(1, number)[0])[0]
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return losses

    step(0)
    for m in (plain, model):
        m.zero_grad()
        for layer in m.layers:
            with torch.no_grad():
                layer.gates[0].wg.weight[0] = 0
                layer.gates[0].wg.weight[1:] *= 1e-3
                layer.gates[0].wg.weight[1] = 5 * m.embed.weight.sum(0)
    prophet.convert(model, optimizer=optimizers[1])
    prophet.attach(model, optimizers[1])
    failed = [f"{a} {b}" for a, b in (step(n) for n in range(1, 5)) if abs(a - b) > 1e-5]
    wanted = original_state_dict(model)
    return failed + [n for n, t in plain.state_dict().items() if not torch.allclose(wanted[n], t, rtol=1e-4, atol=1e-6)]


def test_an_optimizer_goes_on() -> None:
    assert on_processes(1, carried_optimizer) == [[]]


@pytest.mark.parametrize("factor", [0.8, 0])
def test_a_recording_has_the_choices_that_found_room(factor: float, tmp_path: Path) -> None:
    """Two largest logits of 14 tokens; with a capacity, at most six of an expert."""
    model: Any = Net({"k": 2, "capacity_factor": factor}, {"activation_fn": F.relu})
    logits: list[Tensor] = []
    for layer in model.layers:
        layer.gates[0].register_forward_hook(lambda _, __, y: logits.append(y.detach()))
    with prophet.record(model, tmp_path / "r.npz", ranks=2):
        for step in range(4):
            net_loss(model, batches(1, step)[0])[0].backward()
    chosen = np.array([np.bincount(y.topk(2).indices.flatten(), minlength=EXPERTS) for y in logits])
    assert (chosen > 6).any()
    wanted = chosen.clip(max=6 if factor else None).reshape(2, 2, 2, EXPERTS).swapaxes(1, 2)
    assert np.array_equal(read_trace(tmp_path / "r.npz").counts, wanted)


def test_priorities_are_not_told_to_a_recording(tmp_path: Path) -> None:
    model = Net({"k": 2}, {"activation_fn": F.relu}, batch_prioritized_routing=True)
    text = r"batch_prioritized_routing: .* expected it to be off"
    with pytest.raises(ConversionError, match=text), prophet.record(model, tmp_path / "r.npz", ranks=2):
        pass
    assert not list(tmp_path.iterdir())
