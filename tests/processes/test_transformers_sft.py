"""TRL's SFTTrainer on two processes: with the callback it trains, saves and resumes as without it.

TRL, PEFT and datasets are installed for the tests: nothing here skips where they are missing.
"""

from __future__ import annotations

import copy
import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.launch import EXAMPLES, run_gloo, torchrun
from tests.helpers.small_sft import ATTENTION, adapters_of, merged, trained_sft
from tests.helpers.small_trainer import callback, key_warnings, logged

BALANCE = ("moe/max_mean", "moe/copies")
GC = {"gradient_checkpointing": True}


def as_started_by_torchrun(rank: int, size: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29999")  # the group is there already
    gc.freeze()  # accelerate collects garbage whenever training begins, among all that was imported


def lora_on_all_layers(rank: int, size: int, folder: Path, steps: int) -> dict[str, Any]:
    """Losses of a plain run, of one with the callback, and of one that resumes from its checkpoint; adapters saved."""
    import prophet_transformers

    as_started_by_torchrun(rank, size)
    settings = {"max_steps": steps, "save_steps": steps // 2}
    plain = trained_sft(folder / "plain", None, "all-linear", **settings | {"save_strategy": "no"})
    plain.save_model(str(folder / "plain"))
    made = callback()
    ours = trained_sft(folder / "ours", made, "all-linear", **settings)
    half = folder / "ours" / f"checkpoint-{steps // 2}"
    with key_warnings() as said:
        resumed = trained_sft(folder / "resumed", callback(), "all-linear", half, **settings)
    ours.save_model(str(folder / "save_model"))
    ours.model.save_pretrained(folder / "save_pretrained")
    prophet_transformers.save_pretrained(ours.model, folder / "prophet")
    return {
        "plain": logged(plain),
        "ours": logged(ours),
        "norms": [logged(plain, "grad_norm"), logged(ours, "grad_norm")],
        "resumed": logged(resumed),
        "warnings": said,
        "balance": [logged(ours, name) for name in BALANCE],
        "bank": made.report.replaced[0].spec.why if made.report else "",
    }


@pytest.mark.parametrize("steps", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_lora_on_all_layers(tmp_path: Path, steps: int) -> None:
    ranks = run_gloo(lora_on_all_layers, 2, tmp_path, steps)
    for found in ranks:
        assert len(found["ours"]) == steps
        assert found["ours"] == pytest.approx(found["plain"], abs=1e-6)
        assert found["norms"][1] == pytest.approx(found["norms"][0], abs=1e-6)
        assert found["resumed"] == pytest.approx(found["ours"], abs=1e-6)
        assert found["warnings"] == []
        max_mean, copies = found["balance"]
        assert len(max_mean) == len(copies) == steps
        assert min(max_mean) >= 1
        assert sum(copies) > 0, "no replicas: nothing was balanced"
        assert all(float(count).is_integer() for count in copies), "not one step's"
        assert found["bank"].startswith("PEFT has put LoRA on gate_up_proj")
    wanted = adapters_of(tmp_path / "plain")
    for folder in (
        "save_model",
        "save_pretrained",
        "prophet",
        f"ours/checkpoint-{steps}",
        f"resumed/checkpoint-{steps}",
    ):
        got = adapters_of(tmp_path / folder)
        assert got.keys() == wanted.keys()
        # Adam divides by the gradient's size, so rounding in a tiny gradient moves a weight visibly
        assert all(torch.allclose(got[name], wanted[name], rtol=0, atol=2e-3) for name in wanted), folder
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        logits = [merged(tmp_path / name).eval()(input_ids=ids).logits for name in ("plain", "save_model")]
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=2e-3)
    if steps == 20:  # on one rank, where the auxiliary loss is another
        one = trained_sft(tmp_path / "one", callback(), "all-linear", tmp_path / "ours" / "checkpoint-10")
        assert logged(one) == pytest.approx(ranks[0]["ours"], abs=0.02)
    same = [adapters_of(tmp_path / name) for name in ("save_model", "save_pretrained", "prophet")]
    assert all(torch.equal(same[0][name], other[name]) for other in same[1:] for name in wanted)


# what differs from TRL's defaults and the model's: LoRA's targets, and settings
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "all parameters": (None, {}),
    "packing": (None, {"packing": True, "max_steps": 8}),
    "gradient checkpointing": (None, GC),
    "accumulation": (None, {"gradient_accumulation_steps": 2, **GC}),
    "LoRA on attention": (ATTENTION, {}),
    "LoRA on all layers, gradient checkpointing": ("all-linear", GC),
    "bf16": (None, {"bf16": True, **GC}),
    "bf16, LoRA on attention": (ATTENTION, {"bf16": True, **GC}),
    "bf16, LoRA on all layers": ("all-linear", {"bf16": True, **GC}),
}


def all_variants(rank: int, size: int, folder: Path, names: list[str]) -> dict[str, Any]:
    """By variant: losses of the plain run, of one with the callback, and how many replicas there were."""
    as_started_by_torchrun(rank, size)
    found: dict[str, Any] = {}
    for name in names:
        lora, settings = VARIANTS[name]
        runs = [
            trained_sft(folder / name / str(bool(made)), made, lora, save_strategy="no", **copy.deepcopy(settings))
            for made in (None, callback())
        ]
        found[name] = *map(logged, runs), sum(logged(runs[1], "moe/copies"))
    return found


# Sums in another order round differently, here as between one rank and two: either draw may be the larger one.
BF16_FACTOR = 2.0


def gap(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_variants(tmp_path: Path) -> None:
    """float32: 1e-6. bfloat16: `BF16_FACTOR` times what a plain run differs between one rank and two; both printed."""
    found = run_gloo(all_variants, 2, tmp_path, list(VARIANTS), timeout_s=450)[0]
    for name, (plain, ours, copies) in found.items():
        assert copies > 0, name
        difference, limit = gap(plain, ours), 1e-6
        if "bf16" in name:
            lora, settings = VARIANTS[name]
            one = trained_sft(tmp_path / name / "one", None, lora, save_strategy="no", **copy.deepcopy(settings))
            limit = BF16_FACTOR * gap(plain, logged(one))
        print(f"{name}: differs by {difference:.1e}, allowed {limit:.1e}; {copies:.0f} replicas in {len(ours)} steps")
        assert difference <= limit, name


@pytest.mark.slow
def test_a_best_model_and_models_alone(tmp_path: Path) -> None:
    found = run_gloo(best_and_only_models, 2, tmp_path)
    best = adapters_of(tmp_path / "best" / "checkpoint-2")
    saved = adapters_of(tmp_path / "saved")
    assert all(torch.equal(best[name], saved[name]) for name in best)
    for said in found:
        assert "save_only_model" in said
    alone = adapters_of(tmp_path / "alone" / "checkpoint-2")
    assert all(torch.equal(best[name], alone[name]) for name in best)


def best_and_only_models(rank: int, size: int, folder: Path) -> str:
    """A run that ends with the model of its first evaluation, and one whose checkpoints are models; how it resumes."""
    as_started_by_torchrun(rank, size)
    best = trained_sft(
        folder / "best",
        callback(),
        "all-linear",
        max_steps=4,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # so that the first is the best
    )
    best.save_model(str(folder / "saved"))
    settings = {"max_steps": 4, "save_steps": 2, "save_only_model": True}
    trained_sft(folder / "alone", callback(), "all-linear", **settings)
    try:
        trained_sft(folder / "again", callback(), "all-linear", folder / "alone" / "checkpoint-2", **settings)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--lora", "all", "--packing")])
def test_example(tmp_path: Path, options: tuple[str, ...]) -> None:
    logs = []
    for extra in ("--plain", "--float32"):
        out = tmp_path / extra.strip("-")
        steps = ("--steps", "6", "--float32", extra) if extra == "--plain" else ("--steps", "6", extra)
        torchrun(EXAMPLES / "trl_sft.py", "--out", str(out), *steps, *options, ranks=2)
        logs.append([row for row in json.loads((out / "log.json").read_text()) if "loss" in row])
    plain, ours = ([row["loss"] for row in log] for log in logs)
    assert ours == pytest.approx(plain, abs=1e-6)
    assert all(name in row for row in logs[1] for name in BALANCE)
