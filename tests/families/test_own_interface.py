"""Families whose experts are called in another way: the same numbers on two ranks, the same files, or a sentence.

Shape legend: R ranks, E experts.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import prophet
from prophet.convert import converted, load_original_state_dict, original_state_dict
from prophet.convert.find import find_all, standard_adapters
from prophet.errors import ConversionError
from prophet.traces import read_trace
from tests.helpers.moe_models import alone, batches, close, compare, layers_of, together, transformers
from tests.helpers.support import on_threads, seeded

EXPERTS, RANKS = 4, 2
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 12,
    "max_position_embeddings": 32,
}
LLAMA4 = {"intermediate_size_mlp": 20, "num_local_experts": EXPERTS, "num_experts_per_tok": 1}
SWITCH: dict[str, Any] = {
    **{"vocab_size": 32, "d_model": 32, "d_kv": 8, "d_ff": 12, "num_layers": 2, "num_decoder_layers": 2},
    **{"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_heads": 2, "num_experts": EXPERTS},
    **{"dropout_rate": 0.0, "router_jitter_noise": 0.0, "expert_capacity": 3, "decoder_start_token_id": 0},
}
DBRX = {
    **{"vocab_size": 32, "d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 32},
    "ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    "attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0},
}
LONGCAT = {
    **{"vocab_size": 32, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 2, "ffn_hidden_size": 20},
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"head_dim": 4, "moe_topk": 3, "n_routed_experts": EXPERTS, "zero_expert_num": 3, "expert_ffn_hidden_size": 12},
    "max_position_embeddings": 32,
}
STEP_TEXT: dict[str, Any] = {
    **SIZES,
    **{"moe_intermediate_size": 12, "share_expert_dim": 10, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2},
    **{"mlp_layer_types": ["sparse", "sparse"], "moe_router_scaling_factor": 1.5, "sliding_window": 4},
}
STEP_VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
STEP = {"text_config": STEP_TEXT, "vision_config": STEP_VISION, "image_token_id": 31}
NLLB = {
    **{"vocab_size": 32, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_experts": EXPERTS},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12},
    **{"encoder_sparse_step": 2, "decoder_sparse_step": 2},
}
JETMOE = {
    **{"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 8},
    **{"intermediate_size": 12, "num_local_experts": EXPERTS},
}
# family: (config class, model class, options)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM", {**SIZES, **LLAMA4}),
    "llama4_top2": ("Llama4TextConfig", "Llama4ForCausalLM", {**SIZES, **LLAMA4, "num_experts_per_tok": 2}),
    "switch": ("SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration", SWITCH),
    "dbrx": ("DbrxConfig", "DbrxForCausalLM", DBRX),
    "longcat": ("LongcatFlashConfig", "LongcatFlashForCausalLM", LONGCAT),
    "step": ("Step3p7Config", "Step3p7ForConditionalGeneration", STEP),
}
REFUSED = {
    "nllb": ("NllbMoeConfig", "NllbMoeForConditionalGeneration", NLLB),
    "jetmoe": ("JetMoeConfig", "JetMoeForCausalLM", JETMOE),
}


def small(family: str, seed: int = 7, **changes: Any) -> Any:
    """A model with random parameters in training mode, float32."""
    library = transformers()
    config, kind, options = {**FAMILIES, **REFUSED}[family]
    with seeded(seed):
        model = getattr(library, kind)(getattr(library, config)(**{**copy.deepcopy(options), **changes}))
        with torch.no_grad():
            for p in model.parameters():  # routers far from uniform, and no zeros
                p.normal_(std=0.3)
            for name, b in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    b.normal_(std=0.1)
    return model.train()


def loss_of(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Loss, those of routers included, and logits."""
    out = model(input_ids=ids, labels=ids, output_router_logits=True)
    return out.loss, out.logits


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in model.state_dict().items()}


