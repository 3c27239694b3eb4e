"""AutoEP's blocks with our experts, on ranks that are threads, and what is refused.

AutoEP replaces its blocks here as it does inside a DeepSpeed engine; the engine itself is in
tests/processes/test_deepspeed_autoep.py.

Shape legend: R ranks, E experts.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prophet_deepspeed import ConfigError, ProphetSection, autoep
from prophet_deepspeed.checkpoint import Checkpoints
from prophet_deepspeed.section import read_config
from torch import Tensor, nn

import prophet
from prophet.convert import converted, load_original_state_dict, original_state_dict
from prophet.errors import ConversionError
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld
from tests.helpers.autoep_support import let_autoep_read_the_registry
from tests.helpers.moe_models import Seen, alone, batches, compare, hugging_face, trained

RANKS = 2
FAMILIES = ("deepseek_v3", "mixtral", "qwen2", "qwen3", "deepseek_v2")


@pytest.fixture(autouse=True)
def _registry() -> None:
    let_autoep_read_the_registry()


def autoep_config(**changes: Any) -> Any:
    module: Any = importlib.import_module("deepspeed.module_inject.auto_ep_config")
    return module.parse_autoep_config({"enabled": True, "autoep_size": RANKS, **changes})


def take_over(model: nn.Module, group: Collective, *, sources: bool = False, **changes: Any) -> Any:
    """AutoEP's replacement and ours on one rank; what `configure` gives."""
    config = autoep_config(autoep_size=group.size, **changes)
    detection: Any = importlib.import_module("deepspeed.module_inject.auto_ep")

    def replace() -> Any:
        found = detection.AutoEP(model, config)
        return found.replace_moe_layers(found.ep_parser(), group.size, group.rank, collect_sources=sources)

    return autoep.configure(config, model, replace, ProphetSection(), group=group)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """All gradients under the names that parameters had before AutoEP; collective."""
    params = [p for p in model.parameters() if p.requires_grad]
    before = [p.data for p in params]
    for p in params:
        p.data = torch.zeros_like(p) if p.grad is None else p.grad
    state = {k: v.clone() for k, v in original_state_dict(model).items()}
    for p, data in zip(params, before, strict=True):
        p.data = data
    return state


def together(models: Sequence[nn.Module], steps: list[list[Tensor]], group: Collective) -> Seen:
    """Train one rank's model with placements at random."""
    model = models[group.rank]
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    before = {k: v.clone() for k, v in model.state_dict().items()}
    _, report = take_over(model, group)
    after = original_state_dict(model)
    assert set(after) == set(before)
    assert all(torch.equal(after[k], before[k]) for k in before)
    seen = trained(model, steps, group, gradients=gradients)
    seen.gradients = {n: g for n, g in seen.gradients.items() if n in names}
    counts = [block.tokens_per_expert.clone() for _, block, *_ in converted(model)]
    seen.extra = seen.extra, counts, report
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_the_models_own(family: str) -> None:
    """Replicas are in force; shared experts, group limits and correction biases are those of the family."""
    steps = [batches(RANKS, seed=s) for s in range(3)]
    model = hugging_face(family)
    models = [copy.deepcopy(model) for _ in range(RANKS)]
    wanted = alone(model, steps)
    found = ThreadWorld(RANKS).run(partial(together, models, steps))
    # after two updates, gradients of the norm between low-rank queries differ by 2.8e-5 on some processors
    compare(wanted, found, 1e-4 if family == "deepseek_v2" else 1e-5)
    for seen in found:
        copies, counts, report = seen.extra
        assert copies > 0
        top_k = report.replaced[0].spec.top_k
        # AutoEP's statistics go on: every choice of this rank's tokens, step by step
        assert [float(c.sum()) for c in counts] == [3 * steps[0][0].numel() * top_k] * 2


# --- what leads back, and on ---


def changed(model: nn.Module) -> dict[str, Tensor]:
    """Other values for everything that a model has."""
    generator = torch.Generator().manual_seed(5)
    return {k: torch.randn(v.shape, generator=generator) for k, v in model.state_dict().items()}


