"""A Mixtral whose later layers work with more experts per token, over the stages of a pipeline that stays even.

    torchrun --standalone --nproc-per-node 2 examples/pipeline_mixtral.py

`pipeline_mixtral_one.py` is the same loop in one process.
"""

from __future__ import annotations

import torch
from torch.optim import AdamW
from transformers import MixtralConfig, MixtralForCausalLM

from pipeline_balance import ControllerConfig, ElasticPipeline, attach

STEPS, ROWS, TOKENS = 40, 16, 32

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
model = MixtralForCausalLM(MixtralConfig(vocab_size=64, num_hidden_layers=6, num_local_experts=4, **sizes))
for number, layer in enumerate(model.model.layers):
    layer.mlp.gate.top_k = 1 if number < 3 else 4
torch.distributed.init_process_group("gloo")
pipe = ElasticPipeline.from_transformers(model, microbatches=4, make_optimizer=lambda named: AdamW(named, lr=3e-3))
balanced = attach(pipe, config=ControllerConfig(every_steps=10))

for step in range(STEPS):
    starts = torch.randint(64, (ROWS, 1))
    ids = (starts + torch.arange(TOKENS) * (1 + starts % 3)) % 64  # the model learns to count by ones, twos and threes
    loss = balanced.step(ids, ids)
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss:.3f}")

torch.distributed.destroy_process_group()
