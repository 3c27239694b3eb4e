"""Fine-tuning by TRL's SFTTrainer, with the experts over all processes. Run it on two:

torchrun --standalone --nproc-per-node 2 examples/trl_sft.py --out out/sft             # all parameters, in bfloat16
torchrun --standalone --nproc-per-node 2 examples/trl_sft.py --out out/sft --lora all  # LoRA on all layers, experts too

The lines that a script of your own needs are those with ProphetCallback.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from prophet_transformers import ProphetCallback
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

WORDS = ["a", "the", "cat", "dog", "bird", "tree", "sees", "likes", "finds", "chases", "small", "big", "old", "young"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of a few words."""
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    one = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    one.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=one, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def texts(rows: int) -> Dataset:
    """Sentences in which a word is mostly followed by the next of the list."""
    draw = random.Random(0)
    found = []
    for _ in range(rows):
        at, text = draw.randrange(len(WORDS)), []
        for _ in range(draw.randint(6, 14)):
            text.append(WORDS[at % len(WORDS)])
            at += 1 if draw.random() < 0.8 else draw.randrange(len(WORDS))
        found.append({"text": " ".join(text)})
    return Dataset.from_list(found)


def model() -> Qwen3MoeForCausalLM:
    """A small one, the same on every rank."""
    set_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        pad_token_id=0,
        eos_token_id=1,
    )
    return Qwen3MoeForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/sft"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="sequences per process; double it on half the processes")
    parser.add_argument("--lora", choices=["attention", "all"], default=None)
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--float32", action="store_true", help="instead of bfloat16")
    parser.add_argument("--resume", default=None, metavar="CHECKPOINT")
    parser.add_argument("--plain", action="store_true", help="without the callback, to compare")
    options = parser.parse_args()

    peft_config = None
    if options.lora is not None:
        peft_config = LoraConfig(r=4, target_modules=ATTENTION if options.lora == "attention" else "all-linear")
    args = SFTConfig(
        output_dir=str(options.out),
        per_device_train_batch_size=options.batch,
        max_steps=options.steps,
        save_steps=10,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        max_length=32,
        packing=options.packing,
        **({"bf16": False} if options.float32 else {}),
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    callback = ProphetCallback()
    trainer = SFTTrainer(
        model=model(),
        args=args,
        train_dataset=texts(512),
        processing_class=tokenizer(),
        peft_config=peft_config,
        callbacks=[] if options.plain else [callback],
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.out / "final"))  # on every rank
    if trainer.is_world_process_zero():
        (options.out / "log.json").write_text(json.dumps(trainer.state.log_history))
        rows = [row for row in trainer.state.log_history if "moe/copies" in row]
        if rows:
            print(callback.report)
            print(f"loss {rows[0]['loss']:.3f} to {rows[-1]['loss']:.3f}; rank max/mean", end=" ")
            print(f"{rows[-1]['moe/max_mean']:.3f} with {rows[-1]['moe/copies']:.0f} replicas")
    trainer.accelerator.end_training()  # ranks part in order


if __name__ == "__main__":
    main()