@pytest.mark.parametrize("family", ["mixtral", "qwen2"])
def test_a_state_dict_of_before_can_be_loaded(family: str) -> None:
    """Mixtral's router has a second name in AutoEP's layer; Qwen's shared experts have another."""
    model = hugging_face(family)
    given = changed(model)
    models = [copy.deepcopy(model) for _ in range(RANKS)]

    def load(group: Collective) -> dict[str, Tensor]:
        own = models[group.rank]
        take_over(own, group)
        load_original_state_dict(own, given)
        with pytest.raises(RuntimeError, match="unknown"):
            load_original_state_dict(own, given | {"unknown": torch.zeros(1)})
        with pytest.raises(RuntimeError, match=r"model\.norm\.weight"):
            load_original_state_dict(own, {k: v for k, v in given.items() if k != "model.norm.weight"})
        with pytest.raises(ConversionError, match=r"AutoEP has replaced .* cannot be put back"):
            prophet.revert(own)
        return original_state_dict(own)

    for found in ThreadWorld(RANKS).run(load):
        assert set(found) == set(given)
        assert all(torch.equal(found[k], given[k]) for k in given)


def test_deepspeeds_marks_are_carried_over() -> None:
    """They are those of AutoEP's parameters, but for the sizes."""
    constants: Any = importlib.import_module("deepspeed.checkpoint.constants")
    plain, ours = (hugging_face("mixtral") for _ in range(2))
    config = autoep_config()
    detection: Any = importlib.import_module("deepspeed.module_inject.auto_ep")
    theirs = detection.AutoEP(plain, config)
    theirs.replace_moe_layers(theirs.ep_parser(), 2, 1)
    world = ThreadWorld(2)
    models = [copy.deepcopy(ours), ours]
    world.run(lambda group: take_over(models[group.rank], group))
    block: Any = plain.get_submodule("model.layers.1.mlp")
    bank = next(layer.experts for name, *_, layer in converted(ours) if name == "model.layers.1.mlp.experts")
    for new, old in ((bank.w_in, block.experts.w1), (bank.w_out, block.experts.w2)):
        mine, wanted = dict(vars(new)), dict(vars(old))
        meta, its = mine.pop(constants.DS_AUTOEP_UC_META), wanted.pop(constants.DS_AUTOEP_UC_META)
        assert {k: mine[k] for k in wanted} == wanted
        assert wanted["allreduce"] is False
        assert wanted["group_name"] == wanted["ds_zero_partition_group_name"] == "ep_size_2"
        assert wanted["ds_zero_placement_family"] == "autoep_expert"
        assert meta[constants.AUTOEP_PARAM_LOGICAL_SHAPE] == [8, *new.shape[1:]]
        assert set(meta) == set(its)
        for key in (constants.AUTOEP_PARAM_EP_RANK, constants.AUTOEP_PARAM_LOCAL_EXPERTS):
            assert meta[key] == its[key]
    assert getattr(bank.w_out, constants.DS_AUTOEP_UC_META) == getattr(block.experts.w2, constants.DS_AUTOEP_UC_META)


def test_a_clients_optimizer_finds_the_new_parameters() -> None:
    """DeepSpeed asks the map from which old parameters a new one was made."""
    model = hugging_face("deepseek_v3")
    old = dict(model.named_parameters())
    engine: Any = importlib.import_module("deepspeed.runtime.engine")
    experts = [p for n, p in old.items() if ".experts." in n]
    others = [p for n, p in old.items() if ".experts." not in n]
    optimizer = torch.optim.SGD([{"params": others, "lr": 0.5}, {"params": experts, "lr": 0.25}])
    sources, _ = take_over(model, ThreadWorld(1).collective(0), sources=True)
    bank = next(converted(model))[3].experts
    first = "model.layers.0.mlp.experts."
    assert [id(p) for p in sources.sources[id(bank.w_in)]] == [id(old[first + "gate_up_proj"])]
    assert [id(p) for p in sources.sources[id(bank.w_out)]] == [id(old[first + "down_proj"])]
    alive = {id(p) for p in model.parameters()}
    assert set(sources.sources) <= alive
    engine._remap_client_optimizer_after_module_replacement(optimizer, model, sources)
    dense, of_experts = (g["params"] for g in optimizer.param_groups)
    assert {id(p) for p in of_experts} == {id(p) for *_, layer in converted(model) for p in layer.experts.parameters()}
    assert {id(p) for p in (*dense, *of_experts)} == alive


