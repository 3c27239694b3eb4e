"""A Mixtral in a training loop with accelerate: the two lines that name `prophet_accelerate` are ours.

accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py --out out/loop
accelerate launch --multi_gpu --num_processes 4 examples/accelerate_loop.py --out out/loop --resume --epochs 2
"""

from __future__ import annotations

import argparse
from pathlib import Path

import prophet_accelerate
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import MixtralConfig, MixtralForCausalLM, get_linear_schedule_with_warmup

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_local_experts": 8}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on from what the last run has saved")
    parser.add_argument("--batch", type=int, default=16, help="sequences over all processes")
    options = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    balanced = prophet_accelerate.balance(accelerator)
    set_seed(0)  # the same model on every process
    model = MixtralForCausalLM(MixtralConfig(vocab_size=64, initializer_range=0.2, **SIZES, **HEADS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rows = (torch.randint(0, 20, (192, 1)) + 3 * torch.arange(16) + torch.randint(0, 2, (192, 16))) % 64
    data = torch.utils.data.DataLoader(
        [{"input_ids": row, "labels": row} for row in rows],
        batch_size=options.batch // accelerator.num_processes,
        shuffle=True,
    )
    schedule = get_linear_schedule_with_warmup(optimizer, 4, 400)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)

    first = 0
    if options.resume:
        accelerator.load_state(options.out / "state")
        first = options.epochs - 1
    for epoch in range(first, options.epochs):
        data.set_epoch(epoch)
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                mean = accelerator.reduce(loss.detach(), "mean").item()
                copies = balanced.engine.last_step.copies.sum()
                accelerator.print(
                    f"epoch {epoch}: loss {mean:.6f}, norm {norm.item():.6f}, {copies} copies", flush=True
                )
    accelerator.save_state(options.out / "state")  # every rank; to resume, on any number of processes
    accelerator.unwrap_model(model).save_pretrained(
        options.out / "model",
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),  # every rank; for plain transformers
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
