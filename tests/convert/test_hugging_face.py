"""Hugging Face models compute after the conversion what they did before, on any number of ranks, and save as before."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prophet
from prophet.convert import converted, load_original_state_dict, original_state_dict
from prophet.errors import ConversionError
from prophet.ranks.threads import ThreadWorld
from tests.helpers.in_a_terminal import check_whole, noted, printed
from tests.helpers.launch import on_processes
from tests.helpers.moe_models import (
    FAMILIES,
    alone,
    batches,
    compare,
    hugging_face,
    layers_of,
    loss_of,
    together,
    transformers,
)
from tests.helpers.support import on_threads, seeded

# every family on two ranks; on one and on four the one whose experts have most: biases, a clamp, transposed weights
QUICK = {("gpt_oss", 1), ("gpt_oss", 4), *((family, 2) for family in FAMILIES)}
ON_RANKS = [
    pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in product(FAMILIES, (1, 2, 4))
]


@pytest.mark.parametrize(("family", "ranks"), ON_RANKS)
def test_logits_and_gradients(family: str, ranks: int) -> None:
    """Three steps of SGD with placements at random; float32, so up to re-ordered sums: 1e-4 of the largest value."""
    model = hugging_face(family)
    steps = [batches(ranks, s) for s in range(3)]
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    found = on_threads(ranks, lambda group: together(copies[group.rank], steps, group))
    compare(alone(model, steps), found)
    if ranks > 1:
        assert all(s.extra for s in found), "no replica sent gradients home: the placements were not random"


def test_gpt_oss_reaches_its_clamp() -> None:
    """Otherwise the comparison above would say nothing about it."""
    model = hugging_face("gpt_oss")
    prophet.convert(model)
    seen = []
    for layer in layers_of(model):
        layer.register_forward_pre_hook(
            lambda m, args: seen.append(
                (args[0] @ m.experts.w_in.detach().flatten(0, 1).t()).detach().abs().max().item()
            )
        )
    loss_of(model, batches(1)[0])
    assert max(seen) > 14


def in_processes(families: list[str], ranks: int) -> Any:
    found = {}
    for family in families:
        steps = [batches(ranks, s) for s in range(2)]
        from prophet.ranks.process_group import collective_for

        found[family] = together(hugging_face(family), steps, collective_for(None)).mapped(Tensor.numpy)
    return found


def test_on_processes() -> None:
    transformers()
    families = ["mixtral", "gpt_oss"]
    by_rank = on_processes(2, in_processes, families, 2, timeout_s=120)
    for family in families:
        compare(
            alone(hugging_face(family), [batches(2, s) for s in range(2)]),
            [r[family].mapped(torch.from_numpy) for r in by_rank],
        )


def same_state(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    now = model.state_dict()
    assert list(now) == list(state)
    for name, value in state.items():
        assert now[name].dtype == value.dtype
        assert torch.equal(now[name], value), name


@pytest.mark.parametrize(("family", "ranks"), ON_RANKS)
def test_revert_is_exact(family: str, ranks: int) -> None:
    model = hugging_face(family)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    classes = [type(m) for m in model.modules()]
    ids = batches(1)[0]
    before = loss_of(model.eval(), ids)[1]
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def body(group: Any) -> None:
        mine = copies[group.rank]
        report = prophet.convert(mine, group=group)
        assert report.params * ranks == report.params_before
        prophet.revert(mine)

    on_threads(ranks, body)
    for back in copies:
        same_state(back, state)
        assert [type(m) for m in back.modules()] == classes
        assert all(p.requires_grad for p in back.parameters())
        assert torch.equal(loss_of(back, ids)[1], before)
        assert not getattr(back, "_ddp_params_and_buffers_to_ignore", [])


@pytest.mark.parametrize(("family", "ranks"), ON_RANKS)
def test_what_was_trained_is_saved_and_loaded_exactly(family: str, ranks: int, tmp_path: Path) -> None:
    """Train with random placements, save, load with the original class, convert again, revert: the same bits."""
    model = hugging_face(family)
    copies, twins = ([copy.deepcopy(model) for _ in range(ranks)] for _ in range(2))  # copying is not safe on threads
    steps = [batches(ranks, s) for s in range(2)]
    _saving()

    def train(group: Any) -> None:
        from prophet_transformers import save_pretrained

        together(copies[group.rank], steps, group, lr=0.01)
        save_pretrained(copies[group.rank], tmp_path)

    on_threads(ranks, train)
    loaded = type(model).from_pretrained(tmp_path)  # type: ignore[attr-defined]
    saved = {n: t.clone() for n, t in loaded.state_dict().items()}
    changed = [n for n, t in model.state_dict().items() if not torch.equal(saved[n], t)]
    assert any("experts" in n for n in changed), "nothing was trained"

    def back(group: Any) -> None:
        from prophet_transformers import load_pretrained

        prophet.revert(copies[group.rank])
        same_state(copies[group.rank], saved)
        again = twins[group.rank]
        prophet.convert(again, group=group)
        load_pretrained(again, tmp_path)
        prophet.revert(again)
        same_state(again, saved)

    on_threads(ranks, back)
    transformers = pytest.importorskip("transformers")
    assert transformers.PreTrainedModel.tie_weights.__name__ == "tie_weights", "loading has left a replacement behind"


def _saving() -> None:
    """Imported before there are threads: two of them importing at once may see half of a module."""
    import prophet_transformers  # noqa: F401


# above, every family's files are read by its own class
LOADED = ("mixtral", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize(
    "family", [family if family in LOADED else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_the_original_class_loads_what_was_saved(family: str, tmp_path: Path) -> None:
    model = hugging_face(family)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    copies = [copy.deepcopy(model) for _ in range(2)]

    def body(group: Any) -> dict[str, torch.Tensor]:
        prophet.convert(copies[group.rank], group=group)
        return original_state_dict(copies[group.rank], keep=group.rank == 0)

    found, nothing = on_threads(2, body)
    assert not nothing
    assert set(found) == set(state)
    copies[0].save_pretrained(tmp_path, state_dict=found)  # type: ignore[operator]
    loaded = type(model).from_pretrained(tmp_path)  # type: ignore[attr-defined]
    same_state(loaded, state)

    other = hugging_face(family)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    twins = [copy.deepcopy(other) for _ in range(2)]

    def load(group: Any) -> dict[str, torch.Tensor]:
        prophet.convert(twins[group.rank], group=group)
        load_original_state_dict(twins[group.rank], state)
        return original_state_dict(twins[group.rank])

    for found in on_threads(2, load):
        assert all(torch.equal(found[n], t) for n, t in state.items())


@pytest.mark.parametrize("family", ["mixtral", "qwen2", "qwen3", "olmoe", "gpt_oss"])
def test_router_logits_are_still_given_out(family: str) -> None:
    model = hugging_face(family)
    ids = batches(1)[0]
    with torch.no_grad():
        before = model(input_ids=ids, output_router_logits=True, labels=ids)
        prophet.convert(model)
        after = model(input_ids=ids, output_router_logits=True, labels=ids)
    assert len(before.router_logits) == len(after.router_logits) == 2
    for a, b in zip(before.router_logits, after.router_logits, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after.aux_loss, before.aux_loss)


def test_jitter_is_kept() -> None:
    model = hugging_face("mixtral", router_jitter_noise=0.3)
    ids, other = batches(1)[0], copy.deepcopy(model)
    prophet.convert(model)
    answers = []
    for m, seed in ((other, 1), (model, 1), (model, 2)):
        with seeded(seed):
            answers.append(loss_of(m, ids)[1])
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(answers[2], answers[0], rtol=1e-2, atol=1e-2)


def test_frozen_experts_stay_frozen() -> None:
    model = hugging_face("qwen3")
    for name, p in model.named_parameters():
        p.requires_grad_("experts" not in name)
    prophet.convert(model)
    assert not any(p.requires_grad for layer in layers_of(model) for p in layer.parameters())
    loss_of(model, batches(1)[0])[0].backward()
    prophet.revert(model)
    assert not any(p.requires_grad for n, p in model.named_parameters() if "experts" in n)


@pytest.mark.parametrize(
    ("hidden_act", "found"), [("gelu", "geglu"), ("gelu_pytorch_tanh", "geglu_tanh"), ("relu", "reglu")]
)
def test_other_activations_of_the_table(hidden_act: str, found: str) -> None:
    """`convert` compares every block before and after."""
    report = prophet.convert(hugging_face("mixtral", hidden_act=hidden_act))
    assert {r.spec.activation for r in report.replaced} == {found}


def test_another_activation_is_refused_by_name() -> None:
    model = hugging_face("mixtral", hidden_act="tanh")
    with pytest.raises(
        ConversionError, match=r"model.layers.0.*\(Mixtral\): MixtralExperts\._apply_gate \(act_fn Tanh\)"
    ):
        prophet.convert(model)
    assert not list(converted(model))


def gpt_oss_with(**changes: float) -> nn.Module:
    """GPT-OSS whose experts have another slope or limit."""
    model: nn.Module = hugging_face("gpt_oss")
    for module in model.modules():
        for name, value in changes.items():
            if hasattr(module, name):
                setattr(module, name, value)
    return model


def test_another_clamp_is_kept() -> None:
    """`convert` compares every block before and after; its numbers lie beyond this limit."""
    report = prophet.convert(gpt_oss_with(limit=0.25))
    assert {r.spec.activation for r in report.replaced} == {"quick_geglu(limit=0.25, plus_one)"}


def test_another_slope_is_refused_by_name() -> None:
    with pytest.raises(ConversionError, match=r"GptOssExperts\._apply_gate \(alpha 1\.5, limit 7\.0\)"):
        prophet.convert(gpt_oss_with(alpha=1.5))


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "qwen2"])
def test_weight_decay_is_for_the_parameters_that_it_was_for(family: str) -> None:
    """Trainer's rule, by name, and nanoGPT's, by dimension: as many numbers are decayed as before."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    model = hugging_face(family)

    def decayed() -> list[int]:
        params = dict(model.named_parameters())
        trainer = transformers.Trainer.get_decay_parameter_names(None, model)
        return [
            sum(params[name].numel() for name in trainer),
            sum(p.numel() for n, p in params.items() if "expert" in n and p.dim() >= 2 and "bias" not in n),
            sum(p.numel() for n, p in params.items() if "expert" in n and p.dim() < 2),
        ]

    before = decayed()
    if family == "gpt_oss":  # whose own biases have two dimensions
        before[2] = sum(p.numel() for n, p in model.named_parameters() if "expert" in n and "bias" in n)
    prophet.convert(model)
    assert decayed() == before


