#!/usr/bin/env bash
# Guess: Trainer's loss and gradient of a step are means over its rows, however it is cut into ranks and microbatches.
# Fact (transformers 5.24.0): not those of `ForSequenceClassification` and `ForTokenClassification` of Llama, Mixtral,
# Qwen and others. Trainer takes their loss for a part of the step's mean over all ranks, but it is a mean already. So
# loss and gradient are multiplied by the ranks and by the microbatches, and `eval_loss` by the ranks. Nothing warns.
# Why it matters: reward models and classifiers. With the default `max_grad_norm=1.0` nearly every step is clipped, and
# runs on other numbers of GPUs cannot be compared, not even by `eval_loss`.
# A way out: `average_tokens_across_devices=False`, and `trainer.model_accepts_loss_kwargs = False`.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export CUDA_VISIBLE_DEVICES="" GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TORCH_CPP_LOG_LEVEL=ERROR
python3 -m venv "$work/venv"
timeout 1200 "$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 accelerate==1.15.0

cat >"$work/program.py" <<'PY'
import os
import sys

import torch
import transformers
from transformers import MixtralConfig, MixtralForSequenceClassification, MixtralForTokenClassification
from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed

transformers.logging.set_verbosity_error()
rank, ranks, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]
ROWS = 8  # of a step, over all ranks and microbatches; all are equal, so every cut has the same mean


def step(kind, microbatches, way_out=False):
    """Train for one step. Returns the loss, the gradient's norm and the loss of an evaluation."""
    set_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, pad_token_id=0, num_labels=2,
    )
    ids = 1 + torch.arange(12)
    labels = torch.tensor(1) if kind is MixtralForSequenceClassification else ids % 2
    rows = [{"input_ids": ids, "labels": labels}] * ROWS
    arguments = TrainingArguments(
        output_dir=folder, max_steps=1, per_device_train_batch_size=ROWS // ranks // microbatches,
        gradient_accumulation_steps=microbatches, max_grad_norm=0.0, learning_rate=0.0, logging_steps=1,
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, ddp_timeout=60,
        average_tokens_across_devices=not way_out,
    )
    trainer = Trainer(model=kind(config), args=arguments, train_dataset=rows, eval_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    if way_out:
        trainer.model_accepts_loss_kwargs = False
    norms = []
    trainer.add_callback(Norm(norms))
    trainer.train()
    return trainer.state.log_history[0]["loss"], norms[0], trainer.evaluate()["eval_loss"]


class Norm(transformers.TrainerCallback):
    def __init__(self, norms):
        self.norms = norms

    def on_pre_optimizer_step(self, args, state, control, model=None, **more):
        squares = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
        self.norms.append(squares**0.5)


if (rank, ranks) == (0, 1):
    print("transformers", transformers.__version__)
seen = []
for kind in (MixtralForSequenceClassification, MixtralForTokenClassification):
    for microbatches, way_out in ((1, False), (2, False), (2, True)):
        seen.append(step(kind, microbatches, way_out))
        if rank == 0:
            loss, norm, evaluated = seen[-1]
            print(f"{kind.__name__:34} ranks {ranks}, microbatches {microbatches}{', way out' * way_out}: ", end="")
            print(f"loss {loss:.3f}, gradient {norm:.3f}, eval_loss {evaluated:.3f}")
torch.save(seen, f"{folder}/{ranks}-{rank}.pt")
PY
cat >"$work/compare.py" <<'PY'
import sys

import torch

one, two = (torch.load(f"{sys.argv[1]}/{ranks}-0.pt") for ranks in (1, 2))
for start in (0, 3):
    base = one[start]
    for ranks, found in ((1, one), (2, two)):
        for (times, evaluated), seen in zip(((ranks, ranks), (2 * ranks, ranks), (1, 1)), found[start:]):
            expected = [times * base[0], times * base[1], evaluated * base[2]]
            assert all(abs(a - b) < 0.01 * b for a, b in zip(seen, expected)), f"changed: {seen}, not {expected}"
print("Seen: loss and gradient are multiplied by ranks and microbatches, eval_loss by ranks.")
PY
for ranks in 1 2; do
    timeout 240 "$work/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
        "$work/program.py" "$work"
done
timeout 60 "$work/venv/bin/python" "$work/compare.py" "$work"
