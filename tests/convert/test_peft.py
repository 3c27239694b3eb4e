"""LoRA on experts: converted they compute, train, save and load as PEFT's wrappers do, on any number of ranks."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import prophet
from prophet.convert import converted, original_state_dict
from prophet.convert.checks import LORA_ADVICE
from prophet.convert.sources.lora import Piece
from prophet.errors import CheckpointError, ConversionError, PartialStateError
from tests.helpers.moe_models import alone, batches, compare, hugging_face, layers_of, loss_of, together
from tests.helpers.support import on_threads

pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ALL: dict[str, Any] = {"target_modules": "all-linear"}
SOME: dict[str, Any] = {"target_modules": ["q_proj"], "target_parameters": EXPERTS}


def adapted(family: str = "qwen3", **options: Any) -> Any:
    """A model with LoRA of random values."""
    torch.manual_seed(3)
    options = {"r": 2, "lora_alpha": 2, **(options or ALL), "init_lora_weights": False}
    return peft.get_peft_model(hugging_face(family), peft.LoraConfig(**options)).train()


def pair(model: Any) -> list[Any]:
    return [copy.deepcopy(model) for _ in range(2)]


def answer(model: nn.Module) -> Tensor:
    """Logits in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return loss_of(model, batches(1)[0])[1]


def adapter_files(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "adapter_model.safetensors"))


# --- computing ---


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {**ALL, "use_rslora": True, "lora_alpha": 5}),
        ("gpt_oss", {**SOME, "lora_alpha": 1, "rank_pattern": {r".*\.down_proj": 3}}),
        pytest.param("mixtral", ALL, marks=pytest.mark.slow),
        pytest.param("qwen2", SOME, marks=pytest.mark.slow),
        pytest.param("olmoe", ALL, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {**SOME, "target_modules": ["o_proj"]}, marks=pytest.mark.slow),
        pytest.param("mixtral", {**ALL, "target_parameters": ["experts.down_proj"]}, marks=pytest.mark.slow),
    ],
)
def test_logits_and_gradients(family: str, options: dict[str, Any]) -> None:
    """Three steps of SGD with placements at random, against PEFT's own on all batches; 1e-4 of the largest value."""
    model = adapted(family, **options)
    steps = [batches(2, s) for s in range(3)]
    copies = pair(model)
    found = on_threads(2, lambda group: together(copies[group.rank], steps, group))
    compare(alone(model, steps), found)
    assert all(s.extra for s in found), "no replica sent gradients home: the placements were not random"
    trained = [n for n, g in found[0].gradients.items() if ".experts." in n and bool(g.any())]
    assert trained
    assert all("lora_" in n for n in trained)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_answers_are_those_of_peft_in_double_precision(family: str) -> None:
    model = adapted(family, **SOME).double()
    model.get_base_model().set_experts_implementation("eager")  # its grouped product knows no float64
    want = answer(model)
    prophet.convert(model)
    torch.testing.assert_close(answer(model), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_that_no_token_visits_move_on_by_their_momentum(ranks: int) -> None:
    """Adam passes over what has no gradient; PEFT's stacked factors have zeros where no token came."""
    model = adapted()
    steps = [torch.full((2, 1), token) for token in (3, 9, 21, 3)]  # each visits few experts
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def train(mine: Any) -> Any:
        optimizer = torch.optim.AdamW([p for p in mine.parameters() if p.requires_grad], lr=0.01)
        for ids in steps:
            optimizer.zero_grad()
            logits = mine(input_ids=ids).logits
            (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
            optimizer.step()
        return mine

    def body(group: Any) -> dict[str, Tensor]:
        prophet.convert(copies[group.rank], group=group)
        return original_state_dict(train(copies[group.rank]))

    found = on_threads(ranks, body)
    want = train(model).state_dict()
    factors = [name for name in want if ".experts." in name and "lora_" in name]
    for state in found:
        for name in factors:
            torch.testing.assert_close(state[name], want[name], rtol=0, atol=1e-4)


def test_frozen_weights_in_bfloat16_with_factors_in_float32() -> None:
    torch.manual_seed(3)
    base = hugging_face("qwen3", moe_intermediate_size=16).to(torch.bfloat16)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, **SOME, init_lora_weights=False))
    models = pair(model)
    want = answer(model).float()

    def body(group: Any) -> Tensor:
        prophet.convert(models[group.rank], group=group)
        bank: Any = layers_of(models[group.rank])[0].experts
        dtypes = {name.rpartition(".")[2]: p.dtype for name, p in bank.named_parameters()}
        assert dtypes == {"weight": torch.bfloat16, "lora_A": torch.float32, "lora_B": torch.float32}
        assert bank.grad_numel < bank.expert_numel
        return answer(models[group.rank]).float()

    for got in on_threads(2, body):
        torch.testing.assert_close(got, want, rtol=0, atol=0.03 * float(want.abs().max()))


