"""Trainer on real processes: with the callback it trains, saves and resumes as Trainer does with the whole model."""

from __future__ import annotations

import json
import logging
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from tests.helpers.launch import EXAMPLES, process_outcomes, run_gloo, torchrun

pytest.importorskip("transformers", reason="needs transformers: pip install 'moe-prophet[hf]'")
pytest.importorskip("accelerate", reason="needs accelerate: pip install 'moe-prophet[hf]'")

STEPS = ("--steps", "4", "--save-every", "2")
BATCH = 8  # sequences per step, over all ranks


# --- a small Trainer ---


class Text(Dataset[dict[str, torch.Tensor]]):
    """Sequences of ids in which the next is mostly the last one plus three."""

    def __init__(self, rows: int, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(0, 60, (rows, 1), generator=generator)
        self.ids = (start + 3 * torch.arange(12) + torch.randint(0, 2, (rows, 12), generator=generator)) % 64

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[at], "labels": self.ids[at]}


def small_trainer(out: Path, callback: Any, *, seed: int = 0, **settings: Any) -> Any:
    """A Trainer of a Mixtral of two layers and eight experts; four steps, saved after two and four."""
    from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments, set_seed

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    set_seed(seed)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=8,
        )
    )
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": BATCH // ranks,
        "max_steps": 4,
        "save_steps": 2,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "ddp_timeout": 60,
        "seed": seed,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(out), **(chosen | settings)),
        train_dataset=Text(64),
        eval_dataset=Text(16, 2),
        callbacks=[] if callback is None else [callback],
    )


def callback(**options: Any) -> Any:
    """The callback; planning needs no compiled kernels here."""
    import prophet
    from prophet_transformers import ProphetCallback

    return ProphetCallback(config=prophet.EngineConfig(planner="top2"), **options)


def logged(trainer: Any, name: str = "loss") -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def trained(out: Path, made: Any, resume: Any = None, **settings: Any) -> Any:
    """A Trainer that has trained."""
    trainer = small_trainer(out, made, **settings)
    trainer.train(resume_from_checkpoint=None if resume is None else resume if resume is True else str(resume))
    return trainer


@contextmanager
def key_warnings() -> Iterator[list[str]]:
    """What transformers says of missing and unexpected parameters meanwhile."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if any(word in text for word in ("missing keys", "unexpected keys", "MISSING", "UNEXPECTED", "newly")):
                said.append(text[:200])

    handler = Keep()
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import MixtralForCausalLM

    return dict(MixtralForCausalLM.from_pretrained(folder).state_dict())


def same(a: Path, b: Path, tolerance: float) -> None:
    left, right = weights(a), weights(b)
    assert set(left) == set(right)
    for name, value in left.items():
        assert float((value - right[name]).abs().max()) <= tolerance, name


# --- on two ranks ---


def as_started_by_torchrun(rank: int, size: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29999")  # the group is there already


def copied(rank: int, source: Path, target: Path) -> Path:
    if rank == 0:
        shutil.copytree(source, target)
    torch.distributed.barrier()
    return target


def many_runs(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Losses and norms of runs that start anew, and of runs that resume, by name."""
    as_started_by_torchrun(rank, size)
    found: dict[str, Any] = {}

    def keep(name: str, trainer: Any) -> Any:
        found[name] = logged(trainer), logged(trainer, "grad_norm")
        return trainer

    whole = folder / "whole" / "checkpoint-2"
    keep("whole", trained(folder / "whole", callback()))
    keep("unbalanced", trained(folder / "unbalanced", callback(balance=False), max_steps=2))
    keep("other", trained(folder / "other", callback(), seed=1, max_steps=2))
    with key_warnings() as said:
        keep("over another run", trained(folder / "other", callback(), whole))
        keep("elsewhere, renamed", trained(folder / "new", callback(), copied(rank, whole, folder / "renamed")))
        copied(rank, whole, folder / "true" / "checkpoint-2")
        broken = copied(rank, folder / "whole" / "checkpoint-4", folder / "true" / "checkpoint-3")
        if rank == 0:
            (broken / "trainer_state.json").unlink()
        torch.distributed.barrier()
        keep("true", trained(folder / "true", callback(), True))
        keep("of one rank", trained(folder / "more", callback(), folder / "one" / "checkpoint-2"))
        best = keep(
            "best",
            trained(
                folder / "best",
                callback(),
                eval_strategy="steps",
                eval_steps=2,
                load_best_model_at_end=True,
                metric_for_best_model="eval_loss",
                greater_is_better=True,  # so that the first is the best
                save_total_limit=1,
            ),
        )
    found["warnings"] = said
    found["best from"] = Path(best.state.best_model_checkpoint).name
    best.save_model(str(folder / "saved"))
    return found


def test_training_saving_and_resuming(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", None, save_strategy="no")
    one = trained(tmp_path / "one", callback())
    ranks = run_gloo(many_runs, 2, tmp_path)
    for found in ranks:
        whole, norms = found["whole"]
        assert whole == pytest.approx(logged(plain), rel=1e-5)
        # that of the experts of all ranks
        assert norms == pytest.approx(logged(plain, "grad_norm"), rel=1e-4)
        assert found["unbalanced"][0] == pytest.approx(whole[:2], rel=1e-6)
        assert found["unbalanced"][1] == pytest.approx(norms[:2], rel=1e-6)
        assert found["other"][0] != pytest.approx(whole[:2], rel=1e-3)
        for name in ("over another run", "elsewhere, renamed", "true"):
            assert found[name][0] == pytest.approx(whole, rel=1e-6), name
        assert found["of one rank"][0] == pytest.approx(logged(one), rel=1e-5)
        assert found["warnings"] == []
        assert found["best from"] == "checkpoint-2"
    same(tmp_path / "saved", tmp_path / "best" / "checkpoint-2", 0.0)
    fewer = trained(tmp_path / "fewer", callback(), tmp_path / "whole" / "checkpoint-2")
    assert logged(fewer) == pytest.approx(ranks[0]["whole"][0], rel=1e-5)
    same(tmp_path / "fewer" / "checkpoint-4", tmp_path / "whole" / "checkpoint-4", 2e-3)
