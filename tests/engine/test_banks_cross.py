"""Checkpoints do not know how experts are run: on the kernels, or one by one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prophet
from prophet import checkpoint
from prophet.engine.checkpoint.optimizer_by_expert import join_state, shares_of, split_state
from prophet.experts.feed_forward import FeedForwardBank
from prophet.experts.modules import ModulesBank
from prophet.experts.plain import FfnNames, Network
from prophet.parallel import expert_groups
from prophet.ranks.collective import Collective
from prophet.ranks.process_group import processes
from prophet.ranks.threads import ThreadWorld
from tests.helpers.launch import on_processes
from tests.helpers.support import seeded

D, H, E = 6, 5, 4
NETWORK = Network(
    FfnNames(
        w_in=("gate_proj.weight", "up_proj.weight"),
        w_out="down_proj.weight",
        b_in=("gate_proj.bias", "up_proj.bias"),
        b_out="down_proj.bias",
    ),
    "swiglu",
)


class GatedMLP(nn.Module):
    """What the kernels compute with "swiglu", as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(D, H), nn.Linear(D, H), nn.Linear(H, D)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Model(nn.Module):
    def __init__(self, bank: str, group: Collective | None, seed: int) -> None:
        super().__init__()
        with seeded(seed):
            self.moe = prophet.MoE(D, num_experts=E, top_k=2, expert=GatedMLP, group=group)
            if bank == "kernels":
                own = self.moe.experts
                experts = dict(enumerate(own.home_experts(), own.first_expert))
                where = {"first_expert": own.first_expert, "held": len(experts), "total_experts": E}
                self.moe.experts = ModulesBank(experts, dim=D, ep_size=own.ep_size, network=NETWORK, **where)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)


