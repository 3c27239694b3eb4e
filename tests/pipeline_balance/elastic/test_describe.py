"""Descriptions read off modules, of our own and of transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipeline_balance.elastic.layouts.boxes import Block, layout_of
from pipeline_balance.elastic.layouts.describe import Rule, describe, rules_of
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from prophet.errors import LayoutError


class Tied(nn.Module):
    """An embedding that is the head too, a fused projection, a frozen layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.qkv = nn.Linear(4, 24)
        self.out = nn.Linear(8, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def test_a_module_is_described() -> None:
    model = Tied()
    units = [model.embed, nn.ModuleList([model.qkv, model.out]), nn.ModuleList([model.frozen, model.norm]), model.head]
    rules = {
        "embed": Rule(how="vocabulary"),
        "qkv": Rule(how="column", fused=(4, 1, 1)),
        "out": Rule(how="row", units=2),
    }
    found = describe(model, units, rules)
    by_name = {p.name: p for p in found.parameters}
    assert by_name["embed.weight"].layers == (0, 3), "tied: one tensor of two layers"
    assert "head.weight" not in by_name
    assert by_name["qkv.bias"].blocks == by_name["qkv.weight"].blocks
    assert by_name["qkv.weight"].blocks[0] == Block(length=16, units=4)
    assert by_name["qkv.weight"].blocks[1] == Block(length=4, units=1, repeated=True)
    assert (by_name["out.weight"].dim, by_name["out.bias"].dim) == (1, None)
    assert not by_name["frozen.weight"].trained
    assert by_name["norm.num_batches_tracked"].kind == "buffer"
    assert by_name["norm.num_batches_tracked"].dtype == "int64"
    assert "frozen.weight@exp_avg" not in found.space.number
    layout = layout_of(found, Parallelism(pp=2, tp=2, zero=1))
    layout.check_complete()
    on = {p.name: p.box for p in layout.on(3)}
    assert on["embed.weight"].start == (5, 0)
    with pytest.raises(LayoutError, match=r"qkv\.weight belongs to none"):
        describe(model, [model.embed])
    with pytest.raises(LayoutError, match="24 rows cannot be in parts of"):
        describe(model, units, {"qkv": Rule(how="column", fused=(4, 3))})


def test_transformers_models_bring_their_rules() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=2,
        hidden_size=32,
        moe_intermediate_size=16,
        num_experts=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=101,
        head_dim=8,
    )
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    units = [model.model.embed_tokens, *model.model.layers, nn.ModuleList([model.model.norm, model.lm_head])]
    units[0] = nn.ModuleList([units[0], model.model.rotary_emb])
    by_name = {p.name: p for p in describe(model, units, rules_of(model)).parameters}
    attention = "model.layers.1.self_attn"
    assert by_name[f"{attention}.q_proj.weight"].blocks == (Block(length=64, units=8),)
    assert by_name[f"{attention}.k_proj.weight"].blocks == (Block(length=16, units=2, repeated=True),)
    assert by_name[f"{attention}.v_proj.weight"].blocks == by_name[f"{attention}.k_proj.weight"].blocks
    assert by_name[f"{attention}.o_proj.weight"].blocks == (Block(length=64, units=8),)
    assert by_name[f"{attention}.o_proj.weight"].dim == 1
    assert by_name[f"{attention}.q_norm.weight"].dim is None
    assert by_name["model.embed_tokens.weight"].dim == by_name["lm_head.weight"].dim == 0
    experts = [p for p in by_name.values() if p.experts]
    assert len(experts) == 4
    assert all(p.shape[0] == 8 for p in experts)
    assert by_name["model.layers.0.mlp.gate.weight"].dim is None
    with pytest.raises(LayoutError, match="has no tensor-parallel plan"):
        rules_of(nn.Linear(2, 2))


def test_the_first_rule_that_fits_a_module_or_a_parameter_holds() -> None:
    model = nn.ModuleDict({"up": nn.Linear(4, 8), "norm": nn.BatchNorm1d(8)})
    rules = {"up.bias": Rule(how="whole"), "up": Rule(how="column"), "*": Rule(how="row"), "norm": Rule(how="column")}
    found = {p.name: p.dim for p in describe(model, [model], rules).parameters}
    assert (found["up.bias"], found["up.weight"]) == (None, 0)
    assert {found["norm.weight"], found["norm.running_mean"]} == {None}
    assert describe(model, [model], {"norm": Rule(how="column")}).parameters[-2].dim is None, "buffers stay whole"


def test_a_plan_with_a_word_that_has_no_rule_is_refused() -> None:
    model = SimpleNamespace(tp_plan={"layers.*.up": "sideways"}, config=SimpleNamespace())
    with pytest.raises(LayoutError, match=r"layers\.\*\.up is cut 'sideways', which has no rule"):
        rules_of(model)
