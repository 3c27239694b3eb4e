"""One call for a model with Tutel's layers: what users rely on stays, and what cannot be done is said."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import prophet_tutel
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from prophet_tutel import TutelError
from torch import Tensor, nn

import prophet
from prophet.convert import converted
from prophet.errors import ConversionError
from tests.helpers.launch import on_processes
from tests.helpers.support import FixedPlanner, everywhere

WHY = "needs tutel: make test-peers PEERS_TUTEL=folder"
needs_tutel = pytest.mark.skipif(importlib.util.find_spec("tutel") is None, reason=WHY)
DIM, HIDDEN, EXPERTS = 8, 12, 4
FFN = {"type": "ffn", "hidden_size_per_expert": HIDDEN, "activation_fn": F.gelu}
CONFIG = prophet.EngineConfig(planner=FixedPlanner(everywhere(EXPERTS, 2)))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def lookalike(package: str) -> nn.Module:
    """A module that has a framework's layer's name and place, and nothing of it."""
    kind = type("MOELayer", (nn.Module,), {"__module__": package, "group": None})
    made: nn.Module = kind()
    return made


def test_a_model_without_tutels_layer() -> None:
    with pytest.raises(TutelError, match=r"no tutel.moe.moe_layer"):
        prophet_tutel.balance(nn.Linear(2, 2), sgd(nn.Linear(2, 2).parameters()))


def test_a_model_with_layers_of_another_kind() -> None:
    model = nn.Sequential(lookalike("tutel.impls.moe_layer"), lookalike("deepspeed.moe.sharded_moe"), nn.Linear(2, 2))
    with pytest.raises(TutelError, match=r"^1: a block of DeepSpeed beside Tutel's"):
        prophet_tutel.balance(model, sgd(model.parameters()))


def test_what_is_no_optimizer() -> None:
    model = nn.Sequential(lookalike("tutel.impls.moe_layer"), nn.Linear(2, 2))
    with pytest.raises(
        TutelError, match=r"expected a torch.optim.Optimizer, or a TutelDistributedOptimizer .*got func"
    ):
        prophet_tutel.balance(model, sgd)


# --- with Tutel ------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two layers of Tutel's, as its users mark them; the same at any number of ranks."""

    def __init__(self, groups: tuple[Any, Any] = (None, None), experts: dict[str, Any] | None = None) -> None:
        super().__init__()
        from tutel import moe  # type: ignore[import-not-found]

        def layer(number: int) -> Any:
            ranks = dist.get_world_size(groups[number])
            made = moe.moe_layer(
                gate_type={"type": "top", "k": 2, "capacity_factor": 0},
                experts={"num_experts_per_device": EXPERTS // ranks, **(experts or FFN)},
                model_dim=DIM,
                group=groups[number],
                scan_expert_func=lambda name, p: setattr(p, "skip_allreduce", name),
                seeds=(number, 10 * number + dist.get_rank(groups[number]), 1),
            )
            return made

        self.layers = nn.ModuleList(layer(i) for i in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def tokens() -> Tensor:
    return torch.randn(24, DIM, generator=torch.Generator().manual_seed(dist.get_rank()))


def check(name: str, fine: bool) -> list[str]:
    return [] if fine else [name]


def message(call: Callable[[], object], kind: type[Exception] = TutelError) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "nothing was raised"


def what_users_rely_on() -> list[str]:
    plain, model = Net(), Net()
    wanted = [p.skip_allreduce for p in plain.parameters() if hasattr(p, "skip_allreduce")]
    optimizer, twin = sgd(model.parameters()), sgd(plain.parameters())
    balanced = prophet_tutel.balance(model, optimizer, config=CONFIG)
    failed = []
    for _ in range(3):  # from the second step on every rank has replicas
        for m in (plain, model):
            m.zero_grad()
            m(tokens()).square().mean().backward()
            failed += check("l_aux", all(layer.l_aux.ndim == 0 for layer in m.layers))
        for (ours, theirs), ((*_, layer), original) in zip(
            (("w_in", "batched_fc1_w"), ("bias_out", "batched_fc2_bias")),
            zip(converted(model), plain.layers, strict=True),
            strict=True,
        ):
            expected = getattr(original.experts, theirs).grad
            got = getattr(layer.experts, ours).grad.view_as(expected)  # ours has biases flat
            # Tutel's gradient: the sum over ranks, complete when backward has returned
            failed += check(f"gradient of {ours}", torch.allclose(got, expected, rtol=1e-4, atol=1e-6))
        optimizer.step()
        twin.step()
    if balanced.engine.last_step is None or balanced.engine.last_step.copies.sum() != 2 * EXPERTS:
        failed.append("no replicas")
    marks = [p.skip_allreduce for p in model.parameters() if hasattr(p, "skip_allreduce")]
    failed += check(f"marks {marks}", sorted(marks) == sorted(wanted) and len(marks) == 8)
    failed += check("_tutel_expert", sum(hasattr(p, "_tutel_expert") for p in model.parameters()) == 8)
    expected, got = plain.state_dict(), model.state_dict()
    failed += check("keys", list(got) == list(expected))
    failed += [n for n, t in expected.items() if not torch.allclose(got[n], t, rtol=1e-4, atol=1e-6)]
    balanced.revert()
    reverted = model.state_dict()
    failed += [f"reverted {n}" for n, t in got.items() if not torch.equal(reverted[n], t)]
    again = [p.skip_allreduce for p in model.parameters() if hasattr(p, "skip_allreduce")]
    failed += check("marks after revert", again == wanted)
    balanced.close()
    return failed + check("twice", "has been converted" in message(balanced.revert, ConversionError))


def loading() -> list[str]:
    source, model = Net(), Net()
    with torch.no_grad():
        for p in source.parameters():
            p.mul_(2)
    prophet_tutel.balance(model, sgd(model.parameters()), config=CONFIG)
    state = source.state_dict()
    key = "layers.1.experts.batched_fc1_w"
    flat = {**state, key: state[key].reshape(-1)}  # as Tutel's own tools write them
    failed = [] if model.load_state_dict(flat) == nn.Module().load_state_dict({}) else ["strict"]
    failed += [n for n, t in state.items() if not torch.equal(model.state_dict()[n], t)]
    before = model.state_dict()
    less = {n: t for n, t in state.items() if n != key}
    failed += check("missing", list(model.load_state_dict(less, strict=False).missing_keys) == [key])
    failed += [f"untouched {n}" for n, t in before.items() if not torch.equal(model.state_dict()[n], t)]
    words = message(lambda: model.load_state_dict({**state, key: state[key][:, :5]}), RuntimeError)
    failed += check(words, f"{key}: expected a tensor of shape" in words)
    words = message(lambda: model.load_state_dict({**state, "layers.0.experts.typo": torch.zeros(1)}), RuntimeError)
    failed += check(words, "layers.0.experts.typo" in words)
    number = "layers.0._num_global_experts"
    words = message(lambda: model.load_state_dict({**state, number: torch.tensor(8)}), ValueError)
    return failed + check(words, f"{number}: the checkpoint has 8 experts, this layer 4" in words)


def refusals() -> list[str]:
    model = Net()
    failed = []
    said = message(lambda: prophet_tutel.balance(model, sgd(list(model.parameters())[:1])))
    failed += check(said, "it lacks experts of the model (layers.0.experts.batched_fc2_w)" in said)
    adam = torch.optim.Adam(model.parameters())
    model(tokens()).square().mean().backward()
    adam.step()
    adam.zero_grad()
    state = {n: t.clone() for n, t in model.state_dict().items()}
    moments = [t.clone() for _, s in sorted(adam.state_dict()["state"].items()) for t in s.values()]
    foreign: Any = {"zero_optimization": {"stage": 1}}
    said = message(lambda: prophet_tutel.balance(model, adam, config=foreign), TypeError)
    failed += check(said, "config must be a prophet.EngineConfig, got dict" in said)
    # model and optimizer are as they were, though the model had been converted by then
    held = [id(p) for group in adam.param_groups for p in group["params"]]
    failed += check("the optimizer", held == [id(p) for p in model.parameters()])
    again = [t for _, s in sorted(adam.state_dict()["state"].items()) for t in s.values()]
    failed += check("states", all(torch.equal(a, b) for a, b in zip(moments, again, strict=True)))
    failed += [n for n, t in model.state_dict().items() if not torch.equal(state[n], t)]
    failed += check("converted", not list(converted(model)))
    groups = [dist.new_group([r]) for r in range(2)]
    mixed = Net((None, groups[dist.get_rank()]))
    said = message(lambda: prophet_tutel.balance(mixed, sgd(mixed.parameters())))
    failed += check(said, "layers.1: its group is of the processes" in said)
    averaged = nn.parallel.DistributedDataParallel(Net())
    said = message(lambda: prophet_tutel.balance(averaged, sgd(averaged.parameters())))
    return failed + check(
        said, "DistributedDataParallel averages the experts' layers.0.experts.batched_fc1_bias" in said
    )


@needs_tutel
@pytest.mark.parametrize("body", [what_users_rely_on, loading, refusals])
def test_on_two_processes(body: Callable[[], list[str]]) -> None:
    assert on_processes(2, body, timeout_s=120) == [[], []]


@needs_tutel
def test_one_process_is_enough() -> None:
    assert on_processes(1, loading, timeout_s=120) == [[]]
