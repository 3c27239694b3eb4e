"""A Hugging Face Trainer of a small Mixtral, with the callback or without it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

BATCH = 8  # sequences per step, over all ranks


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


def small_mixtral() -> Any:
    """Two layers, eight experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
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


def small_trainer(out: Path, callback: Any, *, kind: Any = None, seed: int = 0, **settings: Any) -> Any:
    """A Trainer, or one of its class `kind`, for four steps, saved after two and four; `settings` are its arguments."""
    from transformers import Trainer, TrainingArguments, set_seed

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    set_seed(seed)
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
    return (kind or Trainer)(
        model=small_mixtral(),
        args=TrainingArguments(output_dir=str(out), **(chosen | settings)),
        train_dataset=Text(64),
        eval_dataset=Text(16, 2),
        callbacks=[] if callback is None else [callback],
    )


def callback(**options: Any) -> Any:
    """The callback; planning needs no compiled kernels here."""
    from prophet_transformers import ProphetCallback

    import prophet

    return ProphetCallback(config=prophet.EngineConfig(planner="top2"), **options)


def trained(out: Path, made: Any, resume: Any = None, **settings: Any) -> Any:
    """A Trainer that has trained. resume: a folder, True or None."""
    trainer = small_trainer(out, made, **settings)
    trainer.train(resume_from_checkpoint=str(resume) if isinstance(resume, Path) else resume)
    return trainer


def logged(trainer: Any, name: str = "loss") -> list[float]:
    """What the Trainer has logged under a name, by step."""
    return [row[name] for row in trainer.state.log_history if name in row]


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
    """The model in a folder, as its class reads it."""
    from transformers import MixtralForCausalLM

    return dict(MixtralForCausalLM.from_pretrained(folder).state_dict())


def same_weights(a: Path, b: Path, tolerance: float) -> None:
    """AssertionError where the models of two folders differ by more."""
    left, right = weights(a), weights(b)
    assert set(left) == set(right)
    for name, value in left.items():
        assert float((value - right[name]).abs().max()) <= tolerance, name
