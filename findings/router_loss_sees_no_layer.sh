#!/usr/bin/env bash
# Guess: the router's loss of a transformers model is least when every layer uses its experts evenly.
# Fact (transformers 5.24.0): counts and probabilities are added up over all layers before they are multiplied. If each
# layer sends all tokens to two experts that no other layer uses, the loss is the least there is, as of even layers.
# Why it matters: `aux_loss` looks perfect while every layer has collapsed. With expert parallelism, one or two ranks
# compute in each layer, and the others wait.
# A way out: `output_router_logits=True` returns the logits of each layer; compute a loss for each of them.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
python3 -m venv "$work/venv"
timeout 1200 "$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0

cat >"$work/program.py" <<'PY'
import torch
import transformers
from transformers import MixtralConfig, MixtralForCausalLM

print("transformers", transformers.__version__)
LAYERS = 4


def router_loss(pairs):
    """The loss of a model whose routers prefer a pair of experts in each layer, and the experts that they use."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )
    model = MixtralForCausalLM(config)
    # A norm of 1 in one place of the router's input makes its column a bias
    for layer, pair in zip(model.model.layers, pairs):
        layer.post_attention_layernorm.register_forward_hook(
            lambda module, given, answer: torch.cat([torch.ones_like(answer[..., :1]), answer[..., 1:]], dim=-1)
        )
        with torch.no_grad():
            layer.mlp.gate.weight[:, 0] = -10.0
            layer.mlp.gate.weight[pair, 0] = 10.0
    answer = model(input_ids=torch.arange(64)[None], output_router_logits=True)
    used = [sorted(logits.topk(2).indices.unique().tolist()) for logits in answer.router_logits]
    return round(float(answer.aux_loss.detach()), 3), used


apart, used_apart = router_loss([[2 * i, 2 * i + 1] for i in range(LAYERS)])
same, used_same = router_loss([[0, 1]] * LAYERS)
print("least possible loss, for two of eight experts: 2.0")
print(f"experts by layer {used_apart}: loss {apart}")
print(f"experts by layer {used_same}: loss {same}")
assert all(len(used) == 2 for used in used_apart + used_same), "a layer uses other experts than it should"
assert abs(same - 8.0) < 0.1, "changed: layers that use the same two"
assert abs(apart - 2.0) < 0.02, "changed: the loss sees layers"
print("Seen: a model of which each layer uses two experts has the loss of an even one.")
PY
timeout 120 "$work/venv/bin/python" "$work/program.py"
