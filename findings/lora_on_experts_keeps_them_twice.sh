#!/usr/bin/env bash
# Guess: LoRA needs memory for its factors, and hardly any for the weights beside them.
# Fact (peft 0.21.2, transformers 5.24.0): with `target_parameters` on experts, each layer adds the product of the
# factors to the weights of all its experts, and keeps the sum until the backward pass. So the experts are in memory
# twice, whatever the rank and however few tokens there are. Training them without LoRA keeps no such copy.
# Why it matters: for 45 billion parameters of experts these are 90 GB more in bfloat16. A plan that counts weights,
# factors and activations is wrong by them.
# A way out: gradient checkpointing, which has one layer's sum at a time.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
python3 -m venv "$work/venv"
timeout 1200 "$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 peft==0.21.2

cat >"$work/program.py" <<'PY'
import warnings

warnings.filterwarnings("ignore")

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def build():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, num_experts=32, num_experts_per_tok=2,
    )
    return Qwen3MoeForCausalLM(config).train()


def kept_bytes(model):
    """What a forward pass of 16 tokens keeps for the backward pass beside parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.arange(16)[None]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return sum(storage.nbytes() for storage in kept.values())


print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
model = build()
experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
found = {"no LoRA, all parameters train": kept_bytes(model)}
for name, targets in {"attention": ATTENTION, "attention and experts": ATTENTION | EXPERTS}.items():
    found[f"LoRA of rank 1 on {name}"] = kept_bytes(get_peft_model(build(), LoraConfig(r=1, **targets)))
print(f"{'weights of the experts':40} {experts:10,} bytes")
for name, size in found.items():
    print(f"{name + ', kept':40} {size:10,} bytes")
whole, attention, both = found.values()
assert max(whole, attention) < 0.2 * experts, "changed: without LoRA on experts"
assert experts <= both - attention < 1.2 * experts, "changed: LoRA on experts keeps something else"
print("Seen: LoRA of rank 1 on experts keeps another copy of all of them.")
PY
timeout 120 "$work/venv/bin/python" "$work/program.py"