def same_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    now = model.state_dict()
    assert list(now) == list(state)
    for name, value in state.items():
        assert now[name].dtype == value.dtype
        assert torch.equal(now[name], value), name


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_movements_and_files(family: str, tmp_path: Path) -> None:
    """Three steps on two ranks with placements at random; float32, so up to re-ordered sums. Then written and reverted:
    plain transformers reads the same bits.
    """
    model = small(family)
    before, classes = state_of(model), [type(m) for m in model.modules()]
    copies = [copy.deepcopy(model) for _ in range(RANKS)]
    steps = [batches(RANKS, s) for s in range(3)]

    def body(group: Any) -> Any:
        mine = copies[group.rank]
        seen = together(mine, steps, group, loss_of)
        mine.save_pretrained(tmp_path)
        prophet.revert(mine)
        return seen

    import prophet_transformers  # noqa: F401  # not by two threads at once

    found = on_threads(RANKS, body)
    compare(alone(model, steps, loss_of), found)
    assert all(s.extra for s in found), "no replica sent gradients home: the placements were not random"
    assert [type(m) for m in copies[0].modules()] == classes
    for name, p in model.state_dict().items():
        close(copies[0].state_dict()[name] - before[name], p - before[name], 1e-3, f"movement of {name}")
    loaded = type(model).from_pretrained(tmp_path)
    same_state(copies[1], state_of(copies[0]))
    same_state(loaded, state_of(copies[0]))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "llama4_top2"])
def test_states_go_in_and_out_exactly(family: str) -> None:
    """What a model had, what was loaded into it while it was converted, and that again once it is reverted."""
    model = small(family)
    before, after = state_of(model), state_of(small(family, seed=8))
    copies = [copy.deepcopy(model) for _ in range(RANKS)]

    def body(group: Any) -> None:
        mine = copies[group.rank]
        report = prophet.convert(mine, group=group, verify=False)
        assert {r.spec.bank for r in report.replaced} == {"feed-forward"}
        assert report.params * RANKS == report.params_before - (0 if family != "longcat" else 2 * 3 * 24 * 32)
        found = original_state_dict(mine)
        assert found.keys() == before.keys()
        assert all(torch.equal(found[n], t) for n, t in before.items())
        load_original_state_dict(mine, after)
        prophet.revert(mine)

    on_threads(RANKS, body)
    for mine in copies:
        same_state(mine, after)