def test_what_does_not_train_can_be_left_out_of_an_export(tmp_path: Path) -> None:
    """Under the names before AutoEP: the router has another here."""
    model = hugging_face("qwen2")
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith("model.layers.0.mlp."))
    wanted = {name for name, p in model.named_parameters() if p.requires_grad}
    take_over(model, ThreadWorld(1).collective(0))
    ds: Any = SimpleNamespace(module=model)
    engine: Any = None
    Checkpoints(ds, engine).save_model(tmp_path, "model.bin", exclude_frozen_parameters=True)
    assert set(torch.load(tmp_path / "model.bin", weights_only=True)) == wanted


# --- layouts of the experts that AutoEP replaced ---


def stack(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes))))


def _holder(**params: nn.Parameter) -> nn.Module:
    found = nn.Module()
    for name, p in params.items():
        found.register_parameter(name, p)
    return found


def _modules() -> nn.Module:
    experts = nn.ModuleList()
    for _ in range(3):
        one = nn.Module()
        for name, sizes in (("w1", (6, 4)), ("w2", (4, 6)), ("w3", (6, 4))):
            one.add_module(name, nn.Linear(*sizes, bias=False))
        experts.append(one)
    return experts


@pytest.mark.parametrize(
    ("experts", "storage", "names"),
    [
        (lambda: _holder(a=stack(3, 8, 6), b=stack(3, 6, 4)), "fused_3d", ("a", "b", None)),
        (lambda: _holder(a=stack(3, 6, 8), b=stack(3, 4, 6)), "fused_3d", ("a", "b", None)),
        (lambda: _holder(a=stack(3, 4, 6), b=stack(3, 6, 4), c=stack(3, 4, 6)), "fused_3d", ("a", "b", "c")),
        (_modules, "module_list", ("w1", "w2", "w3")),
    ],
    ids=["gate and up first", "hidden first", "apart", "modules"],
)
def test_experts_are_read_as_autoep_reads_them_and_written_back(experts: Any, storage: str, names: Any) -> None:
    kinds: Any = importlib.import_module("deepspeed.module_inject.auto_ep_config")
    repack: Any = importlib.import_module("deepspeed.moe.ep_repack")
    fields = {f.name: None for f in dataclasses.fields(kinds.MoELayerSpec)}
    detected = kinds.MoELayerSpec(
        **fields
        | {"num_experts": 3, "expert_storage": storage}
        | dict(zip(("expert_w1_name", "expert_w2_name", "expert_w3_name"), names, strict=True))
    )
    module = experts()
    state = {n: p.detach() for n, p in module.named_parameters()}
    source: Any = autoep.SourceExperts.of(detected, module)
    found = [source.unpack(None, state, e) for e in range(3)]
    w1, w2, w3 = repack.repack_expert_weights(module, detected, 0, 1)
    for e, weights in enumerate(found):
        assert torch.equal(weights.w_in, torch.cat([w1[e], w3[e]]))
        assert torch.equal(weights.w_out, w2[e])
    back = source.pack(None, found)
    assert set(back) == set(state)
    assert all(torch.equal(back[n], state[n]) for n in state)
    module.register_parameter("bias", nn.Parameter(torch.zeros(3)))
    with pytest.raises(ConversionError, match=r"expected the parameters .* got .*bias"):
        autoep.SourceExperts.of(detected, module)


# --- what is refused ---


