"""The lines of docs/parallel.md on FSDP, run as they stand there for every family that `convert` knows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import prophet
from prophet.convert import original_state_dict
from prophet.parallel import ExpertReplicas, expert_groups, expert_parameters
from tests.helpers.house import ROOT
from tests.helpers.launch import on_processes
from tests.helpers.moe_models import FAMILIES, batches, hugging_face, loss_of, transformers

SIZES: dict[str, dict[str, Any]] = {  # grouped products in bfloat16 need rows of 16 bytes
    **{family: {"intermediate_size": 16} for family in ("mixtral", "olmoe", "gpt_oss")},
    **{family: {"moe_intermediate_size": 16} for family in ("qwen2", "qwen3", "deepseek_v2", "deepseek_v3")},
}
SIZES["qwen2"]["shared_expert_intermediate_size"] = 16
# how far losses may differ; Adam in float16 needs a scaler after its first step
NEAR = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
QUICK = [("deepseek_v3", torch.bfloat16, False)]
EVERY = [(f, t, lora) for f in FAMILIES for t in NEAR for lora in (False, True) if (f, t, lora) not in QUICK]


def recipe() -> str:
    page = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"## FSDP\n\n```python[^\n]*\n(.*?)```", page, re.S)
    return str(found)


def loaded(family: str, dtype: torch.dtype, lora: bool, folder: str) -> Any:
    torch.manual_seed(5)
    model = getattr(transformers(), FAMILIES[family][1]).from_pretrained(f"{folder}/{family}", dtype=dtype).train()
    if not lora:
        return model
    import peft

    targets = {"target_modules": ["o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    peft.get_peft_model(model, peft.LoraConfig(**targets, r=2, init_lora_weights=False))
    return model


def dtypes(state: dict[str, torch.Tensor]) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in state.items()}


def followed(cases: list[tuple[str, torch.dtype, bool]], folder: str) -> list[Any]:
    found = []
    for family, dtype, lora in cases:
        model = loaded(family, dtype, lora, folder)
        ep, replicas = expert_groups(2)
        before = dtypes(model.state_dict())
        prophet.convert(model, group=ep)
        names = {"torch": torch, "prophet": prophet, "model": model, "replicas": replicas}
        names |= {"expert_parameters": expert_parameters, "ExpertReplicas": ExpertReplicas}
        exec(recipe(), names)
        cut = [n for n, p in model.named_parameters() if not hasattr(p, "full_tensor") and p not in names["experts"]]
        assert not cut
        losses = []
        for step in range(1 if dtype == torch.float16 else 2):
            loss = loss_of(model, batches(2, step)[dist.get_rank()])[0]
            loss.backward()
            names["engine"].clip_grad_norm_(model.parameters(), 1.0)
            names["optimizer"].step()
            names["optimizer"].zero_grad()
            total = loss.detach().float()
            dist.all_reduce(total)
            losses.append(float(total) / 2)
        names["engine"].close()
        state = original_state_dict(model, keep=dist.get_rank() == 0)
        assert not state or dtypes(state) == before
        found.append(losses)
    return found


def alone(family: str, dtype: torch.dtype, lora: bool, folder: str) -> list[float]:
    model = loaded(family, dtype, lora, folder)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    losses = []
    for step in range(1 if dtype == torch.float16 else 2):
        each = [loss_of(model, ids)[0] for ids in batches(2, step)]
        loss = torch.stack(each).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("cases", [QUICK, pytest.param(EVERY, marks=pytest.mark.slow)])
def test_the_recipe_for_fsdp(cases: list[tuple[str, torch.dtype, bool]], tmp_path: Path) -> None:
    for family in {family for family, *_ in cases}:
        model: Any = hugging_face(family, **SIZES[family])
        model.save_pretrained(tmp_path / family)
    first, second = on_processes(2, followed, cases, str(tmp_path), timeout_s=300)
    for case, losses, others in zip(cases, first, second, strict=True):
        assert losses == others
        assert losses == pytest.approx(alone(*case, str(tmp_path)), rel=NEAR[case[1]]), case
