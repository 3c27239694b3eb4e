#!/usr/bin/env bash
# Guess: Trainer adds `router_aux_loss_coef` times the router's loss to the mean loss of a step, however the step is cut
# into ranks and microbatches, and whatever else is switched on.
# Fact (transformers 5.24.0): it is multiplied by the number of ranks, and by that of the microbatches of a step. The
# loss of the model is scaled for a mean over the tokens of all ranks, and the router's part in it is a mean already.
# `label_smoothing_factor` drops it, and so does the head of `AutoModelForSequenceClassification`. With reentrant
# gradient checkpointing the loss holds it, and the router gets no gradient of it. Nothing warns.
# Why it matters: on 64 ranks with 8 microbatches the coefficient 0.001 acts as 0.512. `eval_loss` holds it too, times
# the ranks. In a reward model, or with label smoothing, nothing balances the experts.
# A way out: divide the coefficient by ranks and microbatches; `use_reentrant=False`, which is the default.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export CUDA_VISIBLE_DEVICES="" GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TORCH_CPP_LOG_LEVEL=ERROR
python3 -m venv "$work/venv"
timeout 1200 "$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 accelerate==1.15.0

cat >"$work/program.py" <<'PY'
import os
import sys
import warnings

warnings.filterwarnings("ignore")

import torch
import transformers
from transformers import MixtralConfig, MixtralForCausalLM, MixtralForSequenceClassification, PrinterCallback, Trainer
from transformers import TrainerCallback, TrainingArguments, set_seed

transformers.logging.set_verbosity_error()
ranks, folder = int(os.environ["WORLD_SIZE"]), sys.argv[1]
ROWS = 8  # of a step, over all ranks and microbatches; all are equal, so every cut has the same mean


class Keep(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **more):
        weights = [p for name, p in model.named_parameters() if name.endswith("gate.weight")]
        self.gradient = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in weights]).clone()


def step(coefficient, kind, microbatches, settings):
    """Train for one step. Returns the loss, the routers' gradient and the loss of an evaluation."""
    set_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=8, num_experts_per_tok=2, pad_token_id=0,
        output_router_logits=True, router_aux_loss_coef=coefficient,
    )
    ids, keep = 1 + torch.arange(12) * 5 % 63, Keep()
    rows = [{"input_ids": ids, "labels": ids if kind is MixtralForCausalLM else torch.tensor(1)}] * ROWS
    arguments = TrainingArguments(
        output_dir=folder, max_steps=1, per_device_train_batch_size=ROWS // ranks // microbatches,
        gradient_accumulation_steps=microbatches, max_grad_norm=0.0, learning_rate=0.0, logging_steps=1,
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, ddp_timeout=60, **settings,
    )
    trainer = Trainer(model=kind(config), args=arguments, train_dataset=rows, eval_dataset=rows, callbacks=[keep])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.state.log_history[0]["loss"], keep.gradient, trainer.evaluate()["eval_loss"]


def router_part(kind=MixtralForCausalLM, microbatches=1, **settings):
    """What the coefficient 1 adds: to the loss, to the routers' gradient (its norm), to the loss of an evaluation."""
    on, off = (step(coefficient, kind, microbatches, settings) for coefficient in (1.0, 0.0))
    return [round(x, 4) for x in (on[0] - off[0], float((on[1] - off[1]).norm()), on[2] - off[2])]


CASES = {
    "one microbatch": {},
    "two microbatches": {"microbatches": 2},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "classification": {"kind": MixtralForSequenceClassification},
    "reentrant checkpointing": {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}
if ranks == 1:
    print("transformers", transformers.__version__)
    print(f"{'ranks, case':34} {'loss':>8} {'gradient':>9} {'eval_loss':>10}")
seen = {}
for name, case in CASES.items():
    seen[name] = router_part(**case)
    if int(os.environ["RANK"]) == 0:
        print(f"{ranks}, {name:31} {seen[name][0]:8} {seen[name][1]:9} {seen[name][2]:10}")
torch.save(seen, f"{folder}/{ranks}-{os.environ['RANK']}.pt")
PY
cat >"$work/compare.py" <<'PY'
import sys

import torch

one, two = (torch.load(f"{sys.argv[1]}/{ranks}-0.pt") for ranks in (1, 2))
loss, gradient, evaluated = one["one microbatch"]


def times(found, factor):
    return all(abs(a - factor * b) <= 2e-3 * factor * b for a, b in zip(found, (loss, gradient)))


assert loss > 2 and gradient > 0.01 and abs(evaluated - loss) < 1e-3, "changed: the plain case"
assert times(one["two microbatches"], 2), "changed: microbatches"
assert times(two["one microbatch"], 2) and times(two["two microbatches"], 4), "changed: ranks"
assert abs(two["one microbatch"][2] - 2 * evaluated) < 2e-3, "changed: evaluation"
for ranks in (one, two):
    assert ranks["label smoothing"][:2] == ranks["classification"][:2] == [0.0, 0.0], "changed: it is not dropped"
    assert ranks["reentrant checkpointing"][0] > 2 and ranks["reentrant checkpointing"][1] == 0.0, "changed: reentrant"
print("Seen: the router's loss is multiplied by ranks and microbatches, or it is not there.")
PY
for ranks in 1 2; do
    timeout 240 "$work/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
        "$work/program.py" "$work"
done
timeout 60 "$work/venv/bin/python" "$work/compare.py" "$work"
