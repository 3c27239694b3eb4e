"""Models of transformers over real stages that move: losses and weights equal those of the model's own loop."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the models are transformers'")

from transformers import AutoModelForCausalLM

from pipeline_balance.pipeline.model.adapter import TransformersModel
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from tests.helpers.launch import run_gloo
from tests.helpers.transformers_models import FAMILIES, LAYERS, batch, small, train_whole

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")  # older versions have no other name
UNITS, MICROBATCHES, STEPS = LAYERS + 2, 2, 4
KINDS = ("plain", "packed", "padded")
MAPS = {
    2: [StageMap((0, 2, UNITS), (0, 1)), StageMap((0, 4, UNITS), (1, 0)), StageMap((0, UNITS), (1,))],
    4: [
        StageMap((0, 1, 2, 4, UNITS), (0, 1, 2, 3)),
        StageMap((0, 2, 3, UNITS), (3, 0, 1)),
        StageMap((0, 1, UNITS), (2, 0)),
    ],
}
TIED = ("llama", "gpt2", "mixtral")
TOLERANCE = {"float32": 1e-6, "autocast": 1e-2}  # bfloat16 keeps eight bits


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for _, p in named), lr=0.02, momentum=0.9)


def prepared(family: str, how: str) -> Any:
    """A model whose first layer is frozen, with its layers checkpointed under autocast."""
    model = small(family, tied=family in TIED)
    if how == "autocast":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.base_model.get_submodule("h.0" if family == "gpt2" else "layers.0").requires_grad_(False)
    return model


def precision(how: str) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16) if how == "autocast" else nullcontext()


def _train(rank: int, size: int, families: list[str], how: str, folder: str) -> list[dict[str, Any]]:
    results = []
    for family in families:
        pipe = ElasticPipeline.from_transformers(
            prepared(family, how), MAPS[size][0], make_optimizer=sgd, microbatches=MICROBATCHES, timeout_s=60.0
        )
        losses = []
        for step in range(STEPS):
            if step:
                pipe.rebuild(MAPS[size][step % len(MAPS[size])])
            with precision(how):
                losses.append(pipe.step(*batch(KINDS[step % 3], tokens=12 + 2 * step)))
        with precision(how):
            evaluated = pipe.evaluate(*batch("padded", rows=3))
        pipe.save_pretrained(Path(folder) / family)
        results.append({"losses": losses, "evaluated": evaluated})
    return results


def _alone(family: str, how: str) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    model = prepared(family, how)
    optimizer = sgd(list(model.named_parameters()))
    counting = TransformersModel(model)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = counting.cut(*batch(KINDS[step % 3], tokens=12 + 2 * step), MICROBATCHES)
        with precision(how):
            losses.append(float(train_whole(model, counting, parts)))
        optimizer.step()
    parts = counting.cut(*batch("padded", rows=3), 2)
    with precision(how):
        evaluated = float(train_whole(model.eval(), counting, parts))
    return losses, evaluated, model.state_dict()


@pytest.mark.parametrize(
    ("size", "families", "how"),
    [
        (2, list(FAMILIES), "float32"),
        pytest.param(4, ["llama", "gpt2", "qwen3_moe"], "float32", marks=pytest.mark.slow),
        pytest.param(2, ["llama", "gpt2", "mixtral"], "autocast", marks=pytest.mark.slow),
    ],
)
def test_a_model_trains_as_it_does_whole(size: int, families: list[str], how: str, tmp_path: Path) -> None:
    """Stages move at every step and lengths differ; what is saved loads in transformers, with nothing missing."""
    results = run_gloo(_train, size, families, how, str(tmp_path), timeout_s=240.0)
    allowed = TOLERANCE[how]
    for i, family in enumerate(families):
        losses, evaluated, state = _alone(family, how)
        for said in results:
            print(family, how, [a - b for a, b in zip(said[i]["losses"], losses, strict=True)])
            assert said[i]["losses"] == pytest.approx(losses, abs=allowed), family
            assert said[i]["evaluated"] == pytest.approx(evaluated, abs=allowed), family
        loaded, about = AutoModelForCausalLM.from_pretrained(tmp_path / family, output_loading_info=True)
        assert not any(about.values()), about
        found = loaded.state_dict()
        assert found.keys() == state.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(found[name], tensor, rtol=10 * allowed, atol=allowed)


LONG_STEPS = 12


def _mixtral(dtype: torch.dtype) -> Any:
    options = {"experts_implementation": "eager"} if dtype == torch.float64 else {}  # the other ones refuse it
    return small("mixtral", **options).to(dtype)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for _, p in named), lr=1e-3)


def _long(rank: int, size: int, dtype: torch.dtype) -> list[float]:
    maps, options = MAPS[size], {"microbatches": 4, "timeout_s": 60.0}
    pipe = ElasticPipeline.from_transformers(_mixtral(dtype), maps[0], make_optimizer=adamw, **options)
    losses = []
    for step in range(LONG_STEPS):
        if step and step % 4 == 0:
            pipe.rebuild(maps[step // 4 % len(maps)])
        losses.append(pipe.step(*batch(KINDS[step % 3], rows=8, tokens=12 + step)))
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_mixtral_with_router_losses_trains_as_one_process_does_with_its_microbatches(dtype: torch.dtype) -> None:
    results = run_gloo(_long, 2, dtype, timeout_s=120.0)
    model = _mixtral(dtype)
    optimizer, counting, alone = adamw(list(model.named_parameters())), TransformersModel(model), []
    for step in range(LONG_STEPS):
        optimizer.zero_grad()
        parts = counting.cut(*batch(KINDS[step % 3], rows=8, tokens=12 + step), 4)
        alone.append(float(train_whole(model, counting, parts)))
        optimizer.step()
    assert alone[-1] < alone[0]
    assert results[0] == results[1]
    apart = max(abs(a - b) for a, b in zip(results[0], alone, strict=True))
    assert apart < TOLERANCE["float32"]  # transformers computes norms and losses in float32 whatever the weights' type


def _lengths(*tokens: int) -> tuple[list[dict[str, torch.Tensor]], list[torch.Tensor]]:
    given = [batch("padded", 2, t) for t in tokens]
    return [inputs for inputs, _ in given], [labels for _, labels in given]


def _by_microbatch(rank: int, size: int) -> tuple[list[float], list[str], str]:
    pipe = ElasticPipeline.from_transformers(small("mixtral"), make_optimizer=sgd, microbatches=3, timeout_s=60.0)
    losses = [pipe.step(*_lengths(16, 24, 8)), pipe.step(*_lengths(8, 12, 20)), pipe.evaluate(*_lengths(9, 14))]
    inputs, labels = _lengths(8, 8)
    errors = []
    for wrong in ((inputs, labels), (inputs, labels[0]), ([*inputs, 3], [*labels, labels[0]])):
        try:
            pipe.step(*wrong)
        except SpecError as error:
            errors.append(str(error))
    given, labels = batch("padded", rows=3)
    if rank:
        given["attention_mask"] = given["attention_mask"].flip(0)
    with pytest.raises(SpecError) as caught:
        pipe.step(given, labels)
    return losses, errors, str(caught.value)


def test_microbatches_may_differ_in_length_and_ranks_in_nothing() -> None:
    results = run_gloo(_by_microbatch, 2)
    model = small("mixtral")
    optimizer, counting, losses = sgd(list(model.named_parameters())), TransformersModel(model), []
    for tokens in ((16, 24, 8), (8, 12, 20), (9, 14)):
        optimizer.zero_grad()
        given = zip(*_lengths(*tokens), strict=True)
        losses.append(
            float(train_whole(model, counting, [counting.cut(one, its, 1, i)[0] for i, (one, its) in enumerate(given)]))
        )
        optimizer.step()
    for got, errors, masks in results:
        assert got == pytest.approx(losses, abs=1e-6)
        assert len(errors) == 3
        assert all("two sequences of 3" in said for said in errors[:2])
        assert "expected a tensor or a dictionary of them, got 3" in errors[2]
        assert "ranks [1] were given other inputs" in masks
