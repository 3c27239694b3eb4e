"""Models with windows, sinks and soft caps in slices on real processes: loss and gradients of the whole model."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the models are transformers'")

from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.slices import SliceOptions, attend
from pipeline_balance.slices.parts import Sliced
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from tests.helpers import sliced_layers as own
from tests.helpers.launch import run_gloo
from tests.helpers.sliced_models import FREE, alone, apart, batch_of, model_of, no_update, pipe_of, whole_loss
from tests.helpers.transformers_models import LAYERS

UNITS = LAYERS + 2
EXACT, SINGLE = 1e-10, 1e-5
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
Case = tuple[str, str, int, int, str, dict[str, Any]]
# family, kind of batch, slices, stages per rank, order, options of the pipeline and of the model
CASES: list[Case] = [
    ("mistral", "packed", 4, 1, "minimal", {"sliding_window": 3, "recompute": "full"}),
    ("gemma2", "silent", 4, 1, "minimal", {"sliding_window": 6, "attn_logit_softcapping": 1.0}),
    ("gemma3", "plain", 4, 2, "aligned", {"sliding_window": 6, "layer_types": MIXED, "recompute": "selective"}),
    ("gpt_oss", "padded", 8, 1, "aligned", {"sliding_window": 5}),
]
MORE: list[Case] = [
    ("mistral", "plain", 8, 1, "aligned", {"sliding_window": 64}),
    ("mistral", "silent", 8, 2, "minimal", {"sliding_window": 7, "balance": "uneven"}),
    ("mistral", "padded", 4, 1, "minimal", {"dtype": torch.float32, "tied": True}),
    ("qwen2", "packed", 8, 1, "minimal", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    ("qwen3", "plain", 4, 2, "aligned", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    ("gemma2", "packed", 4, 1, "aligned", {"sliding_window": 5, "recompute": "full", "dtype": torch.float32}),
    ("gemma3", "packed", 8, 1, "minimal", {"sliding_window": 3, "layer_types": MIXED, "tied": True}),
    ("gemma3", "padded", 4, 1, "minimal", {"sliding_window": 6, "layer_types": MIXED, "dtype": torch.float32}),
    ("gpt_oss", "plain", 4, 2, "minimal", {"sliding_window": 6, "recompute": "full"}),
    ("gpt_oss", "silent", 4, 1, "minimal", {"sliding_window": 6, "dtype": torch.float32}),
    ("gpt_oss", "packed", 8, 1, "aligned", {"layer_types": ["full_attention"] * 3, "balance": "exchange"}),
]


def _options(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of the model, and those of the pipeline."""
    options = dict(case[5])
    pipeline = {name: options.pop(name) for name in ("recompute", "balance") if name in options}
    return options, pipeline


def _one_step(rank: int, size: int, cases: list[Case]) -> list[tuple[float, float, dict[str, torch.Tensor], int]]:
    found = []
    for case in cases:
        family, kind, slices, stages, order, _ = case
        options, pipeline = _options(case)
        pipe = pipe_of(
            model := model_of(family, **options),
            slices,
            stages=stages,
            order=order,
            make_optimizer=no_update,
            **pipeline,
        )
        loss = pipe.step(*batch_of(kind))
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and not p.is_meta}
        assert isinstance(pipe.model, Sliced)
        found.append((loss, pipe.evaluate(*batch_of(kind)), grads, len(pipe.model.store)))
    return found


