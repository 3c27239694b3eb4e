"""LoRA on the experts of families that differ in layout: plain, transposed, without a gate."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import prophet
from tests.helpers.families import small
from tests.helpers.moe_models import alone, batches, compare, together
from tests.helpers.support import on_threads

peft = pytest.importorskip("peft", reason="needs peft: pip install '.[hf]' peft")

FAMILIES = {
    "glm4_moe": ["experts.gate_up_proj", "experts.down_proj"],
    "aria": ["experts.gate_up_proj", "experts.down_proj"],
    "nemotron_h": ["experts.up_proj", "experts.down_proj"],
}


def adapted(family: str) -> Any:
    """A model in float64 with LoRA of random values on its experts."""
    torch.manual_seed(3)
    options = peft.LoraConfig(r=2, lora_alpha=3, target_parameters=FAMILIES[family], init_lora_weights=False)
    return peft.get_peft_model(small(family).double(), options).double().train()


@pytest.mark.parametrize("family", FAMILIES)
def test_it_trains_as_peft_trains_it(family: str) -> None:
    """Three steps on two ranks, with placements at random."""
    model = adapted(family)
    steps = [batches(2, s) for s in range(3)]
    copies = [copy.deepcopy(model) for _ in range(2)]
    found = on_threads(2, lambda group: together(copies[group.rank], steps, group))
    compare(alone(model, steps), found, 1e-6)
    assert all(s.extra for s in found), "no replica sent gradients home: the placements were not random"
    trained = [n for n, g in found[0].gradients.items() if ".experts." in n and bool(g.any())]
    assert trained
    assert all("lora_" in n for n in trained)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_peft_loads_what_is_saved(family: str, tmp_path: Path) -> None:
    model = adapted(family)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def body(group: Any) -> None:
        prophet.convert(copies[group.rank], group=group)
        copies[group.rank].save_pretrained(tmp_path)

    on_threads(2, body)
    loaded = peft.PeftModel.from_pretrained(small(family).double(), tmp_path)
    want = {n: t for n, t in model.state_dict().items() if "lora_" in n}
    found = loaded.state_dict()
    assert want
    assert all(torch.equal(found[n].double(), t) for n, t in want.items())
