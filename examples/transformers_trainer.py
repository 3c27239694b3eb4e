"""A Hugging Face Mixtral, trained by Trainer with its experts over all processes. Run it on two:

torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py --out out/mixtral

The line that a script of your own needs is the one with ProphetCallback. A run that was killed goes on with

torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py --out out/mixtral --resume

or from any checkpoint, in another folder, on another number of processes:

python examples/transformers_trainer.py --out out/again --batch 8 --resume out/mixtral/checkpoint-3
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from prophet_transformers import ProphetCallback
from torch.utils.data import Dataset
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments, set_seed


class Text(Dataset[dict[str, torch.Tensor]]):
    """Sequences of ids in which the next is mostly the last one plus three."""

    def __init__(self, rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(0, 60, (rows, 1), generator=generator)
        noise = torch.randint(0, 2, (rows, 16), generator=generator)
        self.ids = (start + 3 * torch.arange(16) + noise) % 64

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[at], "labels": self.ids[at]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/mixtral"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--ep-size", type=int, default=None)
    parser.add_argument("--batch", type=int, default=4, help="sequences per process; double it on half the processes")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--save-total-limit", type=int, default=None, help="checkpoints to keep")
    parser.add_argument("--best", action="store_true", help="end with the model of the lowest evaluation loss")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=None,
        metavar="CHECKPOINT",
        help="go on from this folder, or without one from the newest checkpoint in --out",
    )
    parser.add_argument("--plain", action="store_true", help="without the callback, to compare")
    options = parser.parse_args()

    set_seed(0)  # the same model on every rank
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=8,
        output_router_logits=True,
    )
    model = MixtralForCausalLM(config)
    callback = ProphetCallback(ep_size=options.ep_size)
    args = TrainingArguments(
        output_dir=str(options.out),
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=2,
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=options.save_every,
        save_total_limit=options.save_total_limit,
        eval_strategy="steps" if options.best else "no",
        eval_steps=options.save_every,
        load_best_model_at_end=options.best,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Text(512, seed=1),
        eval_dataset=Text(32, seed=2),
        callbacks=[] if options.plain else [callback],
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.out / "final"))  # on every rank
    if trainer.is_world_process_zero():
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        (options.out / "losses.json").write_text(json.dumps(losses))
        last = callback.engine.last_step if callback.engine else None
        if last is not None:
            print(callback.report)
            print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; rank max/mean {last.max_mean:.3f}", end=" ")
            print(f"(without balancing {last.max_mean_static:.3f})")
    trainer.accelerator.end_training()  # ranks part in order


if __name__ == "__main__":
    main()