def config_of(changes: dict[str, Any], **others: Any) -> dict[str, Any]:
    section = others.pop("prophet", {})
    return {"expert_parallel": {"enabled": True, "autoep_size": 2, **changes}, "prophet": section, **others}


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (config_of({"comm_backend": "deepep"}), r"expert_parallel\.comm_backend: expected 'comm', .* replicas"),
        (config_of({"score_apply": "pre"}), r"expert_parallel\.score_apply: expected 'auto' or 'post', got 'pre'"),
        (config_of({"async_split_plan": True}), r"expert_parallel\.async_split_plan: expected False"),
        (config_of({"expert_tensor_parallel_size": 2}), r"expert_parallel\.expert_tensor_parallel_size: expected 1"),
        (config_of({"autoep_sizes": 4}), r"expert_parallel\.autoep_sizes: unknown key; did you mean 'autoep_size'"),
        (config_of({"autoep_size": 0}), r"expert_parallel\.autoep_size: expected a number of ranks, got 0"),
        (config_of({}, prophet={"ep_size": 4}), r"prophet\.ep_size: 4, but expert_parallel\.autoep_size is 2"),
        (config_of({}, prophet={"convert": False}), r"prophet\.convert: only true"),
        (
            config_of({}, zero_optimization={"stage": 3}),
            r"zero_optimization\.stage: 3 .* frees parameters between uses",
        ),
        (config_of({}, tensor_parallel={"autotp_size": 2}), r"tensor_parallel\.autotp_size: not supported"),
    ],
)
def test_a_config_is_refused_by_its_key(config: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        autoep.check_config(*read_config(config))


def _half_frozen(experts: Any, block: Any) -> None:
    experts.down_proj.requires_grad_(False)


def _with_a_hook(experts: Any, block: Any) -> None:
    experts.register_forward_hook(lambda *_: None)


def _with_more(experts: Any, block: Any) -> None:
    block.register_parameter("scale", nn.Parameter(torch.ones(1)))


def _steep(experts: Any, block: Any) -> None:
    experts.swiglu_limit, experts.swiglu_alpha = 5.0, 1.5


@pytest.mark.parametrize(
    ("change", "options", "match"),
    [
        (_half_frozen, {}, "some of the experts' parameters are frozen"),
        (_with_a_hook, {}, "has hooks"),
        (_with_more, {}, "scale: AutoEP's layer has no place for it"),
        (
            None,
            {"expert_activation": "of_ours"},
            "expert_activation: 'of_ours' is not supported, expected one of swiglu",
        ),
        (_steep, {"expert_activation": "swiglu_oai"}, r"swiglu_oai is supported with slope 1\.702, got 1\.5"),
    ],
)
def test_a_block_is_refused_before_anything_changes(
    change: Any, options: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = importlib.import_module("deepspeed.moe.ep_experts").EXPERT_ACTIVATIONS
    monkeypatch.setitem(kinds, "of_ours", kinds["swiglu"])
    model = hugging_face("deepseek_v3")
    block: Any = model.get_submodule("model.layers.1.mlp")
    if change is not None:
        change(block.experts, block)
    before = [id(p) for p in model.parameters()]
    with pytest.raises(ConversionError, match=rf"model\.layers\.[01]\.mlp \(AutoEP\): .*{match}"):
        take_over(model, ThreadWorld(1).collective(0), **options)
    assert [id(p) for p in model.parameters()] == before


@pytest.mark.parametrize(
    ("kind", "limit", "found"),
    [
        ("swiglu_clamped", 0.25, "swiglu(limit=0.25)"),
        ("swiglu_oai", 0.25, "quick_geglu(limit=0.25, plus_one)"),
        ("swiglu_oai", 7.0, "swiglu_clamped"),
    ],
)
def test_a_blocks_own_limit_is_kept(kind: str, limit: float, found: str) -> None:
    """The answer is that of AutoEP's own layer, whose experts are small numbers, some of them beyond 0.25."""
    plain, model = (hugging_face("deepseek_v3") for _ in range(2))
    for one in (plain, model):
        for name, module in one.named_modules():
            if name.endswith("mlp.experts"):
                module.swiglu_limit, module.swiglu_alpha = limit, 1.702
    config = autoep_config(autoep_size=1, expert_activation=kind)
    group = ThreadWorld(1).collective(0)
    detection: Any = importlib.import_module("deepspeed.module_inject.auto_ep")
    own = detection.AutoEP(plain, config)
    own.replace_moe_layers(own.ep_parser(), 1, 0)
    _, report = take_over(model, group, expert_activation=kind)
    assert {r.spec.activation for r in report.replaced} == {found}
    ids = batches(1, seed=0)[0]
    torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="expert_parallel: AutoEP detects no MoE layer"):
        take_over(nn.Linear(2, 2), ThreadWorld(1).collective(0))


def test_a_model_goes_through_once() -> None:
    def body(group: Collective) -> None:
        model = hugging_face("deepseek_v3")
        take_over(model, group)
        with pytest.raises(ConfigError, match=r"expert_parallel: the model has been through initialize before"):
            take_over(model, group)

    ThreadWorld(1).run(body)
