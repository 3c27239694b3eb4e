"""TRL's SFTTrainer of the example's small model, with the callback or without it."""

from __future__ import annotations

import functools
import os
import runpy
from pathlib import Path
from typing import Any

from tests.helpers.launch import EXAMPLES

BATCH = 8  # sequences per step, over all ranks
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@functools.cache
def example() -> dict[str, Any]:
    """What `examples/trl_sft.py` defines."""
    return runpy.run_path(str(EXAMPLES / "trl_sft.py"))


def small_sft(out: Path, callback: Any, lora: Any = None, **settings: Any) -> Any:
    """An SFTTrainer for 20 steps in float32, saved after ten. lora: PEFT's target_modules, None for no adapter."""
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    chosen: dict[str, Any] = {
        "per_device_train_batch_size": BATCH // int(os.environ.get("WORLD_SIZE", "1")),
        "max_steps": 20,
        "save_steps": 10,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "max_length": 32,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "ddp_timeout": 60,
        "seed": 0,
    }
    return SFTTrainer(
        model=example()["model"](),
        args=SFTConfig(output_dir=str(out), **(chosen | settings)),
        train_dataset=example()["texts"](512),
        eval_dataset=example()["texts"](16),
        processing_class=example()["tokenizer"](),
        peft_config=None if lora is None else LoraConfig(r=4, target_modules=lora),
        callbacks=[] if callback is None else [callback],
    )


def trained_sft(out: Path, callback: Any, lora: Any = None, resume: Path | None = None, **settings: Any) -> Any:
    """An SFTTrainer that has trained."""
    trainer = small_sft(out, callback, lora, **settings)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def adapters_of(folder: Path) -> dict[str, Any]:
    """The adapter that PEFT has written there."""
    from safetensors.torch import load_file

    return dict(load_file(folder / "adapter_model.safetensors"))


def merged(folder: Path) -> Any:
    """The example's model with the adapter in `folder` loaded and merged by PEFT alone."""
    from peft import PeftModel

    return PeftModel.from_pretrained(example()["model"](), folder).merge_and_unload()