def test_low_precision() -> None:
    model = hugging_face("mixtral", intermediate_size=16).bfloat16()
    state = {n: t.clone() for n, t in model.state_dict().items()}
    ids = batches(1)[0]
    before = loss_of(model, ids)[0]
    prophet.convert(model)
    assert abs(float(before) - float(loss_of(model, ids)[0])) < 0.05
    prophet.revert(model)
    same_state(model, state)


def test_checkpointing_and_skipped_layers_and_uneven_microbatches() -> None:
    """Layers that some steps leave out, recomputation, and steps with one, two and three microbatches."""
    model = hugging_face("mixtral")
    twins = [copy.deepcopy(model) for _ in range(2)]
    plan = [(1, True), (3, False), (2, True), (1, False)]  # microbatches, both layers run
    blocks = "layers"

    def run(m: Any, rank: int, ranks: int, average: Any) -> list[float]:
        optimizer = torch.optim.SGD(m.parameters(), lr=0.05)
        engine = None
        if average is not None:
            from tests.helpers.support import RandomPlanner

            engine = prophet.attach(m, optimizer, config=prophet.EngineConfig(planner=RandomPlanner(1)))
        losses = []
        layers = getattr(m.model, blocks)
        for step, (microbatches, both) in enumerate(plan):
            optimizer.zero_grad()
            m.model.layers = layers if both else layers[:1]
            for micro in range(microbatches):
                for r in range(ranks) if average is None else (rank,):
                    loss = loss_of(m, batches(ranks, 10 * step + micro)[r])[0]
                    (loss / (ranks if average is None else 1)).backward()
                losses.append(float(loss))
            m.model.layers = layers
            if average is not None:
                average(m)
            optimizer.step()
        if engine is not None:
            engine.close()
        return losses

    def body(group: Any) -> list[float]:
        from tests.helpers.support import dense_parameters

        m: Any = twins[group.rank]
        m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        prophet.convert(m, group=group)

        def average(model: nn.Module) -> None:
            group.all_reduce_mean_([p.grad for p in dense_parameters(model).values() if p.grad is not None])

        return run(m, group.rank, 2, average)

    found = on_threads(2, body)
    wanted = run(model, 0, 2, None)
    assert found[1] == pytest.approx(wanted, rel=1e-4)