def _allowed(family: str, name: str, options: dict[str, Any]) -> float:
    # Gemma's norms sum their weights' gradients in float32
    single = options.get("dtype") == torch.float32 or (family.startswith("gemma") and "norm" in name)
    return SINGLE if single else EXACT


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, CASES),
        pytest.param(1, CASES, marks=pytest.mark.slow),
        pytest.param(2, MORE, marks=pytest.mark.slow),
        pytest.param(4, [c for c in CASES + MORE if c[3] == 1], marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_of_the_whole(size: int, cases: list[Case]) -> None:
    results = run_gloo(_one_step, size, cases, timeout_s=300.0)
    for i, case in enumerate(cases):
        family, kind, *_ = case
        options, _ = _options(case)
        losses, want, _ = alone(model_of(family, **options), [kind], make=no_update)
        evaluated = whole_loss(model_of(family, **options), kind)
        loss_allowed = _allowed(family, "loss", options)
        seen: set[str] = set()
        for loss, evaluation, grads, left in (said[i] for said in results):
            print(family, kind, loss / losses[0] - 1, evaluation / evaluated - 1, apart(grads, want))
            assert left == 0
            assert abs(loss / losses[0] - 1) <= loss_allowed
            assert abs(evaluation / evaluated - 1) <= loss_allowed
            for name in grads:
                assert apart({name: grads[name]}, want) <= _allowed(family, name, options), (family, name)
            seen |= grads.keys()
        assert seen == want.keys()


TWENTY = ["plain", "packed", "silent", "plain"] * 5
MAPS = [StageMap((0, 2, UNITS), (1, 0)), StageMap((0, 4, UNITS), (0, 1)), StageMap((0, UNITS), (1,))]


def _twenty(rank: int, size: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    pipe = pipe_of(model_of("gpt_oss", sliding_window=5), 4, order="aligned")
    losses = []
    for step, kind in enumerate(TWENTY):
        if step % 7 == 3:
            pipe.rebuild(MAPS[step // 7])
        losses.append(pipe.step(*batch_of(kind), max_norm=0.5))
    return losses, pipe.state_dict()


def test_twenty_steps_of_adam_with_sinks_windows_and_moves() -> None:
    losses, _, state = alone(model_of("gpt_oss", sliding_window=5), TWENTY, max_norm=0.5)
    results = run_gloo(_twenty, 2)
    for got, _ in results:
        assert got == pytest.approx(losses, rel=EXACT)
    assert apart(results[0][1], state) <= 1e-8  # Adam divides by what may be nearly zero


def _refused(rank: int, size: int) -> list[str]:
    said = []
    for family, options in (
        ("mistral", {"sliding_window": 6}),
        ("gpt_oss", {"sliding_window": 6}),
        ("gemma2", {"attn_logit_softcapping": 1.0, "sliding_window": 64}),
    ):
        pipe = pipe_of(model_of(family, **options), 4, order="aligned", balance="exchange", make_optimizer=no_update)
        with pytest.raises(SpecError) as caught:
            pipe.step(*batch_of())
        said.append(str(caught.value))
        # an evaluation exchanges nothing
        assert pipe.evaluate(*batch_of()) > 0
    # a window that hides nothing is none
    pipe = pipe_of(model_of("mistral", sliding_window=16), 4, order="aligned", balance="exchange")
    assert pipe.step(*batch_of()) > 0
    with pytest.raises(SpecError) as caught:
        _own(own.TOKENS - 1).step(*own.batch(0, 0))
    assert _own(own.TOKENS).step(*own.batch(0, 0)) > 0
    return [*said, str(caught.value)]


def _own(window: int) -> ElasticPipeline:
    """Layers of one's own, of which the last attention has a window."""
    layers = own.layers()
    layers[own.BLOCKS].attention = partial(attend, window=window)  # type: ignore[assignment]
    return own.pipe(layers, SliceOptions(4, order="aligned", balance="exchange", exchange_costs=FREE))


def test_exchange_with_windows_or_caps_is_refused_on_all_ranks() -> None:
    expected = ["layer 0 has a sliding window", "layer 0 has a sliding window", "layer 1 has a soft cap of scores"]
    expected.append(f"layer {own.BLOCKS} has a sliding window")
    for said in run_gloo(_refused, 2):
        for text, part in zip(said, expected, strict=True):
            assert part in text, text
