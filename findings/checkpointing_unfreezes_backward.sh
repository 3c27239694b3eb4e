#!/usr/bin/env bash
# Guess: without reentrant checkpoints, switching gradient checkpointing on changes what a backward pass keeps, and
# switching it off leaves the model as it was.
# Fact (transformers 5.24.0): switching on puts a hook on the input embedding that makes its output require a gradient,
# for `use_reentrant=False`, too. Switching off leaves the hook there, and switching on again adds another one.
# Why it matters: where the first layers are frozen, backward then runs through all of them, for gradients that nobody
# reads, with their activations in memory. It goes on after checkpointing is off. Whoever measures what freezing saves
# measures nothing.
# Way out: call model.disable_input_require_grads() each time that checkpointing was switched on. It removes the last
# hook alone: after two times the first one can no longer be removed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
timeout 900 "$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0

cat >"$work/program.py" <<'PY'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

print("torch", torch.__version__, "transformers", transformers.__version__)
config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).train()
embedding, first = model.model.embed_tokens, model.model.layers[0]
for frozen in (embedding, first):
    frozen.requires_grad_(False)


def state():
    """(hooks on the embedding, whether backward runs through the frozen layer)."""
    seen = []
    hook = first.register_forward_hook(lambda module, given, out: seen.append(out.requires_grad))
    model(input_ids=torch.tensor([[1, 2, 3]]))
    hook.remove()
    return len(embedding._forward_hooks), seen[0]


found = {"at first": state()}
model.activation_checkpointing_enable({"use_reentrant": False})
found["switched on"] = state()
model.activation_checkpointing_disable()
found["switched off"] = state()
model.activation_checkpointing_enable({"use_reentrant": False})
model.activation_checkpointing_disable()
found["on and off again"] = state()
model.disable_input_require_grads()
found["told not to"] = state()
for name, (hooks, through) in found.items():
    print(f"{name}: {hooks} hooks on the embedding; backward runs through the frozen layer: {through}")
expected = {
    "at first": (0, False),
    "switched on": (1, True),
    "switched off": (1, True),
    "on and off again": (2, True),
    "told not to": (1, True),
}
assert found == expected, "changed"
print("Seen: what checkpointing has put on the embedding stays, and frozen layers have a backward pass.")
PY
HF_HUB_OFFLINE=1 timeout 120 "$work/venv/bin/python" "$work/program.py"