def chosen(family: str, model: Any, ids: Tensor) -> list[Tensor]:
    """By block, how many tokens went to each expert, [E], as each family's own experts are called."""
    found: dict[str, Tensor] = {}
    hooks = []

    def note(name: str) -> Any:
        def hook(module: Any, values: Any, answer: Any) -> None:
            if family == "switch":
                found[name] = answer[0].flatten(0, 1).sum(dim=0)
            elif family.startswith("llama4"):
                found[name] = (answer[0] > 0).sum(dim=0)
            else:
                picked = values[1].flatten()
                found[name] = torch.bincount(picked[picked < EXPERTS], minlength=EXPERTS)

        return hook

    for name, module in model.named_modules():
        if name.endswith("router" if family.startswith(("switch", "llama4")) else ".experts"):
            hooks.append(module.register_forward_hook(note(name)))
    with torch.no_grad():
        loss_of(model, ids)
    for one in hooks:
        one.remove()
    return list(found.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_counts(family: str, tmp_path: Path) -> None:
    model = small(family)
    by_rank = batches(RANKS)
    with prophet.record(model, tmp_path / "r.npz", ranks=RANKS):
        for ids in by_rank:
            loss_of(model, ids)
    trace = read_trace(tmp_path / "r.npz")
    wanted = np.array([[c.numpy() for c in chosen(family, model, ids)] for ids in by_rank])
    np.testing.assert_array_equal(trace.counts[0], wanted.swapaxes(0, 1))
    assert wanted.sum() > 0


def test_switch_with_dropout_runs_its_experts_as_modules() -> None:
    """As the released models are configured; what is drawn is each rank's own, so evaluation is compared."""
    model = small("switch", dropout_rate=0.1)
    ids = batches(1)[0]
    with torch.no_grad():
        want = loss_of(model.eval(), ids)[1]
    copies = [copy.deepcopy(model).train() for _ in range(RANKS)]

    def body(group: Any) -> Tensor:
        mine = copies[group.rank]
        report = prophet.convert(mine, group=group)
        assert {r.spec.bank for r in report.replaced} == {"modules"}
        assert "Dropout" in report.replaced[0].spec.why
        loss_of(mine, ids)[0].backward()
        with torch.no_grad():
            return loss_of(mine.eval(), ids)[1]

    for got in on_threads(RANKS, body):
        close(got, want, 1e-5, "logits")


def test_switch_keeps_jitter_names_and_missing_gradients() -> None:
    """Experts keep their keys; one that no token reaches has no gradient, as before."""
    model = small("switch", router_jitter_noise=0.3, expert_capacity=1)
    twin, ids = copy.deepcopy(model), batches(1, rows=1, length=2)[0]
    first = next(m for m in model.modules() if isinstance(m, nn.ModuleDict))["expert_1"]
    prophet.convert(model)
    assert layers_of(model)[0]["expert_1"] is first  # type: ignore[index]
    assert list(model.state_dict()) == list(twin.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in twin.named_parameters()]
    model.load_state_dict(twin.state_dict())
    losses = []
    for m in (twin, model):
        with seeded(1):
            loss, _ = loss_of(m, ids)
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    idle = [{n for n, p in m.named_parameters() if p.grad is None} for m in (twin, model)]
    assert idle[0] == idle[1]
    assert any("expert_" in n for n in idle[0])


def test_an_optimizer_of_switch_goes_along() -> None:
    model = small("switch")
    optimizer = torch.optim.AdamW(model.named_parameters())
    loss_of(model, batches(1)[0])[0].backward()
    optimizer.step()
    optimizer.zero_grad()
    prophet.convert(model, optimizer=optimizer)
    assert optimizer.param_groups[0]["param_names"] == [n for n, _ in model.named_parameters()]


def test_lists_beside_the_experts_are_left_alone() -> None:
    """LongCat-Flash has two attentions, norms and dense layers in each layer; trying them takes long."""
    found, left = find_all(small("longcat"), standard_adapters(), None, 0, 1)
    assert [f.where for f in found] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    beside = [one for one in left if one.name != "model.layers"]
    assert len(beside) == 8
    assert all("stands beside it, has the experts" in one.why for one in beside)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        (
            "nllb",
            {},
            r"\(NLLB-MoE\): NllbMoeSparseMLP.experts is a NllbMoeExperts: .*experts 0 and 1 compute",
        ),
        (
            "jetmoe",
            {},
            r"\(JetMoE\): JetMoeMoE.input_linear is a JetMoeParallelExperts: an expert's two",
        ),
        (
            "step",
            {"text_config": {**STEP_TEXT, "swiglu_limits": [0.0, 7.0]}},
            r"layers.1.mlp \(Step-3.7\): Step3p7Experts.limit: only inf is served, got 7.0",
        ),
        ("llama4", {"hidden_act": "tanh"}, r"\(Llama-4\): hidden_act: expected one of"),
        ("dbrx", {"ffn_config": {**DBRX["ffn_config"], "ffn_act_fn": {"name": "tanh"}}}, r"\(DBRX\): hidden_act"),  # type: ignore[dict-item]
    ],
)
def test_refusals(family: str, changes: dict[str, Any], said: str) -> None:
    model = small(family, **changes)
    before = state_of(model)
    with pytest.raises(ConversionError, match=said):
        prophet.convert(model)
    same_state(model, before)
    assert not list(converted(model))


def test_what_is_said_of_nllb_is_so() -> None:
    """Expert 0 and expert 1 get all the rows, whatever the router says: the day this fails, serve it."""
    model = small("nllb").eval()
    called = set()
    for name, module in model.named_modules():
        if name.rpartition(".")[2].startswith("expert_"):
            module.register_forward_hook(lambda m, _, __, name=name: called.add(name.rpartition("_")[2]))
    loss_of(model, batches(1)[0])
    assert called == {"0", "1"}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama4", {"target_parameters": ["experts.gate_up_proj"], "target_modules": []}),
        ("switch", {"target_modules": ["wi", "wo"]}),
    ],
)
def test_lora_on_experts_is_refused_and_beside_them_it_is_served(family: str, options: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft", reason="needs peft: pip install '.[test]'")
    attention = ["q"] if family == "switch" else ["q_proj"]
    with pytest.raises(ConversionError, match=r"PEFT has put .* on the experts: keep LoRA off"):
        prophet.convert(peft.get_peft_model(small(family), peft.LoraConfig(**options)))
    beside = peft.get_peft_model(small(family), peft.LoraConfig(target_modules=attention))
    prophet.convert(beside)
    assert not any(p.requires_grad for layer in layers_of(beside) for p in layer.parameters())