def train(bank: str, group: Collective | None, *, seed: int) -> tuple[Model, torch.optim.Optimizer]:
    """Two steps."""
    model = Model(bank, group, seed)
    model.moe.gate.requires_grad_(False)  # nothing averages its gradients over ranks here
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(40, D, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
    return model, optimizer


def everything(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Values and moments of every expert and of the gate, by names that every bank has."""
    found = {key: value.detach().clone() for key, value in model.state_dict().items()}
    shares = shares_of(model)
    for name, p in model.named_parameters():
        if name in shares:
            for key, state in split_state(name, p, shares[name], optimizer.state[p]).items():
                found |= {f"{key} {field}": value.clone() for field, value in state.items()}
        else:
            found |= {f"{name} {field}": value.clone() for field, value in optimizer.state.get(p, {}).items()}
    return found


def write(folder: str, bank: str, ep_size: int) -> dict[str, Tensor]:
    group = expert_groups(ep_size)[0] if processes() > 1 else None
    model, optimizer = train(bank, group, seed=1)
    checkpoint.save(folder, model, optimizer)
    return everything(model, optimizer)


def read(folder: str, bank: str, ep_size: int) -> dict[str, Tensor]:
    group = expert_groups(ep_size)[0] if processes() > 1 else None
    model, optimizer = train(bank, group, seed=2)  # other values, which are overwritten
    checkpoint.load(folder, model, optimizer)
    return everything(model, optimizer)


def check(whole: dict[str, Tensor], parts: list[dict[str, Tensor]]) -> None:
    assert {key for part in parts for key in part} == set(whole)
    for part in parts:
        for key, value in part.items():
            assert torch.equal(value, whole[key]), key


@pytest.mark.parametrize("writer", ["modules", "kernels"])
def test_one_process_reads_the_other_bank(tmp_path: Path, writer: str) -> None:
    reader = "kernels" if writer == "modules" else "modules"
    whole = write(str(tmp_path), writer, 1)
    assert "moe.experts.3.up_proj.bias exp_avg_sq" in whole
    assert len(whole) == 1 + 4 * E * 6
    check(whole, [read(str(tmp_path), reader, 1)])


@pytest.mark.parametrize(
    ("writer", "size"),
    [
        ("modules", 2),
        ("kernels", 2),
        pytest.param("modules", 4, marks=pytest.mark.slow),
        pytest.param("kernels", 4, marks=pytest.mark.slow),
    ],
)
def test_other_sizes_read_the_other_bank(tmp_path: Path, writer: str, size: int) -> None:
    reader = "kernels" if writer == "modules" else "modules"
    parts = on_processes(size, write, str(tmp_path / "many"), writer, size)
    whole = read(str(tmp_path / "many"), reader, 1)
    check(whole, parts)
    one = write(str(tmp_path / "one"), writer, 1)
    check(one, on_processes(size, read, str(tmp_path / "one"), reader, size))


def test_state_dicts_are_the_other_banks(tmp_path: Path) -> None:
    alone = ThreadWorld(1).collective(0)
    for bank, other in (("modules", "kernels"), ("kernels", "modules")):
        model, twin = Model(bank, alone, 1).double(), Model(other, alone, 2).double()
        twin.load_state_dict(model.state_dict())
        x = torch.randn(20, D, dtype=torch.float64)
        torch.testing.assert_close(model(x), twin(x), rtol=0, atol=1e-12)


def test_an_expert_that_has_taken_other_steps_is_read(tmp_path: Path) -> None:
    model, optimizer = train("modules", None, seed=1)
    params = list(model.moe.experts.home_experts()[2].parameters())  # type: ignore[operator]
    for p in params:
        optimizer.state[p]["step"] += 1.0
    checkpoint.save(tmp_path, model, optimizer)
    again = train("kernels", None, seed=2)
    checkpoint.load(tmp_path, *again)
    check(everything(model, optimizer), [everything(*again)])
    for p in params:
        del optimizer.state[p]  # as of an expert that no row has visited
    checkpoint.save(tmp_path, model, optimizer)
    checkpoint.load(tmp_path, *again)
    assert not any(again[1].state.get(p) for p in again[0].moe.experts.home_experts()[2].parameters())  # type: ignore[operator]


def stacked() -> tuple[prophet.MoE, torch.optim.Optimizer]:
    """Stacked experts and their optimizer, after a step."""
    layer = prophet.MoE(D, H, E, top_k=2, group=ThreadWorld(1).collective(0))
    optimizer = torch.optim.AdamW(layer.experts.parameters())
    layer(torch.randn(40, D)).sum().backward()
    optimizer.step()
    return layer, optimizer


def test_stacked_experts_have_taken_the_same_steps() -> None:
    layer, optimizer = stacked()
    shares = shares_of(layer)["experts.w_in"]
    p = layer.experts.get_parameter("w_in")
    said = split_state("experts.w_in", p, shares, optimizer.state[p])
    said[shares[2].key]["step"] = said[shares[2].key]["step"] + 1.0
    with pytest.raises(ValueError, match=r"step of experts\.w_in is \[1\.0, 2\.0\] for its experts"):
        join_state("experts.w_in", p, shares, said, on_device=False)
    del said[shares[2].key]
    with pytest.raises(ValueError, match=r"is not alike for all experts \(expert \[2\] has none\)"):
        join_state("experts.w_in", p, shares, said, on_device=False)


def test_experts_of_one_layer_in_two_groups_are_refused(tmp_path: Path) -> None:
    model = Model("modules", None, 1)
    bank: Any = model.moe.experts
    halves = [[p for e in bank.home_experts()[at : at + 2] for p in e.parameters()] for at in (0, 2)]
    optimizer = torch.optim.SGD([{"params": halves[0]}, {"params": halves[1], "lr": 0.5}], lr=0.1)
    text = r"moe\.experts\.\*\.down_proj\.bias: experts of one layer are in two of the optimizer's groups"
    with pytest.raises(ValueError, match=text):
        checkpoint.save(tmp_path, model, optimizer)


def test_rules_by_name_and_by_dimension_sort_parameters_as_before() -> None:
    """nanoGPT decays what has two dimensions; Trainer what is not called a bias."""
    alone = ThreadWorld(1).collective(0)
    for bank in (FeedForwardBank(D, H, E), *(Model(kind, alone, 1).moe.experts for kind in ("kernels", "modules"))):
        for name, p in bank.named_parameters():
            assert (p.dim() >= 2) == (not re.search("bias", name)), name


def test_a_state_that_is_split_and_joined_is_what_it_was() -> None:
    layer, optimizer = stacked()
    shares = shares_of(layer)
    for name, p in layer.named_parameters():
        if name not in shares:
            continue
        state = optimizer.state[p]
        back = join_state(name, p, shares[name], split_state(name, p, shares[name], state), on_device=False)
        assert back.keys() == state.keys()
        assert all(torch.equal(back[f], state[f]) and back[f] is not state[f] for f in state)