def test_a_disabled_adapter() -> None:
    """As a trainer for preferences asks for, to compare with the model before training."""
    model = adapted()
    with model.disable_adapter():
        want = answer(model)
    on = answer(model)
    prophet.convert(model)
    with model.disable_adapter():
        torch.testing.assert_close(answer(model), want)
    torch.testing.assert_close(answer(model), on)
    assert not torch.allclose(on, want, atol=1e-3)


# --- saving and loading ---


@pytest.mark.parametrize("how", ["PeftModel.save_pretrained", "prophet.save_pretrained"])
@pytest.mark.filterwarnings("ignore:Could not find a config file")
def test_saved_adapters_load_and_merge_in_plain_peft(how: str, tmp_path: Path) -> None:
    from prophet.convert.saving import save_pretrained

    model = adapted()
    want, models = answer(model), pair(model)
    model.save_pretrained(tmp_path / "plain")

    def body(group: Any) -> None:
        mine = models[group.rank]
        prophet.convert(mine, group=group)
        if how == "PeftModel.save_pretrained":
            mine.save_pretrained(tmp_path / "ours")
        else:
            save_pretrained(mine, tmp_path / "ours")
        torch.testing.assert_close(answer(mine), want, rtol=0, atol=1e-5)

    on_threads(2, body)
    plain, ours = adapter_files(tmp_path / "plain"), adapter_files(tmp_path / "ours")
    assert plain.keys() == ours.keys()
    assert all(torch.equal(plain[name], ours[name]) for name in plain)
    loaded = peft.PeftModel.from_pretrained(hugging_face("qwen3"), tmp_path / "ours")
    torch.testing.assert_close(answer(loaded), want)
    torch.testing.assert_close(answer(loaded.merge_and_unload()), answer(model.merge_and_unload()), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Could not find a config file")
def test_an_adapter_is_loaded_into_converted_experts(tmp_path: Path) -> None:
    other = adapted()
    with torch.no_grad():
        for name, p in other.named_parameters():
            if "lora_" in name:
                p.mul_(1.5)
    other.save_pretrained(tmp_path)
    models = pair(adapted())

    def body(group: Any) -> tuple[Tensor, Tensor]:
        mine = models[group.rank]
        prophet.convert(mine, group=group)
        before = answer(mine)
        with LOCK:  # PEFT warns, and lists of warnings are no thread's own
            mine.load_adapter(tmp_path, "default", is_trainable=True)
        return before, answer(mine)

    for before, after in on_threads(2, body):
        torch.testing.assert_close(after, answer(other), rtol=0, atol=1e-5)
        assert not torch.allclose(before, after, atol=1e-3)


LOCK = threading.Lock()


@pytest.mark.filterwarnings("ignore:Could not find a config file")
@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_a_file_without_the_experts_leaves_them_as_they_are(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = adapted()
    model.save_pretrained(tmp_path)
    kept = {n: t * 2 for n, t in adapter_files(tmp_path).items() if "experts" not in n}
    save_file(kept, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    prophet.convert(model)
    before = original_state_dict(model)
    with pytest.raises(CheckpointError, match=r"lacks .*experts.*lora_A.*\(8 in all\)"):
        model.load_adapter(tmp_path, "default")
    after = original_state_dict(model)
    assert all(torch.equal(before[n], after[n]) for n in before if ".experts." in n)


def test_peft_cannot_write_one_ranks_share(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    models = pair(adapted())

    def body(group: Any) -> None:
        prophet.convert(models[group.rank], group=group)
        state = peft.get_peft_model_state_dict(models[group.rank])
        with pytest.raises(PartialStateError, match=r"model.save_pretrained\(folder\)"):
            save_file(state, tmp_path / f"{group.rank}.safetensors")

    on_threads(2, body)


def test_reverted_models_are_peft_models_again(tmp_path: Path) -> None:
    model = adapted()
    want, models = {n: p.clone() for n, p in model.state_dict().items()}, pair(model)

    def body(group: Any) -> Any:
        prophet.convert(models[group.rank], group=group)
        prophet.revert(models[group.rank])
        return models[group.rank]

    for again in on_threads(2, body):
        state = again.state_dict()
        assert state.keys() == want.keys()
        assert all(torch.equal(state[n], want[n]) for n in want)
        trains = {n for n, p in again.named_parameters() if p.requires_grad}
        assert trains == {n for n, p in model.named_parameters() if p.requires_grad}
        assert not any("save_pretrained" in vars(m) or "load_adapter" in vars(m) for m in again.modules())
        torch.testing.assert_close(answer(again.merge_and_unload()), answer(copy.deepcopy(model).merge_and_unload()))


@pytest.mark.parametrize("how", ["lora_A", "lora_B", "stacked"])
def test_cutting_and_joining(how: str) -> None:
    value = torch.randn({"lora_A": (12, 5), "lora_B": (5, 12), "stacked": (4, 5, 3)}[how])
    piece = Piece(path="", name="", how=how)
    shares = [piece.share(value, e, 4) for e in range(4)]
    assert torch.equal(piece.whole(torch.stack(shares)), value)


# --- what is refused ---


@pytest.mark.parametrize("call", ["merge_and_unload", "merge_adapter", "unload", "delete_adapter"])
def test_the_end_of_an_adapter_is_refused_before_anything_changes(call: str) -> None:
    model = adapted()
    prophet.convert(model)
    want = answer(model)
    with pytest.raises(ConversionError, match=r"cannot be merged, unloaded or deleted while.*prophet.revert"):
        getattr(model, call)(*(["default"] if call == "delete_adapter" else []))
    torch.testing.assert_close(answer(model), want, rtol=0, atol=0)


def test_another_adapter_is_refused(tmp_path: Path) -> None:
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=2, **ALL))
    with pytest.raises(ConversionError, match=r"expected one adapter.*'default', 'second'"):
        prophet.convert(model)
    late = adapted()
    prophet.convert(late)
    with pytest.raises(ConversionError, match=r"load_adapter\('second'\): the experts were converted with.*'default'"):
        late.load_adapter(tmp_path, "second")
    late.peft_config["second"] = late.peft_config["default"]
    with pytest.raises(ConversionError, match=r"converted with adapter default, got \['default', 'second'\]"):
        loss_of(late.train(), batches(1)[0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.use_dora.update(default=True), "use_dora is not served"),
        (lambda w: w.lora_bias.update(default=True), "lora_bias is not served"),
        (lambda w: w.lora_dropout.update({"default": nn.Dropout(0.1)}), "lora_dropout is not served"),
        (lambda w: setattr(w, "merged_adapters", ["default"]), "default is merged: call unmerge_adapter"),
        (lambda w: setattr(w, "_disable_adapters", True), "default is disabled: call enable_adapter_layers"),
        (lambda w: setattr(w, "parameter_name", "gate_up_proj_bias"), "gate_up_proj_bias: expected"),
    ],
)
def test_refused_by_name(change: Any, said: str) -> None:
    """PEFT itself refuses most of these on experts; another version of it may not."""
    model = adapted()
    change(model.base_model.model.model.layers[1].mlp.experts.base_layer)
    with pytest.raises(ConversionError, match=rf"layers.1.mlp.experts \(Qwen3Moe\): LoRA on .*{said}"):
        prophet.convert(model)
    assert not list(converted(model))


def test_quantised_experts_are_refused() -> None:
    model = adapted()
    base = model.base_model.model.model.layers[0].mlp.experts.base_layer.base_layer
    base.gate_up_proj = nn.Parameter(base.gate_up_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ConversionError, match=r"gate_up_proj is quantised \(torch.float8_e4m3fn\): LoRA on quantised"):
        prophet.convert(model)


def test_an_optimizer_from_before_is_refused() -> None:
    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(ConversionError, match=r"LoRA's factors are cut by expert.*build the optimizer after"):
        prophet.convert(model, optimizer=optimizer)
    with pytest.raises(ConversionError, match=r"AdamW was built before the conversion"):
        prophet.convert(model)


def test_other_adapters_on_experts_are_refused() -> None:
    experts = SimpleNamespace(target_modules=["q_proj"], modules_to_save=["experts"])
    model = peft.get_peft_model(hugging_face("qwen3"), peft.LoraConfig(**vars(experts)))
    with pytest.raises(ConversionError, match="PEFT has made a second block to train") as found:
        prophet.convert(model)
    assert LORA_ADVICE in str(found.value)


# --- what trains ---

EVERY = "experts, router, shared experts, dense layers, the rest"
# what `target_modules="all-linear"` puts LoRA on, as docs/transformers.md says
ALL_LINEAR = {
    "mixtral": "experts, router, the rest",
    "qwen3": "experts, router, the rest",
    "olmoe": "experts, router, the rest",
    "deepseek_v2": "experts, router, the rest",
    "deepseek_v3": "experts, router, the rest",
    "qwen2": "shared experts, dense layers, the rest",
    "gpt_oss": "the rest",
}
DENSE: dict[str, dict[str, Any]] = {  # the first layer without experts
    **{family: {"first_k_dense_replace": 1} for family in ("deepseek_v2", "deepseek_v3")},
    **{family: {"mlp_only_layers": [0]} for family in ("qwen2", "qwen3")},
}


def kinds_of(report: Any, field: str) -> str:
    return ", ".join(part.kind for part in report.trained if getattr(part, field))


@pytest.mark.parametrize("family", ALL_LINEAR)
def test_the_report_says_what_all_linear_adapts(family: str) -> None:
    """Beside the report, names of PEFT's own: what is said of a kind is so for all its layers."""
    model = peft.get_peft_model(hugging_face(family, **DENSE.get(family, {})), peft.LoraConfig(**ALL, r=2))
    adapted = {n.removeprefix("base_model.model.model.") for n, _ in model.named_parameters() if "lora_A" in n}
    has = {
        "experts": "layers.1.mlp.experts.lora_A.default.weight",
        "router": "layers.1.mlp.gate.lora_A.default.weight",
        "dense layers": "layers.0.mlp.up_proj.lora_A.default.weight",
        "the rest": "layers.1.self_attn.o_proj.lora_A.default.weight",
    }
    expected = ALL_LINEAR[family].split(", ")
    assert {kind for kind, name in has.items() if name in adapted} == {*expected} - {"shared experts"}
    assert any(".shared_expert" in name for name in adapted) == ("shared experts" in expected)
    report = prophet.convert(model)
    assert kinds_of(report, "adapters") == kinds_of(report, "trained") == ALL_LINEAR[family]
    total = sum(p.numel() for p in model.parameters())
    assert sum(part.params for part in report.trained) == total
    assert sum(part.trained for part in report.trained) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    said = str(report).splitlines()[-1]
    assert said.startswith("parameters that train here: experts ")
    for part in report.trained:
        assert f"{part.kind} {f'{part.trained:,}' if part.trained else 'none'} of {part.params:,}" in said
    assert (" in adapters" in said) == bool(expected)


@pytest.mark.parametrize("family", ALL_LINEAR)
def test_experts_alone_are_adapted_where_they_are_named(family: str) -> None:
    model = hugging_face(family, **DENSE.get(family, {}))
    options = {**SOME, "target_modules": ["o_proj"]}
    report = prophet.convert(peft.get_peft_model(model, peft.LoraConfig(**options, r=2)))
    assert kinds_of(report, "adapters") == "experts, the rest"


@pytest.mark.parametrize(
    "named",
    [r".*\.shared_experts\.(gate|up|down)_proj", [f"shared_experts.{part}_proj" for part in ("gate", "up", "down")]],
)
def test_peft_reaches_no_shared_expert_of_deepseek(named: Any) -> None:
    """PEFT rewrites the names of projections to those of the stacked experts; the page says so."""
    model = hugging_face("deepseek_v3", **DENSE["deepseek_v3"])
    report = prophet.convert(peft.get_peft_model(model, peft.LoraConfig(target_modules=named, r=2)))
    assert kinds_of(report, "adapters") == "experts"


def test_the_report_of_a_model_without_adapters() -> None:
    model = hugging_face("deepseek_v3", **DENSE["deepseek_v3"])
    report = prophet.convert(model)
    assert kinds_of(report, "params") == kinds_of(report, "trained") == EVERY
    assert not any(part.adapters for part in report.trained)
    assert sum(part.params for part in report.trained) == sum(p.numel() for p in model.parameters())
    frozen = hugging_face("qwen2")
    for name, p in frozen.named_parameters():
        p.requires_grad_("shared_expert" not in name and ".experts." not in name)
    report = prophet.convert(frozen)
    assert kinds_of(report, "trained") == "router, the rest"
    assert "experts none of " in str(report)
