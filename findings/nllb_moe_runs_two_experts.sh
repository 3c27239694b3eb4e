#!/usr/bin/env bash
# Guess: a sparse block of NLLB-MoE in transformers runs the experts that its router chose.
# Fact (transformers 5.24.0): the router hands on a mask of zeros and ones, [tokens, experts], and the experts' module
# takes its entries for experts' numbers. So each of the entries is a choice of expert 0 or 1: both run for every token,
# weighted by the router's probabilities, and experts 2 and above never run and never get a gradient. Nothing warns.
# Why it matters: a fine-tuned NLLB-MoE trains two of 128 experts, and its answers are not those of the checkpoint's
# router. Load that is counted where experts are called says nothing of what the router wants.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
timeout 1200 "$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0

cat >"$work/program.py" <<'PY'
import torch
import transformers
from transformers import NllbMoeConfig, NllbMoeModel

print("transformers", transformers.__version__)
torch.manual_seed(0)
config = NllbMoeConfig(
    vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_sparse_step=1, decoder_sparse_step=1, num_experts=8, expert_capacity=64,
    dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, moe_token_dropout=0.0,
)
model = NllbMoeModel(config).train()
ids = torch.randint(4, 64, (4, 16))
block = model.encoder.layers[0].ffn
rows, chosen = {}, []
for number, (_, expert) in enumerate(block.experts.named_children()):
    if hasattr(expert, "fc1"):
        expert.register_forward_hook(lambda m, given, _, n=number: rows.__setitem__(n, given[0].shape[0]))
block.router.register_forward_hook(lambda m, given, answer: chosen.append(answer[0]))
answer = model(input_ids=ids, decoder_input_ids=ids)
answer.last_hidden_state.square().sum().backward()
by_router = sorted(chosen[0].reshape(-1, 8).argmax(dim=-1).unique().tolist())
trained = [n for n in range(8) if getattr(block.experts, f"expert_{n}").fc1.weight.grad is not None]
print("experts that the router chose for some token:", by_router)
print("rows by expert that ran:", rows)
print("experts with a gradient:", trained)
assert len(by_router) > 2, "the router chose too few experts to tell"
assert sorted(rows) == [0, 1] == trained, "changed: other experts run"
print("Seen: of 8 experts, 0 and 1 run, whatever the router chose.")
PY
HF_HUB_OFFLINE=1 timeout 120 "$work/venv/bin/python" "$work/program.py"
