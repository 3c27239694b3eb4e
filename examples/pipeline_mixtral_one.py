"""A Mixtral whose later layers work with more experts per token, in one process.

    python examples/pipeline_mixtral_one.py

`pipeline_mixtral.py` is the same loop over the stages of a pipeline.
"""

from __future__ import annotations

import torch
from torch.optim import AdamW
from transformers import MixtralConfig, MixtralForCausalLM

STEPS, ROWS, TOKENS = 40, 16, 32

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
model = MixtralForCausalLM(MixtralConfig(vocab_size=64, num_hidden_layers=6, num_local_experts=4, **sizes))
for number, layer in enumerate(model.model.layers):
    layer.mlp.gate.top_k = 1 if number < 3 else 4
optimizer = AdamW(model.parameters(), lr=3e-3)

for step in range(STEPS):
    starts = torch.randint(64, (ROWS, 1))
    ids = (starts + torch.arange(TOKENS) * (1 + starts % 3)) % 64  # the model learns to count by ones, twos and threes
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss:.3f}")