def test_the_report() -> None:
    model = hugging_face("qwen2")
    world = ThreadWorld(1)
    report = prophet.convert(model, group=world.collective(0))
    assert [r.name for r in report.replaced] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert report.replaced[0].spec.top_k == 3
    assert "Qwen2Moe (stacked)" in str(report)
    table = noted(report.__rich__())
    assert len(table.rows) == 2
    for width in (300, 80, 60, 45):
        assert bool(check_whole(printed(report, width), width, table)) == (width < 300)


def test_a_state_of_more_experts_changes_nothing() -> None:
    model = hugging_face("mixtral")
    prophet.convert(model)
    before = original_state_dict(model)
    wrong = {n: torch.cat([t + 1, t]) if "experts" in n else t + 1 for n, t in before.items()}
    with pytest.raises(ConversionError, match=r"expected a tensor \[\d+, .*got \[\d+"):
        load_original_state_dict(model, wrong)
    after = original_state_dict(model)
    assert all(torch.equal(after[n], t) for n, t in before.items())


def test_loading_rounds_no_parameter_of_a_model_in_two_dtypes(tmp_path: Path) -> None:
    from prophet_transformers import load_pretrained, save_pretrained

    model = hugging_face("mixtral")
    model.get_input_embeddings().bfloat16()  # type: ignore[operator]
    prophet.convert(model, verify=False)
    save_pretrained(model, tmp_path)
    before = {n: t.clone() for n, t in original_state_dict(model).items()}
    load_pretrained(model, tmp_path)
    assert all(torch.equal(t, before[n]) for n, t in original_state_dict(model).items())


def own_expert_parallelism(folder: str) -> list[str]:
    """What `convert` says of each way to load a model in transformers' own expert parallelism."""
    library, said = transformers(), []
    for options in (
        {"enable_expert_parallel": True},
        {"ep_size": 2, "tp_size": 2},
        {"ep_size": 2, "fsdp_size": 2},
    ):
        cut = library.DistributedConfig(**options)
        model = library.Qwen3MoeForCausalLM.from_pretrained(folder, distributed_config=cut)
        try:
            report = prophet.convert(model)
            said.append(f"{report.params} of {report.params_before}")
        except ConversionError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_transformers_own_expert_parallelism(tmp_path: Path) -> None:
    """The flag alone cuts nothing, so there is nothing to refuse; docs/transformers.md says so."""
    model: Any = hugging_face("qwen3")
    model.save_pretrained(tmp_path)
    params = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    for flag, *cut in on_processes(2, own_expert_parallelism, str(tmp_path), timeout_s=120):
        assert flag == f"{params // 2} of {params}"
        for said in cut:
            assert "gate_up_proj is a DTensor: convert before sharding" in said
            assert "by the ep_size, tp_size or fsdp_size" in said
            assert "switch that off" in said
