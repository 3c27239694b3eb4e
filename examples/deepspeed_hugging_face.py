"""A Hugging Face Mixtral under DeepSpeed, by Trainer or by accelerate. Run it on two processes:

torchrun --standalone --nproc-per-node 2 examples/deepspeed_hugging_face.py
torchrun --standalone --nproc-per-node 2 examples/deepspeed_hugging_face.py --accelerate

Two lines are for balanced experts: the import, and the section of the DeepSpeed configuration. `--plain` leaves the
section out. `--resume` goes on from the checkpoint in --out. The trained model is in --out/model for transformers.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import prophet_deepspeed  # noqa: F401  (makes deepspeed.initialize heed the section)
import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

Rows = list[dict[str, torch.Tensor]]


def build() -> tuple[Any, Rows]:
    """The model, and sequences in which the next id is mostly the last one plus three."""
    set_seed(0)  # the same model on every rank
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
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, 60, (256, 1), generator=generator)
    ids = (start + 3 * torch.arange(16) + torch.randint(0, 2, (256, 16), generator=generator)) % 64
    return model, [{"input_ids": row, "labels": row} for row in ids]


def configure(options: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": options.stage, "reduce_bucket_size": "auto"},
        "zero_allow_untested_optimizer": True,
    }
    if not options.plain:
        config["prophet"] = {"planner": "top2"}
    return config


def with_trainer(options: argparse.Namespace) -> tuple[list[float], int]:
    """Losses by step, and the replicas of the last step."""
    model, rows = build()
    args = TrainingArguments(
        output_dir=str(options.out),
        deepspeed=configure(options),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=options.steps,
        learning_rate=5e-3,
        logging_steps=1,
        save_steps=options.save_at,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    if options.peft:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trainer = Trainer(model=model, args=args, train_dataset=rows)  # type: ignore[arg-type]
    resumed = str(options.out / f"checkpoint-{options.save_at}") if options.resume else None
    trainer.train(resume_from_checkpoint=resumed)
    trainer.save_model(str(options.out / "model"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, 0 if options.plain else int(trainer.deepspeed.prophet.last_step.copies.sum())


def with_accelerate(options: argparse.Namespace) -> tuple[list[float], int]:
    """The same for a loop of one's own, and an optimizer and a scheduler that exist."""
    model, rows = build()
    plugin = DeepSpeedPlugin(hf_ds_config=configure(options))
    accelerator = Accelerator(gradient_accumulation_steps=2, deepspeed_plugin=plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader: Any = DataLoader(rows, batch_size=4, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses: list[float] = []
    first = 0
    if options.resume:
        accelerator.load_state(str(options.out / "state"))
        first = options.save_at
    for step, batch in enumerate(loader):
        if step // 2 < first:
            continue
        if step // 2 >= options.steps:
            break
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach()).mean()))
        if step == 2 * options.save_at - 1 and not options.resume:
            accelerator.save_state(str(options.out / "state"))
    whole = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(options.out / "model", state_dict=whole)
    accelerator.wait_for_everyone()
    return losses, 0 if options.plain else int(model.prophet.last_step.copies.sum())


def read_options(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/deepspeed_hugging_face"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-at", type=int, default=3)
    parser.add_argument("--stage", type=int, default=2, choices=[0, 1, 2])
    parser.add_argument("--accelerate", action="store_true", help="a loop of one's own instead of Trainer")
    parser.add_argument("--peft", action="store_true", help="Trainer trains adapters alone")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--plain", action="store_true")
    return parser.parse_args(given)


def train(options: argparse.Namespace) -> tuple[list[float], int]:
    if not torch.cuda.is_available():  # accelerate looks for a backend on accelerators only
        os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}
        PartialState(backend="gloo")
    return with_accelerate(options) if options.accelerate else with_trainer(options)


def main() -> None:
    options = read_options()
    losses, replicas = train(options)
    if torch.distributed.get_rank() == 0:
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}, {replicas} replicas in the last step")
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "losses.json").write_text(json.dumps(losses))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
