"""What layers compute again: nothing changes but the bytes that they keep, which are those counted by hand."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the models are transformers'")

from benchmarks.slices.by_hand import Dims, unit_bytes
from benchmarks.slices.live_bytes import LiveBytes
from pipeline_balance.slices import models
from pipeline_balance.slices.adapter import SlicedTransformers
from pipeline_balance.slices.options import Recompute, SliceOptions
from pipeline_balance.slices.saved.recompute import Recomputing, recomputed_parts
from prophet.errors import SpecError
from tests.helpers import sliced_layers as own
from tests.helpers.house import ROOT
from tests.helpers.sliced_models import alone, apart, batch_of, in_slices, model_of, no_update
from tests.helpers.transformers_models import LAYERS, small

ROWS, SLICES, TOKENS = 4, 4, 4


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize(("family", "kind"), [("llama", "silent"), ("qwen3", "packed"), ("mixtral", "padded")])
def test_float64_equals_one_process(family: str, kind: str, recompute: Recompute) -> None:
    model = model_of(family, **({"output_router_logits": False} if family == "mixtral" else {}))
    losses, want, _ = alone(copy.deepcopy(model), [kind], make=no_update)
    loss, found = in_slices(model, SLICES, kind, recompute)
    assert loss == pytest.approx(losses[0], rel=1e-10)
    # Mixtral's router computes in float32, the same one in both
    assert apart(found, want) <= (1e-6 if family == "mixtral" else 1e-10)


@pytest.mark.parametrize(
    ("family", "options", "recompute"),
    [
        ("gpt2", {"resid_pdrop": 0.3}, "selective"),
        ("gpt2", {"resid_pdrop": 0.3}, "full"),
        ("mixtral", {"router_aux_loss_coef": 3.0, "router_jitter_noise": 0.1}, "full"),
    ],
)
def test_random_numbers_are_drawn_once(family: str, options: dict[str, Any], recompute: Recompute) -> None:
    """Dropout and a router's noise are the same when a layer is computed again."""
    model = model_of(family, **options)
    loss, want = in_slices(copy.deepcopy(model), SLICES, "plain")
    again, found = in_slices(model, SLICES, "plain", recompute)
    assert again == loss
    assert apart(found, want) <= 1e-12


def _model(family: str, kv_heads: int) -> Any:
    model: Any = small(family, num_key_value_heads=kv_heads)
    if family == "mixtral":
        model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_unit_keeps_the_bytes_that_are_counted_by_hand(family: str, kv_heads: int, recompute: Recompute) -> None:
    model = _model(family, kv_heads)
    run = SlicedTransformers(model, SliceOptions(SLICES, recompute=recompute))
    count = LiveBytes(run)
    by_hand = unit_bytes(
        Dims.of(model.config), ROWS, TOKENS, LAYERS, recompute, router_loss=run.router_loss is not None
    )
    (whole,) = run.cut(*batch_of(tokens=SLICES * TOKENS), 1)
    kept = []
    for number, part in enumerate(run.sliced(whole)):
        boundary: tuple[torch.Tensor, ...] = ()
        with run.working(part):
            for unit in range(LAYERS + 1):
                boundary = run.run(unit, boundary, part)
        kept.append(boundary)
        assert count.now() == (number + 1) * by_hand


def test_the_table_of_the_page_is_the_count_by_hand() -> None:
    page = (ROOT / "docs" / "slices.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w[^|]*), (\d+) key heads \| (\d+) \| (\d+) \| (\d+) \|$", page, re.M)
    assert len(rows) == 4
    for name, kv_heads, *bytes_ in rows:
        experts = {"experts": 8, "top_k": 2} if "experts" in name else {}
        dims = Dims(hidden=4096, heads=32, kv_heads=int(kv_heads), head_dim=128, intermediate=14336, **experts)
        found = [unit_bytes(dims, 1, 1, 1, how) for how in ("none", "selective", "full")]  # type: ignore[arg-type]
        assert [int(n) for n in bytes_] == found


@pytest.mark.parametrize("slices", [1, SLICES])
def test_a_part_that_changes_its_input_is_refused_before_a_step(slices: int) -> None:
    """Mixtral's noise is multiplied in place, and its parts are computed again from what they were given."""
    options = SliceOptions(slices, recompute="selective")
    with pytest.raises(SpecError, match=r"layer 0 .* changes its input in place, MixtralSparseMoeBlock: .*full"):
        models.transformers(options, model_of("mixtral", router_jitter_noise=0.1))
    models.transformers(options, model_of("mixtral"))


def test_layers_are_as_they_were_afterwards() -> None:
    model = model_of("llama")
    layer = model.base_model.layers[0]
    before = {name: dict(part.__dict__) for name, part in layer.named_modules()}
    in_slices(model, SLICES, "plain", "selective")
    assert {name: dict(part.__dict__).keys() for name, part in layer.named_modules()} == {
        name: of_part.keys() for name, of_part in before.items()
    }
    assert [type(part).__name__ for part in recomputed_parts(layer)] == ["LlamaMLP", "LlamaRMSNorm", "LlamaRMSNorm"]


class OnlyAttention(nn.Module):
    """A layer whose feed-forward part is inside the module that attends."""

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__()
        self.theirs = theirs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.theirs(*args, **kwargs)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SpecError, match="checkpoints its layers itself"):
        SlicedTransformers(model_of("llama", recompute=True), SliceOptions(4, recompute="selective"))
    wrapped = small("llama")
    wrapped.model.layers = nn.ModuleList(OnlyAttention(layer) for layer in wrapped.model.layers)
    with pytest.raises(SpecError, match=r'layer 0 \(OnlyAttention\) has no part.*take recompute="full"'):
        SlicedTransformers(wrapped, SliceOptions(4, recompute="selective"))
    with pytest.raises(SpecError, match="recompute is for transformers models"):
        models.chain(SliceOptions(4, recompute="full"), own.layers(), own.loss_fn)


def test_one_slice_recomputes_too() -> None:
    model = model_of("llama")
    run = models.transformers(SliceOptions(1, recompute="full"), model)
    assert isinstance(run, Recomputing)
    count = LiveBytes(run)
    (whole,) = run.cut(*batch_of(), 1)
    out = run.run(1, run.run(0, (), whole), whole)
    assert out[0].requires_grad
    assert count.now() == ROWS * 16 * 32 * 8  # the layer's input in float64
